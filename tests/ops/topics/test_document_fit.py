# SPDX-License-Identifier: Apache-2.0
"""The local step of topic models against the dense algorithm, and what must never happen in it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_largecat.ops.topics import document_fit, sweeps
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.document_fit import fit_documents
from tests import reference_topics as reference
from tests.memory import temp_bytes
from tests.slow_cases import slow_case

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


def test_digamma() -> None:
    """From the concentrations of thousands of topics to any that float32 holds."""
    x = np.geomspace(1e-5, 1e38, 500)
    with jax.enable_x64(True):
        np.testing.assert_allclose(sweeps.digamma(x), reference.digamma(x), rtol=1e-9)
    found = sweeps.digamma(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, reference.digamma(x), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("total", [slow_case(0.5), 3.0, slow_case(35.0)])
@pytest.mark.usefixtures("x64")
def test_with_all_topics_it_is_the_dense_algorithm(total: float) -> None:
    """Bounds and counts are equal, for few and for all topics active in a document."""
    concentration, (words, own) = np.full(70, total / 70), (WORDS[:8], COUNTS[:8])
    found = solve(LOG_PROBS, concentration, words, own, num_active=70, effort=EXACT)
    bounds, counts = expected(LOG_PROBS, words, own, concentration, num_sweeps=400)
    np.testing.assert_allclose(found.bound, bounds, atol=1e-4)
    np.testing.assert_allclose(found.counts, counts, atol=1e-4)
    np.testing.assert_allclose(found.counts.sum(axis=1), own.sum(axis=1))


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
    """Ten more sweeps never lower the bound of any document."""
    concentration = np.full(70, 0.02)
    values = [
        solve(
            LOG_PROBS,
            concentration,
            WORDS,
            COUNTS,
            num_active=70,
            effort=Effort(n, tolerance=0.0, num_restarts=0),
        ).bound
        for n in (10, 20, 30, 40, 100)
    ]
    assert np.diff(values, axis=0).min() > -1e-9
    assert (values[-1] - values[0]).max() > 1e-3  # and it rises


@pytest.mark.usefixtures("x64")
def test_each_sweep_raises_the_dense_bound() -> None:
    """One more never lowers the bound of any document, from the prior mean to the optimum."""
    concentration = jnp.full(70, 0.02)
    counts = jnp.full((20, 70), 1.0) * COUNTS.sum(axis=1)[:, None] / 70
    shared = document_fit.prepare_topics(jnp.asarray(LOG_PROBS), concentration)

    @jax.jit
    def bounds(counts):
        document, own = document_fit.take_active(shared, WORDS, jnp.asarray(COUNTS), counts, 70)

        def one(own, _):
            done = sweeps.sweep(document, document.probs, own)
            return done.counts, sweeps.bound(document, done)

        return jax.lax.scan(one, own, length=50)[1]

    values = np.asarray(bounds(counts))
    assert np.diff(values, axis=0).min() > -1e-9
    assert (values[-1] - values[0]).min() > 1


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


def test_least_size_holds_the_topics_of_each_document() -> None:
    """32 for few, 128 where it is at most half of K, else K."""
    counts = jnp.zeros((3, 300)).at[0, :32].set(1.0)
    assert document_fit.least_size(counts) == 32
    assert document_fit.least_size(counts.at[1, 7:40].set(1e-5)) == 128
    assert document_fit.least_size(counts.at[2, :129].set(1.0)) == 300
    assert document_fit.least_size(jnp.ones((2, 33))) == 33
    assert document_fit.least_size(jnp.ones((2, 5))) == 5


@pytest.mark.slow
def test_code_for_one_size_solves_as_code_for_several() -> None:
    """And has no branch for other sizes, which would take as long to compile."""
    topics = document_fit.prepare_topics(jnp.asarray(LOG_PROBS), jnp.full(70, 0.05))
    documents = topics, jnp.asarray(WORDS), jnp.asarray(COUNTS)
    start = document_fit.start_documents(*documents)
    assert document_fit.least_size(start) == 32
    solve = document_fit.solve_documents
    found, wanted = (solve(*documents, start, 8, size=size) for size in (32, None))
    for value, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-5)
    own, shared = (solve.lower(*documents, start, 8, size=size).as_text() for size in (32, None))
    assert "stablehlo.case" in shared and "stablehlo.case" not in own


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_a_document_gets_as_many_topics_as_it_uses(monkeypatch) -> None:
    """With code for 10, 16 and 70 topics, documents of which some need each of these."""
    monkeypatch.setattr(document_fit, "SIZES", (10, 16))
    monkeypatch.setattr(document_fit, "LOOSE", 12)

    @jax.jit
    def solve_in_small(concentration):
        topics = document_fit.prepare_topics(LOG_PROBS, concentration)
        documents = topics, jnp.asarray(WORDS), jnp.asarray(COUNTS)
        start = document_fit.start_documents.__wrapped__  # its code for other sizes may be kept
        solve = document_fit.solve_documents.__wrapped__
        return solve(*documents, start(*documents), 70, EXACT)

    sizes = []
    for total in (0.01, 5.0, 35.0):
        concentration = np.full(70, total / 70)
        found = solve_in_small(concentration)
        document = LOG_PROBS, WORDS[:10], COUNTS[:10], concentration
        bounds, counts = expected(*document, num_sweeps=400)
        sizes.append((counts > sweeps.LEAST_COUNT).sum(axis=1).max())
        np.testing.assert_allclose(found.bound[:10], bounds, atol=1e-4)
        np.testing.assert_allclose(found.counts[:10], counts, atol=1e-4)
    assert sizes[0] <= 10 < sizes[1] <= 16 < sizes[2]


@pytest.mark.parametrize("total", [22.5, 400.0])
@pytest.mark.usefixtures("x64")
@pytest.mark.slow
def test_documents_of_very_many_topics(total: float) -> None:
    """With over 128 and over 256 active topics of 300, in a block with an easy one."""
    log_probs, words, counts = corpus(2, 300, 400, 150, sparsity=0.3, seed=1)
    counts[1, 1:] = 0  # one word
    concentration = np.full(300, total / 300)
    found = solve(log_probs, concentration, words, counts, num_active=300, effort=EXACT)
    bounds, expected_counts = expected(log_probs, words, counts, concentration, num_sweeps=400)
    most = (expected_counts > sweeps.LEAST_COUNT).sum(axis=1).max()
    assert most > {22.5: document_fit.LOOSE, 400.0: 256}[total]
    np.testing.assert_allclose(found.bound, bounds, atol=1e-4)
    np.testing.assert_allclose(found.counts, expected_counts, atol=1e-4)


def test_no_documents() -> None:
    found = solve(LOG_PROBS, np.full(70, 0.02), WORDS[:0], COUNTS[:0], num_active=3)
    assert found.bound.shape == (0,) and found.counts.shape == (0, 70)


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


@pytest.mark.parametrize("num_active", [2, 70])
@pytest.mark.some_cases(1)
def test_words_that_only_weak_topics_explain(num_active: int) -> None:
    """Where products of weights and probabilities would underflow in float32, float64 agrees.

    The first document has a heavy topic, and a word that 69 others explain with a 69th of a token
    each, a weight of exp(-65). In the second all topics but the first are up to 300 nats lower for
    four words, and the first 400 for the others.
    """
    rng = np.random.default_rng(2)
    log_probs, words, counts = LOG_PROBS.copy(), WORDS[:2].copy(), np.zeros_like(COUNTS[:2])
    log_probs[0], log_probs[1] = -300, -2
    log_probs[0, 0], log_probs[1, 0] = -1, -400
    words[0, :2], counts[0, :2] = [0, 1], [50, 1]
    log_probs[2:6] = -rng.uniform(90, 300, size=(4, 70))
    log_probs[2:6, 0], log_probs[6:12, 0] = -1, -400
    words[1, :10], counts[1, :10] = np.arange(2, 12), [1] * 4 + [9] * 6
    concentration = np.full(70, 1e-3)
    run = partial(solve, words=words, word_counts=counts, num_active=num_active, effort=EXACT)
    found = run(*(jnp.asarray(x, jnp.float32) for x in (log_probs, concentration)))
    with jax.enable_x64(True):
        exact = run(log_probs, concentration)
    np.testing.assert_allclose(found.bound, exact.bound, rtol=1e-5)
    np.testing.assert_allclose(found.counts, exact.counts, atol=1e-4)
    how = {"num_active": num_active, "num_sweeps": 400}
    bounds, _ = expected(log_probs, words, counts, concentration, **how)
    np.testing.assert_allclose(exact.bound, bounds, rtol=1e-6)


@pytest.mark.slow
def test_equal_topics_are_told_apart_by_position() -> None:
    """Where all topics are equal, a word still uses no more than L of them."""
    log_probs = jnp.full(LOG_PROBS.shape, -2.0)
    effort = Effort(50, 0.0, 0)
    found = solve(log_probs, jnp.full(70, 3.0), WORDS, COUNTS, num_active=2, effort=effort)
    half = COUNTS.sum(axis=1)[:, None] / 2
    np.testing.assert_allclose(found.counts[:, :2], np.repeat(half, 2, axis=1), rtol=1e-5)
    assert not found.counts[:, 2:].any()


@pytest.mark.slow
def test_documents_do_not_depend_on_their_block() -> None:
    """In another order, with others beside them, they have the same bounds."""
    concentration = np.full(70, 0.01, np.float32)
    log_probs = jnp.asarray(LOG_PROBS, jnp.float32)
    there = np.random.default_rng(0).permutation(20)
    here, other = (
        solve(log_probs, concentration, words, counts, num_active=4)
        for words, counts in ((WORDS, COUNTS), (WORDS[there], COUNTS[there]))
    )
    np.testing.assert_allclose(here.bound[there], other.bound, rtol=1e-5)
    np.testing.assert_allclose(here.counts[there], other.counts, atol=1e-3)
    for d in (0, 19):
        alone = solve(log_probs, concentration, WORDS[d : d + 1], COUNTS[d : d + 1], num_active=4)
        np.testing.assert_allclose(alone.bound, here.bound[d : d + 1], rtol=1e-5)
        np.testing.assert_allclose(alone.counts, here.counts[d : d + 1], atol=1e-3)


def test_short_documents() -> None:
    """One without words has its prior; one of a single word has its bound."""
    counts = np.zeros_like(COUNTS)
    counts[1, 0] = 1
    concentration = np.linspace(0.1, 0.5, 70)
    found = solve(
        jnp.asarray(LOG_PROBS, jnp.float32),
        jnp.asarray(concentration, jnp.float32),
        WORDS,
        counts,
        num_active=70,
        effort=Effort(100, 0.0, 0),
    )
    assert found.bound[0] == 0 and not found.counts[0].any()
    _, _, bounds = reference.solve_document(LOG_PROBS[WORDS[1, :1]], np.ones(1), concentration)
    np.testing.assert_allclose(found.bound[1], bounds[-1], rtol=1e-5)
    np.testing.assert_allclose(found.counts[1].sum(), 1, rtol=1e-5)


@pytest.mark.slow
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
