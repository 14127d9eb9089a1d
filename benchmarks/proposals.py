# SPDX-License-Identifier: Apache-2.0
"""How noisy the steps are under each way to draw the classes, and what the draws cost.

The data and the model are the demo's, as in ``benchmarks.time_to_quality``. At fixed weights, at
the start of a fit and after a short one, classes are drawn again and again for the same minibatches
of 500 observations. The Augment & Reduce bound with the best local variables, u = log eta, and its
gradient in all weights are compared with the exact ones; so is the gradient of the log posterior
density, which has the prior of each class too.

Variances of gradients are totals over all entries, divided by the squared norm of the exact
gradient of the bound: at 1 a step's noise is as long as the step itself. Except where a name says
so, each way draws S = 100 classes beside the labels. Times are of ``lc.class_plate`` alone, and of
steps of ``lc.SubsampledSVI``; the ways take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, lax, random
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_mean

import numpyro_largecat as lc
from benchmarks.records import (
    MachineRecord,
    Record,
    argument_parser,
    machine_record,
    print_table,
    write_json,
)
from benchmarks.time_to_quality import (
    BIAS_SCALE,
    INIT_SCALE,
    WEIGHT_SCALE,
    Problem,
    names_problem,
    sample_weights,
    synthetic_problem,
)
from numpyro_largecat.plates.frequency_proposal import FrequencyProposal
from numpyro_largecat.plates.head_proposal import HeadProposal

NAME = "proposals"
NUM_SAMPLED = 100
BATCH_SIZE = 500
LEARNING_RATE = 0.1
NUM_HEAD = 100
DEFAULT = "uniform"


class Effort(NamedTuple):
    """How long to measure."""

    num_fit_steps: int
    num_batches: int
    num_draws: int  # for each batch
    num_chunks: int  # for times
    steps_per_chunk: int
    ways: tuple[str, ...] | None = None  # None for all


FULL = Effort(num_fit_steps=2000, num_batches=4, num_draws=60, num_chunks=4, steps_per_chunk=10)
QUICK = Effort(
    num_fit_steps=50,
    num_batches=2,
    num_draws=5,
    num_chunks=1,
    steps_per_chunk=2,
    ways=("uniform", "frequency ** 0.75"),
)


class Way(NamedTuple):
    """One way to draw classes."""

    num_sampled: int
    options: dict[str, Any]  # of the class plate

    def plate(self, num_categories: int, y: Array) -> lc.class_plate:
        """Open the class plate of a batch."""
        return lc.class_plate("classes", num_categories, y, self.num_sampled, **self.options)


class Noise(NamedTuple):
    """Variances over the draws of classes, means over the minibatches."""

    gradient: float
    gradient_error: float  # standard error of `gradient`
    posterior_gradient: float
    bound: float  # of the mean over the observations, nats squared


def ways_to_draw(problem: Problem) -> dict[str, Way]:
    """List the ways; counts are of the training data, one added."""
    counts = np.bincount(problem.y, minlength=problem.num_categories) + 1
    head = HeadProposal(np.argsort(-counts, kind="stable")[:NUM_HEAD])
    frequency = {power: FrequencyProposal(counts, power) for power in (0.75, 1.0)}
    return {
        DEFAULT: Way(NUM_SAMPLED, {}),
        "frequency ** 0.75": Way(NUM_SAMPLED, {"proposal": frequency[0.75]}),
        "frequency": Way(NUM_SAMPLED, {"proposal": frequency[1.0]}),
        f"head of {NUM_HEAD}": Way(NUM_SAMPLED, {"proposal": head}),
        f"uniform, S = {NUM_SAMPLED + NUM_HEAD}": Way(NUM_SAMPLED + NUM_HEAD, {}),
        "shared": Way(NUM_SAMPLED, {"negatives": "shared", "proposal": frequency[0.75]}),
        "own of each observation": Way(NUM_SAMPLED, {"negatives": "own"}),
    }


def utilities(x: Array, w: Array, b: Array, classes: lc.plates.ClassSubset) -> Array:
    """Linear utilities of the pairs that a way to draw asks for."""
    return classes.utilities(lambda x, w, b: x @ w + b, (x,), (w, b))


def model_of(way: Way, problem: Problem) -> Callable[..., None]:
    """Make the model of ``benchmarks.time_to_quality`` with another class plate."""

    def model(x: Array, y: Array, rows: Array) -> None:
        with way.plate(problem.num_categories, y) as classes:
            w, b = sample_weights(x.shape[1])
        with lc.data_plate("data", len(problem.y), rows) as batch:
            psi = utilities(x, w, b, classes)
            lc.sample_choice("y", psi, classes=classes, rows=batch, obs=y)

    return model


def make_svi(way: Way, problem: Problem) -> lc.SubsampledSVI:
    """Make the SVI object of one way to draw."""
    model = model_of(way, problem)
    guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=INIT_SCALE)
    optimiser = optax.adagrad(LEARNING_RATE)
    return lc.SubsampledSVI(model, guide, optimiser, TraceMeanField_ELBO())


class Weights(NamedTuple):
    """Weights of all classes."""

    w: Array  # (K, D)
    b: Array  # (K,)


def log_prior(weights: Weights, scale: Array | float) -> Array:
    """Log density of the weights of some classes, each class scaled."""
    of_class = dist.Normal(0, WEIGHT_SCALE).log_prob(weights.w).sum(axis=1)
    return (scale * (of_class + dist.Normal(0, BIAS_SCALE).log_prob(weights.b))).sum()


def exact_bound(weights: Weights, x: Array, y: Array) -> tuple[Array, Array]:
    """Sum over the observations of the bound at its best u, and the log probability of each."""
    log_probs = jax.nn.log_softmax(x @ weights.w.T + weights.b)
    own = jnp.take_along_axis(log_probs, y[:, None], axis=1)[:, 0]
    return own.sum(), own


def drawn_terms(
    plate: Callable[[Array], lc.class_plate], weights: Weights, x: Array, y: Array, u: Array
) -> Array:
    """Estimates of the bound and of the log prior, summed."""
    classes = plate(y).classes
    rows = Weights(weights.w[classes.indices], weights.b[classes.indices])
    psi = utilities(x, rows.w, rows.b, classes)
    bound = lc.UtilityCategorical(psi, classes, u=u).log_prob(y).sum()
    return jnp.stack([bound, log_prior(rows, classes.row_weights)])


def noise_meter(
    way: Way, problem: Problem, batches: lc.ArrayBatches, effort: Effort
) -> Callable[[Weights], Noise]:
    """Make a function that draws classes often, and compares estimates with what is exact."""
    prior_share = BATCH_SIZE / len(problem.y)  # of the prior for one batch of the data
    terms = partial(drawn_terms, partial(way.plate, problem.num_categories))

    @jax.jit
    def of_batch(weights: Weights, key: Array) -> tuple[Array, Array, Array]:
        x, y, _ = batches.draw(key)
        (value, own), gradient = jax.value_and_grad(exact_bound, has_aux=True)(weights, x, y)
        prior_gradient = jax.grad(log_prior)(weights, prior_share)

        def of_draw(key: Array) -> tuple[Array, Array, Array]:
            seeded = numpyro.handlers.seed(terms, key)
            values, pull = jax.vjp(lambda weights: seeded(weights, x, y, -own), weights)
            (of_bound,), (of_prior,) = (
                pull(jnp.array([1.0, 0.0])),
                pull(jnp.array([0, prior_share])),
            )
            gap = jax.tree.map(jnp.subtract, of_bound, gradient)
            prior_gap = jax.tree.map(jnp.subtract, of_prior, prior_gradient)
            both_gaps = jax.tree.map(jnp.add, gap, prior_gap)
            return _square(gap), _square(both_gaps), jnp.square((values[0] - value) / len(y))

        of_gap, of_both, of_bound = lax.map(of_draw, random.split(key, effort.num_draws))
        norm = _square(gradient)
        return of_gap / norm, of_both / norm, of_bound

    def noise(weights: Weights) -> Noise:
        by_batch = [of_batch(weights, k) for k in random.split(random.key(1), effort.num_batches)]
        of_gap, of_both, of_bound = map(jnp.concatenate, zip(*by_batch, strict=True))
        error = float(of_gap.std(ddof=1)) / len(of_gap) ** 0.5
        return Noise(float(of_gap.mean()), error, float(of_both.mean()), float(of_bound.mean()))

    return noise


def _square(weights: Weights) -> Array:
    """Squared norm over all entries."""
    return sum((jnp.square(leaf).sum() for leaf in weights), jnp.zeros(()))


@dataclass
class Timer:
    """A compiled loop of draws or of steps, and the time that each chunk of it took."""

    run: Callable[[Any, Array], Any]  # (state, key) to state
    state: Any
    ms: list[float] = field(default_factory=list)

    def take_chunk(self, key: Array, num_steps: int) -> None:
        """Run one chunk and note the milliseconds for each of its steps."""
        start = time.perf_counter()
        self.state = jax.block_until_ready(self.run(self.state, key))
        self.ms.append(1000 * (time.perf_counter() - start) / num_steps)


def draw_timer(way: Way, problem: Problem, batches: lc.ArrayBatches, num_steps: int) -> Timer:
    """Time the class plate alone; the sums of indices and weights keep XLA from leaving it out."""
    y = batches.draw(random.key(2))[1]

    def one(total: Array, key: Array) -> tuple[Array, None]:
        with numpyro.handlers.seed(rng_seed=key):
            classes = way.plate(problem.num_categories, y).classes
        return total + (classes.indices * classes.row_weights).sum(), None

    @jax.jit
    def run(total: Array, key: Array) -> Array:
        return lax.scan(one, total, random.split(key, num_steps))[0]

    return Timer(run, jnp.zeros(()))


def step_timer(way: Way, problem: Problem, batches: lc.ArrayBatches, num_steps: int) -> Timer:
    """Time whole steps of the engine, with the draw of the minibatch."""
    svi = make_svi(way, problem)
    state = svi.init(random.key(0), *batches.draw(random.key(0)))
    state = jax.tree.map(jnp.copy, state)  # NumPyro's state shares arrays with the guide

    @partial(jax.jit, donate_argnums=0)
    def run(state: Any, key: Array) -> Any:
        def step(state: Any, key: Array) -> tuple[Any, Array]:
            return svi.update(state, *batches.draw(key))

        return lax.scan(step, state, random.split(key, num_steps))[0]

    return Timer(run, state)


def measure_times(
    ways: dict[str, Way], problem: Problem, batches: lc.ArrayBatches, effort: Effort
) -> tuple[dict[tuple[str, str], float], Weights]:
    """Measure milliseconds per draw and per step of each way, medians over chunks.

    Returns:
        The times; and posterior means after a short fit, as the steps of the default go on.
    """
    make = {"ms_per_draw": draw_timer, "ms_per_step": step_timer}
    timers = {
        (name, metric): make_timer(way, problem, batches, effort.steps_per_chunk)
        for name, way in ways.items()
        for metric, make_timer in make.items()
    }
    num_chunks = effort.num_fit_steps // effort.steps_per_chunk
    for i in range(1 + effort.num_chunks):
        for timer in timers.values():
            timer.take_chunk(random.key(i), effort.steps_per_chunk)
    times = {key: statistics.median(timer.ms[1:]) for key, timer in timers.items()}
    fit = timers[DEFAULT, "ms_per_step"]
    for i in range(1 + effort.num_chunks, num_chunks):
        fit.take_chunk(random.key(i), effort.steps_per_chunk)
    params = make_svi(ways[DEFAULT], problem).optim.get_params(fit.state.optim_state)
    return times, Weights(params["w_auto_loc"], params["b_auto_loc"])


def measure(problem: Problem, effort: Effort) -> list[Record | MachineRecord]:
    """Measure every way at both weights, print the tables, and return the records."""
    batches = lc.ArrayBatches(problem.x, problem.y, batch_size=BATCH_SIZE)
    ways = {n: w for n, w in ways_to_draw(problem).items() if n in (effort.ways or (n,))}
    meters = {name: noise_meter(way, problem, batches, effort) for name, way in ways.items()}
    times, fitted = measure_times(ways, problem, batches, effort)
    shape = problem.num_categories, problem.x.shape[1]
    at = {
        "start": Weights(jnp.zeros(shape), jnp.zeros(shape[0])),
        "fitted": fitted,
    }
    base = {"K": shape[0], "B": BATCH_SIZE, "D": shape[1]}
    make = partial(Record, benchmark=NAME, better="lower")
    records: list[Record | MachineRecord] = [machine_record(NAME, jax.devices()[0].device_kind)]
    for name, way in ways.items():
        cell = partial(make, setting={**base, "S": way.num_sampled}, method=name, unit="ms")
        for metric in ("ms_per_draw", "ms_per_step"):
            records.append(cell(metric=metric, value=times[name, metric]))
    for place, weights in at.items():
        noise = {name: meter(weights) for name, meter in meters.items()}
        report(place, noise, times)
        for name, found in noise.items():
            setting = {**base, "S": ways[name].num_sampled, "weights": place}
            cell = partial(make, setting=setting, method=name)
            relative = "squared norm of the bound's gradient"
            records += [
                cell(metric="gradient_variance", value=found.gradient, unit=relative),
                cell(metric="gradient_variance_error", value=found.gradient_error, unit=relative),
                cell(
                    metric="posterior_gradient_variance",
                    value=found.posterior_gradient,
                    unit=relative,
                ),
                cell(metric="bound_variance", value=found.bound, unit="nats squared"),
            ]
    return records


def report(place: str, noise: dict[str, Noise], times: dict[tuple[str, str], float]) -> None:
    """Print one table, the least noisy gradient first."""
    what = {"start": "the start of a fit", "fitted": "the weights of a short fit"}[place]
    print(f"Variance over draws of classes at {what}")
    rows = [
        [
            name,
            f"{found.gradient:.3g} ({found.gradient_error:.1g})",
            f"{found.posterior_gradient:.3g}",
            f"{found.bound:.2g}",
            f"{times[name, 'ms_per_draw']:.3f}",
            f"{times[name, 'ms_per_step']:.2f}",
        ]
        for name, found in sorted(noise.items(), key=lambda item: item[1].gradient)
    ]
    print_table(
        ["", "gradient of bound", "with prior", "bound", "ms per draw", "ms per step"], rows
    )
    print()


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    problem = synthetic_problem() if arguments.quick else names_problem(held_back=False)
    records = measure(problem, QUICK if arguments.quick else FULL)
    write_json(arguments.json, records)


if __name__ == "__main__":
    main()
