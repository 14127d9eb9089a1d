# SPDX-License-Identifier: Apache-2.0
"""Whether predictions come true, and where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from numpyro_largecat._checks import (
    check_count,
    check_ids_or_none,
    check_in_range,
    check_integers,
    check_shape,
)
from numpyro_largecat.reading.metrics import calibration_bins
from numpyro_largecat.reading.plots.axes import new_axes


def reliability(
    probabilities: ArrayLike,
    correct: ArrayLike,
    num_bins: int = 10,
    ax: Any = None,
    label: str | None = None,
) -> Any:
    """Plot how often predictions of a given probability come true.

    Predictions are put into bins of equal count by their probability. A calibrated model lies on
    the diagonal; the bars are Wilson's intervals of two standard errors.

    Args:
        probabilities: Predicted probabilities, in [0, 1], any shape.
        correct: Whether each prediction came true, the same shape.
        num_bins: Number of bins, at least 1.
        ax: Axes to draw on, beside what is there; new ones by default.
        label: What these predictions are, for the legend, beside those of others.

    Returns:
        The axes.

    Raises:
        ValueError: If the shapes differ, or a number is out of range.
        TypeError: If a number is no integer.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> p = np.random.default_rng(0).uniform(size=1000)
        >>> ax = lc.plots.reliability(p, p > 0.5)
        >>> ax.get_ylabel()
        'fraction that came true'
    """
    check_count("num_bins", num_bins, 1)
    check_shape("`correct`", correct, np.shape(probabilities), "as `probabilities`")
    predicted, observed, counts = calibration_bins(probabilities, correct, num_bins)
    error = _error_bars(observed, counts)
    ax = new_axes(ax)
    ax.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
    ax.errorbar(predicted, observed, yerr=error, fmt="o-", markersize=4, label=label)
    if label is not None:
        ax.legend()
    ax.set(xlabel="predicted probability", ylabel="fraction that came true")
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    return ax


def accuracy_by_frequency(
    predicted: ArrayLike, obs: ArrayLike, counts: ArrayLike, num_bins: int = 10, ax: Any = None
) -> Any:
    """Plot how often classes are predicted right against how frequent they are in training.

    Observations are put into bins of about equal count by the training count of their class. The
    bars are Wilson's intervals of two standard errors; a grey line shows the accuracy of all.

    Args:
        predicted: Predicted classes, integers, any shape.
        obs: Observed classes, the same shape.
        counts: Observations of each class in the training data, shape (K,).
        num_bins: Number of bins, at least 1; fewer where many classes are equally frequent.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes.

    Raises:
        ValueError: If the shapes differ, or a number is out of range.
        TypeError: If a number is no integer.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> obs = np.arange(100) % 7
        >>> ax = lc.plots.accuracy_by_frequency(np.minimum(obs, 4), obs, 2 ** np.arange(7))
        >>> ax.get_xscale()
        'log'
    """
    check_count("num_bins", num_bins, 1)
    guessed, true = _check_same_shape(predicted, obs)
    is_right, counts = guessed == true, np.asarray(counts)
    check_in_range("`obs`", true, len(counts), "classes of `counts`")
    frequency = counts[true]
    edges = np.unique(np.quantile(frequency, np.linspace(0, 1, num_bins + 1)[1:-1]))
    bins = np.searchsorted(edges, frequency, side="right")
    groups = [np.flatnonzero(bins == b) for b in np.unique(bins)]
    places = np.array([np.exp(np.log(frequency[g] + 0.5).mean()) for g in groups])
    share = np.array([is_right[g].mean() for g in groups])
    error = _error_bars(share, np.array([g.size for g in groups]))
    ax = new_axes(ax)
    ax.axhline(is_right.mean(), color="0.7", linewidth=0.8, label="all observations")
    ax.errorbar(places, share, yerr=error, fmt="o-", color="C0", markersize=4)
    ax.set(xscale="log", xlabel="observations of the class in training", ylabel="accuracy")
    if places.max() < 100 * places.min():  # too narrow for powers of ten
        ax.set_xscale("log", subs=[2, 5])
        ax.xaxis.set_major_formatter("{x:.0f}")
        ax.xaxis.set_minor_formatter("{x:.0f}")
    ax.set_ylim(0, 1.02)
    ax.legend(loc="best")
    return ax


def confusion(
    predicted: ArrayLike,
    obs: ArrayLike,
    labels: Sequence[str] | None = None,
    num_classes: int = 12,
    ax: Any = None,
) -> Any:
    """Plot which of the most confused classes are taken for which.

    The classes shown are those in most errors, as the observed or as the predicted class. A cell
    holds the share, in percent, of the observations of its row that are predicted as its column;
    what is predicted as a class that is not shown is missing from the row.

    Args:
        predicted: Predicted classes, integers in [0, K), or -1 for none; any shape.
        obs: Observed classes, integers in [0, K), the same shape.
        labels: Names of all K classes; their ids by default.
        num_classes: Number of classes to show, at least 2.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes.

    Raises:
        ValueError: If the shapes differ, or a number is out of range.
        TypeError: If a number is no integer.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> obs = np.repeat(np.arange(4), 25)
        >>> ax = lc.plots.confusion(np.where(np.arange(100) % 5, obs, 1), obs, ["a", "b", "c", "d"])
        >>> [text.get_text() for text in ax.get_yticklabels()]
        ['a', 'b', 'c', 'd']
    """
    check_count("num_classes", num_classes, 2)
    guessed, true = _check_same_shape(predicted, obs)
    size = np.iinfo(np.int32).max if labels is None else len(labels)
    check_in_range("`obs`", true, size, "classes")
    check_ids_or_none("`predicted`", guessed, size, "classes")
    classes, places = np.unique(np.append(true, guessed), return_inverse=True)
    errors = np.bincount(places, np.tile(guessed != true, 2))
    shown = np.sort(classes[np.argsort(-errors, kind="stable")[:num_classes]])
    table = np.array([[np.sum((true == i) & (guessed == j)) for j in shown] for i in shown])
    totals = np.array([max(np.sum(true == i), 1) for i in shown])
    percent = 100 * table / totals[:, None]
    ax = new_axes(ax, height=0.4 * shown.size + 2.0)
    ax.imshow(percent, cmap="Blues", vmin=0, vmax=max(percent.max(), 1))
    for (i, j), value in np.ndenumerate(percent):
        if table[i, j]:
            color = "white" if value > 0.6 * percent.max() else "black"
            ax.text(j, i, f"{value:.0f}", ha="center", va="center", color=color, fontsize=8)
    names = ["none" if k < 0 else str(k) if labels is None else labels[k] for k in shown]
    ax.set_xticks(np.arange(shown.size), names, rotation=45, ha="right", rotation_mode="anchor")
    ax.set_yticks(np.arange(shown.size), names)
    ax.set(xlabel="predicted (percent of the row)", ylabel="observed")
    return ax


def _error_bars(shares: Any, counts: Any) -> Any:
    """Lengths of the bars below and above each share: Wilson's interval, also at 0 and 1."""
    z = 2.0
    half = z * np.sqrt(shares * (1 - shares) / counts + (z / (2 * counts)) ** 2)
    centre, scale = shares + z**2 / (2 * counts), 1 + z**2 / counts
    ends = np.stack([shares - (centre - half) / scale, (centre + half) / scale - shares])
    return np.maximum(ends, 0)  # rounding


def _check_same_shape(predicted: ArrayLike, obs: ArrayLike) -> tuple[Any, Any]:
    check_shape("`predicted`", predicted, np.shape(obs), "as `obs`")
    check_integers("predicted", predicted)
    check_integers("obs", obs)
    return np.ravel(predicted), np.ravel(obs)
