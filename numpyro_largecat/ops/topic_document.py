# SPDX-License-Identifier: Apache-2.0
"""The best responsibilities and topic counts of documents, each on the topics that it uses."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.ops.topic_sweeps import (
    LEAST_COUNT,
    ActiveTopics,
    Sweep,
    all_safe,
    bound,
    converge,
    digamma,
    finite_max,
    select,
    smallest_safe,
    sweep,
)

FIRST_SWEEPS = 10  # before any word is confined to L topics
LOOSE = 64  # sweeps are over all topics until no more than this are active
SIZES = (32, LOOSE, 256)  # numbers of active topics that code is compiled for; K is one more
RESTART_SWEEPS = 5
LEAST_GAIN = 1e-6  # of a restart, relative to the bound: above the rounding of float32


class Effort(NamedTuple):
    """How hard to solve for a document's own variables. Code is compiled once for all values."""

    num_sweeps: int | Array = 100
    tolerance: float | Array = 0.05  # largest change in a topic's count, tokens
    num_restarts: int | Array = 5  # topics that are proposed to leave, smallest first


USUAL = Effort()


class DocumentFit(NamedTuple):
    """Best local variables of N documents."""

    bound: Array  # (N,), nats
    counts: Array  # (N, K), expected tokens of each topic
    basis: Array  # (N, K), the counts that the responsibilities were computed from


class Step(NamedTuple):
    """What is done to each document."""

    num_active: int
    effort: Effort


class Topics(NamedTuple):
    """What all documents share."""

    table: Array  # (V, K), C
    probs: Array | None  # (V, K), exp(C - largest)
    largest: Array | None  # (V,), the largest C of each word
    concentration: Array  # (K,)
    total_concentration: Array  # ()

    @property
    def num_topics(self) -> int:
        """K."""
        return self.table.shape[1]


@partial(jax.jit, static_argnames="num_active")
def fit_documents(
    log_probs: Array,
    concentration: Array,
    words: Array,
    word_counts: Array,
    num_active: int,
    effort: Effort = USUAL,
    initial: Array | None = None,
) -> DocumentFit:
    r"""Maximise the bound of each document over its responsibilities and topic frequencies.

    .. math:: \max_{r, \theta} \; \sum_u c_u \sum_k r_{uk} (C_{ku} - \log r_{uk})
              + E_q[\log p(z \mid \pi) + \log p(\pi) - \log q(\pi)], \qquad
              \lvert \{k : r_{uk} > 0\} \rvert \le L

    Cost per document of U words: O(U K) for the first two to ten sweeps, until at most 64 topics
    are active, and O(U A) for each further one on its active topics. A is one of a few sizes that
    code is compiled for, the least that holds the active topics of all documents of a block; so
    no document loses one.

    Args:
        log_probs: Log probability of each word in each topic, or its expectation, (V, K).
        concentration: Dirichlet concentration of the topic frequencies, (K,).
        words: Distinct words of each document, integers in [0, V), (N, U).
        word_counts: Tokens of each, 0 for an empty slot, (N, U).
        num_active: Largest number L of topics with positive responsibility for a word.
        effort: How hard to solve.
        initial: Topic counts to start from, (N, K); None starts from the prior mean.
    """
    log_probs, concentration = jnp.asarray(log_probs), jnp.asarray(concentration)
    words, word_counts = jnp.asarray(words), jnp.asarray(word_counts, log_probs.dtype)
    step = Step(num_active, Effort(*effort))
    num_docs, num_words = words.shape
    topics = share_topics(log_probs, concentration, num_docs * num_words >= log_probs.shape[0])

    def solve(block: tuple[Array, ...]) -> DocumentFit:
        words, word_counts, *start = block
        if start:
            return _solve_from(SIZES, topics, words, word_counts, start[0], step)
        return _solve_cold(topics, words, word_counts, step)

    inputs = (words, word_counts) if initial is None else (words, word_counts, initial)
    fits = lax.map(solve, in_blocks(inputs, block_size_for(num_docs)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_docs], fits)


def share_topics(log_probs: Array, concentration: Array, exponentiate: bool) -> Topics:
    """Exponentials are taken once for all documents, if these use most words."""
    probs = largest = None
    if exponentiate:
        largest = finite_max(log_probs, axis=1)
        probs, largest = jnp.exp(log_probs - largest), largest[:, 0]
    return Topics(log_probs, probs, largest, concentration, concentration.sum())


def block_size_for(num_docs: int) -> int:
    """Documents solved together: on a CPU what a core's cache holds, elsewhere many."""
    return min(num_docs, 16 if jax.default_backend() == "cpu" else 512)


def in_blocks(arrays: tuple[Array, ...], size: int) -> tuple[Array, ...]:
    """Fold (N, X) to (N / size, size, X); documents that fill the last block are empty."""
    num_docs = arrays[0].shape[0]
    num_blocks = -(-num_docs // size)
    padding = ((0, num_blocks * size - num_docs), (0, 0))
    return tuple(jnp.pad(x, padding).reshape(num_blocks, size, x.shape[1]) for x in arrays)


def num_active_topics(counts: Array) -> Array:
    """Number of topics that are in a document."""
    return (counts > LEAST_COUNT).sum(axis=-1)


def _solve_cold(topics: Topics, words: Array, word_counts: Array, step: Step) -> DocumentFit:
    """Solve a block from the prior mean."""
    start = partial(_dense_start, topics)
    if jax.default_backend() == "cpu":  # the rows of one document fill a cache
        document, own, counts = lax.map(start, (words, word_counts))
    else:
        document, own, counts = lax.map(start, (words, word_counts), batch_size=64)
    document = document._replace(table=topics.table)

    def usual() -> DocumentFit:
        selection = select(document, own, own.shape[1])

        def is_wide(state: tuple[Array, Array]) -> Array:
            index, own = state
            return (index < 5) | ((index < 15) & (num_active_topics(own).max() > SIZES[0]))

        rest = lax.while_loop(
            is_wide,
            lambda state: (state[0] + 1, sweep(document, selection, state[1]).counts),
            (jnp.array(0), own),
        )[1]
        if rest.shape[1] <= SIZES[0]:
            return _solve(document, rest, topics, step)

        def narrow() -> DocumentFit:
            return _solve(*_narrow(document, rest, SIZES[0]), topics, step)

        is_narrow = num_active_topics(rest).max() <= SIZES[0]
        return lax.cond(is_narrow, narrow, lambda: _solve(document, rest, topics, step))

    def large() -> DocumentFit:
        return _solve_from(SIZES[2:], topics, words, word_counts, counts, step)

    if own.shape[1] == topics.num_topics:
        return usual()
    return lax.cond(num_active_topics(counts).max() <= LOOSE, usual, large)


def _dense_start(
    topics: Topics, document: tuple[Array, Array]
) -> tuple[ActiveTopics, Array, Array]:
    """Sweep over all topics until few are active; see the document through these.

    Returns:
        The document (without the table), its counts (A,), and the counts of all topics (K,).
    """
    words, word_counts = document
    if topics.probs is None or topics.largest is None:
        rows = topics.table[words]
        largest = finite_max(rows, axis=1)
        rows, largest = jnp.exp(rows - largest), largest[:, 0]
    else:
        rows, largest = topics.probs[words], topics.largest[words]

    def by_products(weights: Array) -> Array:
        norm = rows @ weights
        ratios = jnp.where((word_counts > 0) & (norm > 0), word_counts / norm, 0)
        return weights * (ratios @ rows)

    def one(state: tuple[Array, Array]) -> tuple[Array, Array]:
        index, counts = state
        log_weights = digamma(topics.concentration + counts)
        weights = jnp.exp(log_weights - log_weights.max())
        norm = rows @ weights

        def products() -> Array:
            return weights * (jnp.where(word_counts > 0, word_counts / norm, 0) @ rows)

        def logarithms() -> Array:
            shares = jax.nn.softmax(topics.table[words] + log_weights, axis=1)
            return word_counts @ jnp.nan_to_num(shares)  # NaN: a word that no topic has

        return index + 1, lax.cond(all_safe(norm, word_counts), products, logarithms)

    def is_loose(state: tuple[Array, Array]) -> Array:
        index, counts = state
        return (index < 2) | ((index < FIRST_SWEEPS) & (num_active_topics(counts) > LOOSE))

    start = by_products(topics.concentration / topics.total_concentration)
    counts = lax.while_loop(is_loose, one, (jnp.array(0), start))[1]
    own, ids = lax.top_k(counts, min(LOOSE, topics.num_topics))
    active = ActiveTopics(
        topics=ids,
        words=words,
        word_counts=word_counts,
        probs=rows[:, ids].T,
        shift=largest,
        concentration=topics.concentration[ids],
        total_concentration=topics.total_concentration,
        table=jnp.zeros(()),
    )
    return active, own, counts


def _narrow(document: ActiveTopics, counts: Array, size: int) -> tuple[ActiveTopics, Array]:
    """See documents through fewer topics, which hold all that are active."""
    own, places = lax.top_k(counts, size)
    narrow = document._replace(
        topics=jnp.take_along_axis(document.topics, places, axis=1),
        probs=jnp.take_along_axis(document.probs, places[..., None], axis=1),
        concentration=jnp.take_along_axis(document.concentration, places, axis=1),
    )
    return narrow, own


def take_active(
    topics: Topics, words: Array, word_counts: Array, counts: Array, size: int
) -> tuple[ActiveTopics, Array]:
    """See documents through their ``size`` largest topics; also the counts of these, (B, A)."""
    if size == topics.num_topics:
        ids, own = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), counts.shape), counts
    else:
        own, ids = lax.top_k(counts, size)
    columns = topics.table[words[:, :, None], ids[:, None, :]].swapaxes(1, 2)
    shift = finite_max(columns, axis=1)
    document = ActiveTopics(
        topics=ids,
        words=words,
        word_counts=word_counts,
        probs=jnp.exp(columns - shift),
        shift=shift[:, 0],
        concentration=topics.concentration[ids],
        total_concentration=jnp.broadcast_to(topics.total_concentration, words.shape[:1]),
        table=topics.table,
    )
    return document, own


def _solve_from(
    sizes: tuple[int, ...],
    topics: Topics,
    words: Array,
    word_counts: Array,
    counts: Array,
    step: Step,
) -> DocumentFit:
    """Solve a block from given counts, at the least size that holds all active topics."""
    sizes = (*(size for size in sizes if size < topics.num_topics), topics.num_topics)

    def at(size: int) -> DocumentFit:
        return _solve(*take_active(topics, words, word_counts, counts, size), topics, step)

    index = (num_active_topics(counts).max() > jnp.array(sizes)).sum()
    return lax.switch(index, [partial(at, size) for size in sizes])


def _solve(document: ActiveTopics, counts: Array, topics: Topics, step: Step) -> DocumentFit:
    """Sweep until it converges, propose restarts, and sweep again where one was accepted."""
    document = _rescale(document, counts)
    effort, num_active = step.effort, step.num_active
    num_sweeps = jnp.maximum(effort.num_sweeps - FIRST_SWEEPS, 1)

    def phase(index: Array, state: tuple[Array, Array, Sweep, Array]) -> tuple[Any, ...]:
        counts, is_done, *_ = state
        counts = converge(
            document, counts, is_done, num_active, num_sweeps=num_sweeps, tolerance=effort.tolerance
        )
        done = sweep(document, select(document, counts, num_active), counts)
        value = bound(document, done)
        num_restarts = jnp.where(index == 0, effort.num_restarts, 0)
        counts, is_better = restart(document, counts, value, num_restarts, num_active)
        return counts, ~is_better, done, value

    # One body for both phases: what comes after the restarts is the same code once more.
    num_docs, dtype = counts.shape[0], counts.dtype
    nothing = jnp.zeros(num_docs, bool)
    empty = Sweep(counts, counts, jnp.zeros(document.words.shape, dtype))
    state = counts, nothing, empty, jnp.zeros(num_docs, dtype)
    counts, _, done, value = lax.fori_loop(0, 2, phase, state)

    def all_topics(values: Array) -> Array:
        zeros = jnp.zeros((values.shape[0], topics.num_topics), values.dtype)
        return jnp.put_along_axis(zeros, document.topics, values, axis=1, inplace=False)

    basis = jnp.where(counts > LEAST_COUNT, counts, 0)
    return DocumentFit(value, all_topics(done.counts), all_topics(basis))


def _rescale(document: ActiveTopics, counts: Array) -> ActiveTopics:
    """Make the largest probability of each word over the active topics 1, where it is not lost."""
    active = jnp.where((counts > LEAST_COUNT)[..., None], document.probs, 0)
    largest = active.max(axis=1)
    is_kept = largest > smallest_safe(largest.dtype)
    scale = jnp.where(is_kept, largest, 1)
    # What is lost is 0 for all topics, and so is taken from the table.
    probs = jnp.where(is_kept[:, None], document.probs / scale[:, None], 0)
    return document._replace(probs=probs, shift=document.shift + jnp.log(scale))


def restart(
    document: ActiveTopics, counts: Array, value: Array, num_restarts: Array, num_active: int
) -> tuple[Array, Array]:
    """Propose for each document that a topic leaves it, smallest first; keep what is better.

    Returns:
        The counts (B, A), and which documents have changed, (B,).
    """
    is_active = counts > LEAST_COUNT
    order = jnp.argsort(jnp.where(is_active, counts, jnp.inf), axis=1)
    num_proposals = is_active.sum(axis=1) - 1  # one topic must stay

    def propose(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        counts, value, is_better = state
        leaves = jnp.arange(counts.shape[1]) == order[:, index, None]
        proposed = jnp.where(leaves, 0, counts)
        selection = select(document, proposed, num_active)
        proposed = lax.fori_loop(
            0, RESTART_SWEEPS, lambda _, own: sweep(document, selection, own).counts, proposed
        )
        new_value = bound(document, sweep(document, selection, proposed))
        gains = new_value > value + LEAST_GAIN * jnp.abs(value)
        gains &= index < num_proposals
        return (
            jnp.where(gains[:, None], proposed, counts),
            jnp.where(gains, new_value, value),
            is_better | gains,
        )

    start = counts, value, jnp.zeros(counts.shape[0], bool)
    num_restarts = jnp.minimum(num_restarts, num_proposals.max())
    counts, _, is_better = lax.fori_loop(0, num_restarts, propose, start)
    return counts, is_better
