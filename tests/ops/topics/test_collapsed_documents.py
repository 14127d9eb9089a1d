# SPDX-License-Identifier: Apache-2.0
"""Collapsed documents against the slow algorithm, and what must never happen in them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_largecat.ops.topics import collapsed_documents
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.collapsed_documents import (
    CollapsedFit,
    TopicProbs,
    collapsed_fit,
    no_assignments,
    through_largest,
)
from tests import reference_topics as reference
from tests.memory import temp_bytes

V, K, U, N = 40, 6, 9, 5
EXACT = Effort(500, 1e-10, 0)


def draw(num_topics: int = K, seed: int = 0):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(V, 0.3), num_topics).T + 1e-6
    words = np.stack([rng.choice(V, U, replace=False) for _ in range(N)])
    counts = rng.integers(0, 4, (N, U))  # some slots are empty
    counts[:, 0] += 1
    return probs, rng.gamma(1.0, size=num_topics) * 0.2, words, counts


def topics_of(probs, of_token: float = 0.0, least: float = 0.0) -> TopicProbs:
    each = jnp.ones(probs.shape[1])
    return TopicProbs(jnp.asarray(probs), of_token * each, least * of_token * each)


@partial(jax.jit, static_argnames="num_active")
def fit_of(topics, a, words, counts, num_active, effort, last=None, is_warm=False) -> CollapsedFit:
    if last is None:
        last = no_assignments(words.shape, num_active, topics.probs.dtype)
    documents = through_largest(topics, a, words, counts, last, is_warm)
    return collapsed_fit(documents, counts, num_active, effort)


def counts_of(found: CollapsedFit, num_topics: int):
    """Of all topics, (N, K)."""
    counts = np.zeros((len(found.counts), num_topics))
    np.put_along_axis(counts, np.asarray(found.topics), np.asarray(found.counts), axis=1)
    return counts


@pytest.mark.parametrize("has_last", [False, True])
@pytest.mark.usefixtures("x64")
def test_all_topics_give_what_the_slow_algorithm_does(has_last: bool) -> None:
    """And with what the last visit left, what it does without a token of each word."""
    probs, a, words, counts = draw()
    topics, of_token, shares = topics_of(probs, 0.02, 0.1), 0.02, np.zeros((N, U, K))
    last = None
    if has_last:
        last = fit_of(topics, a, words, counts, 2, EXACT).assignments
        places = np.arange(N)[:, None, None], np.arange(U)[:, None], np.asarray(last.topics)
        np.add.at(shares, places, last.shares)
    found = fit_of(topics, a, words, counts, K, EXACT, last)
    for d in range(N):
        used = counts[d] > 0
        tokens, own = counts[d][used], probs[words[d][used]]
        own = np.maximum(own - of_token * shares[d][used], 0.1 * of_token)
        r = reference.collapsed_document(own, tokens, a, 500)
        np.testing.assert_allclose(counts_of(found, K)[d], tokens @ r, atol=1e-7)


@pytest.mark.usefixtures("x64")
def test_a_warm_start_stays_where_it_is() -> None:
    probs, a, words, counts = draw()
    first = fit_of(topics_of(probs), a, words, counts, K, EXACT)
    few = Effort(3, 1e-10, 0)
    again = fit_of(topics_of(probs), a, words, counts, K, few, first.assignments, is_warm=True)
    np.testing.assert_allclose(counts_of(again, K), counts_of(first, K), atol=0.1)


@pytest.mark.parametrize("num_active", [1, 3])
@pytest.mark.usefixtures("x64")
def test_a_word_has_few_topics_and_all_its_tokens(num_active: int) -> None:
    probs, a, words, counts = draw()
    found = fit_of(topics_of(probs), a, words, counts, num_active, EXACT)
    shares, topics = found.assignments
    assert shares.shape == topics.shape == (N, U, num_active)
    np.testing.assert_allclose(shares.sum(axis=2), counts > 0, atol=1e-12)
    table = np.zeros((N, K))
    np.add.at(table, (np.arange(N)[:, None, None], topics), counts[..., None] * shares)
    np.testing.assert_allclose(counts_of(found, K), table, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_a_document_does_not_depend_on_those_beside_it() -> None:
    probs, a, words, counts = draw()
    together = fit_of(topics_of(probs), a, words, counts, 2, Effort())
    alone = fit_of(topics_of(probs), a, words[2:3], counts[2:3], 2, Effort())
    np.testing.assert_allclose(counts_of(together, K)[2:3], counts_of(alone, K), rtol=1e-12)


def test_few_of_many_topics_go_on(monkeypatch) -> None:
    """A document of three topics is the same if but 16 of 200 go on as if all do."""
    probs, a, words, counts = draw(200)
    a = np.full(200, 0.0025)
    fits = []
    for most in (16, 200):
        monkeypatch.setattr(collapsed_documents, "MOST_TOPICS", most)
        fit_of.clear_cache()
        fits.append(fit_of(topics_of(probs), a, words, counts, 8, Effort(100, 1e-4, 0)))
    fit_of.clear_cache()
    np.testing.assert_allclose(fits[0].counts.sum(axis=1), counts.sum(axis=1), rtol=1e-5)
    few, all_of_them = (counts_of(fit, 200) for fit in fits)
    distance = np.abs(few - all_of_them).sum(axis=1) / counts.sum(axis=1)
    assert np.median(distance) < 0.1


def test_extreme_probabilities_stay_finite() -> None:
    """A word of which the topics have next to nothing, and a document without words."""
    probs = np.full((3, 2), 1e-12, np.float32)
    probs[0] = [1, 1e-12]
    words, counts = np.array([[0, 1], [0, 0]]), np.array([[1, 5], [0, 0]])
    found = fit_of(topics_of(probs, 1e-3, 1e-4), np.full(2, 1e-6), words, counts, 2, Effort())
    np.testing.assert_allclose(found.counts.sum(axis=1), [6, 0], rtol=1e-5)
    assert np.isfinite(found.assignments.shares).all()


def test_memory_does_not_grow_with_documents() -> None:
    """But for what is returned: blocks of documents are solved one after the other."""

    def scratch(num_documents: int) -> int:
        words = jnp.zeros((num_documents, U), int)
        arguments = topics_of(np.full((V, 500), 0.1)), jnp.ones(500), words, words
        return temp_bytes(lambda *x: fit_of(*x, 2, Effort()).counts.sum(), *arguments)

    grows = scratch(640) - scratch(64)
    assert grows < 2 * 4 * (640 - 64) * (500 + 4 * U * 2)


def test_memory_is_that_of_one_document_where_there_are_many_topics() -> None:
    """With 20,000 topics a block of 16 would take 16 times as much."""
    num_topics, words = 20_000, jnp.zeros((32, 128), int)
    arguments = topics_of(np.full((3, num_topics), 0.3)), jnp.ones(num_topics), words, words
    scratch = temp_bytes(lambda *x: fit_of(*x, 2, Effort()).assignments, *arguments)
    whole_counts = 4 * 32 * num_topics
    assert scratch < 2 * whole_counts + 6 * 4 * 128 * num_topics


def test_longer_documents_may_have_more_topics() -> None:
    most = [collapsed_documents.most_topics(slots) for slots in (16, 256, 416, 3072)]
    assert most == [32, 32, 52, 384]
