# SPDX-License-Identifier: Apache-2.0
"""Unbiased steps on one observation and one class beside the biased ones, as in their paper.

The protocol is that of Unbiased scalable softmax optimization, section 4: rows of norm 1, the first
label, the training log-loss, and step sizes that fall by 0.9 in each of 50 epochs. The initial rate
is tuned for each method and data set, for the least log-loss after 50 epochs on a random tenth of
the rows; a fit that diverges counts as infinite.

The rates are those of the mean over the observations, the paper's times N: the paper's vanilla rate
on MNIST, 0.01, would in the form of the sum (its Eq. 6) be a first step of 5,400 x, which overflows
at once. They are tried over 10^-3 to 10^3 as in the paper, and further, decade by decade, while the
best one is at an end of what was tried. If a tuned rate ends above log K on all rows, where w = 0
starts, the next lower one is taken. One-vs-each counts K - 1 times its one pair, so that its step
is an unbiased one on its own bound; importance sampling and noise contrastive estimation (with
normaliser 1) have bounded steps.

Beside the paper's six methods: Implicit SGD on minibatches, and two fits by ``SubsampledSVI`` with
Adam, Augment & Reduce and exact softmax (all classes in the plate), whose rates of Adam are tuned
likewise over 10^-3 to 1. Seconds are those of steps alone, without compilation and evaluation:
those of a few epochs, times the number of epochs.

A star marks a factor against one-vs-each, NCE or importance sampling that is below the paper's, and
Implicit SGD where it is not within 5 percent of the best of the six. The paper's biased methods
take 100 observations and 5 classes in a step; here it is one and one, and the paper finds virtually
no difference.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from jax import Array, lax, random
from numpy.typing import NDArray
from numpyro.infer import Trace_ELBO
from scipy.sparse import csr_array

import numpyro_largecat as lc
from benchmarks.biased_rules import ImportanceSampling, NoiseContrast, OneVsEach
from benchmarks.data_folder import add_data_argument, how_to_name_data
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

NAME = "unbiased"
FOLDERS = {"bibtex": "xml", "delicious": "xml", "mnist": "mnist"}
SPARSE = {"bibtex"}  # less than a tenth of the features present: sparse rows are faster
EXPONENTS = range(-3, 4)
ADAM_EXPONENTS = range(-3, 1)
DECAY = 0.9
NUM_CURVE_POINTS = 10
BATCH = (32, 8)  # observations and other classes of the implicit minibatch
SVI_BATCH = (100, 20)
SENSITIVITY = "bibtex"
SPEED_FEATURES = 100
WITHIN = 1.05


RULES: dict[str, Any] = {
    "one-vs-each": OneVsEach,
    "NCE": NoiseContrast,
    "importance sampling": ImportanceSampling,
    "vanilla": lc.double_sum.Vanilla,
    "U-max": lc.double_sum.UMax,
    "implicit": lc.double_sum.ImplicitSGD,
}
BIASED = ("one-vs-each", "NCE", "importance sampling")
MINIBATCH = "implicit, minibatches"
SVI_METHODS = ("A&R, Adam", "exact, Adam")
PAPER_LOSSES = {  # its Table 3, in the order of RULES
    "mnist": (5.73, 6.05, 5.74, 1.43, 1.56, 1.0),
    "bibtex": (29.03, 28.52, 32.71, 15.18, 9.77, 1.0),
    "delicious": (1.90, 1.91, 1.89, 1.25, 1.11, 1.0),
}
PAPER_EXPONENTS = {  # its Table 2
    "mnist": (1, 1, 1, -2, 1, -1),
    "bibtex": (2, 2, 2, -2, -1, 1),
    "delicious": (1, 3, 3, -3, -2, -2),
}


class Problem(NamedTuple):
    """Rows of norm 1 with their labels."""

    name: str
    x: NDArray[np.float32]  # (N, D)
    y: NDArray[np.int32]  # (N,)
    num_categories: int

    def part(self, share: int) -> Problem:
        """Take one in ``share`` of the rows, at random."""
        rows = np.random.default_rng(0).permutation(len(self.y))[: len(self.y) // share]
        return self._replace(x=self.x[rows], y=self.y[rows])

    def features(self) -> Any:
        """Features in the faster form."""
        if self.name in SPARSE:
            return lc.SparseRows.from_scipy(csr_array(self.x))
        return jnp.asarray(self.x)


class Sizes(NamedTuple):
    """How much work a run does."""

    num_passes: int
    timed_epochs: int
    speed_rows: int
    speed_categories: tuple[int, ...]
    speed_rounds: int
    exponents: range
    svi_exponents: range
    more_decades: int  # beyond an end of the rates
    tuned_share: int  # one row in so many


FULL = Sizes(50, 5, 20_000, (1_000, 100_000), 5, EXPONENTS, ADAM_EXPONENTS, 3, 10)
QUICK = Sizes(10, 1, 500, (1_000,), 1, range(-1, 1), range(-1, 0), 0, 1)


class Result(NamedTuple):
    """One method on all rows."""

    rate: float
    losses: list[float]  # at evenly spaced epochs
    seconds: float  # of all epochs


def normalised(name: str, x: NDArray[Any], y: NDArray[Any], num_categories: int) -> Problem:
    """Scale rows to norm 1."""
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return Problem(name, np.asarray(x / np.maximum(norms, 1e-30), np.float32), y, num_categories)


def read_problem(name: str, directory: Path) -> Problem:
    """Load the training part of a data set."""
    data = load(name, directory / FOLDERS[name])
    return normalised(name, data.x_train, data.y_train, data.num_categories)


def synthetic_problem() -> Problem:
    """Draw labels from a linear softmax."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1000, 12)), rng.standard_normal((30, 12))
    y = (2 * x @ w.T + rng.gumbel(size=(1000, 30))).argmax(axis=1).astype(np.int32)
    return normalised("quick", x, y, 30)


@jax.jit
def log_loss(w: Array, x: Array, y: Array) -> Array:
    """Mean of -log p(y | x); the utilities of all rows are in memory."""
    utilities = x @ w.T
    own = jnp.take_along_axis(utilities, y[:, None], axis=1)[:, 0]
    return (jax.nn.logsumexp(utilities, axis=1) - own).mean()


def batch_sizes(method: str, num_categories: int) -> dict[str, int]:
    """Sizes of a step; a minibatch and its classes together must leave no class out twice."""
    if method != MINIBATCH:
        return {}
    batch_size, num_sampled = BATCH
    return {
        "batch_size": min(batch_size, num_categories // 2),
        "num_sampled": min(num_sampled, num_categories // 2),
    }


def fit_rule(method: str, problem: Problem, features: Any, rate: float, **options: Any) -> Any:
    """Fit by a rule of the double sum at the rate of the mean; None if it diverges."""
    rule = RULES["implicit" if method == MINIBATCH else method](rate)
    options |= batch_sizes(method, problem.num_categories)
    try:
        return lc.fit_double_sum(
            random.key(0),
            features,
            problem.y,
            problem.num_categories,
            rule,
            progress_bar=False,
            **options,
        )
    except FloatingPointError:
        return None


def finite(loss: Any) -> float:
    """Take what is not a number as infinite."""
    return float(loss) if np.isfinite(loss) else math.inf


def loss_at_rate(method: str, problem: Problem, features: Any, rate: float, epochs: int) -> float:
    """Log-loss after the last epoch, infinite if the fit diverges."""
    fit = fit_rule(method, problem, features, rate, num_passes=epochs)
    return math.inf if fit is None else finite(log_loss(fit.w, problem.x, problem.y))


def tune(loss_of: Callable[[float], float], exponents: range, more: int) -> int:
    """Exponent of the best rate; while it is at an end of what was tried, try one decade on."""
    if len(exponents) == 1:
        return exponents[0]
    losses = {e: loss_of(10.0**e) for e in exponents}
    lowest, highest = exponents[0] - more, exponents[-1] + more
    while True:
        best = min(losses, key=lambda e: (losses[e], e))
        if not math.isfinite(losses[best]):  # the lowest that was tried
            best = min(losses)
        beyond = [e for e in (best - 1, best + 1) if e not in losses and lowest <= e <= highest]
        if not beyond:
            return best
        losses |= {e: loss_of(10.0**e) for e in beyond}


def run_rule(method: str, problem: Problem, exponent: int, sizes: Sizes) -> Result:
    """Fit all rows, at a lower rate if it ends above its start, and time a few epochs of it."""
    fit = None
    while fit is None:
        dense = jnp.asarray(problem.x)  # the losses of all epochs are quicker from dense rows
        rate = 10.0**exponent
        options = {"num_passes": sizes.num_passes, "record_losses": True}
        fit = fit_rule(method, problem, dense, rate, **options)
        if fit is not None and not fit.losses[-1] < math.log(problem.num_categories):
            fit = None
        exponent -= 1
    features = problem.features()
    fit_rule(method, problem, features, rate, num_passes=1)
    start = time.perf_counter()
    timed = fit_rule(method, problem, features, rate, num_passes=sizes.timed_epochs)
    jax.block_until_ready(timed.w)
    seconds = (time.perf_counter() - start) * sizes.num_passes / sizes.timed_epochs
    losses = [finite(fit.losses[epoch - 1]) for epoch in curve_epochs(sizes)]
    return Result(rate, losses, seconds)


def curve_epochs(sizes: Sizes) -> list[int]:
    """Epochs at which the log-loss is recorded."""
    step = sizes.num_passes // NUM_CURVE_POINTS
    return list(range(step, sizes.num_passes + 1, step))


def run_svi(method: str, problem: Problem, rate: float, sizes: Sizes, last_only: bool) -> Result:
    """Fit by Adam, one compiled loop for each epoch."""
    num_rows, num_features = problem.x.shape
    num_categories = problem.num_categories
    batch_size = min(SVI_BATCH[0], num_rows)
    num_sampled = min(SVI_BATCH[1], num_categories - 1)
    steps = -(-num_rows // batch_size)

    def model(x: Array, y: Array, rows: Array) -> None:
        sampled = () if method == "exact, Adam" else (y, num_sampled)
        with lc.class_plate("classes", num_categories, *sampled) as classes:
            w = numpyro.param("w", jnp.zeros((num_categories, num_features)), event_dim=1)
        with lc.data_plate("data", num_rows, rows) as batch:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=batch, obs=y)

    def guide(*args: Any) -> None:
        del args

    schedule = optax.exponential_decay(rate, steps, DECAY, staircase=True)
    svi = lc.SubsampledSVI(model, guide, optax.adam(schedule), Trace_ELBO())
    batches = lc.ArrayBatches(problem.x, problem.y, batch_size=batch_size)
    init_key, run_key = random.split(random.key(0))
    state = jax.tree.map(jnp.copy, svi.init(init_key, *batches.draw(init_key)))

    def epoch(state: Any, rng_key: Array, batches: lc.ArrayBatches) -> Any:
        def step(state: Any, key: Array) -> tuple[Any, Array]:
            return svi.update(state, *batches.draw(key))

        return lax.scan(step, state, random.split(rng_key, steps))[0]

    compiled = jax.jit(epoch, donate_argnums=0).lower(state, run_key, batches).compile()
    seconds, losses = 0.0, []
    points = curve_epochs(sizes)[-1:] if last_only else curve_epochs(sizes)
    for number in range(1, sizes.num_passes + 1):
        start = time.perf_counter()
        state = compiled(state, random.fold_in(run_key, number), batches)
        jax.block_until_ready(state)
        seconds += time.perf_counter() - start
        if number in points:
            losses.append(finite(log_loss(svi.get_params(state)["w"], problem.x, problem.y)))
    return Result(rate, losses, seconds)


def run_problem(problem: Problem, sizes: Sizes) -> dict[str, Result]:
    """Tune and run all methods on one data set."""
    tenth = problem.part(sizes.tuned_share)
    features = tenth.features()
    results = {}
    for method in (*RULES, MINIBATCH):
        epochs = sizes.num_passes
        at_rate = partial(loss_at_rate, method, tenth, features, epochs=epochs)
        exponent = tune(
            lambda rate, at_rate=at_rate: at_rate(rate=rate), sizes.exponents, sizes.more_decades
        )
        results[method] = run_rule(method, problem, exponent, sizes)
        _progress(problem.name, method, results[method])
    for method in SVI_METHODS:

        def svi_loss(rate: float, method: str = method) -> float:
            return run_svi(method, tenth, rate, sizes, last_only=True).losses[-1]

        exponent = tune(svi_loss, sizes.svi_exponents, min(sizes.more_decades, 1))
        results[method] = run_svi(method, problem, 10.0**exponent, sizes, last_only=False)
        _progress(problem.name, method, results[method])
    return results


def _progress(name: str, method: str, result: Result) -> None:
    print(f"# {name}: {method}, rate {result.rate:g}, log-loss {result.losses[-1]:.5f}", flush=True)


def sensitivity(problem: Problem, sizes: Sizes) -> dict[str, list[float]]:
    """Log-loss of each of the six methods on all rows at each rate of the paper."""
    features, epochs = problem.features(), sizes.num_passes
    return {
        method: [loss_at_rate(method, problem, features, 10.0**e, epochs) for e in sizes.exponents]
        for method in RULES
    }


def speeds(num_categories: int, sizes: Sizes) -> dict[str, tuple[float, float]]:
    """Steps and observations per second, by what more epochs add to the time of one."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((sizes.speed_rows, SPEED_FEATURES))
    y = rng.integers(num_categories, size=sizes.speed_rows).astype(np.int32)
    problem = normalised("speed", x, y, num_categories)
    features = jnp.asarray(problem.x)
    rules = {
        "implicit": (lc.double_sum.ImplicitSGD, 1),
        "U-max": (lc.double_sum.UMax, 1),
        "vanilla": (lc.double_sum.Vanilla, 1),
        MINIBATCH: (lc.double_sum.ImplicitSGD, BATCH[0]),
    }

    def seconds(method: str, num_passes: int) -> float:
        make, _ = rules[method]  # plain SGD takes as long at any rate, but overflows at this one
        rule = make(1.0 if make is lc.double_sum.ImplicitSGD else 1e-4 / sizes.speed_rows)
        options = batch_sizes(method, num_categories) | {
            "num_passes": num_passes,
            "progress_bar": False,
        }
        start = time.perf_counter()
        fit = lc.fit_double_sum(random.key(0), features, y, num_categories, rule, **options)
        jax.block_until_ready(fit.w)
        return time.perf_counter() - start

    more = 3
    least: dict[tuple[str, int], float] = {}
    for number in range(sizes.speed_rounds + 1):
        for method in rules:
            for num_passes in (1, 1 + more):
                taken = seconds(method, num_passes)
                if number > 0:  # the first round compiles
                    key = (method, num_passes)
                    least[key] = min(least.get(key, math.inf), taken)
    result = {}
    for method, (_, batch_size) in rules.items():
        added = max(least[method, 1 + more] - least[method, 1], 1e-9)
        observations = more * sizes.speed_rows / added
        result[method] = (observations / batch_size, observations)
    return result


Results = dict[str, dict[str, Result]]


def print_results(results: Results) -> None:
    """Print relative losses, rates, and losses with seconds."""
    methods = list(RULES)
    header = ["data set", *methods]
    rows, rate_rows = [], []
    for name, cells in results.items():
        row, rate_row = [name], [name]
        for place, method in enumerate(methods):
            factor = relative_loss(cells, method)
            text = f"{factor:.2f}"
            if name in PAPER_LOSSES:
                text += f" ({PAPER_LOSSES[name][place]:.2f})"
            row.append(text + ("*" if is_starred(name, cells, method) else ""))
            text = f"{cells[method].rate:.0e}"
            if name in PAPER_EXPONENTS:
                text += f" ({10.0 ** PAPER_EXPONENTS[name][place]:.0e})"
            rate_row.append(text)
        rows.append(row)
        others = (MINIBATCH, *SVI_METHODS)
        rate_rows.append(rate_row + [f"{cells[m].rate:.0e}" for m in others])
    print("\nLog-loss relative to Implicit SGD (the paper's); * misses the aim")
    print_table(header, rows)
    print("\nTuned rates, of the mean form (the paper's)")
    print_table([*header, MINIBATCH, *SVI_METHODS], rate_rows)
    print("\nTraining log-loss in nats after the last epoch, and seconds of steps")
    lines = [
        [name, method, f"{cell.losses[-1]:.5f}", f"{cell.seconds:.2f}"]
        for name, cells in results.items()
        for method, cell in cells.items()
    ]
    print_table(["data set", "method", "log-loss", "seconds"], lines)


def relative_loss(cells: dict[str, Result], method: str) -> float:
    """Final log-loss over that of Implicit SGD."""
    return cells[method].losses[-1] / cells["implicit"].losses[-1]


def is_starred(name: str, cells: dict[str, Result], method: str) -> bool:
    """Whether the aim is missed."""
    if method in BIASED and name in PAPER_LOSSES:
        return relative_loss(cells, method) < PAPER_LOSSES[name][list(RULES).index(method)]
    return method == "implicit" and min(relative_loss(cells, m) for m in RULES) < 1 / WITHIN


def print_speeds(found: dict[int, dict[str, tuple[float, float]]]) -> None:
    """Print steps and observations per second."""
    print(
        f"\nPer second, D = {SPEED_FEATURES}; a minibatch has {BATCH} observations, other classes"
    )
    lines = [
        [method, str(num_categories), f"{steps:,.0f}", f"{observations:,.0f}"]
        for num_categories, methods in found.items()
        for method, (steps, observations) in methods.items()
    ]
    print_table(["method", "K", "steps", "observations"], lines)


def plot_results(
    results: Results, rates: dict[str, dict[str, list[float]]], sizes: Sizes, folder: Path
) -> None:
    """Draw log-loss against epochs and seconds, and against the rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    epochs = np.array(curve_epochs(sizes))
    shape = {"figsize": (5 * len(results), 8), "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(2, len(results), **shape)
    for column, (name, cells) in enumerate(results.items()):
        for number, (method, cell) in enumerate(cells.items()):
            style = {"label": method, "color": f"C{number}", "marker": "o", "markersize": 3}
            axes[0, column].plot(epochs, cell.losses, **style)
            axes[1, column].plot(epochs / sizes.num_passes * cell.seconds, cell.losses, **style)
        axes[0, column].set(title=name, xlabel="epochs", yscale="log")
        axes[1, column].set(xlabel="seconds of steps", xscale="log", yscale="log")
    for row in axes:
        row[0].set_ylabel("training log-loss (nats)")
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(folder / "log_loss.png", dpi=110)
    plt.close(figure)
    for name, losses in rates.items():
        figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
        for method, values in losses.items():
            shown = [value if math.isfinite(value) else math.nan for value in values]
            axis.plot([10.0**e for e in sizes.exponents], shown, marker="o", label=method)
        axis.set(title=f"{name}; no point where a fit diverged", xscale="log", yscale="log")
        axis.set(xlabel="initial rate, of the mean form", ylabel="training log-loss (nats)")
        axis.legend(fontsize="small")
        figure.savefig(folder / f"sensitivity_{name}.png", dpi=110)
        plt.close(figure)


def _record(setting: dict[str, Any], method: str, metric: str, value: float, unit: str) -> Record:
    better = "higher" if metric.endswith("per_second") else "lower"
    known = value if math.isfinite(value) else None
    return record(NAME, setting, method, metric, known, unit, better)


def fit_records(results: Results, sizes: Sizes) -> Iterator[Record]:
    """Records of the fits."""
    for name, cells in results.items():
        for method, cell in cells.items():
            setting = {"dataset": name, "rate": cell.rate}
            yield _record(setting, method, "seconds", cell.seconds, "s")
            yield _record(setting, method, "relative_loss", relative_loss(cells, method), "")
            for epoch, loss in zip(curve_epochs(sizes), cell.losses, strict=True):
                yield _record(setting | {"epoch": epoch}, method, "log_loss", loss, "nats")


def other_records(
    rates: dict[str, dict[str, list[float]]],
    found: dict[int, dict[str, tuple[float, float]]],
    sizes: Sizes,
) -> Iterator[Record]:
    """Records of the sensitivity to the rate, and of speeds."""
    for name, methods in rates.items():
        for method, losses in methods.items():
            for exponent, loss in zip(sizes.exponents, losses, strict=True):
                setting = {"dataset": name, "rate": 10.0**exponent}
                yield _record(setting, method, "loss_at_rate", loss, "nats")
    for num_categories, speeds_of in found.items():
        for method, (steps, observations) in speeds_of.items():
            setting = {"K": num_categories, "D": SPEED_FEATURES}
            yield _record(setting, method, "steps_per_second", steps, "1/s")
            yield _record(setting, method, "observations_per_second", observations, "1/s")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argument_parser(__doc__)
    add_data_argument(parser, "xml/ and mnist/")
    parser.add_argument("--datasets", nargs="+", choices=list(FOLDERS), default=list(FOLDERS))
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write pictures there")
    parser.add_argument(
        "--tuned-share",
        type=int,
        default=FULL.tuned_share,
        metavar="M",
        help="tune on one in M of the rows; 1 shows what tuning on a tenth costs",
    )
    args = parser.parse_args()
    if args.data is None and not args.quick:
        parser.error(f"{how_to_name_data('xml/ and mnist/')}; or give --quick")
    return args


def finish(
    args: argparse.Namespace,
    sizes: Sizes,
    results: Results,
    rates: dict[str, dict[str, list[float]]],
    found: dict[int, dict[str, tuple[float, float]]],
) -> None:
    """Write what there is so far."""
    records: list[Record | MachineRecord] = [*fit_records(results, sizes)]
    records += other_records(rates, found, sizes)
    records.append(machine_record(NAME, jax.devices()[0].device_kind))
    write_json(args.json, records)
    if args.plot:
        plot_results(results, rates, sizes, args.plot)


def main() -> None:
    """Run all methods and print the tables."""
    args = parse_arguments()
    sizes = QUICK if args.quick else FULL._replace(tuned_share=args.tuned_share)
    found = {k: speeds(k, sizes) for k in sizes.speed_categories}
    print_speeds(found)
    results: Results = {}
    rates: dict[str, dict[str, list[float]]] = {}
    problems = {}
    for name in ["quick"] if args.quick else args.datasets:
        problems[name] = synthetic_problem() if args.quick else read_problem(name, args.data)
        results[name] = run_problem(problems[name], sizes)
        finish(args, sizes, results, rates, found)  # after each: the run is long
    print_results(results)
    if args.plot:
        for name in problems.keys() & {SENSITIVITY, "quick"}:
            rates[name] = sensitivity(problems[name], sizes)
        finish(args, sizes, results, rates, found)


if __name__ == "__main__":
    main()
