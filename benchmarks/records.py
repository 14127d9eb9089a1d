# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: records of measurements, tables and command-line arguments."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypedDict

PACKAGES = ("numpyro-largecat", "numpyro", "jax", "jaxlib", "optax", "numpy")


class Record(TypedDict):
    """One measured cell."""

    benchmark: str  # name of the module
    setting: dict[str, Any]  # what was varied, such as {"K": 100000}
    method: str  # what was measured
    metric: str  # which of its properties
    value: float | None  # None if the property has no value, such as a goal that was not reached
    unit: str
    better: Literal["lower", "higher"]


def record(
    benchmark: str,
    setting: dict[str, Any],
    method: str,
    metric: str,
    value: float | None,
    unit: str,
    better: Literal["lower", "higher"] = "lower",
) -> Record:
    """Make the record of one measured cell."""
    return Record(
        benchmark=benchmark,
        setting=setting,
        method=method,
        metric=metric,
        value=value,
        unit=unit,
        better=better,
    )


class MachineRecord(TypedDict):
    """Where and when the other records were measured."""

    benchmark: str
    machine: dict[str, Any]
    versions: dict[str, str]
    date: str  # ISO 8601, UTC


def machine_record(benchmark: str, device: str) -> MachineRecord:
    """Describe the machine; ``device`` is the kind of device that JAX computed on."""
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "device": device,
    }
    packages = PACKAGES if torch_is_missing() else (*PACKAGES, "torch")
    versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return MachineRecord(benchmark=benchmark, machine=machine, versions=versions, date=date)


def torch_is_missing() -> bool:
    """Whether PyTorch, which only a peer needs, is not installed."""
    return find_spec("torch") is None


def say_that_torch_is_missing(methods: Sequence[str]) -> None:
    """Print which methods are left out, and what to do."""
    print(f"Without {' and '.join(methods)}: PyTorch is not installed. It comes with the extra")
    print('`benchmarks`: pip install "numpyro-largecat[benchmarks]"')


def _processor() -> str:
    """Name of the processor; Python knows it only on some systems."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the arguments of every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the records to this file")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: a test of the benchmark, not of speed"
    )
    return parser


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns, the first one flush left and the others flush right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def write_json(path: Path | None, records: Sequence[Record | MachineRecord]) -> None:
    """Write the records, if a path was given."""
    if path is not None:
        path.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
