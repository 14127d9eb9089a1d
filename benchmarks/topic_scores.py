# SPDX-License-Identifier: Apache-2.0
"""Scores of point estimates of topics (K, V), by a procedure that favours no way of fitting."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from numpyro_largecat.data import Corpus

TOTALS = 0.5, 2.0, 5.0, 20.0  # concentrations over all topics, of which each method has its best
NUM_STEPS = 100  # of EM
LEAST_PROBABILITY = 1e-12
TOP = 10  # words


class Split(NamedTuple):
    """Documents to fit, and others of which a half is held out: of the tokens, and of the words."""

    train: Corpus
    tokens: tuple[Corpus, Corpus]  # what is seen, and what is held out
    words: tuple[Corpus, Corpus]


def split_corpus(corpus: Corpus, seed: int = 0) -> Split:
    """Hold out a tenth of the documents."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(corpus.num_documents)
    cut = corpus.num_documents // 10
    held = corpus[order[:cut]]
    halves: tuple[list, list] = ([], [])
    for d in range(held.num_documents):
        tokens = rng.permutation(np.repeat(*held[d]))
        for half, own in zip(halves, np.array_split(tokens, 2), strict=True):
            half.append(np.unique(own, return_counts=True))
    seen, unseen = (Corpus.from_rows(half, corpus.num_words) for half in halves)
    train = corpus[np.sort(order[cut:])]
    return Split(train, (seen, unseen), held.split_words(seed, 0.5))


def held_out_score(topics: NDArray[np.floating], seen: Corpus, unseen: Corpus) -> float:
    """Mean log probability of what is held out, in nats per token.

    Topic frequencies come from EM on what is seen, with a concentration added to the counts: the
    best of four for each method, so that none is tied to the one that it was fitted with.
    """
    num_topics = len(topics)
    topics = np.maximum(topics, LEAST_PROBABILITY).astype(np.float32)

    def rows(corpus: Corpus) -> tuple[NDArray[np.intp], NDArray[np.floating]]:
        owner = np.repeat(np.arange(corpus.num_documents), np.diff(corpus.offsets))
        return owner, topics[:, corpus.words].T

    owner, probs = rows(seen)
    shape = seen.num_documents, len(owner)
    tokens = csr_array((seen.counts.astype(np.float32), (owner, np.arange(len(owner)))), shape)
    unseen_owner, unseen_probs = rows(unseen)
    scores = []
    for total in TOTALS:
        frequencies = np.full((shape[0], num_topics), 1 / num_topics, np.float32)
        for _ in range(NUM_STEPS):
            shares = probs * frequencies[owner]
            shares /= shares.sum(axis=1, keepdims=True)
            frequencies = tokens @ shares + np.float32(total / num_topics)
            frequencies /= frequencies.sum(axis=1, keepdims=True)
        found = np.log((unseen_probs * frequencies[unseen_owner]).sum(axis=1))
        scores.append(float(unseen.counts @ found) / unseen.num_tokens)
    return max(scores)


def coherence(topics: NDArray[np.floating], corpus: Corpus) -> float:
    """Mean normalised pointwise mutual information of pairs of top words, over documents."""
    tops = _tops(topics)
    owner = np.repeat(np.arange(corpus.num_documents), np.diff(corpus.offsets))
    shape = corpus.num_documents, corpus.num_words
    has = csr_array((np.ones(len(owner)), (owner, corpus.words)), shape)
    scores = []
    for own in tops:
        columns = has[:, own].toarray()
        share = columns.T @ columns / corpus.num_documents
        for i, j in itertools.combinations(range(TOP), 2):
            scores.append(_npmi(share[i, j], share[i, i] * share[j, j]))
    return float(np.mean(scores))


def _npmi(both: float, by_chance: float) -> float:
    if both == 0:
        return -1.0
    return float(np.log(both / by_chance) / -np.log(both)) if both < 1 else 1.0


def diversity(topics: NDArray[np.floating]) -> float:
    """Share of different words among the top words of all topics."""
    tops = _tops(topics)
    return len(np.unique(tops)) / tops.size


def _tops(topics: NDArray[np.floating]) -> NDArray[np.intp]:
    return np.argsort(-topics, axis=1, kind="stable")[:, :TOP]
