# SPDX-License-Identifier: Apache-2.0
"""The best responsibilities and topic counts of documents, each on the topics that it uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_largecat.ops.topics.active_search import Effort, search
from numpyro_largecat.ops.topics.sweeps import (
    ActiveTopics,
    active_topics,
    finite_max,
    least_log_weight,
    length_term,
    num_active_topics,
    topic_weights,
)

SIZES = (32, 128)  # numbers of active topics that code is compiled for, and K
LOOSE = 128  # sweeps are over all topics until no more than this are active
WIDE_SWEEPS = 60  # at most before words have but L topics, half of them over more than LOOSE
USUAL = Effort()
T = TypeVar("T")


class DocumentFit(NamedTuple):
    """Best local variables of N documents."""

    bound: Array  # (N,), nats
    counts: Array  # (N, K), expected tokens of each topic
    basis: Array  # (N, K), the counts that the responsibilities were computed from


class Topics(NamedTuple):
    """What all documents share; ``prepare_topics`` makes it."""

    table: Array  # (V, K), C
    concentration: Array  # (K,)
    probs: Array | None  # (V, K), exp(C - largest C of the word)

    @property
    def num_topics(self) -> int:
        """K."""
        return self.table.shape[1]


@partial(jax.jit, static_argnames="for_most")
def prepare_topics(log_probs: Array, concentration: Array, *, for_most: bool = True) -> Topics:
    """What does not change from document to document.

    Args:
        log_probs: As for ``fit_documents``, (V, K).
        concentration: (K,).
        for_most: Whether the documents use most words, so that exponentials of the whole table,
            taken once, cost less than those of each word of each document.
    """
    probs = _relative_probs(log_probs) if for_most else None
    return Topics(log_probs, concentration, probs)


@jax.jit
def fit_documents(
    log_probs: Array,
    concentration: Array,
    words: Array,
    word_counts: Array,
    num_active: int | Array,
    effort: Effort = USUAL,
) -> DocumentFit:
    r"""Maximise the bound of each document over its responsibilities and topic frequencies.

    .. math:: \max_{r, \theta} \; \sum_u c_u \sum_k r_{uk} (C_{ku} - \log r_{uk})
              + E_q[\log p(z \mid \pi) + \log p(\pi) - \log q(\pi)], \qquad
              \lvert \{k : r_{uk} > 0\} \rvert \le L

    Cost per document of U words: O(U K) for each of the first sweeps, thirty at most, until at most
    128 topics are active (sixty, until 32 are, if there are no more than 128), and O(U A) for each
    further one on its active topics. A is one of a few sizes that code is compiled for, the least
    that holds the active topics of all documents of a block; so no document loses one. Code is
    compiled once for all L and efforts.

    Args:
        log_probs: Log probability of each word in each topic, or its expectation, (V, K).
        concentration: Dirichlet concentration of the topic frequencies, (K,).
        words: Distinct words of each document, integers in [0, V), (N, U).
        word_counts: Tokens of each, whole numbers, 0 for an empty slot, (N, U).
        num_active: Largest number L of topics with positive responsibility for a word.
        effort: How hard to solve.
    """
    words, log_probs = jnp.asarray(words), jnp.asarray(log_probs)
    word_counts = jnp.asarray(word_counts)
    for_most = words.size >= log_probs.shape[0]
    topics = prepare_topics(log_probs, concentration, for_most=for_most)
    counts = start_documents(topics, words, word_counts)
    return solve_documents(topics, words, word_counts, counts, num_active, effort)


@jax.jit
def start_documents(topics: Topics, words: Array, word_counts: Array) -> Array:
    """Counts of documents after some sweeps from the prior mean, (N, K)."""
    word_counts = word_counts.astype(topics.table.dtype)

    def one(document: tuple[Array, Array]) -> Array:
        return _start_document(topics, *document)

    # On a CPU one by one, since the rows of a document fill a cache.
    batch_size = None if jax.default_backend() == "cpu" else 64
    return lax.map(one, (words, word_counts), batch_size=batch_size)


@partial(jax.jit, static_argnames="size")
def solve_documents(
    topics: Topics,
    words: Array,
    word_counts: Array,
    initial: Array,
    num_active: int | Array,
    effort: Effort = USUAL,
    *,
    size: int | None = None,
) -> DocumentFit:
    """What ``fit_documents`` gives, for many calls with the same topics.

    With ``size``, which ``least_size`` gives, no code is compiled for other numbers of topics.
    """
    num_docs, word_counts = len(words), word_counts.astype(topics.table.dtype)
    order = num_active_topics(initial).argsort()  # so that few blocks need a large size

    def solve(block: tuple[Array, Array, Array]) -> DocumentFit:
        words, word_counts, counts = block

        def at(size: int) -> DocumentFit:
            document, own = take_active(topics, words, word_counts, counts, size)
            found = search(document, own, num_active, Effort(*effort))

            def all_topics(values: Array) -> Array:
                return over_all_topics(document.topics, values, topics.num_topics)

            return DocumentFit(found.bound, all_topics(found.counts), all_topics(found.basis))

        return at_least_size(at, counts, size)

    inputs = words[order], word_counts[order], initial[order]
    fits = lax.map(solve, in_blocks(inputs, block_size_for(num_docs)))
    place = order.argsort()
    found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[place], fits)
    return found._replace(bound=found.bound + length_term(topics.concentration.sum(), word_counts))


def may_be_log_probs(log_probs: Array, words: Array, word_counts: Array, excess: float) -> Array:
    """Whether a topic can have the words of each document with these log probabilities, (N,).

    No probability is above 1, and no two of different words are above 1/2, ``excess`` nats aside:
    so no column of ``log_probs`` (V, K) holds probabilities. Cost: O(U K) per document.
    """
    num_words = log_probs.shape[0]

    def one(block: tuple[Array, Array]) -> Array:
        words, word_counts = block
        words = jnp.sort(jnp.where(word_counts > 0, words, num_words), axis=1)
        is_first = jnp.diff(words, axis=1, prepend=-1) > 0  # a word may have two slots
        is_first &= words < num_words
        rows = jnp.where(is_first[..., None], log_probs[words], -jnp.inf)
        above_half = (rows > excess - np.log(2)).sum(axis=1)
        return ((rows <= excess).all(axis=1) & (above_half <= 1)).all(axis=1)

    blocks = in_blocks((words, word_counts), block_size_for(len(words)))
    return lax.map(one, blocks).ravel()[: len(words)]


def block_size_for(num_docs: int) -> int:
    """Documents solved together: on a CPU what a core's cache holds, elsewhere many."""
    return max(1, min(num_docs, 16 if jax.default_backend() == "cpu" else 512))


def in_blocks(arrays: tuple[Array, ...], size: int) -> tuple[Array, ...]:
    """Fold (N, X) to (N / size, size, X); documents that fill the last block are empty."""
    num_docs = arrays[0].shape[0]
    num_blocks = -(-num_docs // size)
    padding = ((0, num_blocks * size - num_docs), (0, 0))
    return tuple(jnp.pad(x, padding).reshape(num_blocks, size, x.shape[1]) for x in arrays)


def sizes_for(num_topics: int) -> list[int]:
    """Numbers of active topics that code is compiled for, ascending; the last is K."""
    small, middle = SIZES
    return [small] * (small < num_topics) + [middle] * (2 * middle <= num_topics) + [num_topics]


def least_size(counts: Array) -> int:
    """The least of these that holds the active topics of each document, (N, K)."""
    most = int(_most_active(counts))
    return next(size for size in sizes_for(counts.shape[1]) if size >= most)


@jax.jit
def _most_active(counts: Array) -> Array:
    return num_active_topics(counts).max()


def at_least_size(solve: Callable[[int], T], counts: Array, size: int | None = None) -> T:
    """Solve at ``size``, or at the least number of topics that holds all of a block, (B, K)."""
    if size is not None:
        return solve(size)
    sizes = sizes_for(counts.shape[1])
    is_enough = num_active_topics(counts).max() <= jnp.array(sizes)
    return lax.switch(is_enough.argmax(), [partial(solve, size) for size in sizes])


def take_active(
    topics: Topics,
    words: Array,
    word_counts: Array,
    counts: Array,
    size: int,
    find: Callable[[Array, int], tuple[Array, Array]] = active_topics,
) -> tuple[ActiveTopics, Array]:
    """See documents through their topics, ``size`` at most; also the counts of these, (B, A)."""
    if size == topics.num_topics:
        ids, own = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), counts.shape), counts
    else:
        ids, own = find(counts, size)
    columns = topics.table[words[:, :, None], ids[:, None, :]].swapaxes(1, 2)
    is_active = (num_active_topics(own[..., None]) > 0)[..., None]
    shift = finite_max(jnp.where(is_active, columns, -jnp.inf), axis=1)
    document = ActiveTopics(
        topics=ids,
        word_counts=word_counts,
        probs=jnp.where(is_active, jnp.exp(columns - shift), 0),
        shift=shift[:, 0],
        concentration=topics.concentration[ids],
    )
    return document, own


def over_all_topics(topics: Array, values: Array, num_topics: int) -> Array:
    """Values (B, A, ...) of some topics (B, A) among those of all, (B, K, ...)."""
    docs = jnp.arange(len(topics))[:, None]
    zeros = jnp.zeros((len(topics), num_topics, *values.shape[2:]), values.dtype)
    return zeros.at[docs, topics].add(values)  # the topic of an empty place may be another's


def _relative_probs(log_probs: Array) -> Array:
    """Probabilities of each word over the largest of it."""
    return jnp.exp(log_probs - finite_max(log_probs, axis=-1))


def _start_document(topics: Topics, words: Array, word_counts: Array) -> Array:
    """Sweep a document over all topics until few are active, and then over these."""
    table = topics.table if topics.probs is None else topics.probs
    rows = _relative_probs(table[words]) if topics.probs is None else table[words]

    def weighted(rows: Array, weights: Array) -> Array:
        norm = jnp.dot(rows, weights, precision="highest")
        ratios = jnp.where(norm > 0, word_counts / norm, 0)
        return weights * jnp.dot(ratios, rows, precision="highest")

    def sweeps(rows: Array, concentration: Array, counts: Array, enough: int, most: int) -> Array:
        def is_wide(state: tuple[Array, Array]) -> Array:
            return (state[0] < most) & (num_active_topics(state[1]) > enough)

        def one(state: tuple[Array, Array]) -> tuple[Array, Array]:
            return state[0] + 1, weighted(rows, topic_weights(state[1], concentration))

        return lax.while_loop(is_wide, one, (jnp.array(0), counts))[1]

    prior = topics.concentration / topics.concentration.max()
    counts = weighted(rows, jnp.maximum(prior, jnp.exp(least_log_weight(rows.dtype))))
    if topics.num_topics <= SIZES[0]:
        return counts
    if topics.num_topics <= LOOSE:
        return sweeps(rows, topics.concentration, counts, SIZES[0], WIDE_SWEEPS)
    counts = sweeps(rows, topics.concentration, counts, LOOSE, WIDE_SWEEPS // 2)
    (ids,), (own,) = active_topics(counts[None], LOOSE)
    own = sweeps(rows[:, ids], topics.concentration[ids], own, SIZES[0], WIDE_SWEEPS // 2)
    few = jnp.zeros_like(counts).at[ids].add(own)
    return jnp.where(num_active_topics(counts) <= LOOSE, few, counts)
