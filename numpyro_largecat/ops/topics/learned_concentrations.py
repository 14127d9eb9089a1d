# SPDX-License-Identifier: Apache-2.0
r"""Dirichlet concentrations that fit expected counts best, by Minka's fixed point.

Counts n of draws from a Dirichlet of concentrations a have a log probability with the sum of
log(Gamma(a[k] + n[k]) / Gamma(a[k])), which is 0 for n = 0 and steep up to 1: expected counts well
below 1 say how likely one token is, not that there is a little of one. With P the probability that
there is any, and the expected counts in that case, n / P, in place of the counts in it,

    rises[k] = sum_d P[d, k] (digamma(a[k] + n[d, k] / P[d, k]) - digamma(a[k]))
    a[k] <- a[k] rises[k] / sum_d (digamma(sum a + n[d]) - digamma(sum a)).

Minka, Estimating a Dirichlet distribution, 2000. For counts above 0 and their probability: Teh,
Newman and Welling, A Collapsed Variational Bayesian Inference Algorithm for LDA, 2007.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma

MOST_SHARE = 1 - 1e-6  # of a token, whose complement has a logarithm in float32
LEAST = 1e-5  # concentration of a topic that is nowhere


def log_absence(shares: NDArray[np.floating]) -> NDArray[np.floating]:
    """Log probability that a token is not of a topic."""
    return np.log1p(-np.minimum(shares, MOST_SHARE))


def rises(
    counts: NDArray[np.floating],
    log_absence: NDArray[np.floating],
    concentration: NDArray[np.floating] | float,
) -> NDArray[np.floating]:
    """P (digamma(a + n / P) - digamma(a)), for each count above 0."""
    presence = -np.expm1(log_absence)
    if_any = np.maximum(counts / presence, 1)
    return presence * (digamma(concentration + if_any) - digamma(concentration))


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
    concentration: float, counts: NDArray[np.floating], log_absence: NDArray[np.floating]
) -> float:
    """One step for the words of all topics, which have one concentration.

    Args:
        concentration: Of each word.
        counts: Expected tokens of words in topics, (V, K).
        log_absence: Log probability that no token of a word is of a topic, (V, K).
    """
    used = log_absence < 0
    rise = rises(counts[used], log_absence[used], concentration).sum()
    whole = len(counts) * concentration
    falls = (digamma(whole + counts.sum(axis=0)) - digamma(whole)).sum()
    return max(float(concentration * rise / (len(counts) * falls)), LEAST)
