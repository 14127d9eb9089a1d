# SPDX-License-Identifier: Apache-2.0
"""Collapsed documents against the slow algorithm, and what must never happen in them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.collapsed_documents import (
    FIRST_SWEEPS,
    CollapsedFit,
    Pieces,
    TopicProbs,
    collapsed_fit,
    most_topics,
    no_assignments,
    through_largest,
)
from tests import reference_topics as reference

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


def one_block(words, counts, num_slots: int = U) -> Pieces:
    """Documents (N, U) in pieces of so many slots, one after the other."""
    owners = np.repeat(np.arange(len(words)), words.shape[1] // num_slots)
    return Pieces(*(x.reshape(-1, num_slots) for x in (words, counts)), owners)


@partial(jax.jit, static_argnames=("num_active", "most"))
def fit_of(
    topics, a, pieces, num_active, effort, last=None, is_warm=False, most=None
) -> CollapsedFit:
    if last is None:
        last = no_assignments(pieces.words.shape, num_active, topics.probs.dtype)
    num_sweeps = 1 if most is None else FIRST_SWEEPS
    most = len(a) if most is None else most
    documents = through_largest(topics, a, pieces, last, is_warm, num_sweeps, most=most)
    return collapsed_fit(documents, pieces, num_active, effort)


def counts_of(found: CollapsedFit, num_topics: int):
    """Of all topics, (R, K)."""
    own, topics = np.asarray(found.counts), np.asarray(found.topics)
    counts = np.zeros((len(own), num_topics))
    np.put_along_axis(counts, topics, own, axis=1)
    return counts


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("num_slots", [U, 3])
@pytest.mark.parametrize("has_last", [False, True])
@pytest.mark.usefixtures("x64")
def test_all_topics_give_what_the_slow_algorithm_does(has_last: bool, num_slots: int) -> None:
    """And with what the last visit left, what it does without a token of each word."""
    probs, a, words, counts = draw()
    pieces = one_block(words, counts, num_slots)
    topics, of_token, shares = topics_of(probs, 0.02, 0.1), 0.02, np.zeros((N, U, K))
    last = None
    if has_last:
        last = fit_of(topics, a, pieces, 2, EXACT).assignments
        places = np.arange(N)[:, None, None], np.arange(U)[:, None], last.topics.reshape(N, U, 2)
        np.add.at(shares, places, last.shares.reshape(N, U, 2))
    found = fit_of(topics, a, pieces, K, EXACT, last)
    for d in range(N):
        used = counts[d] > 0
        tokens, own = counts[d][used], probs[words[d][used]]
        own = np.maximum(own - of_token * shares[d][used], 0.1 * of_token)
        r = reference.collapsed_document(own, tokens, a, 500)
        np.testing.assert_allclose(counts_of(found, K)[d], tokens @ r, atol=1e-7)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_a_warm_start_stays_where_it_is() -> None:
    probs, a, words, counts = draw()
    pieces, few = one_block(words, counts), Effort(3, 1e-10, 0)
    first = fit_of(topics_of(probs), a, pieces, K, EXACT)
    again = fit_of(topics_of(probs), a, pieces, K, few, first.assignments, is_warm=True)
    np.testing.assert_allclose(counts_of(again, K), counts_of(first, K), atol=0.1)


@pytest.mark.parametrize("num_active", [1, 3])
@pytest.mark.usefixtures("x64")
def test_a_word_has_few_topics_and_all_its_tokens(num_active: int) -> None:
    probs, a, words, counts = draw()
    found = fit_of(topics_of(probs), a, one_block(words, counts), num_active, EXACT)
    assert {x.shape for x in found.assignments} == {(N, U, num_active)}
    shares, topics = found.assignments
    np.testing.assert_allclose(shares.sum(axis=2), counts > 0, atol=1e-12)
    table = np.zeros((N, K))
    np.add.at(table, (np.arange(N)[:, None, None], topics), counts[..., None] * shares)
    np.testing.assert_allclose(counts_of(found, K), table, atol=1e-12)


@pytest.mark.parametrize("num_sweeps", [3, 11])
@pytest.mark.usefixtures("x64")
def test_a_third_of_the_sweeps_are_over_few_topics_of_a_word(num_sweeps: int) -> None:
    """From where all topics led, with the largest of them."""
    probs, a, words, counts = draw()
    arguments = topics_of(probs), a, one_block(words, counts)
    found = fit_of(*arguments, 2, Effort(num_sweeps, 0.0, 0))
    before = fit_of(*arguments, K, Effort(num_sweeps, 0.0, 0)).assignments
    places = np.arange(N)[:, None, None], np.arange(U)[:, None], before.topics
    shares = np.zeros((N, U, K))
    shares[places] = before.shares
    for d in range(N):
        used = counts[d] > 0
        tokens, r = counts[d][used], shares[d][used]
        own = np.where(r >= np.sort(r, axis=1)[:, -2:-1], probs[words[d][used]], 0)
        r = np.where(own > 0, r, 0)
        r /= r.sum(axis=1, keepdims=True)
        for _ in range(num_sweeps // 3):
            r = own * (a + tokens @ r - r)
            r /= r.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(counts_of(found, K)[d], tokens @ r, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_a_document_does_not_depend_on_those_beside_it() -> None:
    """Nor on the pieces that it is in, and on empty ones after them."""
    probs, a, words, counts = draw()
    together = fit_of(topics_of(probs), a, one_block(words, counts, 3), 2, Effort())
    alone = fit_of(topics_of(probs), a, one_block(words[2:3], counts[2:3]), 2, Effort())
    np.testing.assert_allclose(counts_of(together, K)[2:3], counts_of(alone, K), rtol=1e-12)
    assert (counts_of(together, K)[N:] == 0).all()


@pytest.mark.slow
def test_few_of_many_topics_go_on() -> None:
    """A document of three topics is the same if but 16 of 200 go on as if all do."""
    probs, a, words, counts = draw(200)
    a, fits = np.full(200, 0.0025), []
    for most in (16, 200):
        arguments = topics_of(probs), a, one_block(words, counts), 8, Effort(100, 1e-4, 0)
        fits.append(fit_of(*arguments, most=most))
    np.testing.assert_allclose(fits[0].counts.sum(axis=1), counts.sum(axis=1), rtol=1e-5)
    few, all_of_them = (counts_of(fit, 200) for fit in fits)
    distance = np.abs(few - all_of_them).sum(axis=1) / counts.sum(axis=1)
    assert np.median(distance) < 0.1


def test_a_block_without_words_has_no_topics() -> None:
    """As a device has it that is left without documents."""
    probs, a, words, counts = draw()
    found = fit_of(topics_of(probs), a, one_block(words, 0 * counts), 2, Effort())
    assert not found.counts.any() and not found.assignments.shares.any()


@pytest.mark.parametrize("scale", [1e-8, 1e-20])
def test_the_topics_of_a_single_token_follow_from_small_concentrations(scale: float) -> None:
    """Nothing else is in its document: shares go by probability times concentration."""
    probs, a, words, counts = draw()
    single = np.where(np.arange(U) == 0, 1, 0) * np.ones_like(counts)
    probs, a = probs.astype(np.float32), (scale * a).astype(np.float32)
    found = fit_of(topics_of(probs), a, one_block(words, single), K, Effort(100, 1e-6, 0))
    expected = probs[words[:, 0]] * (a / a.sum())
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(counts_of(found, K), expected, atol=1e-5)


@pytest.mark.slow
def test_extreme_probabilities_stay_finite() -> None:
    """A word of which the topics have next to nothing, and a document without words."""
    probs = np.full((3, 2), 1e-12, np.float32)
    probs[0] = [1, 1e-12]
    pieces = one_block(np.array([[0, 1], [0, 0]]), np.array([[1, 5], [0, 0]]), 2)
    found = fit_of(topics_of(probs, 1e-3, 1e-4), np.full(2, 1e-6), pieces, 2, Effort())
    np.testing.assert_allclose(found.counts.sum(axis=1), [6, 0], rtol=1e-5)
    assert np.isfinite(found.assignments.shares).all()


def test_longer_documents_may_have_more_topics() -> None:
    assert [most_topics(words) for words in (16, 512, 832, 3072)] == [32, 32, 52, 192]
