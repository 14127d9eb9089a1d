# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one SVI step as the number of classes K grows.

A linear softmax model, with a posterior over all K D weights (AutoNormal), TraceMeanField_ELBO
and Adam, is fitted to minibatches of B = 500 rows: by ``lc.SubsampledSVI`` with S = 100 sampled
classes (``subsampled``; with other errors ``probit`` and ``logistic``), and by
``numpyro.infer.SVI`` with the exact ``Categorical`` (``numpyro``). All run compiled loops of steps
with donated state on the same minibatches.

Each method and K has a process of its own, for its peak memory, and these processes take turns in
running a chunk of steps, so that all of them meet the same load of the machine. The figures are the
median over chunks; the least and the greatest show how noisy the machine was. The whole takes about
18 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.records import (
    Record,
    argument_parser,
    machine_record,
    print_table,
    write_json,
)

NAME = "step_cost"
NUM_ROWS = 20_000
BATCH_SIZE = 500
NUM_SAMPLED = 100
LEARNING_RATE = 0.01
NUM_TABLES = 6  # location and scale, and two moments of Adam for each
WANTED = {
    "ratio_1e6_1e3": "at most 1.2",
    "speedup_1e5": "at least 250",
    "peak_mb_above_tables": "at most 600",
    "probit_1e6_to_softmax": "at most 2.5",
    "logistic_1e6_to_softmax": "at most 2.5",
}
NOISES = {"subsampled": "gumbel", "probit": "normal", "logistic": "logistic"}


class Cell(NamedTuple):
    """One method at one number of classes."""

    method: str
    num_categories: int
    num_features: int
    steps_per_chunk: int  # steps of one compiled loop

    @property
    def setting(self) -> dict[str, int]:
        """The setting of this cell's records."""
        return {
            "K": self.num_categories,
            "B": BATCH_SIZE,
            "S": NUM_SAMPLED,
            "D": self.num_features,
        }


class Measured(NamedTuple):
    """What was measured in one cell."""

    ms_per_step: list[float]  # one entry per chunk
    peak_mb: float  # greatest resident memory of the process


FULL_CELLS = (
    Cell("subsampled", 10**3, 128, 100),
    Cell("subsampled", 10**4, 128, 100),
    Cell("subsampled", 10**5, 128, 100),
    Cell("subsampled", 10**6, 128, 100),
    Cell("probit", 10**3, 128, 100),
    Cell("probit", 10**6, 128, 100),
    Cell("logistic", 10**3, 128, 100),
    Cell("logistic", 10**6, 128, 100),
    Cell("numpyro", 10**3, 128, 50),
    Cell("numpyro", 10**4, 128, 10),
    Cell("numpyro", 10**5, 128, 3),
)
QUICK_CELLS = (
    Cell("subsampled", 10**3, 8, 5),
    Cell("subsampled", 10**4, 8, 5),
    Cell("probit", 10**3, 8, 5),
    Cell("logistic", 10**3, 8, 5),
    Cell("numpyro", 10**3, 8, 2),
    Cell("numpyro", 10**4, 8, 2),
)


# What runs in the process of a cell. It imports JAX; the process that compares cells need not.


def make_chunk(cell: Cell) -> Callable[[], None]:
    """Initialise and compile a cell; the result runs one chunk of steps."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax import lax, random
    from numpyro.infer import SVI, TraceMeanField_ELBO
    from numpyro.infer.autoguide import AutoNormal

    import numpyro_largecat as lc

    rng = np.random.default_rng(0)
    x = rng.standard_normal((NUM_ROWS, cell.num_features), np.float32)
    y = rng.integers(cell.num_categories, size=NUM_ROWS, dtype=np.int32)
    batches = lc.ArrayBatches(x, y, batch_size=BATCH_SIZE)
    if cell.method == "numpyro":
        svi_class, model = SVI, exact_model(cell.num_categories)
    else:
        svi_class = lc.SubsampledSVI
        model = subsampled_model(cell.num_categories, NOISES[cell.method])
    svi = svi_class(model, AutoNormal(model), optax.adam(LEARNING_RATE), TraceMeanField_ELBO())

    def steps(state: Any, rng_key: Any, batches: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            return svi.update(state, *batches.draw(key))

        return lax.scan(step, state, random.split(rng_key, cell.steps_per_chunk))

    init_key, run_key = random.split(random.key(0))
    state = svi.init(init_key, *batches.draw(init_key))
    if cell.method == "numpyro":  # its state shares arrays with the guide
        state = jax.tree.map(jnp.copy, state)
    compiled = jax.jit(steps, donate_argnums=0).lower(state, run_key, batches).compile()

    def chunk() -> None:
        nonlocal state, run_key
        run_key, key = random.split(run_key)
        state, losses = compiled(state, key, batches)
        if not bool(jnp.isfinite(losses).all()):
            raise RuntimeError(f"{cell} gave a loss that is not finite.")

    return chunk


def exact_model(num_categories: int) -> Callable[..., None]:
    """Make the plain NumPyro model, whose softmax is over all classes."""
    import numpyro
    import numpyro.distributions as dist

    def model(x: Any, y: Any, rows: Any) -> None:
        del rows
        with numpyro.plate("classes", num_categories):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("data", NUM_ROWS, subsample_size=len(x)):
            numpyro.sample("y", dist.Categorical(logits=x @ w.T), obs=y)

    return model


def subsampled_model(num_categories: int, noise: str) -> Callable[..., None]:
    """Make the same model, or that of other errors, on a weighted subset of classes."""
    import numpyro
    import numpyro.distributions as dist

    import numpyro_largecat as lc

    def model(x: Any, y: Any, rows: Any) -> None:
        with lc.class_plate("classes", num_categories, y, num_sampled=NUM_SAMPLED) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with lc.data_plate("data", NUM_ROWS, rows) as batch:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=batch, noise=noise, obs=y)

    return model


def serve_cell(cell: Cell) -> None:
    """Say that the cell is ready, run a chunk for each line of input, and say what it took."""
    import jax

    chunk = make_chunk(cell)
    chunk()  # the first one warms up
    print(json.dumps({"device": jax.devices()[0].device_kind}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        chunk()
        ms_per_step = 1000 * (time.perf_counter() - start) / cell.steps_per_chunk
        print(json.dumps({"ms_per_step": ms_per_step}), flush=True)
    print(json.dumps({"peak_mb": peak_memory() / 1e6}), flush=True)


def peak_memory() -> float:
    """Greatest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # the figure below can be the parent's, if that is greater
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * float(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


# What compares cells.


class CellProcess:
    """A process that runs chunks of one cell when it is told to."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{NAME}", "--cell", json.dumps(cell)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> str:
        """Wait until the first chunk can run, and return the kind of device it runs on."""
        return str(self._answer()["device"])

    def run_chunk(self) -> float:
        """Run one chunk and return its milliseconds per step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer()["ms_per_step"])

    def finish(self) -> float:
        """Return the peak memory in MB, and end the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        peak_mb = float(self._answer()["peak_mb"])
        self._process.wait()
        return peak_mb

    def stop(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(
                f"The process of {self.cell} ended with exit code {code}. "
                "With code -9 it probably ran out of memory."
            )
        return json.loads(line)


def measure(cells: Sequence[Cell], num_rounds: int) -> tuple[dict[Cell, Measured], str]:
    """Measure the cells in turns; also return the kind of device they ran on."""
    processes: list[CellProcess] = []
    try:
        for cell in cells:  # one by one, so that `processes` holds those to stop if one fails
            processes.append(CellProcess(cell))
        devices = [process.wait_until_ready() for process in processes]
        rounds = [[process.run_chunk() for process in processes] for _ in range(num_rounds)]
        times = [list(column) for column in zip(*rounds, strict=True)]
        peaks = [process.finish() for process in processes]
    finally:
        for process in processes:
            process.stop()
    measured = map(Measured, times, peaks)
    return dict(zip(cells, measured, strict=True)), devices[0]


def wanted_figures(records: Sequence[Record]) -> list[Record]:
    """Compare cells, where those concerned were measured; memory is among the cells' records."""
    found = {(r["method"], r["setting"]["K"], r["metric"]): r for r in records}

    def ratio(metric: str, better: str, of: tuple[str, int], to: tuple[str, int]) -> list[Record]:
        if (*of, "ms_per_step") not in found:
            return []
        over, under = found[*of, "ms_per_step"], found[*to, "ms_per_step"]
        value = over["value"] / under["value"]
        method = of[0] if better == "lower" else to[0]
        changes = {"method": method, "metric": metric, "value": value}
        return [Record(**{**over, **changes, "unit": "ratio", "better": better})]

    memory = found.get(("subsampled", 10**6, "peak_mb_above_tables"))
    return [
        *ratio("ratio_1e6_1e3", "lower", ("subsampled", 10**6), ("subsampled", 10**3)),
        *ratio("speedup_1e5", "higher", ("numpyro", 10**5), ("subsampled", 10**5)),
        *([memory] if memory else []),
        *ratio("probit_1e6_to_softmax", "lower", ("probit", 10**6), ("subsampled", 10**6)),
        *ratio("logistic_1e6_to_softmax", "lower", ("logistic", 10**6), ("subsampled", 10**6)),
    ]


def table_memory(cell: Cell) -> float:
    """Memory that parameters and moments need in float32, in MB."""
    return 4e-6 * NUM_TABLES * cell.num_categories * cell.num_features


def cell_records(cell: Cell, measured: Measured) -> list[Record]:
    """The records of one cell."""
    make = partial(Record, benchmark=NAME, setting=cell.setting, method=cell.method, better="lower")
    times, peak = measured
    return [
        make(metric="ms_per_step", value=statistics.median(times), unit="ms"),
        make(metric="ms_per_step_min", value=min(times), unit="ms"),
        make(metric="ms_per_step_max", value=max(times), unit="ms"),
        make(metric="peak_mb", value=peak, unit="MB"),
        make(metric="peak_mb_above_tables", value=peak - table_memory(cell), unit="MB"),
    ]


def report(measured: dict[Cell, Measured], figures: Sequence[Record]) -> None:
    """Print the table, then the wanted figures."""
    rows = []
    for cell, (times, peak) in measured.items():
        milliseconds = (f"{ms:.2f}" for ms in (statistics.median(times), min(times), max(times)))
        memory = (f"{mb:.0f}" for mb in (peak, peak - table_memory(cell)))
        rows.append([cell.method, f"{cell.num_categories}", *milliseconds, *memory])
    header = ["method", "K", "ms per step", "least", "greatest", "peak MB", "above tables"]
    print_table(header, rows)
    for figure in figures:
        metric, value = figure["metric"], figure["value"]
        print(f"{metric} {value:.4g} (wanted: {WANTED[metric]})")


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, help="chunks of each cell (default 9; quick 2)")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.cell is not None:
        serve_cell(Cell(*json.loads(arguments.cell)))
        return
    cells = QUICK_CELLS if arguments.quick else FULL_CELLS
    measured, device = measure(cells, arguments.rounds or (2 if arguments.quick else 9))
    records = [record for cell, m in measured.items() for record in cell_records(cell, m)]
    figures = wanted_figures(records)
    report(measured, figures)
    ratios = [figure for figure in figures if figure not in records]
    write_json(arguments.json, [machine_record(NAME, device), *records, *ratios])


if __name__ == "__main__":
    main()
