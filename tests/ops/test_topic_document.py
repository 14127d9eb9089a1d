# SPDX-License-Identifier: Apache-2.0
"""The local step of topic models against the dense algorithm, and what must never happen in it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_largecat.ops import topic_document, topic_sweeps
from numpyro_largecat.ops.topic_document import Effort, fit_documents
from tests import reference_topics as reference
from tests.memory import temp_bytes

EXACT = Effort(num_sweeps=400, tolerance=1e-9, num_restarts=0)
solve = fit_documents


def corpus(num_docs, num_topics, vocabulary, num_tokens, *, sparsity=0.1, seed=0):
    """Topics (V, K), and padded documents of a topic model; the last slot of each is empty."""
    rng = np.random.default_rng(seed)
    topics = rng.gamma(sparsity, size=(vocabulary, num_topics)) + 1e-8
    topics /= topics.sum(axis=0)
    words = np.zeros((num_docs, num_tokens + 1), np.int32)
    counts = np.zeros((num_docs, num_tokens + 1))
    for d in range(num_docs):
        frequencies = rng.dirichlet(np.full(num_topics, 3 / num_topics))
        tokens = rng.choice(vocabulary, size=num_tokens, p=topics @ frequencies)
        ids, own = np.unique(tokens, return_counts=True)
        words[d, : len(ids)], counts[d, : len(ids)] = ids, own
    return np.log(topics), words, counts


LOG_PROBS, WORDS, COUNTS = corpus(20, 70, 150, 60)


def expected(log_probs, words, counts, concentration, **options):
    """What the reference finds for each document: bounds and counts."""
    fits = [
        reference.solve_document(log_probs[w[c > 0]], c[c > 0], concentration, **options)
        for w, c in zip(words, counts, strict=True)
    ]
    return np.array([b[-1] for _, _, b in fits]), np.array([n for _, n, _ in fits])


@pytest.mark.parametrize("total", [0.5, 3.0, 35.0])
@pytest.mark.usefixtures("x64")
def test_with_all_topics_it_is_the_dense_algorithm(total: float) -> None:
    """Bounds and counts are equal, for few and for all topics active in a document."""
    concentration = np.full(70, total / 70)
    found = solve(LOG_PROBS, concentration, WORDS, COUNTS, num_active=70, effort=EXACT)
    bounds, counts = expected(LOG_PROBS, WORDS, COUNTS, concentration, num_sweeps=400)
    np.testing.assert_allclose(found.bound, bounds, atol=1e-4)
    np.testing.assert_allclose(found.counts, counts, atol=1e-4)
    np.testing.assert_allclose(found.counts.sum(axis=1), COUNTS.sum(axis=1))


@pytest.mark.parametrize("num_active", [1, 4])
@pytest.mark.usefixtures("x64")
def test_bound_and_counts_are_those_of_the_responsibilities(num_active: int) -> None:
    """From the counts it started with, the reference's last sweep gives the same bound."""
    concentration = np.linspace(0.01, 0.3, 70)
    found = solve(LOG_PROBS, concentration, WORDS, COUNTS, num_active=num_active)
    for d in range(len(WORDS)):
        used = COUNTS[d] > 0
        log_probs, counts = LOG_PROBS[WORDS[d, used]], COUNTS[d, used]
        basis = np.asarray(found.basis[d])
        in_it = np.where(basis > 0, reference.digamma(concentration + basis), -np.inf)
        r = reference.softmax_of_largest(log_probs + in_it, num_active)
        value = reference.collapsed_bound(log_probs, counts, concentration, r)
        np.testing.assert_allclose(found.bound[d], value, rtol=1e-10)
        np.testing.assert_allclose(found.counts[d], counts @ r, atol=1e-9)


@pytest.mark.usefixtures("x64")
def test_dense_bound_never_decreases_over_sweeps() -> None:
    """One more sweep never lowers the bound of any document."""
    concentration = np.full(70, 0.02)
    values = [
        solve(
            LOG_PROBS,
            concentration,
            WORDS,
            COUNTS,
            num_active=70,
            effort=Effort(10 + n, tolerance=0.0, num_restarts=0),
        ).bound
        for n in (1, 2, 3, 5, 8, 15, 40)
    ]
    assert np.diff(values, axis=0).min() > -1e-9
    assert (values[-1] - values[0]).max() > 1e-3  # and it rises


@pytest.mark.parametrize("num_active", [1, 8, 70])
def test_restarts_never_lower_a_bound(num_active: int) -> None:
    """And raise many: they find nearby optima with fewer topics."""
    concentration = np.full(70, 0.5 / 70, np.float32)
    log_probs = jnp.asarray(LOG_PROBS, jnp.float32)
    run = partial(solve, log_probs, concentration, WORDS, COUNTS, num_active=num_active)
    plain, better = (run(effort=Effort(200, 1e-3, n)) for n in (0, 8))
    gains = np.asarray(better.bound - plain.bound)
    assert gains.min() > -1e-6 * np.abs(plain.bound).max()
    assert (gains > 0.1).sum() >= 5


@pytest.mark.usefixtures("x64")
def test_a_restart_is_what_the_reference_proposes() -> None:
    """A document with one accepted proposal has the reference's bound of it."""
    concentration = np.full(70, 0.5 / 70)
    fits = [
        solve(LOG_PROBS, concentration, WORDS, COUNTS, num_active=70, effort=Effort(300, 1e-10, n))
        for n in (0, 1)
    ]
    changed = np.flatnonzero(fits[1].bound - fits[0].bound > 1e-4)
    assert len(changed) >= 3
    for d in changed:
        used = COUNTS[d] > 0
        counts = np.asarray(fits[0].counts[d])
        leaves = np.where(counts > 0, counts, np.inf).argmin()
        document = LOG_PROBS[WORDS[d, used]], COUNTS[d, used], concentration
        value = reference.restart_document(*document, leaves, counts, num_sweeps=300)
        np.testing.assert_allclose(fits[1].bound[d], value, atol=1e-6)


@pytest.mark.parametrize("total", [22.5, 400.0])
@pytest.mark.usefixtures("x64")
def test_a_document_gets_as_many_topics_as_it_uses(total: float) -> None:
    """Documents with over 64 and over 256 active topics of 300, in a block with an easy one."""
    log_probs, words, counts = corpus(3, 300, 400, 150, sparsity=0.3, seed=1)
    counts[2, 1:] = 0  # one word
    concentration = np.full(300, total / 300)
    found = solve(log_probs, concentration, words, counts, num_active=300, effort=EXACT)
    bounds, expected_counts = expected(log_probs, words, counts, concentration, num_sweeps=400)
    most = (expected_counts > topic_sweeps.LEAST_COUNT).sum(axis=1).max()
    assert most > {22.5: topic_document.LOOSE, 400.0: topic_document.SIZES[-1]}[total]
    np.testing.assert_allclose(found.bound, bounds, atol=1e-4)
    np.testing.assert_allclose(found.counts, expected_counts, atol=1e-4)


def test_eight_topics_a_word_are_as_good_as_all() -> None:
    """Distance in total variation between topic frequencies, on average below 0.01."""
    concentration = np.full(70, 0.5 / 70, np.float32)
    log_probs = jnp.asarray(LOG_PROBS, jnp.float32)
    sparse, dense = (
        solve(
            log_probs, concentration, WORDS, COUNTS, num_active=n, effort=Effort(100, 1e-3)
        ).counts
        for n in (8, 70)
    )
    shares = [np.asarray(n / n.sum(axis=1, keepdims=True)) for n in (sparse, dense)]
    assert (np.abs(shares[0] - shares[1]).sum(axis=1) / 2).mean() < 0.01


@pytest.mark.parametrize("num_active", [2, 6])
def test_words_that_only_weak_topics_explain(num_active: int) -> None:
    """Products that underflow in float32 are replaced by logarithms; float64 agrees."""
    rng = np.random.default_rng(2)
    log_probs = -rng.uniform(0, 4, size=(12, 6))
    log_probs[8:] -= rng.uniform(90, 300, size=(4, 6))  # far below the smallest float32
    log_probs[8:, 5] = -1.0  # the one topic that explains these words leaves the document
    log_probs[:8, 5] = -400
    words, counts = np.arange(12)[None], np.array([[9.0] * 8 + [1e-3] * 4])
    concentration = np.full(6, 1e-3)
    options = dict(num_active=num_active, effort=Effort(100, 0.0, 0))
    found = solve(
        *(jnp.asarray(x, jnp.float32) for x in (log_probs, concentration)), words, counts, **options
    )
    with jax.enable_x64(True):
        exact = solve(log_probs, concentration, words, counts, **options)
    np.testing.assert_allclose(found.bound, exact.bound, rtol=1e-5)
    np.testing.assert_allclose(found.counts, exact.counts, atol=1e-4)
    _, _, bounds = reference.solve_document(
        log_probs, counts[0], concentration, num_active=num_active
    )
    np.testing.assert_allclose(found.bound, bounds[-1], rtol=1e-3)


def test_equal_topics_are_told_apart_by_position() -> None:
    """Where all topics are equal, a word still uses no more than L of them."""
    log_probs = jnp.full((5, 6), -2.0)
    words, counts = np.arange(5)[None], np.full((1, 5), 2.0)
    concentration = jnp.full(6, 3.0)
    found = solve(log_probs, concentration, words, counts, num_active=2, effort=Effort(50, 0.0, 0))
    np.testing.assert_allclose(found.counts, [[5, 5, 0, 0, 0, 0]], atol=1e-5)


def test_documents_do_not_depend_on_their_block() -> None:
    """A document alone has the bound that it has among others."""
    concentration = np.full(70, 0.01, np.float32)
    log_probs = jnp.asarray(LOG_PROBS, jnp.float32)
    together = solve(log_probs, concentration, WORDS, COUNTS, num_active=4)
    for d in (0, 19):
        alone = solve(log_probs, concentration, WORDS[d : d + 1], COUNTS[d : d + 1], num_active=4)
        np.testing.assert_allclose(alone.bound, together.bound[d : d + 1], rtol=1e-5)
        np.testing.assert_allclose(alone.counts, together.counts[d : d + 1], atol=1e-3)


def test_an_empty_document_has_its_prior() -> None:
    found = solve(
        jnp.asarray(LOG_PROBS),
        jnp.full(70, 0.1),
        np.zeros((1, 3), int),
        np.zeros((1, 3)),
        num_active=4,
    )
    assert found.bound[0] == 0 and not found.counts.any()


def test_memory_does_not_hold_all_topics_of_all_documents() -> None:
    """Sixteen times the documents need little more scratch memory."""

    def scratch(num_docs: int) -> int:
        shapes = ((500, 64), (64,), (num_docs, 50), (num_docs, 50))
        arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        arrays[2] = jax.ShapeDtypeStruct(shapes[2], jnp.int32)
        fit = partial(fit_documents, num_active=8)
        return temp_bytes(fit, *arrays)

    extra = scratch(1024) - scratch(64)
    assert extra < 0.2 * 960 * 50 * 64 * 4  # of one float for each word and topic
