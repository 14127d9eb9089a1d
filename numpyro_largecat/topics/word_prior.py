# SPDX-License-Identifier: Apache-2.0
"""Dirichlet concentrations of the words in topics: one for all, of each word, or of each topic."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_largecat._checks import as_positive
from numpyro_largecat.data.corpus import Corpus


class WordPrior(NamedTuple):
    """Concentrations of words in topics, with one row where all words have the same."""

    each: NDArray[np.float64]  # (V, K) or (V, 1) or (1, 1)
    totals: NDArray[np.float64]  # (K,) or (1,), sums over words

    @classmethod
    def of(cls, given: ArrayLike, num_words: int, num_topics: int) -> WordPrior:
        """From one number, or arrays of shape (V,) or (K, V); ValueError if it is none."""
        array = np.asarray(given)
        if array.ndim >= 2:
            array = as_positive(NAME, given, "for each topic and word", (num_topics, num_words))
            return cls.of_each(array.T)
        array = as_positive(NAME, given, "for each word", (num_words,))
        if array.ndim == 1:
            return cls.of_each(array[:, None])
        return cls(np.full((1, 1), array), np.full(1, num_words * array))

    @classmethod
    def of_each(cls, each: NDArray[np.float64]) -> WordPrior:
        """From (V, K) or (V, 1), with sums that are the same wherever these come from."""
        each = np.ascontiguousarray(each)
        return cls(each, each.sum(axis=0))

    @property
    def as_given(self) -> Any:
        """What ``of`` takes."""
        if self.each.size == 1:
            return float(self.each[0, 0])
        return self.each.T if self.differs_by_topic else self.each[:, 0]

    @property
    def differs_by_topic(self) -> bool:
        """Whether topics have concentrations of their own."""
        return len(self.totals) > 1

    @property
    def favouring_topics(self) -> NDArray[np.intp]:
        """Topics for which some word has more than the least that it has in any topic."""
        if not self.differs_by_topic:
            return np.zeros(0, np.intp)
        return np.flatnonzero((self.each > self.each.min(axis=1, keepdims=True)).any(axis=0))

    def with_topics(self, num_topics: int) -> WordPrior:
        """With so many, of which the further ones favour no word."""
        if not self.differs_by_topic:
            return self
        least = self.each.min(axis=1, keepdims=True)
        missing = num_topics - self.each.shape[1]
        return self.of_each(np.concatenate([self.each, np.repeat(least, missing, axis=1)], axis=1))

    def of_topics(self, topics: NDArray[np.intp]) -> WordPrior:
        """Those of some topics, in this order."""
        if not self.differs_by_topic:
            return self
        return self.of_each(self.each[:, topics])

    def rows(self, words: NDArray[np.intp] | slice) -> NDArray[np.float64]:
        """Those of some words, (R, K), or fewer where they are the same."""
        return self.each if len(self.each) == 1 else self.each[words]


def by_documents(corpus: Corpus) -> NDArray[np.float64]:
    """Relative concentrations of words, (V,), 1 on average.

    They are as the root of the number of documents that have a word, a half if none has it. A topic
    knows next to nothing of most words, and of these takes the common ones for likelier.
    """
    roots = np.sqrt(np.bincount(corpus.words, minlength=corpus.num_words) + 0.5)
    found: NDArray[np.float64] = roots / roots.mean()
    return found


NAME = "word_concentration"
