# SPDX-License-Identifier: Apache-2.0
"""The ELBO of a fit over its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike

from numpyro_largecat._checks import check_count
from numpyro_largecat.reading.plots.axes import new_axes


def elbo(
    losses: ArrayLike,
    window: int = 100,
    exact: Mapping[int, float] | None = None,
    ax: Any = None,
) -> Any:
    """Plot the ELBO of each step and its moving average.

    The vertical range is that of the moving average, so that the first steps of a fit do not
    flatten the rest.

    Cost: O(steps window).

    Args:
        losses: Losses of the fit, the negative ELBO in nats, shape (steps,).
        window: Steps that the moving average spans, at least 1.
        exact: ELBOs with all classes at some steps, which the subsampled ones estimate.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes.

    Raises:
        ValueError: If there are no losses, or ``window`` is out of range.
        TypeError: If ``window`` is no integer.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> ax = lc.plots.elbo(np.exp(-np.arange(50)), window=5)
        >>> ax.get_xlabel()
        'step'
    """
    elbos = -np.asarray(losses, float)
    if not elbos.size:
        raise ValueError("`losses` must hold at least one step; got none.")
    window = min(check_count("window", window, 1), elbos.size)
    is_known = np.isfinite(elbos)  # a step that was skipped has none
    if not is_known.any():
        raise ValueError("`losses` must hold at least one finite loss; all are NaN or infinite.")
    # Differences of running sums would lose all that is small beside a first loss of 1e20.
    total, number = (
        sliding_window_view(values, window).sum(axis=-1)
        for values in (np.where(is_known, elbos, 0), is_known)
    )
    with np.errstate(invalid="ignore"):  # a window of skipped steps is a gap
        average = total / number
    ax = new_axes(ax)
    ax.plot(elbos, color="C0", alpha=0.25, linewidth=0.5, label="each step")
    ax.plot(np.arange(window - 1, elbos.size), average, color="C0", label=f"mean of {window} steps")
    low, high = np.nanquantile(average, 0.02), np.nanmax(average)
    if exact:
        steps, values = np.array(sorted(exact.items())).T
        ax.plot(steps, values, "o", color="C1", markersize=4, label="all classes")
        low, high = min(low, values[-1]), max(high, values.max())
    margin = 0.1 * (high - low) or 1.0
    ax.set(xlabel="step", ylabel="ELBO (nats)", ylim=(low - margin, high + margin))
    legend = ax.legend(loc="lower right")
    legend.legend_handles[0].set(alpha=0.5, linewidth=1)  # as dense as the noise looks
    return ax
