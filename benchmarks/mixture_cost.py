# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a mixture's log density and its gradient, with L of K components.

Gaussian components with full covariances (``full``) or variances of each entry (``diagonal``): the
value and the gradient in weights, means and scales, summed over N observations, by NumPyro's
``MixtureSameFamily`` (``numpyro``) and by ``lc.TopLMixture`` with L components; for ``diagonal``
also by ``lc.TopL_ELBO`` on the model with an explicit component (``elbo``).

Memory is what XLA sets aside at N observations. Times are measured with N / 10 observations, since
NumPyro's mixture needs several arrays of shape (N, K, D), and given for N; the methods take turns,
and the least of all turns is reported. OpenBLAS has one thread: XLA calls it from several, where
threads of its own make NumPyro's triangular solves many times slower.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import numpyro_largecat as lc
from benchmarks.records import (
    Record,
    argument_parser,
    machine_record,
    print_table,
    write_json,
)

NAME = "mixture_cost"
PART = 10  # of the observations are timed


class Sizes(NamedTuple):
    """How large the mixture is, and how often it is timed."""

    num_rows: int = 36_000
    num_components: int = 200
    num_features: int = 64
    num_active: tuple[int, ...] = (1, 4, 16)
    num_turns: int = 5


def make_components(covariance: str, loc: Any, scale: Any) -> dist.Distribution:
    """Gaussian components from means and scales."""
    if covariance == "full":
        return dist.MultivariateNormal(loc, scale_tril=scale, validate_args=False)
    return dist.Normal(loc, scale, validate_args=False).to_event(1)


def mixture_loss(make: Callable[..., Any], covariance: str, params: Any, x: Any) -> Any:
    """Negative log density of all observations."""
    mixing = dist.Categorical(logits=params["logits"], validate_args=False)
    mixture = make(mixing, make_components(covariance, params["loc"], params["scale"]))
    return -mixture.log_prob(x).sum()


def elbo_loss(num_active: int, params: Any, x: Any) -> Any:
    """Negative ELBO of the model with an explicit component, and nothing else latent."""

    def model(x: Any) -> None:
        logits, loc, scale = (numpyro.param(name) for name in ("logits", "loc", "scale"))
        with numpyro.plate("data", len(x)):
            prior = dist.Categorical(logits=logits, validate_args=False)
            z = numpyro.sample("z", prior, infer={"enumerate": "parallel"})
            numpyro.sample("x", make_components("diagonal", loc[z], scale[z]), obs=x)

    return lc.TopL_ELBO(num_active).loss(jax.random.key(0), params, model, lambda x: None, x)


def methods(covariance: str, sizes: Sizes) -> dict[str, Callable[..., Any]]:
    """Losses by name."""
    losses = {"numpyro": partial(mixture_loss, dist.MixtureSameFamily, covariance)}
    for num_active in (*sizes.num_active, sizes.num_components):
        make = partial(lc.TopLMixture, num_active=num_active)
        losses[f"L = {num_active}"] = partial(mixture_loss, make, covariance)
    if covariance == "diagonal":
        losses |= {f"elbo, L = {n}": partial(elbo_loss, n) for n in sizes.num_active}
    return losses


def make_data(covariance: str, sizes: Sizes, num_rows: int) -> tuple[dict[str, Any], Any]:
    """Parameters of the components, and observations."""
    keys = jax.random.split(jax.random.key(0), 4)
    num_components, num_features = sizes.num_components, sizes.num_features
    loc = jax.random.normal(keys[0], (num_components, num_features))
    scale = 1 + jnp.abs(0.1 * jax.random.normal(keys[1], loc.shape))
    if covariance == "full":
        square = (num_components, num_features, num_features)
        lower = jnp.tril(0.05 * jax.random.normal(keys[2], square), -1)
        scale = lower + scale[..., None] * jnp.eye(num_features)
    x = 1.5 * jax.random.normal(keys[3], (num_rows, num_features))
    return {"logits": jnp.zeros(num_components), "loc": loc, "scale": scale}, x


def measure(covariance: str, sizes: Sizes) -> list[Record]:
    """Records of every method."""
    args = make_data(covariance, sizes, sizes.num_rows // PART)
    whole = jax.eval_shape(lambda: make_data(covariance, sizes, sizes.num_rows))
    losses = methods(covariance, sizes)
    steps = {name: jax.jit(jax.value_and_grad(loss)) for name, loss in losses.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(sizes.num_turns + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(*args))
            if turn > 0:  # the first compiles
                times[name].append(time.perf_counter() - start)
    setting = {
        "N": sizes.num_rows,
        "K": sizes.num_components,
        "D": sizes.num_features,
        "covariance": covariance,
    }
    cell = partial(Record, benchmark=NAME, setting=setting, better="lower")
    records = []
    for name, step in steps.items():
        memory = step.lower(*whole).compile().memory_analysis().temp_size_in_bytes / 1e6
        records += [
            cell(method=name, metric="seconds", value=PART * min(times[name]), unit="s"),
            cell(method=name, metric="memory", value=memory, unit="MB"),
        ]
    return records


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    args = argument_parser(__doc__).parse_args(argv)
    sizes = Sizes(200, 8, 3, (2,), 1) if args.quick else Sizes()
    records = []
    for covariance in ("full", "diagonal"):
        found = measure(covariance, sizes)
        records += found
        print(f"\nValue and gradient of N = {sizes.num_rows:,} observations, {covariance}")
        cells = {(r["method"], r["metric"]): r["value"] for r in found}
        names = dict.fromkeys(r["method"] for r in found)
        rows = [
            (name, f"{cells[name, 'seconds']:.2f}", f"{cells[name, 'memory']:,.0f}")
            for name in names
        ]
        print_table(("method", "seconds", "memory, MB"), rows)
    device = jax.devices()[0].device_kind
    write_json(args.json, [machine_record(NAME, device), *records])


if __name__ == "__main__":
    main()
