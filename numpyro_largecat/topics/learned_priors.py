# SPDX-License-Identifier: Apache-2.0
"""Dirichlet concentrations that are learned between passes, and when."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.ops.topics.learned_concentrations import (
    next_concentration,
    next_word_concentration,
)
from numpyro_largecat.topics.document_chunks import tokens_of_documents
from numpyro_largecat.topics.memory import Memory
from numpyro_largecat.topics.problem import Learns, Priors, Problem
from numpyro_largecat.topics.word_prior import WordPrior

SETTLED = 5  # passes, or half of them, after which the concentrations of words are learned


def next_priors(
    problem: Problem,
    memory: Memory,
    learns: Learns,
    counts: NDArray[np.float64],
    log_absence: NDArray[np.float64],
) -> Priors:
    """The next priors, of those that learn, after a pass that left these of words (V, K)."""
    topics, words = memory.priors
    if learns.topics:
        lengths = tokens_of_documents(problem.corpus)
        found = next_concentration(topics, memory.rises.sum(axis=0), lengths)
        topics = found.astype(topics.dtype)
    if learns.words:
        learned = next_word_concentration(words.as_given, counts, log_absence)
        words = WordPrior.of(learned, *counts.shape)
    return Priors(topics, words)


def learns_after(number: int, num_passes: int, problem: Problem) -> Learns:
    """What is learned after a pass, by its number from 0: nothing after 0, unless a fit goes on.

    Topics that are still alike share words, for which the best concentration of these is high; it
    would keep them alike. So that of words waits until topics are settled.
    """
    topics, words = problem.learns
    are_settled = problem.goes_on or number >= min(SETTLED, num_passes / 2)
    return Learns(topics and (number > 0 or problem.goes_on), words and are_settled)
