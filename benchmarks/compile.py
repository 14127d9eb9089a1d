# SPDX-License-Identifier: Apache-2.0
"""Seconds that the programs of every entry point take to compile, by the number of classes K.

Each entry point is called once, with nothing compiled before. ``compile`` is what XLA takes,
``programs`` how many it compiles, and ``call`` the whole first call, with tracing and the run
itself. All sizes but K are small. K is the number of classes; of words, for topics; and of
components, for mixtures, which take a thousandth of it where it is a million. Neither the code of a
program nor the time of its compilation may grow with K.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from benchmarks.records import (
    MachineRecord,
    Record,
    argument_parser,
    machine_record,
    print_table,
    write_json,
)
from numpyro_largecat.data import Corpus

NAME = "compile"
KEY = jax.random.key(3)
NUM_ROWS, BATCH_SIZE, NUM_SAMPLED, NUM_FEATURES = 1_000, 100, 50, 8
NUM_TOPICS, NUM_DOCUMENTS = 20, 200
COMPILED = "/jax/core/compile/backend_compile_duration"

Call = Callable[[], Any]


class Compiled(NamedTuple):
    """What a first call took."""

    seconds: float  # of XLA's compilation
    programs: int
    call: float  # seconds of the whole call


class Watch:
    """Count the programs that are compiled, and the seconds that XLA takes for them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, duration: float, **_: Any) -> None:
        if event == COMPILED:
            self.seconds.append(duration)

    def first(self, call: Call) -> Compiled:
        """Call it with nothing compiled before."""
        jax.clear_caches()
        self.seconds.clear()
        start = time.perf_counter()
        jax.block_until_ready(jax.tree.leaves(call()))
        passed = time.perf_counter() - start
        return Compiled(sum(self.seconds), len(self.seconds), passed)


PROPOSALS: dict[str, Callable[[int], dict[str, Any]]] = {
    "uniform": lambda k: {},
    "frequency": lambda k: {"proposal": lc.FrequencyProposal(np.arange(1, k + 1))},
    "head": lambda k: {"proposal": lc.HeadProposal(np.arange(20))},
    "shared": lambda k: {"negatives": "shared"},
    "own": lambda k: {"negatives": "own"},
}


def arviz_of_two_draws(fitted: lc.Fitted, x: Any, y: Any) -> tuple[()]:
    """The posterior of one class, and the log likelihood."""
    given = fitted.on(x, y, jnp.arange(len(x)))
    given.to_arviz(rng_key=KEY, rows={"classes": [0]}, num_draws=2, obs=y)
    return ()


PREDICTIONS: dict[str, Callable[..., Any]] = {
    "top_classes": lambda fitted, x, y: fitted.on(x).top_classes(),
    "top_classes, draws": lambda fitted, x, y: fitted.on(x).top_classes(rng_key=KEY, num_draws=2),
    "log_likelihood": lambda fitted, x, y: fitted.on(x).log_likelihood(y),
    "draw_choices": lambda fitted, x, y: fitted.on(x).draw_choices(rng_key=KEY, num_draws=2),
    "to_arviz": arviz_of_two_draws,
}


class Softmax:
    """A softmax regression with K classes, and its fit."""

    def __init__(
        self, num_categories: int, noise: str = "gumbel", proposal: str = "uniform"
    ) -> None:
        options = PROPOSALS[proposal](num_categories)
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((NUM_ROWS, NUM_FEATURES), np.float32)
        self.y = rng.integers(num_categories, size=NUM_ROWS)
        self.batches = lc.ArrayBatches(self.x, self.y, batch_size=BATCH_SIZE)

        def model(x: Any, y: Any = None, rows: Any = None) -> None:
            with lc.class_plate("classes", num_categories, y, NUM_SAMPLED, **options) as classes:
                w = numpyro.sample("w", dist.Normal(0, 1).expand([NUM_FEATURES]).to_event(1))
            with lc.data_plate("data", NUM_ROWS, rows) as rows:
                utilities = classes.utilities(jnp.dot, (x,), (w,))
                lc.sample_choice("y", utilities, classes=classes, rows=rows, noise=noise, obs=y)

        self.guide = AutoNormal(model)
        self.model = model
        self.svi = lc.SubsampledSVI(model, self.guide, optax.adam(0.01), TraceMeanField_ELBO())

    def init(self) -> Any:
        """Make the first state."""
        return self.svi.init(jax.random.key(0), *self.batches.draw(jax.random.key(1)))

    def steps(self) -> Call:
        """The loop of ``run``, from a state that is there."""
        state = self.init()
        run = partial(self.svi.run, jax.random.key(2), 2, batches=self.batches, init_state=state)
        return lambda: run(progress_bar=False).losses

    def prediction(self, name: str) -> Call:
        """One of ``PREDICTIONS``."""
        fitted = lc.Fitted(self.model, self.guide, self.svi.get_params(self.init()))
        return partial(PREDICTIONS[name], fitted, self.x[:BATCH_SIZE], self.y[:BATCH_SIZE])


def topics(num_words: int, method: Any) -> Call:
    """A fit to documents of ten words."""
    rng = np.random.default_rng(0)
    words = [rng.choice(num_words, 10, replace=False) for _ in range(NUM_DOCUMENTS)]
    corpus = Corpus.from_rows([(row, np.ones(10)) for row in words], num_words)
    fit = partial(lc.fit_topics, jax.random.key(0), corpus, NUM_TOPICS, num_passes=1)
    return lambda: fit(method=method, progress_bar=False).topics


def mixture(num_components: int, method: Any) -> Call:
    """A fit to points in two dimensions."""
    x = np.random.default_rng(0).standard_normal((2 * num_components, 2), np.float32)
    family = lc.mixtures.DiagonalGaussianFamily(np.zeros(2), np.ones(2))
    fit = partial(lc.fit_mixture, jax.random.key(0), x, num_components, family, num_passes=1)
    return lambda: fit(method=method, progress_bar=False).counts


def double_sum(num_categories: int, rule: Any) -> Call:
    """A fit by steps on one observation and one class."""
    fit, data = lc.fit_double_sum, Softmax(num_categories)
    arguments = jax.random.key(0), data.x, data.y, num_categories, rule
    return lambda: fit(*arguments, num_passes=1, progress_bar=False).w


def entry_points(num_categories: int) -> dict[str, Callable[[], Call]]:
    """What prepares each entry point, by name."""
    k, found = num_categories, {}
    cases = [(name, "gumbel") for name in PROPOSALS]
    for name, noise in [*cases, ("uniform", "normal"), ("uniform", "logistic")]:
        fit = partial(Softmax, k, noise, name)
        found[f"init, {name} {noise}"] = lambda fit=fit: fit().init
        found[f"steps, {name} {noise}"] = lambda fit=fit: fit().steps()
    for name in PREDICTIONS:
        found[name] = lambda name=name: Softmax(k).prediction(name)
    for method in ("memoized", "stochastic"):
        found[f"fit_topics, {method}"] = partial(topics, k, method)
        found[f"fit_mixture, {method}"] = partial(mixture, min(k, 1_000), method)
    for rule in (
        lc.double_sum.ImplicitSGD(1.0),
        lc.double_sum.UMax(1.0),
        lc.double_sum.Vanilla(1e-3),
    ):
        found[f"fit_double_sum, {type(rule).__name__}"] = partial(double_sum, k, rule)
    return found


def measure(num_categories: int, parts: Sequence[str]) -> dict[str, Compiled]:
    """What the first call of each entry point takes whose name holds one of ``parts``."""
    watch = Watch()
    return {
        name: watch.first(prepare())
        for name, prepare in entry_points(num_categories).items()
        if any(part in name for part in parts)
    }


def cell_records(num_categories: int, name: str, found: Compiled) -> list[Record]:
    """The records of one entry point."""
    make = partial(
        Record, benchmark=NAME, setting={"K": num_categories}, method=name, better="lower"
    )
    return [
        make(metric="compile_seconds", value=found.seconds, unit="s"),
        make(metric="programs", value=found.programs, unit="count"),
        make(metric="first_call_seconds", value=found.call, unit="s"),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--categories", type=int, nargs="+", default=[10**3, 10**6])
    parser.add_argument(
        "--entries", nargs="+", default=[""], metavar="PART", help="those with such a name alone"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    jax.config.update("jax_enable_compilation_cache", False)
    sizes = [200] if arguments.quick else arguments.categories
    found = {num_categories: measure(num_categories, arguments.entries) for num_categories in sizes}
    header = ["first call of"]
    for num_categories in sizes:
        header += [f"K = {num_categories}: compile s", "programs", "call s"]
    rows = []
    for name in found[sizes[0]]:
        cells = [found[k][name] for k in sizes]
        rows.append(
            [name]
            + [f for c in cells for f in (f"{c.seconds:.1f}", str(c.programs), f"{c.call:.1f}")]
        )
    print(f"JAX {jax.__version__}")
    print_table(header, rows)
    records: list[Record | MachineRecord] = [machine_record(NAME, jax.devices()[0].device_kind)]
    for num_categories, by_name in found.items():
        for name, compiled in by_name.items():
            records += cell_records(num_categories, name, compiled)
    write_json(arguments.json, records)


if __name__ == "__main__":
    main()
