# SPDX-License-Identifier: Apache-2.0
"""Pictures of a fit; each function draws on matplotlib axes and returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from numpyro_largecat.metrics import calibration_bins


def plot_elbo(losses: ArrayLike, window: int = 100, ax: Any = None) -> Any:
    """Plot the ELBO of each step and its moving average.

    The vertical range is that of the moving average, so that the first steps of a fit do not
    flatten the rest.

    Args:
        losses: Losses of the fit, the negative ELBO in nats, shape (steps,).
        window: Steps that the moving average spans, at least 1.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes.

    Raises:
        ValueError: If there are no losses.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> ax = lc.plot_elbo(np.exp(-np.arange(50)), window=5)
        >>> ax.get_xlabel()
        'step'
    """
    elbo = -np.asarray(losses, float)
    if not elbo.size:
        raise ValueError("`losses` must hold at least one step; got none.")
    window = min(window, elbo.size)
    total = np.cumsum(np.concatenate([[0.0], np.nan_to_num(elbo)]))
    average = (total[window:] - total[:-window]) / window
    ax = _new_axes(ax)
    ax.plot(elbo, color="C0", alpha=0.25, linewidth=0.5, label="each step")
    ax.plot(np.arange(window - 1, elbo.size), average, color="C0", label=f"mean of {window} steps")
    low, high = np.quantile(average, 0.02), average.max()
    margin = 0.1 * (high - low) or 1.0
    ax.set(xlabel="step", ylabel="ELBO (nats)", ylim=(low - margin, high + margin))
    ax.legend(loc="lower right")
    return ax


def plot_intervals(
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
        ValueError: If there is not one label for each row of ``draws``.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> ax = lc.plot_intervals(np.random.default_rng(0).normal(size=(100, 2)), ["a", "b"])
        >>> [text.get_text() for text in ax.get_yticklabels()]
        ['a', 'b']
    """
    draws = np.asarray(draws)
    if draws.ndim != 2 or draws.shape[1] != len(labels):
        raise ValueError(
            "`draws` must have shape (num_draws, rows) with one of `labels` for each row; got "
            f"shape {draws.shape} and {len(labels)} labels."
        )
    tail = (1 - probability) / 2
    low, middle, high = np.quantile(draws, [tail, 0.5, 1 - tail], axis=0)
    ax = _new_axes(ax, height=0.28 * len(labels) + 1.2)
    places = np.arange(len(labels))
    ax.hlines(places, low, high, color="C0")
    ax.plot(middle, places, "o", color="C0", markersize=4)
    ax.axvline(0, color="0.7", linewidth=0.8, zorder=0)
    ax.set_yticks(places, labels)
    ax.invert_yaxis()
    ax.set_xlabel(f"posterior median and {probability:.0%} interval")
    return ax


def plot_reliability(
    probabilities: ArrayLike, correct: ArrayLike, num_bins: int = 10, ax: Any = None
) -> Any:
    """Plot how often predictions of a given probability come true.

    Predictions are put into bins of equal count by their probability. A calibrated model lies on
    the diagonal; the bars are two standard errors.

    Args:
        probabilities: Predicted probabilities, in [0, 1], any shape.
        correct: Whether each prediction came true, the same shape.
        num_bins: Number of bins, at least 1.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes.

    Raises:
        ValueError: If the shapes differ.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> p = np.random.default_rng(0).uniform(size=1000)
        >>> ax = lc.plot_reliability(p, p > 0.5)
        >>> ax.get_ylabel()
        'fraction that came true'
    """
    if np.shape(probabilities) != np.shape(correct):
        raise ValueError(
            "`probabilities` and `correct` must have the same shape; got "
            f"{np.shape(probabilities)} and {np.shape(correct)}."
        )
    predicted, observed, counts = calibration_bins(probabilities, correct, num_bins)
    error = 2 * np.sqrt(observed * (1 - observed) / counts)
    ax = _new_axes(ax)
    ax.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
    ax.errorbar(predicted, observed, yerr=error, fmt="o-", color="C0", markersize=4)
    ax.set(xlabel="predicted probability", ylabel="fraction that came true")
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    return ax


def _new_axes(ax: Any, height: float = 4.0) -> Any:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt  # slow to import, so only where it is used

    return plt.subplots(figsize=(6.4, height), layout="constrained")[1]
