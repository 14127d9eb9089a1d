# SPDX-License-Identifier: Apache-2.0
"""Where the time of one SVI step goes, for any setting of ``step_cost``.

The compiled loop of steps runs under JAX's profiler. Each instruction of the program goes to one
class: by its operation (matrix product, sort, scatter, gather, exponential) and by what asked for
it (draws of rows and classes, normals, the optimiser). A fusion goes to the class that most of its
work is of, as far as that can be told from numbers of entries; so the classes are a guide, while
their sum is exact. Where two instructions run side by side, each gets half of the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax

from benchmarks.hlo_text import Instruction, Program, read_program
from benchmarks.records import Record, argument_parser, machine_record, print_table, write_json
from benchmarks.step_cells import Cell
from benchmarks.step_loops import METHODS, make_step_loop
from benchmarks.trace_times import TraceTimes, trace_times

NAME = "step_profile"
BETWEEN = "between instructions"
CLASSES = (
    "matrix products",
    "sorts",
    "draws",
    "normals",
    "gathers",
    "scatters",
    "optimiser",
    "exponentials",
    "rest",
    BETWEEN,
)
BY_OPCODE = {
    "dot": "matrix products",
    "convolution": "matrix products",
    "sort": "sorts",
    "scatter": "scatters",
    "dynamic-update-slice": "scatters",
    "gather": "gathers",
    "dynamic-slice": "gathers",
}
# A fusion with one of these is of its class, whatever else is in it.
DECISIVE = {"dot", "convolution", "sort", "scatter"}
TRANSCENDENTAL = {"exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic"}
# The others count by the entries of their results, and these several times: they take longer.
WORK_PER_ENTRY = dict.fromkeys({"gather", *TRANSCENDENTAL}, 16) | {"divide": 4, "sqrt": 4}
FREE = {"parameter", "constant", "bitcast", "broadcast", "reshape", "tuple", "get-tuple-element"}
LOOPS = {"while", "conditional", "call"}  # what is inside them has times of its own


class Row(NamedTuple):
    """One instruction in one step."""

    class_: str
    name: str
    microseconds: float
    op_name: str


def class_of_part(part: Instruction) -> str:
    """The class of an instruction that is no fusion."""
    op_name, files = part.op_name, part.files
    if part.opcode in BY_OPCODE:
        return BY_OPCODE[part.opcode]
    if part.opcode == "custom-call" and op_name.endswith("dot_general"):
        return "matrix products"
    if "_normal" in op_name or "erf_inv" in op_name:
        return "normals"
    if any("/optax/" in file or file.endswith("numpyro/optim.py") for file in files):
        return "optimiser"
    if any("/plates/" in file or file.endswith("array_batches.py") for file in files):
        return "draws"
    if any(word in op_name for word in ("threefry", "random_bits", "randint", "shuffle")):
        return "draws"
    return "exponentials" if part.opcode in TRANSCENDENTAL else "rest"


def class_of(instruction: Instruction, program: Program) -> str:
    """The class that most of an instruction's work is of."""
    if instruction.opcode in LOOPS:
        return BETWEEN
    work: dict[str, float] = defaultdict(float)
    for part in program.inside(instruction):
        if part.opcode in DECISIVE:
            return class_of_part(part)
        if part.opcode not in FREE:
            entries = part.num_elements * WORK_PER_ENTRY.get(part.opcode, 1)
            work[class_of_part(part)] += entries
    return max(work, key=lambda name: work[name], default="rest")


def rows_of(times: TraceTimes, program: Program, num_steps: int) -> Iterator[Row]:
    """Say of each instruction what class it is of and what it takes in one step."""
    for name, nanoseconds in times.by_instruction.items():
        instruction = program.instructions[name]
        microseconds = nanoseconds / 1000 / num_steps
        yield Row(class_of(instruction, program), name, microseconds, instruction.op_name)
    yield Row(BETWEEN, "", times.between / 1000 / num_steps, "")


def profile(cell: Cell) -> tuple[list[Row], float, float]:
    """The instructions of a step; its microseconds under the profiler, and without it."""
    loop = make_step_loop(cell)
    program = read_program(loop.hlo_text)
    loop()  # warms up
    alone = []
    for _ in range(5):
        start = time.perf_counter()
        loop()
        alone.append(1e6 * (time.perf_counter() - start) / cell.steps_per_chunk)
    times = trace_times(loop, program.name)
    rows = list(rows_of(times, program, cell.steps_per_chunk))
    return rows, times.total / 1000 / cell.steps_per_chunk, statistics.median(alone)


def by_class(rows: Sequence[Row]) -> dict[str, float]:
    """Microseconds of each class, in the order of ``CLASSES``."""
    sums = dict.fromkeys(CLASSES, 0.0)
    for row in rows:
        sums[row.class_] += row.microseconds
    return sums


def report(cell: Cell, rows: Sequence[Row], total: float, alone: float, num_listed: int) -> None:
    """Print the table of classes, and the instructions that take longest."""
    setting = ", ".join(f"{name} = {value}" for name, value in cell.setting.items())
    print(f"One step of {cell.method}, {setting}")
    table = [
        [name, f"{microseconds:.0f}", f"{100 * microseconds / total:.0f}"]
        for name, microseconds in by_class(rows).items()
    ]
    print_table(["", "microseconds", "per cent"], [*table, ["sum", f"{total:.0f}", "100"]])
    print(f"Without the profiler, a step takes {alone:.0f} microseconds.")
    longest = sorted(rows, key=lambda row: -row.microseconds)[:num_listed]
    if longest:
        print()
    for row in longest:
        print(f"{row.microseconds:8.1f}  {row.class_:<20}  {row.name:<36}  {row.op_name}")


def make_records(cell: Cell, rows: Sequence[Row], total: float, alone: float) -> list[Record]:
    """The records of a profile."""
    make = partial(
        Record, benchmark=NAME, setting=cell.setting, method=cell.method, unit="us", better="lower"
    )
    return [
        *(make(metric=name, value=value) for name, value in by_class(rows).items()),
        make(metric="sum", value=total),
        make(metric="without the profiler", value=alone),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--method", choices=METHODS, default="subsampled", help="default: subsampled")
    add("--categories", type=int, metavar="K", help="classes (default 10 ** 5; quick 1000)")
    add("--features", type=int, metavar="D", help="features (default 128; quick 8)")
    add("--steps", type=int, help="steps to trace (default 100; quick 5)")
    add("--list", type=int, default=20, metavar="N", help="instructions to list (default 20)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    sizes = (1000, 8, 5) if arguments.quick else (10**5, 128, 100)
    given = (arguments.categories, arguments.features, arguments.steps)
    cell = Cell(arguments.method, *(g or s for g, s in zip(given, sizes, strict=True)))
    rows, total, alone = profile(cell)
    report(cell, rows, total, alone, arguments.list)
    machine = machine_record(NAME, jax.devices()[0].device_kind)
    write_json(arguments.json, [machine, *make_records(cell, rows, total, alone)])


if __name__ == "__main__":
    main()
