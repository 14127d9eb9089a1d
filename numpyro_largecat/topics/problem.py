# SPDX-License-Identifier: Apache-2.0
"""What a fit of topics is about: priors, what is learned of them, and candidates for topics."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.topics.document_layout import Layout
from numpyro_largecat.topics.local_step import LocalStep
from numpyro_largecat.topics.word_prior import WordPrior


class Priors(NamedTuple):
    """Dirichlet concentrations."""

    topics: NDArray[np.floating]  # (K,), of the topic frequencies of a document
    words: WordPrior


class Learns(NamedTuple):
    """Which of them are learned: topics' after each pass but the first, words' later."""

    topics: bool
    words: bool


class Candidates(NamedTuple):
    """More topics at first, of which those remain that the others are mixtures of."""

    num_passes: int  # that they have; 0 for none
    num_first: int
    num_topics: int | None  # that remain; None for as many as have the largest bound

    def first_priors(self, priors: Priors) -> Priors:
        """With the same concentration over all topics of a document."""
        if self.num_passes == 0:
            return priors
        each = priors.topics.sum() / self.num_first
        topics = np.full(self.num_first, each, priors.topics.dtype)
        return Priors(topics, priors.words.with_topics(self.num_first))


class Problem(NamedTuple):
    """What does not change while topics are learned."""

    corpus: Corpus
    local_step: LocalStep
    layout: Layout
    learns: Learns = Learns(False, False)
    goes_on: bool = False  # from an earlier fit, so that topics differ before the first visit
    candidates: Candidates = Candidates(0, 0, 0)
    concentration: NDArray[np.floating] | None = None  # (K,) as given, if topics' differ
