# SPDX-License-Identifier: Apache-2.0
r"""Dirichlet concentrations that fit expected counts best, by Minka's fixed point.

With ``rises`` of ``presence`` in place of those of known counts,

    a[k] <- a[k] sum_d rises[d, k] / sum_d (digamma(sum a + n[d]) - digamma(sum a)).

Minka, Estimating a Dirichlet distribution, 2000.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma

from numpyro_largecat.ops.topics.presence import rises

LEAST = 1e-5  # concentration of a topic that is nowhere


def next_concentration(
    concentration: NDArray[np.floating],
    rises: NDArray[np.floating],
    num_tokens: NDArray[np.integer],
) -> NDArray[np.float64]:
    """One step for the topics of documents, (K,).

    Args:
        concentration: a, (K,).
        rises: Their sum over documents, (K,).
        num_tokens: Of each document, (N,).
    """
    total = concentration.sum()
    falls = (digamma(total + num_tokens) - digamma(total)).sum()
    return np.maximum(concentration * rises / falls, LEAST)


def next_word_concentration(
    concentration: NDArray[np.floating] | float,
    counts: NDArray[np.floating],
    log_absence: NDArray[np.floating],
) -> NDArray[np.float64]:
    """One step for the level of the concentrations b of words, whose proportions stay.

    For b = c m with c the sum over words, c <- c sum_kv m[v] rises[k, v] / sum_k (digamma(c + S[k])
    - digamma(c)), with S[k] the tokens of a topic.

    Args:
        concentration: Of each word, (V,), or of all.
        counts: Expected tokens of words in topics, (V, K).
        log_absence: Log probability that no token of a word is of a topic, (V, K).
    """
    used = np.flatnonzero(log_absence)
    of_words = np.broadcast_to(np.asarray(concentration, np.float64), len(counts))
    words, whole = used // counts.shape[1], of_words.sum()
    entries = counts.ravel()[used], log_absence.ravel()[used]
    rise = (of_words[words] * rises(*entries, of_words, words)).sum()
    falls = (digamma(whole + counts.sum(axis=0)) - digamma(whole)).sum()
    least = LEAST / of_words.min()  # all by one factor, so that proportions stay
    return concentration * np.maximum(rise / (whole * falls), least)
