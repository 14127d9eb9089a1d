# SPDX-License-Identifier: Apache-2.0
"""A map of classes, from their rows of features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_largecat._checks import check_finite, check_in_range, check_shape
from numpyro_largecat.reading.plots.axes import new_axes


def class_map(
    weights: ArrayLike,
    labels: Mapping[int, str] | None = None,
    color: ArrayLike | None = None,
    ax: Any = None,
) -> Any:
    """Plot classes as points, similar ones near each other: their two principal components.

    The rows are centred and turned, not stretched, so distances are those of the rows as far as a
    plane can show them; the axes say how much of the variance they hold. Costs O(K D^2). Of a
    table of millions, give the rows that are to be seen.

    Args:
        weights: Rows of the classes, shape (K, D), such as the posterior means of their weights.
        labels: Names to write beside points, by the number of the row.
        color: A value of each class, such as the logarithm of its count, shape (K,); all alike by
            default.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes.

    Raises:
        ValueError: If ``weights`` are no table of two rows and columns at least, or not finite, if
            a label is of no row, or ``color`` has not one value for each.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> w = np.random.default_rng(0).normal(size=(100, 8))
        >>> ax = lc.plots.class_map(w, {3: "cat", 4: "dog"}, np.arange(100))
        >>> [text.get_text() for text in ax.texts]
        ['cat', 'dog']
    """
    w = np.asarray(weights, float)
    check_shape("`weights`", w, ("K", "D"), "the features of each class", least=2)
    check_finite([("`weights`", w)])
    labels = dict(labels or {})
    check_in_range("the keys of `labels`", np.array(list(labels), int), len(w), "rows")
    if color is not None:
        check_shape("`color`", color, (len(w),), "one for each row of `weights`")
    places, shares = _principal_components(w)
    ax = new_axes(ax)
    ax.scatter(*places.T, c=color, s=8, alpha=0.6, linewidths=0)
    for k, label in labels.items():
        ax.annotate(label, places[k], xytext=(3, 3), textcoords="offset points", fontsize=8)
    ax.set_xlabel(f"first component ({shares[0]:.0%} of the variance)")
    ax.set_ylabel(f"second component ({shares[1]:.0%})")
    ax.set_aspect("equal", adjustable="datalim")
    return ax


def _principal_components(w: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Places of the rows on the two components, and the share of the variance of each.

    The sign of a component, which is arbitrary, makes its largest coefficient positive.
    """
    w = w - w.mean(axis=0)
    variances, vectors = np.linalg.eigh(w.T @ w)
    vectors = vectors[:, [-1, -2]]
    vectors *= np.sign(vectors[np.abs(vectors).argmax(axis=0), [0, 1]])
    return w @ vectors, variances[[-1, -2]] / max(variances.sum(), np.finfo(float).tiny)
