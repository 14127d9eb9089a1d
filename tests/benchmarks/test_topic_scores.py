# SPDX-License-Identifier: Apache-2.0
"""Scores of topics against slow ones, and what they must not depend on."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import topic_scores
from benchmarks.topic_scores import coherence, diversity, held_out_score, split_corpus
from numpyro_largecat.data import Corpus
from tests import reference_topics as reference

RNG = np.random.default_rng(0)
TOPICS = RNG.dirichlet(np.full(30, 0.2), 3)
CORPUS = Corpus.from_documents(
    [[str(w) for w in RNG.choice(30, 20, p=TOPICS[d % 3])] for d in range(40)],
    [str(w) for w in range(30)],
)


def test_a_split_divides_the_documents_and_their_tokens() -> None:
    split = split_corpus(CORPUS)
    assert (split.train.num_documents, split.tokens[0].num_documents) == (36, 4)
    for seen, unseen in (split.tokens, split.words):
        assert split.train.num_tokens + seen.num_tokens + unseen.num_tokens == CORPUS.num_tokens
    assert split.tokens[0].num_tokens == split.tokens[1].num_tokens == 40
    both = [set(split.words[0][d][0]) & set(split.words[1][d][0]) for d in range(4)]
    assert not any(both)


def test_a_score_is_that_of_the_best_of_four_concentrations() -> None:
    seen, unseen = split_corpus(CORPUS).tokens
    totals = []
    for total in topic_scores.TOTALS:
        found = 0.0
        for d in range(seen.num_documents):
            (words, counts), p = seen[d], np.full(3, 1 / 3)
            for _ in range(topic_scores.NUM_STEPS):
                r = TOPICS[:, words].T * p
                r /= r.sum(axis=1, keepdims=True)
                p = (counts @ r + total / 3) / (counts.sum() + total)
            words, counts = unseen[d]
            found += counts @ np.log(np.maximum(p @ TOPICS[:, words], 1e-12))
        totals.append(found / unseen.num_tokens)
    assert held_out_score(TOPICS, seen, unseen) == pytest.approx(max(totals), abs=1e-4)


def test_the_order_of_topics_changes_no_score() -> None:
    seen, unseen = split_corpus(CORPUS).words
    scores = [
        (held_out_score(t, seen, unseen), coherence(t, CORPUS), diversity(t))
        for t in (TOPICS, TOPICS[[2, 0, 1]])
    ]
    np.testing.assert_allclose(*scores, rtol=1e-5)


def test_coherence_is_the_mean_of_all_topics() -> None:
    documents = [set(CORPUS[d][0].tolist()) for d in range(CORPUS.num_documents)]
    tops = np.argsort(-TOPICS, axis=1, kind="stable")[:, :10]
    expected = np.mean([reference.npmi(documents, top, len(documents)) for top in tops])
    assert coherence(TOPICS, CORPUS) == pytest.approx(expected)


def test_topics_with_one_top_have_little_diversity() -> None:
    assert diversity(np.tile(TOPICS[:1], (4, 1))) == pytest.approx(1 / 4)
