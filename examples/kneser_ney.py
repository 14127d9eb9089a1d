# SPDX-License-Identifier: Apache-2.0
"""Interpolated modified Kneser-Ney trigrams, the classic model of the next word, by sorting."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ORDER = 3


class _Level(NamedTuple):
    """What one order knows: counts of its n-grams, and for each context the weights to use them."""

    grams: np.ndarray  # codes of n-grams, sorted
    discounted: np.ndarray  # count less its discount, of each n-gram
    contexts: np.ndarray  # codes of contexts, sorted
    totals: np.ndarray  # sum of the counts that follow each context
    given_back: np.ndarray  # sum of the discounts of each context


class KneserNey:
    r"""The probability of a word w after u v, mixed with those of shorter contexts.

    .. math:: p(w | u v) = \frac{c(u v w) - D(c(u v w)) + g(u v) \, p(w | v)}{\sum_w c(u v w)}

    where g(u v) is the sum of the discounts after u v, and D takes three values of its order, for
    counts of 1, 2, and 3 or more. The counts of shorter n-grams are the numbers of different words
    that come before them, and p(w) is mixed with 1 / K.

    Args:
        tokens: Word ids in [0, K), shape (N,), in order.
        num_words: Number of words K; K**3 must be below 2**63.
        before: The word that comes before the first one.

    References:
        Chen and Goodman, An Empirical Study of Smoothing Techniques for Language Modeling, 1998,
        section 3 and equations (24) to (26).
    """

    def __init__(self, tokens: np.ndarray, num_words: int, before: int) -> None:
        if num_words**ORDER >= 2**63:
            raise ValueError(f"`num_words` must be below 2**21; got {num_words}.")
        self.num_words, self.before = num_words, before
        grams, counts = np.unique(self._codes(tokens), return_counts=True)
        self.levels = [_level(grams, counts, num_words)]
        for order in range(ORDER - 1, 0, -1):  # count the different words before each n-gram
            grams, counts = np.unique(grams % num_words**order, return_counts=True)
            self.levels.insert(0, _level(grams, counts, num_words))

    def log_prob(self, tokens: np.ndarray) -> np.ndarray:
        """Log probability of each token after those before it, shape (N,)."""
        return np.log(self.prob(self._codes(tokens)))

    def prob(self, codes: np.ndarray) -> np.ndarray:
        """Probability of the last word of trigrams, given as ``(u * K + v) * K + w``."""
        prob = np.full(codes.shape, 1 / self.num_words)
        for order, level in enumerate(self.levels, start=1):
            gram = codes % self.num_words**order
            total = _look_up(level.contexts, level.totals, gram // self.num_words)
            given_back = _look_up(level.contexts, level.given_back, gram // self.num_words)
            mixed = _look_up(level.grams, level.discounted, gram) + given_back * prob
            prob = np.where(total > 0, mixed / np.maximum(total, 1), prob)
        return prob

    def _codes(self, tokens: np.ndarray) -> np.ndarray:
        """Trigrams that end at each token, as integers."""
        words = np.concatenate([np.full(ORDER - 1, self.before), tokens]).astype(np.int64)
        first, second, third = (words[i : i + len(tokens)] for i in range(ORDER))
        return (first * self.num_words + second) * self.num_words + third


def _level(grams: np.ndarray, counts: np.ndarray, num_words: int) -> _Level:
    discounts = _discounts(counts)[np.minimum(counts, 3)]
    contexts, of_context = np.unique(grams // num_words, return_inverse=True)
    totals = np.bincount(of_context, counts)
    return _Level(grams, counts - discounts, contexts, totals, np.bincount(of_context, discounts))


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Discounts of counts of 0, 1, 2, and 3 or more, by how many n-grams have counts of 1 to 4."""
    number = np.bincount(np.minimum(counts, 5), minlength=6).astype(float)
    if not number[1:5].all():  # a text too small, or too even, to tell
        return np.array([0, 0.5, 0.5, 0.5])
    y = number[1] / (number[1] + 2 * number[2])
    found = [i - (i + 1) * y * number[i + 1] / number[i] for i in (1, 2, 3)]
    return np.clip([0, *found], 0, [0, 1, 2, 3])


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of the wanted keys, 0 where there is none."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0.0)
