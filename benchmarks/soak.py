# SPDX-License-Identifier: Apache-2.0
"""Whether a long fit stays as it began: its memory, and the programs that it compiles.

A posterior over all weights of a softmax regression is fitted for some minutes from each kind of
batches, in a process of its own. ``growth_mb`` is by how much resident memory at the end is above
that after the first 1,000 steps, and ``programs`` how many were compiled since then. Checkpoints
are left out: their copies of the state come with the first of them.

    python -m benchmarks.soak [--minutes M] [--json OUT]
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
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
    record,
    write_json,
)

NAME = "soak"
NUM_ROWS, BATCH_SIZE, NUM_FEATURES, NUM_SAMPLED = 20_000, 100, 16, 100
MB = 2**20


@dataclass(frozen=True)
class Found:
    """What one fit showed."""

    num_steps: int
    growth_mb: float
    num_programs: int


class Watch:
    """A callback that ends the fit when its time is over, and notes memory and compilations."""

    def __init__(self, seconds: float, first_step: int) -> None:
        self._seconds, self._first_step = seconds, first_step
        self.start: tuple[float, int] | None = None  # memory and programs at the first step
        self.end = (0.0, 0)
        self.num_steps, self._begin = 0, time.monotonic()
        self._programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._programs += 1

    def __call__(self, progress: lc.Progress) -> None:
        """Note what there is."""
        self.end, self.num_steps = (resident_mb(), self._programs), progress.step
        if self.start is None and progress.step >= self._first_step:
            self.start = self.end
        if time.monotonic() - self._begin > self._seconds and self.start is not None:
            raise StopIteration


def resident_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


def make_svi(num_categories: int) -> lc.SubsampledSVI:
    """The fit that goes on for so long."""

    def model(x: Any, y: Any, rows: Any) -> None:
        with lc.class_plate("classes", num_categories, y, num_sampled=NUM_SAMPLED) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([NUM_FEATURES]).to_event(1))
        with lc.data_plate("data", NUM_ROWS, rows) as batch:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=batch, obs=y)

    guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=0.1)
    return lc.SubsampledSVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())


def batches_of(kind: str, x: np.ndarray, y: np.ndarray) -> Any:
    """The batches of one kind."""
    if kind == "arrays":
        return lc.ArrayBatches(x, y, batch_size=BATCH_SIZE)
    if kind == "streamed":
        return lc.StreamedBatches(x, y, batch_size=BATCH_SIZE)
    rng = np.random.default_rng(1)

    def iterator() -> Any:
        while True:
            rows = rng.choice(NUM_ROWS, BATCH_SIZE, replace=False).astype(np.int32)
            yield x[rows], y[rows], rows

    return iterator()


def watch_fit(kind: str, num_categories: int, first_step: int, seconds: float) -> Found:
    """Fit from batches of one kind for so long."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NUM_ROWS, NUM_FEATURES), np.float32)
    y = rng.integers(0, num_categories, NUM_ROWS, np.int32)
    watch = Watch(seconds, first_step)
    make_svi(num_categories).run(
        jax.random.key(0),
        10**9,
        batches=batches_of(kind, x, y),
        callbacks=[lc.Callback(watch, every_steps=20)],
        progress_bar=False,
    )
    assert watch.start is not None
    growth_mb, num_programs = (b - a for a, b in zip(watch.start, watch.end, strict=True))
    return Found(watch.num_steps, growth_mb, int(num_programs))


def main() -> None:
    """Run each kind of batches in a process of its own, print and write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each kind of batches")
    options = parser.parse_args()
    minutes = 0.02 if options.quick else options.minutes
    num_categories, first_step = (1_000, 20) if options.quick else (10**6, 1_000)
    records: list[Record | MachineRecord] = [machine_record(NAME, jax.devices()[0].device_kind)]
    setting = {"K": num_categories, "D": NUM_FEATURES, "B": BATCH_SIZE, "minutes": minutes}
    rows = []
    for kind in ("arrays", "streamed", "iterator"):
        # What a fit before gives back of its memory, or keeps, must not count in this one.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found = process.submit(
                watch_fit, kind, num_categories, first_step, 60 * minutes
            ).result()
        rows.append(
            [kind, f"{found.num_steps:,}", f"{found.growth_mb:.1f}", str(found.num_programs)]
        )
        metrics = [
            ("steps", float(found.num_steps), "steps", "higher"),
            ("growth_mb", found.growth_mb, "MB", "lower"),
            ("programs", float(found.num_programs), "programs", "lower"),
        ]
        for metric, value, unit, better in metrics:
            records.append(record(NAME, setting, kind, metric, value, unit, better))
    print_table(["batches", "steps", "growth MB", "programs"], rows)
    write_json(options.json, records)


if __name__ == "__main__":
    main()
