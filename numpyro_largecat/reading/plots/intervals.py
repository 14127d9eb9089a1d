# SPDX-License-Identifier: Apache-2.0
"""Intervals of a posterior, and how often they hold the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from numpyro_largecat._checks import check_interval, check_shape
from numpyro_largecat.reading.calibration import Calibration
from numpyro_largecat.reading.plots.axes import new_axes


def coverage(found: Calibration, ax: Any = None) -> Any:
    """Plot how often central intervals hold the true value, by their probability.

    A line above the diagonal has intervals that are too wide, one below too narrow. The bands are
    two standard errors wide on either side.

    Args:
        found: What ``simulation_based_calibration`` returned.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> ranks = np.random.default_rng(0).integers(0, 100, (200, 5))
        >>> ax = lc.plots.coverage(lc.Calibration({"w": ranks}, 99))
        >>> ax.get_xlabel()
        'probability of the interval'
    """
    levels = np.linspace(0.05, 0.95, 19)
    at_levels = [found.coverage(level) for level in levels]
    ax = new_axes(ax)
    ax.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for name in found.ranks:
        share, error = np.array([at_level[name] for at_level in at_levels]).T
        (line,) = ax.plot(levels, share, label=name)
        band = share - 2 * error, share + 2 * error
        ax.fill_between(levels, *band, color=line.get_color(), alpha=0.2, linewidth=0)
    ax.set(xlabel="probability of the interval", ylabel="share that holds the truth")
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.legend(loc="upper left")
    return ax


def intervals(
    draws: ArrayLike, labels: Sequence[str], probability: float = 0.9, ax: Any = None
) -> Any:
    """Plot posterior medians and central intervals, one row for each quantity.

    Args:
        draws: Posterior draws, shape (num_draws, rows).
        labels: Names of the rows, top first.
        probability: Probability inside the interval, in (0, 1).
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes.

    Raises:
        ValueError: If there is not one label for each row of ``draws``, or ``probability`` is out
            of range.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> ax = lc.plots.intervals(np.random.default_rng(0).normal(size=(100, 2)), ["a", "b"])
        >>> [text.get_text() for text in ax.get_yticklabels()]
        ['a', 'b']
    """
    check_interval("probability", probability, "(0, 1)")
    draws = np.asarray(draws)
    check_shape("`draws`", draws, ("num_draws", len(labels)), "a column for each of `labels`")
    tail = (1 - probability) / 2
    low, middle, high = np.quantile(draws, [tail, 0.5, 1 - tail], axis=0)
    ax = new_axes(ax, height=0.28 * len(labels) + 1.2)
    places = np.arange(len(labels))
    ax.hlines(places, low, high, color="C0")
    ax.plot(middle, places, "o", color="C0", markersize=4)
    ax.axvline(0, color="0.7", linewidth=0.8, zorder=0)
    ax.set_yticks(places, labels)
    ax.invert_yaxis()
    ax.set_xlabel(f"posterior median and {probability:.0%} interval")
    return ax
