# SPDX-License-Identifier: Apache-2.0
"""Draw the figure of docs/how_to_choose.md: ``python docs/figures/decisions.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

BOX = {"boxstyle": "round,pad=0.45", "linewidth": 1.2}
QUESTION = BOX | {"facecolor": "#eef3fb", "edgecolor": "#4a6fa5"}
ANSWER = BOX | {"facecolor": "#eaf6ea", "edgecolor": "#3c8d40"}


def draw_question(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=10, bbox=QUESTION)


def draw_answer(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(
        x,
        y,
        text,
        ha="center",
        va="center",
        fontsize=9,
        family="monospace",
        bbox=ANSWER,
    )


def draw_arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], label: str = ""
) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#555555"})
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    axes.text(
        *middle, label, ha="center", va="center", fontsize=9, backgroundcolor="white"
    )


def main() -> None:
    figure, axes = plt.subplots(figsize=(11, 5.2))
    axes.set(xlim=(0, 11), ylim=(0.2, 5.6))
    axes.axis("off")
    draw_question(axes, 5.5, 5.2, "What is huge?")
    for x, label in (
        (2.3, "classes that are observed"),
        (6.6, "components"),
        (9.4, "topics"),
    ):
        draw_arrow(axes, (5.5, 4.9), (x, 4.15), label)
    draw_question(axes, 2.3, 3.85, "5,000 classes or more?")
    draw_arrow(axes, (1.9, 3.5), (0.95, 2.85), "no")
    draw_arrow(axes, (2.7, 3.5), (3.35, 2.85), "yes")
    draw_answer(axes, 0.95, 2.55, "class_plate,\nno num_sampled")
    draw_question(axes, 3.35, 2.55, "do observations have ids?")
    draw_arrow(axes, (2.9, 2.2), (1.75, 1.55), "yes")
    draw_arrow(axes, (3.8, 2.2), (4.35, 1.55), "no")
    draw_answer(axes, 1.55, 1.15, "sample_choice in data_plate,\nnum_sampled=200")
    draw_answer(axes, 4.5, 1.15, "UtilityCategorical,\nnum_sampled=1000")
    draw_question(axes, 6.6, 3.85, "exponential family?")
    draw_arrow(axes, (6.2, 3.5), (5.95, 2.85), "no")
    draw_arrow(axes, (7.0, 3.5), (7.35, 2.85), "yes")
    draw_answer(axes, 5.8, 2.55, "TopLMixture")
    draw_answer(axes, 7.4, 2.55, "fit_mixture")
    draw_question(axes, 9.4, 3.85, "Dirichlet priors alone?")
    draw_arrow(axes, (9.1, 3.5), (8.85, 2.85), "yes")
    draw_arrow(axes, (9.7, 3.5), (10.1, 2.85), "no")
    draw_answer(axes, 8.8, 2.55, "fit_topics")
    draw_answer(axes, 10.15, 2.55, "TopicDocument")
    axes.text(
        8.3, 1.6, "and in any model with classes", ha="center", va="center", fontsize=9
    )
    extras = (
        "a learned scale:           not_centred\n"
        "a posterior that matters:  AutoRowNormal"
    )
    draw_answer(axes, 8.3, 1.05, extras)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
