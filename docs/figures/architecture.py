# SPDX-License-Identifier: Apache-2.0
"""Draw the picture of docs/architecture.md: ``python docs/figures/architecture.py``."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

# Name, what it holds, what a newcomer adds there; x, y, width; colour.
ROOMS = [
    (
        "reading/",
        "what a fit says: predictions, ArviZ,\ndiagnosis, plots",
        "",
        0,
        8.0,
        6.2,
        "C7",
    ),
    ("svi/", "3. only touched rows move:\nplan, step, loop", "", 0, 6.2, 6.2, "C0"),
    (
        "choices/",
        "2. likelihoods that sum over classes",
        "a bound · an error family · an update rule · a guide",
        0,
        4.4,
        6.2,
        "C0",
    ),
    ("plates/", "1. which rows exist this step", "a proposal", 0, 2.6, 6.2, "C0"),
    ("topics/", "closed form", "", 6.8, 8.0, 2.6, "C2"),
    ("double_sum/", "closed form", "a rule", 6.8, 6.2, 2.6, "C2"),
    ("mixtures/", "closed form", "a conjugate family", 6.8, 4.4, 2.6, "C2"),
    ("top_l/", "sums over the\nL best values", "", 6.8, 2.6, 2.6, "C2"),
    (
        "handlers/",
        "all knowledge of NumPyro's messages and internals",
        "",
        0,
        0.8,
        9.4,
        "C1",
    ),
    ("data/", "corpora, formats", "a format", 0, -1.0, 9.4, "C7"),
    ("ops/", "array functions, JAX alone", "", 0, -2.8, 9.4, "C7"),
]
HEIGHT = 1.45


def draw_room(axes: Axes, room: tuple[str, str, str, float, float, float, str]) -> None:
    """A box with the folder's name, its idea, and what may be added to it."""
    name, holds, added, x, y, width, color = room
    style = "round,pad=0,rounding_size=0.12"
    box = FancyBboxPatch(
        (x, y), width, HEIGHT, boxstyle=style, fc=color, ec=color, alpha=0.16
    )
    axes.add_patch(box)
    axes.text(
        x + 0.15, y + HEIGHT - 0.15, name, va="top", weight="bold", family="monospace"
    )
    axes.text(x + 0.15, y + HEIGHT - 0.55, holds, va="top", fontsize=9)
    if added:
        axes.text(x + 0.15, y + 0.12, f"+ {added}", fontsize=9, color="C4")


def draw_way(axes: Axes) -> None:
    """The way of a minibatch: from the loop to plates, bound, and back to the rows."""
    steps = [
        (7.25, "1  the loop hands a minibatch to the step"),
        (3.3, "2  its labels, and a draw, say which rows exist"),
        (5.1, "3  the utilities of these rows make the bound"),
        (6.6, "4  its gradient moves these rows alone"),
    ]
    x = -0.35
    for (start, _), (end, _) in pairwise(steps):
        arrow = {"arrowstyle": "->", "color": "C3", "lw": 1.6}
        arrow["connectionstyle"] = "arc3,rad=0.5" if end < start else "arc3,rad=-0.5"
        axes.annotate("", (x, end), (x, start), arrowprops=arrow)
    for y, label in steps:
        axes.text(x - 1.0, y, label, ha="right", va="center", fontsize=9, color="C3")


def main() -> None:
    """Write ``architecture.png`` beside this file."""
    figure, axes = plt.subplots(figsize=(11, 9), layout="constrained")
    for room in ROOMS:
        draw_room(axes, room)
    draw_way(axes)
    axes.set(xlim=(-5.6, 9.6), ylim=(-3.0, 9.6))
    axes.axis("off")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
