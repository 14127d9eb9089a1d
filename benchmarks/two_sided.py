# SPDX-License-Identifier: Apache-2.0
"""Two huge tables: time of a step as users and items grow, and what is recommended.

Cost: utilities ``v[user] @ w.T`` with a posterior over both tables (AutoNormal, TraceMeanField_ELBO
and Adam), D = 32, minibatches of B = 500 rows, S = 100 sampled items, beside PyTorch's two sparse
embeddings with SparseAdam and a sampled softmax, which estimates a point. Each cell has a process
of its own, and these take turns. ``setup_seconds`` is processor time from the start of the process
until the first chunk of steps has run, imports and compilation and all.

Quality, where a folder of data is given: Gowalla check-ins of 29,858 users at 40,981 places, of
which a fifth is held out (LightGCN's split). Methods learn embeddings of one size and take turns,
so that each has had as many seconds of steps at each check point; ``heldout_log_likelihood`` (nats
per pair, over all places) and ``recall_at_20`` are those of one scorer for all. ``--tune METHOD``
instead tries the settings of ``TRIED`` on a tenth of the training pairs that is held back; the test
part is not looked at, and ``SETTINGS`` holds the best by log likelihood at the last check point.

Without PyTorch (the extra ``benchmarks``) its cells are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.cell import runs_in_torch
from benchmarks.data_folder import add_data_argument, how_to_name_data
from benchmarks.records import (
    Record,
    argument_parser,
    machine_record,
    print_table,
    torch_is_missing,
    write_json,
)
from benchmarks.turns import (
    Measured,
    cell_records,
    measure,
    print_cells,
    serve_cell,
    without_missing_torch,
)
from benchmarks.two_sided_cells import FULL_CELLS, QUICK_CELLS, Cell

NAME = "two_sided"
CHECK_POINTS = 4
QUALITY_METRICS = (
    "heldout_log_likelihood",
    "heldout_log_likelihood_error",
    "recall_at_20",
    "recall_at_20_error",
)
WANTED = {
    "flat_ratio": "at most 1.1",
    "ratio_to_torch": "at most 1.2",
    "setup_seconds": "at most 12",
}


def make_chunk(cell: Cell) -> Callable[[], None]:
    """Make what runs a chunk of the cell's steps; import either PyTorch or JAX."""
    if runs_in_torch(cell):
        from benchmarks.two_sided_torch import make_step_loop
    else:
        from benchmarks.two_sided_steps import make_step_loop
    return make_step_loop(cell)


def ratios(measured: dict[Cell, Measured]) -> list[Record]:
    """Each of our cells beside PyTorch's of its size, and the largest beside the smallest."""
    times = {(c.method, c.size): statistics.median(m.ms_per_step) for c, m in measured.items()}
    cells = {(cell.method, cell.size): cell for cell in measured}
    ours = sorted(size for method, size in times if method == "subsampled")
    make = partial(Record, benchmark=NAME, method="subsampled", unit="ratio", better="lower")
    found = []
    for size in ours:
        if ("torch", size) in times:
            value = times["subsampled", size] / times["torch", size]
            setting = cells["subsampled", size].setting
            found.append(make(setting=setting, metric="ratio_to_torch", value=value))
    if len(ours) > 1:
        value = times["subsampled", ours[-1]] / times["subsampled", ours[0]]
        setting = cells["subsampled", ours[-1]].setting
        found.append(make(setting=setting, metric="flat_ratio", value=value))
    return found


def report(measured: dict[Cell, Measured], figures: Sequence[Record]) -> None:
    """Print the table, then the ratios."""
    setup = [f"{found.setup_seconds:.1f}" for found in measured.values()]
    print_cells(measured, "U and K", "set-up s", setup)
    for figure in figures:
        where = f"at {figure['setting']['K']}"
        wanted = WANTED[figure["metric"]]
        print(f"{figure['metric']} {where}: {figure['value']:.3g} (wanted: {wanted})")


def measure_quality(arguments: argparse.Namespace) -> list[Record]:
    """Records of what is recommended, or those of settings that are tried."""
    from benchmarks import two_sided_quality as quality

    is_tuned = arguments.tune is not None
    problem = quality.synthetic()
    if not arguments.quick:
        problem = quality.gowalla(arguments.data, held_back=is_tuned)
    names = [arguments.tune] if is_tuned else ["subsampled", "torch"]
    if torch_is_missing():
        names = [name for name in names if name != "torch"]
    settings = {
        f"{name} {setting}" if is_tuned else name: (name, setting)
        for name in names
        for setting in (quality.TRIED[name] if is_tuned else [quality.SETTINGS[name]])
    }
    seconds = 0.2 if arguments.quick else arguments.seconds
    make = partial(Record, benchmark=NAME, setting={"D": quality.NUM_FEATURES, "seconds": seconds})
    records: list[Record] = []
    rows: list[list[str]] = []

    def say(name: str, clock: float, scores: quality.Scores) -> None:
        log_prob, log_prob_error, recall, recall_error = scores
        print(
            f"{name} {clock:.0f} s: {log_prob:.4f} +- {log_prob_error:.4f}, recall "
            f"{recall:.4f} +- {recall_error:.4f}",
            flush=True,
        )

    if not is_tuned:
        settings["popularity"] = ("popularity", quality.SETTINGS["subsampled"])
    groups = [[name] for name in settings] if is_tuned else [list(settings)]
    for group in groups:  # of those that are tuned one is in memory
        methods = {
            name: quality.make_method(settings[name][0], problem, settings[name][1])
            for name in group
        }
        points = [seconds * i / CHECK_POINTS for i in range(1, CHECK_POINTS + 1)]
        for name, curve in quality.compare(methods, problem, points, say).items():
            last = curve[-1][1]
            rows.append([name, *(f"{value:.4f}" for value in last)])
            figures = dict(zip(QUALITY_METRICS, last, strict=True))
            for metric, value in figures.items():
                better = "lower" if metric.endswith("error") else "higher"
                unit = "nats" if metric.startswith("heldout") else "share"
                records.append(
                    make(method=name, metric=metric, value=value, unit=unit, better=better)
                )
    print_table(["method", "log likelihood", "+-", "recall at 20", "+-"], rows)
    return records


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add_data_argument(parser, "choice/, for quality")
    parser.add_argument("--seconds", type=float, default=120, help="of steps, for quality")
    parser.add_argument("--tune", choices=("subsampled", "torch"), help="try its settings")
    parser.add_argument("--rounds", type=int, help="chunks of each cell (default 15; quick 2)")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tune is not None and arguments.data is None and not arguments.quick:
        parser.error(f"for --tune, {how_to_name_data('choice/')}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.cell is not None:
        serve_cell(Cell(*json.loads(arguments.cell)), make_chunk)
        return
    if arguments.tune is not None:
        measure_quality(arguments)
        return
    cells = QUICK_CELLS if arguments.quick else FULL_CELLS
    rounds = arguments.rounds or (2 if arguments.quick else 15)
    measured, device = measure(NAME, without_missing_torch(cells), rounds)
    figures = ratios(measured)
    report(measured, figures)
    records = []
    for cell, found in measured.items():
        own = "setup_seconds", found.setup_seconds, "processor seconds"
        records += cell_records(NAME, cell, found, *own)
    if arguments.quick or arguments.data is not None:
        records += measure_quality(arguments)
    write_json(arguments.json, [machine_record(NAME, device), *records, *figures])


if __name__ == "__main__":
    main()
