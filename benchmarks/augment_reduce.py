# SPDX-License-Identifier: Apache-2.0
"""Tables of the two Augment & Reduce papers, measured with this package beside what they print.

Paper 1: Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Table 3 (data sets ``mnist``,
``bibtex``, ``omniglot``) and section 4.1 (``synthetic``). Paper 2: Ruiz, Titsias and Blei, Scalable
Large-Scale Classification with Latent Variable Augmentation, Table 1 (``mnist100``). The methods
fit utilities ``x @ w.T + b`` as a point estimate, by maximum likelihood (paper 1) or with the prior
Normal(0, 1) on each weight and bias (paper 2). All start at the same values. Preprocessing,
minibatch sizes and step sizes are the papers'. The papers do not say how the gradient is scaled: it
is that of the sum over all N rows here, which comes nearest to their exact row of MNIST (log
likelihood -0.263, and theirs -0.261; with the sum over the batch -0.271, with its mean -0.88).

Three things differ. A step shares its classes among the observations, so that the labels of a batch
are negatives for all of it, where the papers draw S classes for each observation, as is done here
for ``synthetic`` alone; where the batch holds all K labels, as with MNIST, nothing is left to draw.
Since a step touches some rows of the
tables only, the papers' step size counts the steps that a row has seen. Local variables move by
natural gradients that count visits. With ``--steps`` below the papers' number the schedule is cut
short, not compressed.

Test log likelihoods use exact probabilities; "clipped" takes a log probability below -26 as -26, as
the authors' code does. A star marks a cell that is worse than the paper's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
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
from numpyro.infer import Trace_ELBO

import numpyro_largecat as lc
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

NAME = "augment_reduce"
FOLDERS = "mnist/, xml/ and images/"
NOISE = {
    "exact": "gumbel",
    "one-vs-each": "gumbel",
    "softmax": "gumbel",
    "probit": "normal",
    "logistic": "logistic",
}
METHODS = tuple(NOISE)
INITIAL_SCALES = {"w": 0.1, "b": 0.001}
LEAST_LOG_PROB = -26.0  # at which the authors' code clips
SCORED_TOGETHER = 500  # rows

Params = dict[str, Array]
Cell = tuple[str, str, float]  # method, metric, value


class Setting(NamedTuple):
    """How a data set is fitted: sizes and number of steps as the papers have them."""

    batch_size: int
    num_sampled: int
    num_steps: int
    folder: str = ""
    has_prior: bool = False
    parts: tuple[str, ...] = ("test",)
    methods: tuple[str, ...] = METHODS
    negatives: str = "batch"


SETTINGS = {
    "mnist": Setting(500, 1, 35_000, "mnist"),
    "bibtex": Setting(488, 20, 5_000, "xml"),
    "omniglot": Setting(541, 50, 45_000, "images", methods=METHODS[1:]),
    # Paper 2 does not give the number of steps.
    "mnist100": Setting(200, 10, 20_000, "mnist", has_prior=True, parts=("train", "test")),
    # The step size falls by 0.9 every 2,000 steps: the 440,000 steps that follow change nothing.
    "synthetic": Setting(500, 100, 60_000, methods=("one-vs-each", "softmax"), negatives="own"),
}
QUICK_SETTINGS = {
    # Most of a quick run is compilation, so there are three fits.
    "quick": Setting(64, 5, 100, parts=("train", "test"), methods=("exact", "softmax")),
    "synthetic": Setting(64, 10, 100, methods=("one-vs-each",), negatives="own"),
}


def _paper_cells(methods: tuple[str, ...], **columns: tuple[float, ...]) -> dict[Any, float]:
    return {
        (method, metric): value
        for metric, values in columns.items()
        for method, value in zip(methods, values, strict=True)
    }


PAPER = {
    "mnist": _paper_cells(
        METHODS,
        test_log_likelihood=(-0.261, -0.276, -0.271, -0.302, -0.287),
        test_accuracy=(0.927, 0.919, 0.924, 0.918, 0.917),
    ),
    "bibtex": _paper_cells(
        METHODS,
        test_log_likelihood=(-3.188, -3.300, -3.036, -4.184, -3.151),
        test_accuracy=(0.361, 0.352, 0.361, 0.346, 0.353),
    ),
    "omniglot": _paper_cells(
        METHODS[1:],
        test_log_likelihood=(-5.667, -5.171, -7.350, -5.395),
        test_accuracy=(0.179, 0.201, 0.178, 0.184),
    ),
    "mnist100": _paper_cells(
        METHODS,
        train_log_likelihood=(-0.1835, -0.2635, -0.2925, -0.2656, -0.2730),
        train_accuracy=(0.956, 0.923, 0.917, 0.922, 0.918),
        test_log_likelihood=(-0.3594, -0.3618, -0.3662, -0.4122, -0.3805),
        test_accuracy=(0.903, 0.900, 0.901, 0.895, 0.898),
    ),
    "synthetic": _paper_cells(
        ("one-vs-each", "softmax"), bound=(-1.40e9, -2.62e6), error_of_fit=(3.65e-6, 3.00e-6)
    ),
}


class Problem(NamedTuple):
    """Rows to fit, rows to score, and the number of classes."""

    x_train: NDArray[np.float32]  # (N, D)
    y_train: NDArray[np.int32]  # (N,)
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int32]
    num_categories: int


def read_problem(name: str, directory: Path) -> Problem:
    """Load a data set of the papers."""
    data = load(name, directory)
    return Problem(data.x_train, data.y_train, data.x_test, data.y_test, data.num_categories)


def linear_problem() -> Problem:
    """Make a small problem from a softmax."""
    random_state = np.random.default_rng(0)
    w = random_state.standard_normal((30, 8))
    x = random_state.standard_normal((2500, 8)).astype(np.float32)
    y = (x @ w.T + random_state.gumbel(size=(2500, 30))).argmax(axis=1).astype(np.int32)
    return Problem(x[:2000], y[:2000], x[2000:], y[2000:], 30)


def frequency_problem(num_rows: int, num_categories: int) -> tuple[Problem, NDArray[np.float64]]:
    """Draw labels without covariates, p_k proportional to a squared uniform variable.

    Classes that were not drawn are left out, as in the paper.

    Returns:
        The problem, with x of no columns, and the probabilities of the classes that are left.
    """
    random_state = np.random.default_rng(0)
    p = random_state.uniform(size=num_categories) ** 2
    p /= p.sum()
    drawn = random_state.choice(num_categories, size=num_rows, p=p)
    classes, places = np.unique(drawn, return_inverse=True)
    x, y = np.zeros((num_rows, 0), np.float32), np.asarray(places, np.int32)
    return Problem(x, y, x, y, len(classes)), p[classes]


def initial_params(rng_key: Array, num_categories: int, num_features: int) -> Params:
    """Draw the start of a fit, the same for all methods."""
    w_key, b_key = random.split(rng_key)
    w = random.normal(w_key, (num_categories, num_features))
    b = random.normal(b_key, (num_categories,))
    return {"w": INITIAL_SCALES["w"] * w, "b": INITIAL_SCALES["b"] * b}


def make_model(method: str, problem: Problem, setting: Setting, start: Params) -> Any:
    """Make the model of a method; its weights are parameters, so its guide is empty."""
    num_rows, num_categories = len(problem.y_train), problem.num_categories

    def open_class_plate(y: Array) -> lc.class_plate:
        if method == "exact":
            return lc.class_plate("classes", num_categories)
        num_sampled = min(setting.num_sampled, num_categories - 1)
        return lc.class_plate(
            "classes", num_categories, y, num_sampled, negatives=setting.negatives
        )

    def model(x: Array, y: Array, rows: Array) -> None:
        with open_class_plate(y) as classes:
            w = numpyro.param("w", start["w"], event_dim=1)
            b = numpyro.param("b", start["b"], event_dim=0)
            if setting.has_prior:
                numpyro.factor("log_prior", dist.Normal().log_prob(w).sum(-1))
                numpyro.factor("log_prior_b", dist.Normal().log_prob(b))
        with lc.data_plate("data", num_rows, rows) as batch:
            utilities = classes.utilities(lambda x, w, b: x @ w + b, (x,), (w, b))
            if method == "one-vs-each":
                numpyro.sample("y", lc.bounds.OneVsEach(utilities, classes), obs=y)
            else:
                noise = NOISE[method]
                lc.sample_choice("y", utilities, classes=classes, rows=batch, noise=noise, obs=y)

    return model


class Fit(NamedTuple):
    """Parameters after a fit, and what it took."""

    params: Params
    num_steps: int
    seconds: float  # with compilation


def fit(method: str, problem: Problem, setting: Setting, optimiser: Any) -> Fit:
    """Fit one method, all steps in compiled loops."""

    def guide(*args: Any) -> None:
        del args

    start = initial_params(random.key(0), problem.num_categories, problem.x_train.shape[1])
    model = make_model(method, problem, setting, start)
    svi = lc.SubsampledSVI(model, guide, optimiser, Trace_ELBO())
    arrays = (problem.x_train, problem.y_train)
    batches = lc.ArrayBatches(*arrays, batch_size=setting.batch_size)
    begin = time.perf_counter()
    run = svi.run(random.key(1), setting.num_steps, batches=batches, progress_bar=False)
    jax.block_until_ready(run.params)
    return Fit(run.params, len(run.losses), time.perf_counter() - begin)


@partial(jax.jit, static_argnums=4)
def _score(w: Array, b: Array, x: Array, y: Array, noise: str) -> tuple[Array, Array]:
    utilities = x @ w.T + b
    log_prob = lc.UtilityCategorical(utilities, noise=noise).log_prob(y)
    return log_prob, utilities.argmax(axis=-1) == y


def score(params: Params, x: NDArray[Any], y: NDArray[Any], noise: str) -> dict[str, float]:
    """Mean exact log probability, plain and clipped, and accuracy, some rows at a time."""
    log_probs, hits = [], []
    for begin in range(0, len(y), SCORED_TOGETHER):
        rows = np.arange(begin, begin + SCORED_TOGETHER) % len(y)  # one shape, one compilation
        log_prob, hit = _score(params["w"], params["b"], x[rows], y[rows], noise)
        log_probs.append(np.asarray(log_prob, np.float64))
        hits.append(np.asarray(hit))
    log_prob = np.concatenate(log_probs)[: len(y)]
    return {
        "log_likelihood": float(log_prob.mean()),
        "clipped_log_likelihood": float(np.maximum(log_prob, LEAST_LOG_PROB).mean()),
        "accuracy": float(np.concatenate(hits)[: len(y)].mean()),
    }


def classification_cells(method: str, problem: Problem, setting: Setting, fit: Fit) -> list[Cell]:
    """Score a fit of a data set with covariates."""
    rows = {
        "train": (problem.x_train, problem.y_train),
        "test": (problem.x_test, problem.y_test),
    }
    cells = []
    for part in setting.parts:
        scores = score(fit.params, *rows[part], NOISE[method])
        if scores["clipped_log_likelihood"] == scores["log_likelihood"]:
            del scores["clipped_log_likelihood"]
        cells += [(method, f"{part}_{metric}", value) for metric, value in scores.items()]
    return cells


def frequency_cells(method: str, problem: Problem, p: NDArray[Any], fit: Fit) -> list[Cell]:
    """Compare fitted probabilities with what they estimate, and the bound with the exact value."""
    y, b = problem.y_train, jnp.asarray(fit.params["b"])
    log_p = np.asarray(jax.nn.log_softmax(b), np.float64)
    frequencies = np.bincount(y) / len(y)
    log_likelihood = float(log_p[y].sum())
    if method == "softmax":
        u = np.asarray(fit.params["y_u"], np.float64)
        bound = float((1 - u - np.exp(-log_p[y] - u)).sum())
    else:
        bound = float(len(y) * (frequencies @ np.asarray(one_vs_each_bounds(b), np.float64)))
    return [
        (method, "error_of_fit", float(np.abs(np.exp(log_p) - frequencies).mean())),
        (method, "error_of_truth", float(np.abs(np.exp(log_p) - p).mean())),
        (method, "bound", bound),
        (method, "log_likelihood", log_likelihood),
        (method, "gap_per_observation", (log_likelihood - bound) / len(y)),
    ]


@jax.jit
def one_vs_each_bounds(b: Array) -> Array:
    """Bound of each class as the chosen one, with O(K) memory."""
    return lax.map(lambda own: jax.nn.log_sigmoid(own - b).sum() + jnp.log(2.0), b)


def measure(name: str, setting: Setting, arguments: argparse.Namespace) -> Iterator[Cell]:
    """Fit and score all wanted methods of a data set, and yield cells as they come."""
    if name == "synthetic":
        problem, p = frequency_problem(*((2000, 200) if arguments.quick else (300_000, 10_000)))
        cells = partial(frequency_cells, p=p)
    else:
        directory = arguments.data / setting.folder if setting.folder else None
        problem = linear_problem() if directory is None else read_problem(name, directory)
        cells = partial(classification_cells, setting=setting)
    rate = arguments.learning_rate
    optimiser = lc.adaptive_steps() if rate is None else optax.adagrad(rate)
    for method in setting.methods:
        if method in arguments.methods:
            result = fit(method, problem, setting, optimiser)
            yield from cells(method=method, problem=problem, fit=result)
            yield method, "steps", result.num_steps
            yield method, "fit_seconds", result.seconds


UNITS: dict[str, tuple[str, Any]] = {
    "log_likelihood": ("nats per observation", "higher"),
    "accuracy": ("fraction", "higher"),
    "error_of_fit": ("probability", "lower"),
    "error_of_truth": ("probability", "lower"),
    "bound": ("nats", "higher"),
    "gap_per_observation": ("nats per observation", "lower"),
    "steps": ("steps", "lower"),
    "fit_seconds": ("s", "lower"),
}


def unit_of(metric: str) -> tuple[str, Any]:
    """Unit of a metric, and which direction is better."""
    if metric == "log_likelihood":  # of the synthetic data, beside its bound
        return "nats", "higher"
    return next(unit for suffix, unit in UNITS.items() if metric.endswith(suffix))


def is_worse(metric: str, value: float, paper: float | None) -> bool:
    """Whether a value is worse than the paper's by more than the rounding of what is printed."""
    if paper is None:
        return False
    is_score = metric.endswith(("log_likelihood", "accuracy"))
    rounding = 5e-4 if is_score else 5e-3 * 10.0 ** np.floor(np.log10(abs(paper)))
    loss = paper - value if unit_of(metric)[1] == "higher" else value - paper
    return bool(loss > rounding)


def report(name: str, setting: Setting, cells: list[Cell]) -> None:
    """Print one line for each method: ours, and the paper's in brackets."""
    metrics = list(dict.fromkeys(metric for _, metric, _ in cells))
    values = {(method, metric): value for method, metric, value in cells}
    methods = list(dict.fromkeys(method for method, _, _ in cells))
    rows = []
    for method in methods:
        row = [method]
        for metric in metrics:
            value = values.get((method, metric))
            paper = PAPER.get(name, {}).get((method, metric))
            text = "" if value is None else f"{value:.5g}"
            text += "" if paper is None else f" ({paper:g})"
            row.append(text + "*" * (value is not None and is_worse(metric, value, paper)))
        rows.append(row)
    sizes = f"B = {setting.batch_size}, S = {setting.num_sampled}"
    print(f"{name}: {sizes}; (the paper's), * worse")
    print_table(["method", *(metric.replace("_", " ") for metric in metrics)], rows)
    print(flush=True)


def make_records(name: str, setting: Setting, cells: list[Cell], rate: float | None) -> list[Any]:
    """Turn cells into records."""
    steps = {method: value for method, metric, value in cells if metric == "steps"}
    records = []
    for method, metric, value in cells:
        unit, better = unit_of(metric)
        base = {"dataset": name, "B": setting.batch_size, "S": setting.num_sampled}
        base |= {"steps": int(steps[method]), "paper": PAPER.get(name, {}).get((method, metric))}
        base["optimiser"] = "paper" if rate is None else f"adagrad({rate:g})"
        records.append(record(NAME, base, method, metric, value, unit, better))
    return records


def names_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Make a parser of names with commas between them."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    datasets, methods = names_of(tuple(SETTINGS)), names_of(METHODS)
    add_data_argument(parser, FOLDERS)
    parser.add_argument("--datasets", type=datasets, default=list(SETTINGS), help="a,b,...")
    parser.add_argument("--methods", type=methods, default=list(METHODS), help="a,b,...")
    parser.add_argument("--steps", type=int, help="of each fit (default: as the papers)")
    parser.add_argument(
        "--learning-rate", type=float, help="Adagrad's, in place of the papers' step sizes"
    )
    arguments = parser.parse_args()
    if arguments.data is None and not arguments.quick and arguments.datasets != ["synthetic"]:
        parser.error(how_to_name_data(FOLDERS))
    return arguments


def main() -> None:
    arguments = parse_arguments()
    settings = {name: SETTINGS[name] for name in arguments.datasets}
    if arguments.quick:
        settings = QUICK_SETTINGS
    records: list[Record | MachineRecord] = [machine_record(NAME, jax.devices()[0].device_kind)]
    for name, setting in settings.items():
        if arguments.steps is not None:
            setting = setting._replace(num_steps=arguments.steps)
        cells: list[Cell] = []
        for cell in measure(name, setting, arguments):  # a fit takes long: show what there is
            cells.append(cell)
            if cell[1] == "fit_seconds":
                print(f"{name}, {cell[0]}: {cell[2]:.0f} s", flush=True)
                done = make_records(name, setting, cells, arguments.learning_rate)
                write_json(arguments.json, [*records, *done])
        report(name, setting, cells)
        records += make_records(name, setting, cells, arguments.learning_rate)


if __name__ == "__main__":
    main()
