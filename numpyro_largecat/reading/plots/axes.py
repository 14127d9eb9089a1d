# SPDX-License-Identifier: Apache-2.0
"""Axes to draw on, where a caller has none."""

from __future__ import annotations

from typing import Any


def new_axes(ax: Any, height: float = 4.0) -> Any:
    """The axes of the caller, or new ones."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt  # slow to import, so only where it is used

    return plt.subplots(figsize=(6.4, height), layout="constrained")[1]


def new_grid(number: int, height: float) -> Any:
    """Axes of so many panels, at most four in a row, each of this height."""
    import matplotlib.pyplot as plt

    columns = min(number, 4)
    rows = -(-number // columns)
    size = 3.2 * columns, height * rows + 0.4
    grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)[1]
    for ax in grid.flat[number:]:
        ax.set_visible(False)
    return grid.flat[:number]
