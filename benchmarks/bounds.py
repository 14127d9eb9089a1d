# SPDX-License-Identifier: Apache-2.0
"""Bias, variance and cost of every bound, at the utilities of a fitted model.

The model is the demo's, fitted for a while; the observations are held out. The *bias* is the exact
log probability less the mean of the bound at its best local state, in nats per observation: what
is lost (negative: what is feigned) in the place of the exact likelihood. The *sd* is the standard
deviation of one observation's bound over the draws of the class plate (and of the error, where it
is drawn). The *time* is that of value and gradient in the utilities of the classes that are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, lax, random
from numpyro import handlers
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_largecat as lc
from benchmarks.readers import load
from benchmarks.records import (
    MachineRecord,
    Record,
    argument_parser,
    machine_record,
    print_table,
    record,
    write_json,
)
from numpyro_largecat.choices.choice_distribution import ChoiceDistribution
from numpyro_largecat.choices.error_families import FAMILIES
from numpyro_largecat.ops.logistic_bound import logistic_bound
from numpyro_largecat.plates.class_subset import ClassSubset

NAME = "bounds"
NUM_SAMPLED = 100
NUM_HEAD = 100  # most frequent classes that the hierarchy of one-vs-each keeps together
NUM_OBSERVATIONS = 100
NUM_DRAWS = 200
NUM_FIT_STEPS = 2000
NUM_ROUNDS, CALLS_PER_ROUND = 10, 10  # of the timing

Estimate = Callable[[Array, ClassSubset | None, Array, Array], Array]


class Case(NamedTuple):
    """One bound: its estimate from (utilities, classes, labels, key), and the exact family."""

    noise: str
    estimate: Estimate
    is_unbiased: bool = True  # over the draws of classes, so that all of them give its mean


def fitted_utilities(num_steps: int, num_observations: int) -> tuple[Array, Array, Array]:
    """Utilities of held-out observations, shape (B, K), their labels and the classes' counts."""
    data = load("names")
    num_rows, num_categories = len(data.y_train), data.num_categories

    def model(x: Array, y: Array | None = None, rows: Array | None = None) -> None:
        with lc.class_plate("classes", num_categories, y, NUM_SAMPLED) as classes:
            w = numpyro.sample("w", dist.Normal(0, 0.2).expand([x.shape[1]]).to_event(1))
            b = numpyro.sample("b", dist.Normal(0, 3))
        with lc.data_plate("data", num_rows, rows) as plate_rows:
            lc.sample_choice("y", x @ w.T + b, classes=classes, rows=plate_rows, obs=y)

    svi = lc.SubsampledSVI(model, AutoDelta(model), optax.adagrad(0.1), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(data.x_train, data.y_train, batch_size=500)
    params = svi.run(random.key(0), num_steps, batches=batches, progress_bar=False).params
    chosen = np.random.default_rng(0).choice(len(data.y_test), num_observations, replace=False)
    x, y = jnp.asarray(data.x_test[chosen]), jnp.asarray(data.y_test[chosen])
    counts = jnp.asarray(np.bincount(data.y_train, minlength=num_categories))
    return x @ params["w_auto_loc"].T + params["b_auto_loc"], y, counts


def synthetic_utilities() -> tuple[Array, Array, Array]:
    """Make a small problem of the same form."""
    psi = 2 * random.normal(random.key(0), (20, 400))
    y = random.categorical(random.key(1), psi)
    return psi, y, jnp.exp(psi).sum(axis=0)


def best_gaussian(psi: Array, y: Array, noise: str) -> Array:
    """Location and log precision of the best Gaussian error, with all classes."""
    rule = lc.update_rules.GaussianNaturalGradient()

    def derivatives(q: Array) -> tuple[Array, Array]:
        d = lc.bounds.GaussianErrorBound(
            psi, noise=noise, loc=q[..., 0], scale=jnp.exp(-0.5 * q[..., 1])
        )
        return d.expected_derivatives(y)

    def step(_: int, q: Array) -> Array:
        return rule.update(q, jnp.zeros(y.shape, jnp.int32), derivatives)[0]

    return lax.fori_loop(0, 4, step, jnp.zeros((*y.shape, 2)).at[..., 0].set(3.0))


def all_cases(psi: Array, y: Array, counts: Array) -> dict[str, Case]:
    """Every bound with its best local state at these utilities."""
    u = jax.nn.logsumexp(psi, axis=-1) - jnp.take_along_axis(psi, y[:, None], axis=-1)[:, 0]
    alpha = lc.bounds.Bouchard(psi).best_alpha()
    is_head = jnp.zeros(psi.shape[-1], bool).at[jnp.argsort(-counts)[:NUM_HEAD]].set(True)

    def softmax(bound: Callable[..., Any], **kwargs: Any) -> Case:
        def estimate(psi: Array, classes: ClassSubset | None, y: Array, rng_key: Array) -> Array:
            del rng_key
            return bound(psi, classes, **kwargs).log_prob(y)

        return Case("gumbel", estimate)

    def augment_reduce(psi: Array, classes: ClassSubset | None, y: Array, rng_key: Array) -> Array:
        del rng_key
        if classes is None:
            return lc.UtilityCategorical(psi).log_prob(y)
        return lc.UtilityCategorical(psi, classes, u=u).log_prob(y)

    def hierarchy(psi: Array, classes: ClassSubset | None, y: Array, rng_key: Array) -> Array:
        """The head is summed exactly, so the plate must hold it: labels have weight 1."""
        del rng_key
        head = is_head if classes is None else is_head[classes.indices] & (classes.weights == 1)
        return lc.bounds.OneVsEach(psi, classes, together=head).log_prob(y)

    cases = {
        "A&R softmax, u kept": Case("gumbel", augment_reduce),
        "importance sampling (stateless u)": softmax(lc.UtilityCategorical)._replace(
            is_unbiased=False
        ),
        "one-vs-each": softmax(lc.bounds.OneVsEach),
        "one-vs-each, labels and head together": Case("gumbel", hierarchy),
        "Bouchard, alpha kept": softmax(lc.bounds.Bouchard, alpha=alpha),
    }
    u_logistic = jax.jit(lc.UtilityCategorical(psi, noise="logistic").optimal_u)(y)

    def largest(psi: Array, classes: ClassSubset | None, y: Array, rng_key: Array) -> Array:
        del rng_key
        if classes is None:
            return logistic_bound(*ChoiceDistribution(psi, None).competitors(y), u_logistic)
        return lc.UtilityCategorical(psi, classes, "logistic", u=u_logistic).log_prob(y)

    cases["A&R logistic, u kept"] = Case("logistic", largest)
    for noise in ("normal", "logistic"):
        cases[f"A&R {noise}, Gaussian kept"] = Case(noise, *_gaussian_cases(psi, y, noise)[:1])
        cases[f"A&R {noise}, error drawn"] = Case(noise, *_gaussian_cases(psi, y, noise)[1:])
    return cases


def _gaussian_cases(psi: Array, y: Array, noise: str) -> tuple[Estimate, Estimate]:
    q = jax.jit(best_gaussian, static_argnums=2)(psi, y, noise)
    loc, scale = q[:, 0], jnp.exp(-0.5 * q[:, 1])

    def at_nodes(psi: Array, classes: ClassSubset | None, y: Array, rng_key: Array) -> Array:
        del rng_key
        d = lc.bounds.GaussianErrorBound(psi, classes, noise, loc=loc, scale=scale)
        return d.log_prob(y)

    def at_draw(psi: Array, classes: ClassSubset | None, y: Array, rng_key: Array) -> Array:
        error = loc + scale * random.normal(rng_key, loc.shape)
        likelihood = lc.AugmentedCategorical(psi, classes, noise, error=error).log_prob(y)
        log_q = dist.Normal(loc, scale).log_prob(error)
        return likelihood + FAMILIES[noise].log_prob(error) - log_q

    return at_nodes, at_draw


def measure(psi: Array, y: Array, case: Case, exact: Array, num_draws: int) -> tuple[float, ...]:
    """Bias and sd in nats, and microseconds for one value and gradient of one observation."""

    def draw_classes(rng_key: Array) -> ClassSubset:
        with handlers.seed(rng_seed=rng_key):
            return lc.class_plate("classes", psi.shape[-1], y, NUM_SAMPLED).classes

    def one_draw(rng_key: Array) -> Array:
        key_classes, key_error = random.split(rng_key)
        classes = draw_classes(key_classes)
        return case.estimate(psi[:, classes.indices], classes, y, key_error)

    keys = random.split(random.key(1), num_draws)
    draws = np.asarray(jax.jit(lambda keys: lax.map(one_draw, keys))(keys))
    means = draws.mean(axis=0)
    if case.is_unbiased:  # draws of the error are left, where there are any
        full = jax.jit(lambda keys: lax.map(lambda key: case.estimate(psi, None, y, key), keys))
        means = full(keys[:20]).mean(axis=0)
    bias = float((exact - means).mean())
    classes = draw_classes(keys[0])
    total = jax.jit(jax.value_and_grad(lambda psi, key: case.estimate(psi, classes, y, key).sum()))
    seconds = seconds_per_call(lambda: total(psi[:, classes.indices], keys[0]))
    return bias, float(draws.std(axis=0, ddof=1).mean()), seconds / len(y) * 1e6


def seconds_per_call(fn: Callable[[], Any]) -> float:
    """Least mean time of a few rounds, after a first call that compiles."""
    jax.block_until_ready(fn())
    times = []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([fn() for _ in range(CALLS_PER_ROUND)])
        times.append((time.perf_counter() - start) / CALLS_PER_ROUND)
    return min(times)


def main() -> None:
    """Measure all bounds and print them."""
    args = argument_parser(__doc__).parse_args()
    if args.quick:
        psi, y, counts = synthetic_utilities()
        num_draws = 20
    else:
        psi, y, counts = fitted_utilities(NUM_FIT_STEPS, NUM_OBSERVATIONS)
        num_draws = NUM_DRAWS
    families = {
        noise: jax.jit(lc.UtilityCategorical(psi, noise=noise).log_prob)(y) for noise in FAMILIES
    }
    records: list[Record | MachineRecord] = []
    lines = []
    for method, case in all_cases(psi, y, counts).items():
        values = measure(psi, y, case, families[case.noise], num_draws)
        lines.append([method, *(f"{value:.3f}" for value in values[:2]), f"{values[2]:.1f}"])
        for metric, value, unit in zip(
            ("bias", "sd", "time"), values, ("nats", "nats", "us"), strict=True
        ):
            setting = {"K": psi.shape[-1], "S": NUM_SAMPLED}
            records.append(record(NAME, setting, method, metric, value, unit))
    print(f"K = {psi.shape[-1]}, S = {NUM_SAMPLED}, {len(y)} observations")
    print_table(["bound", "bias", "sd", "us per observation"], lines)
    records.append(machine_record(NAME, jax.devices()[0].device_kind))
    write_json(args.json, records)


if __name__ == "__main__":
    main()
