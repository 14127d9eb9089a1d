# SPDX-License-Identifier: Apache-2.0
"""Which components or topics some rows or documents are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from numpyro_largecat._checks import check_shape
from numpyro_largecat.reading.plots.axes import new_axes

COLORS = 9  # of matplotlib's ten, without the grey one


def responsibilities(
    shares: ArrayLike,
    labels: Sequence[str] | None = None,
    names: Mapping[int, str] | None = None,
    ax: Any = None,
) -> Any:
    """Plot what rows are made of: a bar for each row, coloured by component.

    The nine components with the largest shares of these rows have a colour each; all others
    together are grey.

    Args:
        shares: Responsibilities of components for rows, or proportions of topics in documents, in
            [0, 1], shape (rows, K): ``fit.responsibilities(x).probs`` of a mixture, or
            ``fit.proportions(corpus)`` of topics. Give few rows, since a bar is drawn for each.
        labels: Names of the rows, top first; their numbers by default.
        names: Names of components for the legend, by number; "0", "1" and so on by default.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes.

    Raises:
        ValueError: If ``shares`` are no table, some are negative or the sum of a row is above 1, or
            there is not one label for each row.

    Example:
        >>> import numpyro_largecat as lc
        >>> ax = lc.plots.responsibilities([[0.9, 0.1], [0.2, 0.8]], ["a", "b"], {0: "sea"})
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['sea', '1']
    """
    shares = np.asarray(shares, float)
    check_shape("`shares`", shares, ("rows", "K"), "those of each row", least=1)
    if not (np.all(shares >= 0) and np.all(shares.sum(axis=1) <= 1 + 1e-3)):
        raise ValueError("`shares` must be at least 0, and those of a row at most 1 in sum.")
    labels = [str(row) for row in range(len(shares))] if labels is None else list(labels)
    check_shape("`labels`", labels, (len(shares),), "one for each row of `shares`")
    totals = shares.sum(axis=0)
    shown = np.argsort(-totals, kind="stable")[:COLORS]
    shown = shown[totals[shown] > 0]
    ax = new_axes(ax, height=0.28 * len(labels) + 1.2)
    places = np.arange(len(labels))
    start = np.zeros(len(labels))
    for place, k in enumerate(shown):
        color = f"C{place if place < 7 else place + 1}"  # C7 is grey
        name = str((names or {}).get(int(k), k))
        ax.barh(places, shares[:, k], left=start, color=color, label=name)
        start += shares[:, k]
    if len(shown) < np.count_nonzero(totals):
        rest = shares.sum(axis=1) - start
        ax.barh(places, rest, left=start, color="0.75", label="others")
    ax.set_yticks(places, labels)
    ax.invert_yaxis()
    ax.set(xlabel="share", xlim=(0, 1))
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    return ax
