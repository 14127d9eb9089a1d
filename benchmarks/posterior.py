# SPDX-License-Identifier: Apache-2.0
"""The posterior that subsampling finds, beside that of all data and that of NUTS.

A softmax regression with K = 50 classes, small enough for every method: NumPyro's SVI on all data
and all classes (``numpyro``), ``lc.SubsampledSVI`` with the kept local variable (``subsampled``)
and without it (``stateless``, which is biased), and NUTS (``nuts``), the reference. Both kinds of
SVI use AutoNormal. The posterior means and standard deviations of all weights are compared; the
means also as contrasts, weights less their mean over classes, since the likelihood says nothing of
that mean: only the prior holds it, and slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from benchmarks.records import Record, argument_parser, machine_record, print_table, write_json

NAME = "posterior"


class Size(NamedTuple):
    """Sizes of the problem and lengths of the runs."""

    num_rows: int = 2000
    num_categories: int = 50
    num_features: int = 3
    batch_size: int = 200
    num_sampled: int = 10
    full_steps: int = 4000
    subsampled_steps: int = 40_000
    warmup: int = 500
    draws: int = 2000


QUICK = Size(200, 8, 2, 40, 2, 200, 200, 50, 100)


def make_model(size: Size, num_sampled: int | None, keep_local: bool = True) -> Any:
    """Softmax regression; ``num_sampled=None`` makes the likelihood exact."""

    def model(x, y=None, rows=None):
        with lc.class_plate("classes", size.num_categories, y, num_sampled) as classes:
            prior = dist.Normal(0, 1).expand([size.num_features]).to_event(1)
            w = numpyro.sample("w", prior)
        with lc.data_plate("data", size.num_rows, rows) as rows:
            if keep_local:
                lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)
            else:
                numpyro.sample("y", lc.UtilityCategorical(x @ w.T, classes), obs=y)

    return model


def simulate(size: Size) -> tuple[jax.Array, jax.Array]:
    """Draw features, with a constant, and choices of unequal frequency."""
    x = jax.random.normal(jax.random.key(1), (size.num_rows, size.num_features)).at[:, 0].set(1)
    w = jax.random.normal(jax.random.key(2), (size.num_categories, size.num_features))
    y = jax.random.categorical(jax.random.key(3), x @ w.T)
    return x, y


def fit(size: Size, method: str) -> tuple[np.ndarray, np.ndarray]:
    """Posterior means and standard deviations of all weights, by one method."""
    x, y = simulate(size)
    if method == "nuts":
        kernel = NUTS(make_model(size, None))
        mcmc = MCMC(kernel, num_warmup=size.warmup, num_samples=size.draws, progress_bar=False)
        mcmc.run(jax.random.key(0), x, y)
        draws = np.asarray(mcmc.get_samples()["w"])
        return draws.mean(axis=0), draws.std(axis=0)
    exact = method == "numpyro"
    model = make_model(size, None if exact else size.num_sampled, method != "stateless")
    guide = AutoNormal(model, init_loc_fn=numpyro.infer.init_to_feasible)
    steps = size.full_steps if exact else size.subsampled_steps
    optimiser = optax.adam(optax.exponential_decay(0.02, steps // 10, 0.6))
    if exact:
        svi = SVI(model, guide, optimiser, TraceMeanField_ELBO(num_particles=10))
        params = svi.run(jax.random.key(0), steps, x, y, progress_bar=False).params
    else:
        svi = lc.SubsampledSVI(model, guide, optimiser, TraceMeanField_ELBO())
        batches = lc.ArrayBatches(x, y, batch_size=size.batch_size)
        params = svi.run(jax.random.key(0), steps, batches=batches, progress_bar=False).params
    return np.asarray(params["w_auto_loc"]), np.asarray(params["w_auto_scale"])


def compare(size: Size, methods: Sequence[str]) -> list[Record]:
    """Fit by all methods and compare each SVI with NUTS and with the SVI on all data."""
    found = {method: fit(size, method) for method in methods}
    setting = {"K": size.num_categories, "N": size.num_rows, "D": size.num_features}
    records = []
    for method in methods:
        for reference in ("nuts", "numpyro"):
            if method in ("nuts", reference) or reference not in found:
                continue
            (mean, sd), (mean0, sd0) = found[method], found[reference]
            contrast, contrast0 = mean - mean.mean(axis=0), mean0 - mean0.mean(axis=0)
            figures = {
                "rms_mean_difference": (np.sqrt((((mean - mean0) / sd0) ** 2).mean()), "sd"),
                "rms_contrast_difference": (
                    np.sqrt((((contrast - contrast0) / sd0) ** 2).mean()),
                    "sd",
                ),
                "rms_log_sd_ratio": (np.sqrt((np.log(sd / sd0) ** 2).mean()), "nats"),
                "geometric_mean_sd_ratio": (np.exp(np.log(sd / sd0).mean()), "ratio"),
            }
            records += [
                Record(
                    benchmark=NAME,
                    setting=setting | {"reference": reference},
                    method=method,
                    metric=metric,
                    value=float(value),
                    unit=unit,
                    better="higher" if metric == "geometric_mean_sd_ratio" else "lower",
                )
                for metric, (value, unit) in figures.items()
            ]
    return records


def main() -> None:
    """Run the comparison and print it."""
    args = argument_parser(__doc__).parse_args()
    size = QUICK if args.quick else Size()
    records = compare(size, ("nuts", "numpyro", "subsampled", "stateless"))
    pairs = dict.fromkeys((r["method"], r["setting"]["reference"]) for r in records)
    rows = []
    for method, reference in pairs:
        values = {
            r["metric"]: r["value"]
            for r in records
            if (r["method"], r["setting"]["reference"]) == (method, reference)
        }
        rows.append([f"{method} against {reference}", *(f"{v:.3f}" for v in values.values())])
    header = [
        "",
        "rms mean diff (sd)",
        "rms contrast diff (sd)",
        "rms log sd ratio",
        "mean sd ratio",
    ]
    print_table(header, rows)
    write_json(args.json, [*records, machine_record(NAME, jax.devices()[0].device_kind)])


if __name__ == "__main__":
    main()
