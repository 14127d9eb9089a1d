# SPDX-License-Identifier: Apache-2.0
"""Pictures of a fit; each function draws on matplotlib axes and returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from numpyro_largecat._checks import check_shape
from numpyro_largecat.reading.calibration import Calibration
from numpyro_largecat.reading.metrics import calibration_bins

__all__ = [
    "accuracy_by_frequency",
    "confusion",
    "coverage",
    "elbo",
    "intervals",
    "reliability",
    "topics",
]


def elbo(
    losses: ArrayLike,
    window: int = 100,
    exact: Mapping[int, float] | None = None,
    ax: Any = None,
) -> Any:
    """Plot the ELBO of each step and its moving average.

    The vertical range is that of the moving average, so that the first steps of a fit do not
    flatten the rest.

    Args:
        losses: Losses of the fit, the negative ELBO in nats, shape (steps,).
        window: Steps that the moving average spans, at least 1.
        exact: ELBOs with all classes at some steps, which the subsampled ones estimate.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes.

    Raises:
        ValueError: If there are no losses.

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
    window = min(window, elbos.size)
    is_known = np.isfinite(elbos)  # a step that was skipped has none
    if not is_known.any():
        raise ValueError("`losses` must hold at least one finite loss; all are NaN or infinite.")
    total, number = (
        np.cumsum(np.concatenate([[0.0], values]))
        for values in (np.where(is_known, elbos, 0), is_known)
    )
    with np.errstate(invalid="ignore"):  # a window of skipped steps is a gap
        average = (total[window:] - total[:-window]) / (number[window:] - number[:-window])
    ax = _new_axes(ax)
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
    ax = _new_axes(ax)
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
        ValueError: If there is not one label for each row of ``draws``.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> ax = lc.plots.intervals(np.random.default_rng(0).normal(size=(100, 2)), ["a", "b"])
        >>> [text.get_text() for text in ax.get_yticklabels()]
        ['a', 'b']
    """
    draws = np.asarray(draws)
    check_shape("`draws`", draws, ("num_draws", len(labels)), "a column for each of `labels`")
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
        ValueError: If the shapes differ.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> p = np.random.default_rng(0).uniform(size=1000)
        >>> ax = lc.plots.reliability(p, p > 0.5)
        >>> ax.get_ylabel()
        'fraction that came true'
    """
    check_shape("`correct`", correct, np.shape(probabilities), "as `probabilities`")
    predicted, observed, counts = calibration_bins(probabilities, correct, num_bins)
    error = _error_bars(observed, counts)
    ax = _new_axes(ax)
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
        ValueError: If the shapes differ.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> obs = np.arange(100) % 7
        >>> ax = lc.plots.accuracy_by_frequency(np.minimum(obs, 4), obs, 2 ** np.arange(7))
        >>> ax.get_xscale()
        'log'
    """
    guessed, true = _check_same_shape(predicted, obs)
    is_right = guessed == true
    frequency = np.asarray(counts)[true]
    edges = np.unique(np.quantile(frequency, np.linspace(0, 1, num_bins + 1)[1:-1]))
    bins = np.searchsorted(edges, frequency, side="right")
    groups = [np.flatnonzero(bins == b) for b in np.unique(bins)]
    places = np.array([np.exp(np.log(frequency[g] + 0.5).mean()) for g in groups])
    share = np.array([is_right[g].mean() for g in groups])
    error = _error_bars(share, np.array([g.size for g in groups]))
    ax = _new_axes(ax)
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
        predicted: Predicted classes, integers in [0, K), any shape.
        obs: Observed classes, the same shape.
        labels: Names of all K classes; their ids by default.
        num_classes: Number of classes to show, at least 2.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes.

    Raises:
        ValueError: If the shapes differ.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> obs = np.repeat(np.arange(4), 25)
        >>> ax = lc.plots.confusion(np.where(np.arange(100) % 5, obs, 1), obs, ["a", "b", "c", "d"])
        >>> [text.get_text() for text in ax.get_yticklabels()]
        ['a', 'b', 'c', 'd']
    """
    guessed, true = _check_same_shape(predicted, obs)
    classes, places = np.unique(np.append(true, guessed), return_inverse=True)
    errors = np.bincount(places, np.tile(guessed != true, 2))
    shown = np.sort(classes[np.argsort(-errors, kind="stable")[:num_classes]])
    table = np.array([[np.sum((true == i) & (guessed == j)) for j in shown] for i in shown])
    totals = np.array([max(np.sum(true == i), 1) for i in shown])
    percent = 100 * table / totals[:, None]
    ax = _new_axes(ax, height=0.4 * shown.size + 2.0)
    ax.imshow(percent, cmap="Blues", vmin=0, vmax=max(percent.max(), 1))
    for (i, j), value in np.ndenumerate(percent):
        if table[i, j]:
            color = "white" if value > 0.6 * percent.max() else "black"
            ax.text(j, i, f"{value:.0f}", ha="center", va="center", color=color, fontsize=8)
    names = [str(k) if labels is None else labels[k] for k in shown]
    ax.set_xticks(np.arange(shown.size), names, rotation=45, ha="right", rotation_mode="anchor")
    ax.set_yticks(np.arange(shown.size), names)
    ax.set(xlabel="predicted (percent of the row)", ylabel="observed")
    return ax


def topics(
    top_words: Sequence[Sequence[tuple[str, float]]],
    titles: Sequence[str] | None = None,
    axes: Any = None,
) -> Any:
    """Plot the first words of some topics as bars, one panel for each topic.

    All panels have one scale, so that topics of a few words stand out.

    Args:
        top_words: Words and probabilities of each topic, best first: those of ``fit.top_words(8)``
            that are to be seen, a dozen at most.
        titles: A title for each; "topic 0", "topic 1" and so on by default.
        axes: Axes to draw on, one for each topic; new ones by default, four in a row.

    Returns:
        The axes of the topics, an array of shape (topics,).

    Raises:
        ValueError: If there are no topics, or not as many titles or axes.

    Example:
        >>> import numpyro_largecat as lc
        >>> axes = lc.plots.topics([[("sea", 0.3), ("ship", 0.1)], [("moon", 0.2), ("star", 0.2)]])
        >>> axes[1].get_title()
        'topic 1'
    """
    if not len(top_words):
        raise ValueError("`top_words` must hold at least one topic; got none.")
    if titles is None:
        titles = [f"topic {k}" for k in range(len(top_words))]
    if axes is None:
        axes = _new_grid(len(top_words), height=0.25 * max(map(len, top_words)) + 0.7)
    axes = np.ravel(axes)
    for name, given in (("titles", titles), ("axes", axes)):
        if len(given) != len(top_words):
            raise ValueError(
                f"`{name}` must have one for each of the {len(top_words)} topics; got {len(given)}."
            )
    highest = max(probability for words in top_words for _, probability in words)
    for ax, words, title in zip(axes, top_words, titles, strict=True):
        places = range(len(words))
        ax.barh(places, [probability for _, probability in words])
        ax.set_yticks(places, [str(word) for word, _ in words])
        ax.invert_yaxis()
        ax.set_title(title, fontsize=10)
        ax.set_xlim(0, 1.05 * highest)
        ax.locator_params(axis="x", nbins=4)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].figure.supxlabel("probability of the word in the topic")
    return axes


def _error_bars(shares: Any, counts: Any) -> Any:
    """Lengths of the bars below and above each share: Wilson's interval, also at 0 and 1."""
    z = 2.0
    half = z * np.sqrt(shares * (1 - shares) / counts + (z / (2 * counts)) ** 2)
    centre, scale = shares + z**2 / (2 * counts), 1 + z**2 / counts
    ends = np.stack([shares - (centre - half) / scale, (centre + half) / scale - shares])
    return np.maximum(ends, 0)  # rounding


def _check_same_shape(predicted: ArrayLike, obs: ArrayLike) -> tuple[Any, Any]:
    check_shape("`predicted`", predicted, np.shape(obs), "as `obs`")
    return np.ravel(predicted), np.ravel(obs)


def _new_axes(ax: Any, height: float = 4.0) -> Any:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt  # slow to import, so only where it is used

    return plt.subplots(figsize=(6.4, height), layout="constrained")[1]


def _new_grid(number: int, height: float) -> Any:
    """Axes of so many panels, at most four in a row, each of this height."""
    import matplotlib.pyplot as plt

    columns = min(number, 4)
    rows = -(-number // columns)
    size = 3.2 * columns, height * rows + 0.4
    grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)[1]
    for ax in grid.flat[number:]:
        ax.set_visible(False)
    return grid.flat[:number]
