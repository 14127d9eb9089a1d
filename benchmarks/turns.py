# SPDX-License-Identifier: Apache-2.0
"""Cells of a benchmark, each in a process of its own, which take turns in running their steps.

So each has its own peak memory, and all of them meet the same load of the machine. The process that
compares cells need not import JAX.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cell import Cell, runs_in_torch
from benchmarks.records import (
    Record,
    print_table,
    record,
    say_that_torch_is_missing,
    torch_is_missing,
)


class Measured(NamedTuple):
    """What was measured in one cell."""

    ms_per_step: list[float]  # one entry per chunk
    peak_mb: float  # greatest resident memory of the process
    setup_seconds: float  # processor time until the first chunk had run


# What runs in the process of a cell.


def serve_cell(cell: Cell, make_chunk: Callable[[Any], Callable[[], None]]) -> None:
    """Say that the cell is ready, run a chunk for each line of input, and say what it took.

    ``make_chunk`` makes what runs a chunk of its steps.
    """
    chunk = make_chunk(cell)
    chunk()  # the first one warms up
    seconds = time.process_time()
    print(json.dumps({"device": _device(cell), "setup_seconds": seconds}), flush=True)
    for turn, _ in enumerate(sys.stdin):
        if turn == 0 and runs_in_torch(cell):  # now, with the other processes silent
            from benchmarks.torch_peers import best_number_of_threads

            best_number_of_threads(chunk)  # XLA's are one for each core
        start = time.perf_counter()
        chunk()
        ms_per_step = 1000 * (time.perf_counter() - start) / cell.steps_per_chunk
        print(json.dumps({"ms_per_step": ms_per_step}), flush=True)
    print(json.dumps({"peak_mb": peak_memory() / 1e6}), flush=True)


def _device(cell: Cell) -> str:
    """The kind of device that the cell runs on."""
    if runs_in_torch(cell):
        return "cpu"
    import jax

    return jax.devices()[0].device_kind


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

    def __init__(self, benchmark: str, cell: Cell) -> None:
        self.cell = cell
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{benchmark}", "--cell", json.dumps(cell)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> tuple[str, float]:
        """Wait until the first chunk has run; return the kind of device, and the set-up time."""
        answer = self._answer()
        return str(answer["device"]), float(answer["setup_seconds"])

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


def without_missing_torch(cells: Sequence[Any]) -> list[Any]:
    """The cells that can run here: all of them, or those of JAX and a word of the others."""
    left_out = [cell for cell in cells if torch_is_missing() and runs_in_torch(cell)]
    if left_out:
        say_that_torch_is_missing(list(dict.fromkeys(cell.method for cell in left_out)))
    return [cell for cell in cells if cell not in left_out]


def measure(
    benchmark: str, cells: Sequence[Any], num_rounds: int
) -> tuple[dict[Any, Measured], str]:
    """Measure the cells in turns; also return the kind of device they ran on."""
    processes: list[CellProcess] = []
    ready: list[tuple[str, float]] = []
    try:
        for cell in cells:  # a process is ready before the next begins
            processes.append(CellProcess(benchmark, cell))
            ready.append(processes[-1].wait_until_ready())
        rounds = [[process.run_chunk() for process in processes] for _ in range(num_rounds)]
        times = [list(column) for column in zip(*rounds, strict=True)]
        peaks = [process.finish() for process in processes]
    finally:
        for process in processes:
            process.stop()
    measured = map(Measured, times, peaks, [seconds for _, seconds in ready])
    return dict(zip(cells, measured, strict=True)), ready[0][0]


def cell_records(
    benchmark: str, cell: Cell, measured: Measured, metric: str, value: float, unit: str
) -> list[Record]:
    """The records of one cell: its times and memory, and what its benchmark alone measures."""
    times = measured.ms_per_step
    figures = [
        ("ms_per_step", statistics.median(times), "ms"),
        ("ms_per_step_min", min(times), "ms"),
        ("ms_per_step_max", max(times), "ms"),
        ("peak_mb", measured.peak_mb, "MB"),
        (metric, value, unit),
    ]
    return [record(benchmark, cell.setting, cell.method, *figure) for figure in figures]


def print_cells(measured: dict[Any, Measured], size: str, last: str, column: Sequence[str]) -> None:
    """Print a row for each cell; the last column is what its benchmark alone measures."""
    rows = []
    for (cell, found), entry in zip(measured.items(), column, strict=True):
        times = found.ms_per_step
        milliseconds = (f"{ms:.2f}" for ms in (statistics.median(times), min(times), max(times)))
        rows.append([cell.method, f"{cell.setting['K']}", *milliseconds, f"{found.peak_mb:.0f}"])
        rows[-1].append(entry)
    print_table(["method", size, "ms per step", "least", "greatest", "peak MB", last], rows)
