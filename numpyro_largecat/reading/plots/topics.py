# SPDX-License-Identifier: Apache-2.0
"""The first words of topics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from numpyro_largecat.reading.plots.axes import new_grid


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
        TypeError: If a fit is given for its words.

    Example:
        >>> import numpyro_largecat as lc
        >>> axes = lc.plots.topics([[("sea", 0.3), ("ship", 0.1)], [("moon", 0.2), ("star", 0.2)]])
        >>> axes[1].get_title()
        'topic 1'
    """
    if hasattr(top_words, "top_words"):
        raise TypeError("`top_words` must be lists of words, `fit.top_words(8)[:12]`; got the fit.")
    if not len(top_words):
        raise ValueError("`top_words` must hold at least one topic; got none.")
    if titles is None:
        titles = [f"topic {k}" for k in range(len(top_words))]
    if axes is None:
        axes = new_grid(len(top_words), height=0.25 * max(map(len, top_words)) + 0.7)
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
