# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one SVI step as the number of classes K grows.

A linear softmax model, with a posterior over all K D weights (AutoNormal), TraceMeanField_ELBO
and Adam, is fitted to minibatches of B = 500 rows: by ``lc.SubsampledSVI`` with S = 100 sampled
classes (``subsampled``; with other errors ``probit`` and ``logistic``; ``bfloat16`` with tables in
16 bits; ``shared`` with a label against the sampled classes alone, not against the labels of
others), and by ``numpyro.infer.SVI`` with the exact ``Categorical`` (``numpyro``). Four methods
estimate a point: ``delta`` and ``shared_delta``, by ``lc.SubsampledSVI`` with AutoDelta;
``torch``, by PyTorch's sparse embeddings and SparseAdam with a softmax over each observation's
class and S sampled ones, which is what ``shared`` compares; ``torch_batch``, over the labels of the
minibatch and S sampled ones, which is what the others compare; and ``torch_exact``, over all
classes. ``ratio_to_torch`` is of unlike work, B + S classes to S + 1; ``shared_ratio_to_torch`` and
``ratio_to_torch_batch`` are of like.
The methods of JAX run compiled loops of steps with donated state, all of them on minibatches of the
same data.

Each method and K has a process of its own, for its peak memory, and these processes take turns in
running a chunk of steps, so that all of them meet the same load of the machine. The figures are the
median over chunks; the least and the greatest show how noisy the machine was. There are two groups
of them, one after the other, of which the larger takes about 22 GB of memory. Without PyTorch (the
extra ``benchmarks``) its cells are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

from benchmarks.cell import runs_in_torch
from benchmarks.records import Record, argument_parser, machine_record, write_json
from benchmarks.step_cells import FULL_GROUPS, QUICK_GROUPS, Cell
from benchmarks.turns import (
    Measured,
    cell_records,
    measure,
    print_cells,
    serve_cell,
    without_missing_torch,
)

NAME = "step_cost"
WANTED = {
    "ratio_1e6_1e3": "at most 1.1",
    "speedup_1e5": "at least 300",
    "peak_mb_above_tables": "at most 600",
    "probit_1e6_to_softmax": "at most 2.5",
    "logistic_1e6_to_softmax": "at most 2.5",
    "ratio_to_torch": "at most 1.0",
    "delta_ratio_to_torch": "at most 0.7",
    "ratio_to_torch_batch": "at most 1.0",
    "delta_ratio_to_torch_batch": "at most 0.7",
    "shared_ratio_to_torch": "at most 1.0",
    "shared_delta_ratio_to_torch": "at most 0.7",
}


def make_chunk(cell: Cell) -> Callable[[], None]:
    """Make what runs a chunk of the cell's steps; import either PyTorch or JAX."""
    if runs_in_torch(cell):
        from benchmarks.torch_peers import make_step_loop
    else:
        from benchmarks.step_loops import make_step_loop
    return make_step_loop(cell)


def wanted_figures(records: Sequence[Record]) -> list[Record]:
    """Compare cells, where those concerned were measured; memory is among the cells' records."""
    found = {(r["method"], r["setting"]["K"], r["metric"]): r for r in records}

    def ratio(metric: str, better: str, of: tuple[str, int], to: tuple[str, int]) -> list[Record]:
        if any((*cell, "ms_per_step") not in found for cell in (of, to)):
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
        *(
            record
            for k in (10**5, 10**6)
            for record in (
                *ratio("ratio_to_torch", "lower", ("subsampled", k), ("torch", k)),
                *ratio("delta_ratio_to_torch", "lower", ("delta", k), ("torch", k)),
                *ratio("ratio_to_torch_batch", "lower", ("subsampled", k), ("torch_batch", k)),
                *ratio("delta_ratio_to_torch_batch", "lower", ("delta", k), ("torch_batch", k)),
                *ratio("shared_ratio_to_torch", "lower", ("shared", k), ("torch", k)),
                *ratio("shared_delta_ratio_to_torch", "lower", ("shared_delta", k), ("torch", k)),
            )
        ),
    ]


def records_of(measured: dict[Cell, Measured]) -> list[Record]:
    """The records of the cells."""
    records = []
    for cell, found in measured.items():
        own = "peak_mb_above_tables", found.peak_mb - cell.table_mb, "MB"
        records += cell_records(NAME, cell, found, *own)
    return records


def report(measured: dict[Cell, Measured], figures: Sequence[Record]) -> None:
    """Print the table, then the wanted figures."""
    above = [f"{found.peak_mb - cell.table_mb:.0f}" for cell, found in measured.items()]
    print_cells(measured, "K", "above tables", above)
    for figure in figures:
        metric, value = figure["metric"], figure["value"]
        where = f" at K = {figure['setting']['K']}" if "to_torch" in metric else ""
        print(f"{metric}{where} {value:.4g} (wanted: {WANTED[metric]})")


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, help="chunks of each cell (default 9; quick 2)")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.cell is not None:
        serve_cell(Cell(*json.loads(arguments.cell)), make_chunk)
        return
    groups = QUICK_GROUPS if arguments.quick else FULL_GROUPS
    num_rounds = arguments.rounds or (2 if arguments.quick else 9)
    records: list[Record] = []
    for cells in groups:
        measured, device = measure(NAME, without_missing_torch(cells), num_rounds)
        own = records_of(measured)
        figures = wanted_figures(own)
        report(measured, figures)
        found = [*own, *(figure for figure in figures if figure not in own)]
        known = {_names(record) for record in records}
        records += [record for record in found if _names(record) not in known]
    write_json(arguments.json, [machine_record(NAME, device), *records])


def _names(record: Record) -> tuple[str, int, str]:
    """What two groups may have both measured."""
    return record["method"], record["setting"]["K"], record["metric"]


if __name__ == "__main__":
    main()
