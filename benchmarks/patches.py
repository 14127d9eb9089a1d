# SPDX-License-Identifier: Apache-2.0
"""How soon L-sparse mixtures of image patches reach the held-out score of dense ones.

Section 4 and Figs. 1 and 2 of Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse
Posteriors, arXiv:1609.07521: 8 x 8 patches on a grid of 4 pixels, each with its mean removed, and a
mixture of zero-mean Gaussians with full covariances, Dirichlet(10 / K) weights, in minibatches of
four images. Here there are 40 training and 20 held-out images (the paper has 400), in
``bsds300_gray_sub.npz``, which ``--data`` must hold.

All fits of one K start from the same seeds. They take turns, batch by batch, so that all meet the
same load of the machine. The clock counts whole steps, with the posterior and the copying of
batches, but no compilation, seeding or scoring. Beside wall time it counts processor time of all
threads, which other programs on the machine hardly change. The score is the mean log density of
held-out patches at the posterior means. ``sooner`` is the time that the dense fit of the same
algorithm needs for its final score, divided by the time in which the sparse one reaches that score.

Then the distance of sparse from dense responsibilities under a dense fit (Fig. 1d), and the time of
one local step with its sums.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

import numpyro_largecat as lc
from benchmarks.data_folder import add_data_argument, how_to_name_data
from benchmarks.readers import find_file
from benchmarks.records import (
    MachineRecord,
    Record,
    argument_parser,
    machine_record,
    print_table,
    record,
    write_json,
)
from numpyro_largecat.mixtures.global_step import Statistics
from numpyro_largecat.mixtures.mixture_fit import MixtureFit
from numpyro_largecat.mixtures.passes import Model, Step, memoized_steps, stochastic_steps
from numpyro_largecat.mixtures.row_stream import RowStream, look_at
from numpyro_largecat.mixtures.start_statistics import num_candidates, seed_statistics

NAME = "patches"
PICTURES = "images/bsds300_gray_sub.npz"
SIZE, STRIDE = 8, 4
IMAGES_PER_BATCH = 4
CONCENTRATION = 10.0
PRIOR_STRENGTH = 10.0  # patches
PRIOR_SHARE = 0.1  # prior variance, of the mean variance of the patches
OPTIONS = lc.mixtures.Options(delay=1.0, forgetting=0.55)
DENSE = 0  # L = K, whatever K is
SPEED_ROWS = 36_000
SPEED_COMPONENTS = 200
WANTED_SOONER = 2.0
WANTED_SECONDS = 0.8
ALGORITHMS = ("memoized", "stochastic")


class Effort(NamedTuple):
    """What to fit and for how long."""

    num_components: tuple[int, ...]
    num_active: tuple[int, ...]  # beside the dense mixture
    num_passes: int
    score_every: int  # batches
    num_held_out: int
    speed_rows: int
    speed_components: int
    num_timings: int


FULL = Effort((200, 800), (1, 4, 8, 16), 4, 5, 10_000, SPEED_ROWS, SPEED_COMPONENTS, 5)
QUICK = Effort((6,), (1, 2), 2, 1, 200, 300, 6, 1)


class Problem(NamedTuple):
    """Batches to fit and rows to score."""

    batches: list[NDArray[np.float32]]  # (n, 64) each
    held_out: NDArray[np.float32]  # (M, 64)

    def family(self) -> lc.mixtures.ZeroMeanGaussianFamily:
        """The components, with a prior worth ``PRIOR_STRENGTH`` patches of little variance."""
        variance = np.mean([np.square(batch, dtype=np.float64).mean() for batch in self.batches])
        return lc.mixtures.ZeroMeanGaussianFamily(
            PRIOR_SHARE * variance * np.eye(SIZE**2), PRIOR_STRENGTH
        )


class Point(NamedTuple):
    """One point of a curve."""

    num_batches: int
    clock: float  # seconds of wall time
    processor: float  # seconds of processor time
    score: float  # nats per patch


def patches(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Patches of images (n, rows, columns), scaled to [0, 1], less their means; (N, 64)."""
    windows = np.lib.stride_tricks.sliding_window_view(images, (SIZE, SIZE), axis=(1, 2))
    x = windows[:, ::STRIDE, ::STRIDE].reshape(-1, SIZE**2).astype(np.float32) / 255
    return x - x.mean(axis=1, keepdims=True)


def problem_of(train: NDArray[np.uint8], test: NDArray[np.uint8], num_held_out: int) -> Problem:
    """Batches of four images each, and held-out patches drawn at random."""
    starts = range(0, len(train), IMAGES_PER_BATCH)
    held_out = patches(test)
    rows = np.random.RandomState(0).permutation(len(held_out))[:num_held_out]
    return Problem([patches(train[i : i + IMAGES_PER_BATCH]) for i in starts], held_out[rows])


def berkeley(directory: Path, num_held_out: int) -> Problem:
    """Patches of the Berkeley images."""
    with np.load(find_file(directory, "bsds300_gray_sub.npz")) as file:
        return problem_of(file["train"], file["test"], num_held_out)


def synthetic(num_held_out: int) -> Problem:
    """Patches of small pictures of smooth noise, some rougher than others."""
    random = np.random.RandomState(0)
    steps = random.randint(-9, 10, (12, 40, 40)) * np.repeat([1, 4, 12], 4)[:, None, None]
    images = np.clip(128 + steps.cumsum(axis=1) // 3, 0, 255).astype(np.uint8)
    return problem_of(images[random.permutation(12)[:8]], images, num_held_out)


@dataclass
class Run:
    """One fit under way."""

    model: Model
    steps: Iterator[Step]
    clock: float = 0.0
    processor: float = 0.0
    times: list[float] = field(default_factory=list)
    curve: list[Point] = field(default_factory=list)
    latest: Step | None = None

    def advance(self) -> None:
        """Take one timed step."""
        start, processor = time.perf_counter(), time.process_time()
        self.latest = next(self.steps)
        self.times.append(time.perf_counter() - start)
        self.clock += self.times[-1]
        self.processor += time.process_time() - processor

    def fit(self) -> MixtureFit:
        """The mixture as it is now."""
        assert self.latest is not None
        model, statistics = self.model, self.latest.statistics
        return MixtureFit(
            model.family,
            model.mixing,
            model.objective,
            model.num_active,
            statistics.counts,
            statistics.features,
            np.array([self.latest.bound]),
            model.look.dtype,
        )

    def score(self, held_out: NDArray[np.float32]) -> None:
        """Add a point to the curve."""
        score = float(self.fit().log_likelihood(held_out).mean())
        self.curve.append(Point(len(self.times), self.clock, self.processor, score))

    def seconds_to_reach(self, score: float, clock: str = "clock") -> float | None:
        """Time at which the curve first reaches a score, interpolated; None if it does not."""
        for before, after in zip([None, *self.curve], self.curve, strict=False):
            if after.score >= score:
                end: float = getattr(after, clock)
                if before is None:
                    return end
                share = (score - before.score) / (after.score - before.score)
                return end - (1 - share) * (end - getattr(before, clock))
        return None


def start_run(
    problem: Problem, method: str, num_active: int, start: Statistics, num_passes: int
) -> Run:
    """Set up a fit, and compile its step."""
    num_components = len(start.counts)
    rng = np.random.default_rng(0)
    stream = RowStream(problem.batches, None, rng)
    family = problem.family()
    model = Model(
        family,
        lc.mixtures.DirichletMixing(CONCENTRATION),
        "variational",
        num_active or num_components,
        look_at(stream, family, 1, rng),
    )
    posterior = model.global_step(start)
    jax.block_until_ready(model.sum_batch(problem.batches[0], posterior))
    if method == "memoized":
        return Run(model, memoized_steps(model, start, stream, num_passes))
    steps = stochastic_steps(model, start, stream, num_passes, OPTIONS, jax.random.key(0))
    return Run(model, steps)


def seeds(problem: Problem, num_components: int) -> Statistics:
    """The start of all fits with K components."""
    random = np.random.RandomState(1)
    rows = np.concatenate(problem.batches)
    chosen = random.permutation(len(rows))[: num_candidates(num_components)]
    return seed_statistics(
        jax.random.key(0), problem.family(), rows[chosen], num_components, "kmeans++"
    )


def fit_in_turns(
    problem: Problem, effort: Effort, algorithm: str, start: Statistics, seconds: float
) -> dict[int, Run]:
    """Fit with each L, a batch in turn, until the passes or the time are over."""
    runs = {
        num_active: start_run(problem, algorithm, num_active, start, effort.num_passes)
        for num_active in (*effort.num_active, DENSE)
    }
    num_batches = len(problem.batches)
    end = time.perf_counter() + seconds
    for i in range(1, effort.num_passes * num_batches + 1):
        last = i == effort.num_passes * num_batches or time.perf_counter() > end
        for run in runs.values():
            run.advance()
            if i in (1, 2) or i % effort.score_every == 0 or last:
                run.score(problem.held_out)
        if last:
            break
    return runs


def report_runs(
    num_components: int, algorithm: str, runs: dict[int, Run], num_batches: int
) -> list[Record]:
    """Print a table of one K and algorithm, and return its records."""
    dense = runs[DENSE].curve[-1]
    rows, records = [], []
    for num_active, run in runs.items():
        setting = {"K": num_components, "L": num_active or num_components, "algorithm": algorithm}
        method, end = "dense" if num_active == DENSE else "sparse", run.curve[-1]
        reached = run.seconds_to_reach(dense.score)
        sooner = None if reached is None else dense.clock / reached
        processor = run.seconds_to_reach(dense.score, "processor")
        processor_sooner = None if processor is None else dense.processor / processor
        step = statistics.median(run.times)
        rows.append(
            [
                f"{setting['L']}",
                f"{step:.3f}",
                f"{min(run.times):.3f} to {max(run.times):.3f}",
                f"{end.clock:.1f}",
                f"{end.score:.3f}",
                "not" if reached is None else f"{reached:.1f}",
                "" if sooner is None else f"{sooner:.2f}",
                f"{end.processor / end.num_batches:.3f}",
                "" if processor_sooner is None else f"{processor_sooner:.2f}",
            ]
        )
        cells: list[tuple[str, float | None, str, Any, dict[str, Any]]] = [
            ("seconds_per_batch", step, "s", "lower", {}),
            ("seconds_per_batch_min", min(run.times), "s", "lower", {}),
            ("seconds_per_batch_max", max(run.times), "s", "lower", {}),
            ("seconds_to_reach", reached, "s", "lower", {}),
            ("speedup_to_reach", sooner, "ratio", "higher", {}),
            ("processor_seconds_per_batch", end.processor / end.num_batches, "s", "lower", {}),
            ("processor_speedup_to_reach", processor_sooner, "ratio", "higher", {}),
        ]
        cells += [
            (
                "heldout_log_likelihood",
                point.score,
                "nats per patch",
                "higher",
                {"seconds": round(point.clock, 3), "batches": point.num_batches},
            )
            for point in run.curve
        ]
        records += [
            record(NAME, setting | place, method, metric, value, unit, better)
            for metric, value, unit, better, place in cells
        ]
    passes = len(runs[DENSE].times) / num_batches
    print(f"\nK = {num_components}, {algorithm}, {passes:g} passes")
    header = ["L", "s per batch", "range", "s in all", "score", "s to dense score", "sooner"]
    header += ["processor s per batch", "sooner"]
    print_table(header, rows)
    return records


def distances(fit: MixtureFit, x: NDArray[np.float32], actives: Sequence[int]) -> list[Record]:
    """Total variation between dense responsibilities and the best L-sparse ones, Fig. 1d.

    The sparse ones are the dense ones on their support, normalised; so it is the mass left out.
    """
    dense = np.sort(np.asarray(fit.responsibilities(x, num_active=fit.num_components).probs))
    rows, records = [], []
    for num_active in actives:
        left = np.maximum(1 - dense[:, -num_active:].sum(axis=1), 0)
        figures = {
            "distance_mean": left.mean(),
            "distance_median": np.quantile(left, 0.5),
            "distance_90": np.quantile(left, 0.9),
            "distance_99": np.quantile(left, 0.99),
        }
        rows.append([str(num_active), *(f"{value:.4f}" for value in figures.values())])
        setting = {"K": fit.num_components, "L": num_active}
        records += [
            record(NAME, setting, "sparse", name, float(value), "total variation")
            for name, value in figures.items()
        ]
    print(f"\nTotal variation from dense responsibilities, K = {fit.num_components}")
    print_table(["L", "mean", "median", "90 %", "99 %"], rows)
    return records


def local_step_times(problem: Problem, effort: Effort) -> list[Record]:
    """Seconds of one local step with its sums, for fixed globals."""
    x = np.concatenate(problem.batches)[: effort.speed_rows]
    start = seeds(problem, effort.speed_components)
    few = Problem([x], problem.held_out)
    runs = {a: start_run(few, "memoized", a, start, 1).model for a in (*effort.num_active, DENSE)}
    posterior = next(iter(runs.values())).global_step(start)
    times: dict[int, list[float]] = {num_active: [] for num_active in runs}
    for _ in range(effort.num_timings):
        for num_active, model in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(model.sum_batch(x, posterior))
            times[num_active].append(time.perf_counter() - began)
    rows, records = [], []
    for num_active, seconds in times.items():
        setting = {"K": effort.speed_components, "L": num_active or effort.speed_components}
        setting["N"] = len(x)
        method = "dense" if num_active == DENSE else "sparse"
        figures = {
            "local_step_seconds": statistics.median(seconds),
            "local_step_seconds_min": min(seconds),
            "local_step_seconds_max": max(seconds),
        }
        rows.append([str(setting["L"]), *(f"{value:.3f}" for value in figures.values())])
        records += [record(NAME, setting, method, k, v, "s") for k, v in figures.items()]
    print(f"\nOne local step with its sums, N = {len(x)}, K = {effort.speed_components}")
    print(f"(wanted: at most {WANTED_SECONDS} s for 36,000 rows, K = 200, L = 4, two cores)")
    print_table(["L", "seconds", "least", "greatest"], rows)
    return records


def plot(curves: dict[tuple[int, str], dict[int, Run]], path: Path) -> None:
    """Draw held-out log likelihood against time, a panel for each K and algorithm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(curves), figsize=(4.5 * len(curves), 4), layout="constrained", squeeze=False
    )
    for axes, ((num_components, algorithm), runs) in zip(panels[0], curves.items(), strict=True):
        for num_active, run in runs.items():
            label = f"L = {num_active}" if num_active else f"L = K = {num_components}"
            style = "k.-" if num_active == DENSE else ".-"
            axes.plot(
                [p.clock for p in run.curve], [p.score for p in run.curve], style, label=label
            )
        axes.set(xscale="log", xlabel="seconds", title=f"K = {num_components}, {algorithm}")
        axes.set_ylabel("held-out log likelihood per patch (nats)")
        ends = [run.curve[-1].score for run in runs.values()]
        starts = [run.curve[min(2, len(run.curve) - 1)].score for run in runs.values()]
        axes.set_ylim(min(starts) - 1, max(ends) + 1)
        axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add_data_argument(parser, PICTURES)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw all curves into this file")
    parser.add_argument(
        "--components", type=int, nargs="+", metavar="K", help="default 200 800; quick 6"
    )
    parser.add_argument(
        "--active", type=int, nargs="+", metavar="L", help="default 1 4 8 16; quick 1 2"
    )
    parser.add_argument(
        "--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), help="default both"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="end the fits of one K and algorithm early after so many seconds of wall time",
    )
    arguments = parser.parse_args()
    if arguments.data is None and not arguments.quick:
        parser.error(how_to_name_data(PICTURES))
    return arguments


def main() -> None:
    arguments = parse_arguments()
    effort = QUICK if arguments.quick else FULL
    if arguments.active is not None:
        effort = effort._replace(num_active=tuple(arguments.active))
    if arguments.quick:
        problem = synthetic(effort.num_held_out)
    else:
        problem = berkeley(arguments.data, effort.num_held_out)
    sizes = [len(batch) for batch in problem.batches]
    print(f"{sum(sizes)} patches in {len(sizes)} batches; {len(problem.held_out)} held out")
    records: list[Record | MachineRecord] = [machine_record(NAME, jax.devices()[0].device_kind)]
    records += local_step_times(problem, effort)
    curves: dict[tuple[int, str], dict[int, Run]] = {}
    for num_components in arguments.components or effort.num_components:
        start = seeds(problem, num_components)
        for algorithm in arguments.algorithms:
            runs = fit_in_turns(problem, effort, algorithm, start, arguments.seconds)
            curves[num_components, algorithm] = runs
            records += report_runs(num_components, algorithm, runs, len(sizes))
            write_json(arguments.json, records)
        records += distances(runs[DENSE].fit(), problem.held_out, effort.num_active)
    print(f"\n(wanted: at least one moderate L that is {WANTED_SOONER:g} times sooner)")
    if arguments.plot is not None:
        plot(curves, arguments.plot)
    write_json(arguments.json, records)


if __name__ == "__main__":
    main()
