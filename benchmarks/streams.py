# SPDX-License-Identifier: Apache-2.0
"""What a step costs on data from disk, and a fit its checkpoints.

``disk_to_memory_ratio``
    milliseconds per step of ``StreamedBatches`` from a file that is generated, and removed
    afterwards, over those of ``ArrayBatches`` with the same array in memory; in turns.
``torch_loader_ratio``
    the same over those of the iterator of a PyTorch ``DataLoader`` on the file, with as many
    workers as are best for it. Left out without PyTorch.
``checkpoint_pause_s``
    by how much a step that begins a checkpoint of a state of this size is longer than the others:
    the first, which makes room for the copy, and the later ones.
``resume_s``
    seconds from the call of ``run`` with ``resume=True`` to its end, of which one step is new.

    python -m benchmarks.streams [--folder DIR] [--json OUT]

``--folder`` is where the file and the checkpoints are written; both need about 8 GB.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

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
    say_that_torch_is_missing,
    torch_is_missing,
    write_json,
)

NAME = "streams"
BATCH_SIZE = 500
NUM_SAMPLED = 100
NUM_WORKERS = (0, 1, 2)  # that a DataLoader is tried with
QUIET: dict[str, Any] = {"progress_bar": False}


class Sizes(NamedTuple):
    """Of the data, the tables and the runs."""

    num_rows: int  # 3.3 GB of features
    num_features: int
    num_categories: int  # of the steps
    num_large: int  # of the checkpoints: six tables and moments are 2 GB
    num_steps: int  # of a turn
    num_turns: int


FULL = Sizes(6_400_000, 128, 100_000, 650_000, 150, 7)
QUICK = Sizes(2_000, 8, 1_000, 1_000, 6, 2)


def make_svi(sizes: Sizes, num_categories: int) -> lc.SubsampledSVI:
    """A posterior over all the weights of a softmax regression."""

    def model(x: Any, y: Any, rows: Any) -> None:
        with lc.class_plate("classes", num_categories, y, num_sampled=NUM_SAMPLED) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([sizes.num_features]).to_event(1))
        with lc.data_plate("data", sizes.num_rows, rows) as batch:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=batch, obs=y)

    guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=0.1)
    return lc.SubsampledSVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())


def write_features(path: Path, sizes: Sizes) -> None:
    """Write a file of random features, a part at a time."""
    shape = sizes.num_rows, sizes.num_features
    file = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    part = max(1, sizes.num_rows // 64)
    rng = np.random.default_rng(0)
    for start in range(0, sizes.num_rows, part):
        rows = file[start : start + part]
        rng.standard_normal(rows.shape, np.float32, out=rows)
    file.flush()


class Features:
    """Rows of a file for a DataLoader, many at once; each worker opens it."""

    def __init__(self, path: Path, y: np.ndarray) -> None:
        self.path, self.y = path, y

    @cached_property
    def x(self) -> np.ndarray:
        """The file."""
        return np.load(self.path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A batch."""
        places = np.array(rows)
        return self.x[places], self.y[places], places.astype(np.int32)


def loader_of(path: Path, y: np.ndarray, num_workers: int) -> Iterator[Any]:
    """Endless shuffled passes of a DataLoader, whose sampler gives batches of rows."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    data = Features(path, y)
    sampler = BatchSampler(RandomSampler(data), BATCH_SIZE, drop_last=True)
    # Not by a fork, which JAX's threads do not survive.
    ahead = {"prefetch_factor": 8, "multiprocessing_context": "spawn"} if num_workers else {}
    while True:
        # Batches of indices, and NumPy arrays as they are: nothing is collated or copied.
        yield from DataLoader(
            data, None, sampler=sampler, num_workers=num_workers, collate_fn=_as_is, **ahead
        )


def _as_is(batch: Any) -> Any:
    return batch


class StepTimes:
    """A callback that notes when it is called."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, progress: lc.Progress) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def ms_per_step(svi: lc.SubsampledSVI, state: Any, batches: Any, sizes: Sizes) -> float:
    """Milliseconds of a step in the later part of a run, by the clock."""
    noted = StepTimes()
    every = max(1, sizes.num_steps // 6)
    called = [lc.Callback(noted, every)]
    key = jax.random.key(1)
    svi.run(key, sizes.num_steps, batches=batches, init_state=state, callbacks=called, **QUIET)
    first = 1  # the calls before are of a run that is getting under way
    return 1e3 * (noted.times[-1] - noted.times[first]) / (every * (len(noted.times) - 1 - first))


def time_steps(path: Path, sizes: Sizes) -> dict[str, list[float]]:
    """Milliseconds per step of each kind of batches, one figure for each turn."""
    y = np.random.default_rng(1).integers(0, sizes.num_categories, sizes.num_rows, np.int32)
    on_disk = np.load(path, mmap_mode="r")
    arrays = lc.ArrayBatches(np.load(path), y, batch_size=BATCH_SIZE)
    streamed = lc.StreamedBatches(on_disk, y, batch_size=BATCH_SIZE)
    kinds: dict[str, Callable[[], Any]] = {"memory": lambda: arrays, "disk": lambda: streamed}
    svi = make_svi(sizes, sizes.num_categories)
    state = svi.run(jax.random.key(0), 1, batches=streamed, **QUIET).state
    if torch_is_missing():
        say_that_torch_is_missing(["torch_loader"])
    else:
        loaders = {n: loader_of(path, y, n) for n in NUM_WORKERS}
        tried = {n: ms_per_step(svi, state, loader, sizes) for n, loader in loaders.items()}
        best = loaders[min(tried, key=lambda n: tried[n])]
        kinds["torch_loader"] = lambda: best
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for make in kinds.values():
        ms_per_step(svi, state, make(), sizes)  # compiles
    for _ in range(sizes.num_turns):
        for name, make in kinds.items():
            found[name].append(ms_per_step(svi, state, make(), sizes))
    return found


def time_checkpoints(folder: Path, sizes: Sizes) -> dict[str, float]:
    """Seconds of pauses and of going on, and the size of the state in GB."""
    sizes = sizes._replace(num_rows=2_000)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((sizes.num_rows, sizes.num_features), np.float32)
    y = rng.integers(0, sizes.num_large, sizes.num_rows, np.int32)
    svi = make_svi(sizes, sizes.num_large)
    noted, every = StepTimes(), 40 if sizes.num_large > 10_000 else 2
    steps = 3 * every
    options = {
        "batches": lc.StreamedBatches(x, y, batch_size=BATCH_SIZE),
        "checkpoints": lc.Checkpoints(folder, every_steps=every),
        "resume": True,
    } | QUIET

    def wait(progress: lc.Progress) -> None:
        """Let the thread write what it has before the next checkpoint is due."""
        noted(progress)
        number = progress.step // every * every
        if number and progress.step == number + every - 1:
            while not (folder / str(number)).exists():
                time.sleep(0.05)

    result = svi.run(jax.random.key(0), steps, callbacks=[lc.Callback(wait, 1)], **options)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(result.state) if hasattr(leaf, "nbytes"))
    lengths = np.diff(noted.times)
    usual = statistics.median(lengths)
    pauses = [lengths[n * every - 1] - usual for n in (1, 2)]
    del result
    start = time.perf_counter()
    svi.run(jax.random.key(0), steps + 1, **options)
    return {
        "state_gb": size / 1e9,
        "first_pause": pauses[0],
        "later_pause": pauses[1],
        "resume": time.perf_counter() - start,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, metavar="DIR", help="default: the temporary one")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        path = Path(name) / "features.npy"
        write_features(path, sizes)
        gigabytes = path.stat().st_size / 1e9
        steps = time_steps(path, sizes)
        path.unlink()
        checkpoints = time_checkpoints(Path(name) / "checkpoints", sizes)
    report(options, sizes, gigabytes, steps, checkpoints)


def report(
    options: argparse.Namespace,
    sizes: Sizes,
    gigabytes: float,
    steps: dict[str, list[float]],
    checkpoints: dict[str, float],
) -> None:
    """Print tables and write records."""
    setting = {"K": sizes.num_categories, "D": sizes.num_features, "B": BATCH_SIZE}
    rows = [[n, f"{statistics.median(ms):.2f}", _spread(ms)] for n, ms in steps.items()]
    print_table([f"batches ({gigabytes:.1f} GB)", "ms per step", "spread"], rows)
    ratios = {"disk_to_memory_ratio": _ratios(steps["disk"], steps["memory"])}
    if "torch_loader" in steps:
        ratios["torch_loader_ratio"] = _ratios(steps["disk"], steps["torch_loader"])
    print()
    table = [[n, f"{statistics.median(r):.2f}", _spread(r)] for n, r in ratios.items()]
    print_table(["ratio of the turns", "median", "spread"], table)
    print()
    state = f"{checkpoints['state_gb']:.2f} GB"
    table = [[n, f"{checkpoints[n]:.2f}"] for n in ("first_pause", "later_pause", "resume")]
    print_table([f"state of {state}", "seconds"], table)
    records: list[Record | MachineRecord] = [machine_record(NAME, jax.devices()[0].device_kind)]
    large = setting | {"K": sizes.num_large, "state_gb": round(checkpoints["state_gb"], 2)}
    found = [
        *((setting, "disk", n, statistics.median(r), "ratio") for n, r in ratios.items()),
        *((setting, n, "ms_per_step", statistics.median(ms), "ms") for n, ms in steps.items()),
        (large, "first", "checkpoint_pause_s", checkpoints["first_pause"], "s"),
        (large, "later", "checkpoint_pause_s", checkpoints["later_pause"], "s"),
        (large, "run", "resume_s", checkpoints["resume"], "s"),
    ]
    for of, method, metric, value, unit in found:
        records.append(record(NAME, of, method, metric, value, unit))
    write_json(options.json, records)


def _ratios(ours: list[float], others: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, others, strict=True)]


def _spread(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


if __name__ == "__main__":
    main()
