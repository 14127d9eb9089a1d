# SPDX-License-Identifier: Apache-2.0
"""How soon subsampled classes reach the held-out score that exact softmax reaches in a minute.

The data are the demo's: predict the next name in Python's standard library from the three names
before it. Both methods fit the same model, utilities ``x @ w.T + b`` with a posterior over all
weights, by the same guide and loss; each with the optimiser, the minibatch and the number of drawn
classes that were best of those tried (``SETTINGS``). The score is the exact log likelihood per
held-out token at the posterior mean. The clock counts steps alone, not compilation and not
evaluation; the methods take turns, check point by check point, so that all meet the same load of
the machine.

With PyTorch (the extra ``benchmarks``) two point estimates of the same utilities run too: exact
softmax (``torch_exact``), and sampled softmax with the log-frequency correction
(``torch_sampled``). They over-fit, so the best score of their curves counts, as if they were
stopped early by the held-out data themselves, and the question is when ours reaches that.

``--tune METHOD`` instead tries the settings of ``TRIED`` on a part of the training data that is
held back; the test part is not looked at. ``SETTINGS`` holds the winners: of exact NumPyro after 60
seconds, of ours after 5, and of PyTorch by the best score at any time of 60 seconds, or of 20 where
it draws classes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, lax, random
from numpy.typing import NDArray
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_mean

import numpyro_largecat as lc
from benchmarks.readers import load
from benchmarks.records import (
    MachineRecord,
    Record,
    argument_parser,
    machine_record,
    print_table,
    say_that_torch_is_missing,
    torch_is_missing,
    write_json,
)

NAME = "time_to_quality"
WEIGHT_SCALE = 0.2  # prior standard deviation of each of the D weights of a class
BIAS_SCALE = 3.0  # prior standard deviation of a class's log frequency
INIT_SCALE = 0.01  # posterior standard deviations at the start


class Setting(NamedTuple):
    """How a method takes its steps."""

    optimizer: str
    learning_rate: float
    batch_size: int
    num_sampled: int = 0  # classes drawn, beside the labels; 0 for all


SETTINGS = {
    "numpyro": Setting("adagrad", 0.1, 2000),
    "subsampled": Setting("adagrad", 0.1, 200, 200),
    "torch_exact": Setting("adagrad", 0.1, 200),
    "torch_sampled": Setting("adam", 0.003, 200, 400),
}
METHODS = tuple(SETTINGS)
PEERS = ("torch_exact", "torch_sampled")
SIZES = [(100, 100), (200, 100), (200, 200), (200, 400), (500, 100), (500, 400)]
TRIED = {  # rates at one size, and sizes at the rates that were good there
    "numpyro": [
        *(Setting("adagrad", rate, 500) for rate in (0.025, 0.05, 0.1, 0.2)),
        *(Setting("adagrad", rate, 1000) for rate in (0.05, 0.1, 0.2)),
        Setting("adagrad", 0.1, 2000),
    ],
    "subsampled": [Setting("adagrad", r, b, s) for r in (0.05, 0.1, 0.15) for b, s in SIZES],
    "torch_exact": [
        *(Setting("adam", rate, 500) for rate in (0.001, 0.003, 0.01)),
        *(Setting("adagrad", rate, 500) for rate in (0.03, 0.1, 0.3)),
        *(Setting("adagrad", 0.1, size) for size in (200, 1000)),
    ],
    "torch_sampled": [
        *(Setting("adam", rate, 500, 100) for rate in (0.001, 0.003, 0.01)),
        *(Setting("adagrad", rate, 500, 100) for rate in (0.03, 0.1, 0.3)),
        *(Setting("adam", 0.003, b, s) for b, s in SIZES),
        *(Setting("adam", 0.001, b, s) for b, s in ((200, 200), (500, 400))),
    ],
}
# Those of JAX are compiled together; a chunk is about 0.1 s.
STEPS_PER_CHUNK = {"numpyro": 1, "subsampled": 75, "torch_exact": 1, "torch_sampled": 50}
NUM_SCORED = 5000  # held-out tokens, a fixed subset
SCORED_TOGETHER = 500
WANTED_SPEEDUP = 25
NAMES = {
    "numpyro": "exact (NumPyro)",
    "subsampled": "sampled (ours)",
    "torch_exact": "exact (PyTorch)",
    "torch_sampled": "sampled (PyTorch)",
}


class Problem(NamedTuple):
    """Training data, held-out data to score, and the number of classes."""

    x: NDArray[np.float32]  # (N, D)
    y: NDArray[np.int32]  # (N,)
    x_scored: NDArray[np.float32]  # (NUM_SCORED, D)
    y_scored: NDArray[np.int32]  # (NUM_SCORED,)
    num_categories: int


class Point(NamedTuple):
    """One point of a curve."""

    check_point: float  # planned seconds
    clock: float  # seconds taken, to the end of the chunk that reached the check point
    steps: int
    score: float  # held-out log likelihood per token, in nats


def names_problem(*, held_back: bool) -> Problem:
    """Load the demo's data; ``held_back`` scores a part of the training data in place of the test.

    The training data are in the order of the files, so each held-back block of 2000 observations is
    from a few files, and most of these files are not trained on, as with the test part.
    """
    data = load("names")
    x, y, x_test, y_test = data.x_train, data.y_train, data.x_test, data.y_test
    if held_back:
        back = np.arange(len(y)) // 2000 % 10 == 0
        x, y, x_test, y_test = x[~back], y[~back], x[back], y[back]
    return _with_scored_subset(x, y, x_test, y_test, data.num_categories)


def synthetic_problem() -> Problem:
    """Make a small problem of the same form."""
    rng = np.random.default_rng(0)
    num_rows, num_categories, num_features = 15_000, 500, 16
    w = rng.standard_normal((num_categories, num_features))
    b = 2 * rng.standard_normal(num_categories)
    x = rng.standard_normal((num_rows, num_features)).astype(np.float32)
    y = (x @ w.T + b + rng.gumbel(size=(num_rows, num_categories))).argmax(axis=1).astype(np.int32)
    return _with_scored_subset(x[5000:], y[5000:], x[:5000], y[:5000], num_categories)


def _with_scored_subset(
    x: NDArray[np.float32],
    y: NDArray[np.int32],
    x_test: NDArray[np.float32],
    y_test: NDArray[np.int32],
    num_categories: int,
) -> Problem:
    scored = np.random.default_rng(0).choice(len(y_test), NUM_SCORED, replace=False)
    return Problem(x, y, x_test[scored], y_test[scored], num_categories)


def sample_weights(num_features: int) -> tuple[Array, Array]:
    """Sample the weights and the bias of each class of the enclosing plate."""
    w = numpyro.sample("w", dist.Normal(0, WEIGHT_SCALE).expand([num_features]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, BIAS_SCALE))
    return w, b


def exact_model(labels: NDArray[np.int32], num_categories: int) -> Callable[..., None]:
    """Make the plain NumPyro model, whose softmax is over all classes."""

    def model(x: Array, y: Array, rows: Array) -> None:
        del rows
        with numpyro.plate("classes", num_categories):
            w, b = sample_weights(x.shape[1])
        with numpyro.plate("data", len(labels), subsample_size=len(x)):
            numpyro.sample("y", dist.Categorical(logits=x @ w.T + b), obs=y)

    return model


def subsampled_model(
    labels: NDArray[np.int32], num_categories: int, num_sampled: int
) -> Callable[..., None]:
    """Make the same model on a weighted subset of classes, drawn by their frequency."""
    counts = np.bincount(labels, minlength=num_categories) + 1
    proposal = lc.FrequencyProposal(counts)

    def model(x: Array, y: Array, rows: Array) -> None:
        plate = lc.class_plate("classes", num_categories, y, num_sampled, proposal=proposal)
        with plate as classes:
            w, b = sample_weights(x.shape[1])
        with lc.data_plate("data", len(labels), rows) as batch:
            lc.sample_choice("y", x @ w.T + b, classes=classes, rows=batch, obs=y)

    return model


def make_svi(problem: Problem, setting: Setting) -> SVI:
    """Make the SVI object of one of JAX's methods: exact where no classes are drawn."""
    if setting.num_sampled:
        model = subsampled_model(problem.y, problem.num_categories, setting.num_sampled)
    else:
        model = exact_model(problem.y, problem.num_categories)
    guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=INIT_SCALE)
    kind = lc.SubsampledSVI if setting.num_sampled else SVI
    optimizer = {"adagrad": optax.adagrad, "adam": optax.adam}[setting.optimizer]
    return kind(model, guide, optimizer(setting.learning_rate), TraceMeanField_ELBO())


@jax.jit
def log_likelihood(w: Array, b: Array, x: Array, y: Array) -> Array:
    """Mean exact log likelihood, with the utilities of a few observations in memory at a time."""

    def chunk(xy: tuple[Array, Array]) -> Array:
        utilities = xy[0] @ w.T + b
        return jnp.take_along_axis(jax.nn.log_softmax(utilities), xy[1][:, None], axis=1)

    chunks = (x.reshape(-1, SCORED_TOGETHER, x.shape[1]), y.reshape(-1, SCORED_TOGETHER))
    return lax.map(chunk, chunks).mean()


Weights = tuple[Array | NDArray[np.float32], Array | NDArray[np.float32]]


@dataclass
class Fit:
    """A fit whose clock stands still while it is looked at."""

    method: str
    run_chunk: Callable[[], None]
    weights: Callable[[], Weights]  # (K, D) and (K,), as they are now
    clock: float = 0.0
    num_chunks: int = 0
    curve: list[Point] = field(default_factory=list)

    def go_to(self, check_point: float) -> None:
        """Take steps until the clock shows ``check_point`` seconds."""
        while self.clock < check_point:
            start = time.perf_counter()
            self.run_chunk()
            self.clock += time.perf_counter() - start
            self.num_chunks += 1

    def add_point(self, check_point: float, problem: Problem) -> None:
        """Score the estimate, which is the mean of a posterior, as it is now."""
        score = log_likelihood(*self.weights(), problem.x_scored, problem.y_scored)
        steps = self.num_chunks * STEPS_PER_CHUNK[self.method]
        self.curve.append(Point(check_point, self.clock, steps, float(score)))


def start_fit(method: str, problem: Problem, setting: Setting) -> Fit:
    """Initialise a fit of a method, and compile its steps."""
    return (start_peer if method in PEERS else start_posterior)(method, problem, setting)


def start_posterior(method: str, problem: Problem, setting: Setting) -> Fit:
    """Initialise a fit of a posterior and compile its steps."""
    init_key, rng_key = random.split(random.key(0))
    svi = make_svi(problem, setting)
    batches = lc.ArrayBatches(problem.x, problem.y, batch_size=setting.batch_size)
    state = svi.init(init_key, *batches.draw(init_key))
    state = jax.tree.map(jnp.copy, state)  # NumPyro's state shares arrays with the guide

    def chunk(state: Any, rng_key: Array, batches: lc.ArrayBatches) -> tuple[Any, Array]:
        def step(state: Any, key: Array) -> tuple[Any, Array]:
            return svi.update(state, *batches.draw(key))

        return lax.scan(step, state, random.split(rng_key, STEPS_PER_CHUNK[method]))

    compiled = jax.jit(chunk, donate_argnums=0).lower(state, rng_key, batches).compile()

    def run_chunk() -> None:
        nonlocal state, rng_key
        rng_key, key = random.split(rng_key)
        state, loss = compiled(state, key, batches)
        jax.block_until_ready(loss)

    def weights() -> Weights:
        params = svi.get_params(state)
        return params["w_auto_loc"], params["b_auto_loc"]

    return Fit(method, run_chunk, weights)


def start_peer(method: str, problem: Problem, setting: Setting) -> Fit:
    """Initialise a fit of PyTorch."""
    import torch

    from benchmarks.torch_peers import Peer, best_number_of_threads

    def make() -> Peer:
        return Peer(
            method,
            problem.x,
            problem.y,
            problem.num_categories,
            **setting._asdict(),
        )

    num_steps = STEPS_PER_CHUNK[method]
    threads = best_number_of_threads(partial(make().run, 2 * num_steps))
    peer = make()

    def run_chunk() -> None:
        torch.set_num_threads(threads)  # the peers take turns, each with its own number
        peer.run(num_steps)

    return Fit(method, run_chunk, peer.weights)


def check_points(seconds: float) -> list[float]:
    """Times to score at: dense at first, where curves are steep, and then every 60th."""
    fractions = [*np.arange(1, 24) / 120, *np.arange(12, 61) / 60]
    return [float(f"{seconds * f:.4g}") for f in fractions]


def run_side_by_side(fits: Sequence[Fit], problem: Problem, seconds: float) -> None:
    """Advance all fits to one check point after the other."""
    for fit in fits:
        fit.add_point(0.0, problem)  # compiles the score, and is the start of the curve
    for check_point in check_points(seconds):
        for fit in fits:
            fit.go_to(check_point)
            fit.add_point(check_point, problem)


def seconds_to_reach(curve: Sequence[Point], score: float) -> float | None:
    """Clock of the first point that is at least as good as ``score``."""
    return next((point.clock for point in curve if point.score >= score), None)


def best_point(curve: Sequence[Point]) -> Point:
    """The point with the best score."""
    return max(curve, key=lambda point: point.score)


def measure(problem: Problem, seconds: float, methods: Sequence[str]) -> dict[str, list[Point]]:
    """Run all methods for ``seconds`` each."""
    fits = [start_fit(method, problem, SETTINGS[method]) for method in methods]
    run_side_by_side(fits, problem, seconds)
    return {fit.method: fit.curve for fit in fits}


def make_records(
    curves: dict[str, list[Point]], problem: Problem, seconds: float
) -> list[Record | MachineRecord]:
    """Turn the curves into records, and compare ours with the others."""
    base = {"K": problem.num_categories, "N": len(problem.y), "D": problem.x.shape[1]}
    make = partial(Record, benchmark=NAME)
    records: list[Record | MachineRecord] = [machine_record(NAME, jax.devices()[0].device_kind)]
    for method, curve in curves.items():
        own = {**base, **SETTINGS[method]._asdict()}
        for point in curve:
            cell = partial(make, setting={**own, "seconds": point.check_point}, method=method)
            score = {"metric": "heldout_log_likelihood", "value": point.score}
            records += [
                cell(**score, unit="nats per token", better="higher"),
                cell(metric="steps", value=point.steps, unit="steps", better="higher"),
            ]
    target = curves["numpyro"][-1]
    reached = seconds_to_reach(curves["subsampled"], target.score)
    cell = partial(make, setting={**base, "seconds": seconds}, method="subsampled")
    ratio = None if reached is None else target.clock / reached
    records += [
        cell(metric="seconds_to_reach", value=reached, unit="s", better="lower"),
        cell(metric="speedup_to_reach", value=ratio, unit="ratio", better="higher"),
    ]
    for peer in [method for method in PEERS if method in curves]:
        best = best_point(curves[peer])
        reached = seconds_to_reach(curves["subsampled"], best.score)
        setting = {**base, "seconds": seconds, "peer": peer}
        cell = partial(make, setting=setting, unit="s", better="lower")
        records += [
            cell(method="subsampled", metric="seconds_to_peer_best", value=reached),
            cell(method=peer, metric="seconds_to_own_best", value=best.clock),
        ]
    return records


def report(curves: dict[str, list[Point]]) -> None:
    """Print the curves and what they say."""
    rows = [
        [f"{points[0].check_point:g}", *(f"{p.steps} {p.score:.4f}".rjust(16) for p in points)]
        for points in zip(*curves.values(), strict=True)
    ]
    print("Steps and held-out log likelihood per token after some seconds of steps")
    print_table(["seconds", *(NAMES[method] for method in curves)], rows)
    target = curves["numpyro"][-1]
    reached = seconds_to_reach(curves["subsampled"], target.score)
    what = f"what exact softmax reaches in {target.clock:.1f} s, {target.score:.4f}"
    if reached is None:
        print(f"Subsampled classes did not reach {what}.")
    else:
        ratio = target.clock / reached
        print(f"Subsampled classes reach {what}, in {reached:.2f} s: {ratio:.1f} times sooner")
        print(f"(wanted: at least {WANTED_SPEEDUP}).")
    for peer in [method for method in PEERS if method in curves]:
        best = best_point(curves[peer])
        reached = seconds_to_reach(curves["subsampled"], best.score)
        ours = "did not reach" if reached is None else f"in {reached:.2f} s reach"
        print(f"Subsampled classes {ours} the best of {NAMES[peer]}, {best.score:.4f}")
        print(f"after {best.clock:.2f} s (wanted: sooner).")


def plot(curves: dict[str, list[Point]], path: Path) -> None:
    """Draw the curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = {
        "numpyro": "exact softmax (NumPyro SVI)",
        "subsampled": "sampled classes (SubsampledSVI)",
        "torch_exact": "exact softmax (PyTorch, a point)",
        "torch_sampled": "sampled softmax (PyTorch, a point)",
    }
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for method, curve in curves.items():
        points = curve[1:]  # the common start would hide the rest
        axes.plot([p.clock for p in points], [p.score for p in points], ".-", label=labels[method])
    axes.axhline(curves["numpyro"][-1].score, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds of steps")
    axes.set_ylabel("held-out log likelihood per token (nats)")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def tune(problem: Problem, seconds: float, method: str) -> list[Record | MachineRecord]:
    """Score a method with each of its settings on ``problem``, at check points.

    Cost: ``seconds`` and a compilation for each.
    """
    records: list[Record | MachineRecord] = [machine_record(NAME, jax.devices()[0].device_kind)]
    rows = []
    shares = (1 / 12, 1 / 6, 1 / 3, 2 / 3, 1)
    for setting in TRIED[method]:
        fit = start_fit(method, problem, setting)
        for share in shares:
            fit.go_to(share * seconds)
            fit.add_point(share * seconds, problem)
            records.append(
                Record(
                    benchmark=NAME,
                    setting={**setting._asdict(), "seconds": share * seconds},
                    method=method,
                    metric="heldback_log_likelihood",
                    value=fit.curve[-1].score,
                    unit="nats per token",
                    better="higher",
                )
            )
        scores = [f"{point.score:.4f}" for point in fit.curve]
        rows.append([*map(str, setting), str(fit.curve[-1].steps), *scores])
        print(*rows[-1], flush=True)
    after = [f"{share * seconds:.3g} s" for share in shares]
    print(f"{method}: log likelihood per token of training data that were held back")
    print_table(["optimiser", "rate", "rows", "classes", "steps", *after], rows)
    return records


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, help="clock of each method (default 60; quick 2)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the curves into this file")
    parser.add_argument("--tune", choices=METHODS, help="try the settings of this method instead")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    seconds = arguments.seconds or (2.0 if arguments.quick else 60.0)
    problem = (
        synthetic_problem() if arguments.quick else names_problem(held_back=bool(arguments.tune))
    )
    if arguments.tune in PEERS and torch_is_missing():
        say_that_torch_is_missing([arguments.tune])
        return
    if arguments.tune:
        write_json(arguments.json, tune(problem, seconds, arguments.tune))
        return
    methods = [m for m in METHODS if m not in PEERS or not torch_is_missing()]
    if torch_is_missing():
        say_that_torch_is_missing(list(PEERS))
    curves = measure(problem, seconds, methods)
    report(curves)
    if arguments.plot is not None:
        plot(curves, arguments.plot)
    write_json(arguments.json, make_records(curves, problem, seconds))


if __name__ == "__main__":
    main()
