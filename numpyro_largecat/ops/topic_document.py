# SPDX-License-Identifier: Apache-2.0
"""The best responsibilities and topic counts of documents, each on the topics that it uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import gammaln

from numpyro_largecat.ops.topic_search import Effort, search
from numpyro_largecat.ops.topic_sweeps import (
    ActiveTopics,
    finite_max,
    least_log_weight,
    length_term,
    num_active_topics,
    topic_weights,
)

SIZES = (32, 128)  # numbers of active topics that code is compiled for, and K
LOOSE = 64  # sweeps are over all topics until no more than this are active
FIRST_SWEEPS = 10  # at most, over all topics and then over LOOSE, before words have but L topics
USUAL = Effort()
T = TypeVar("T")


class DocumentFit(NamedTuple):
    """Best local variables of N documents."""

    bound: Array  # (N,), nats
    counts: Array  # (N, K), expected tokens of each topic
    basis: Array  # (N, K), the counts that the responsibilities were computed from


class Topics(NamedTuple):
    """What all documents share."""

    table: Array  # (V, K), C
    concentration: Array  # (K,)
    log_gamma: Array  # (K,), of the concentration
    probs: Array | None = None  # (V, K), exp(C - largest C of the word)

    @property
    def num_topics(self) -> int:
        """K."""
        return self.table.shape[1]


@jax.jit
def fit_documents(
    log_probs: Array,
    concentration: Array,
    words: Array,
    word_counts: Array,
    num_active: int | Array,
    effort: Effort = USUAL,
    initial: Array | None = None,
) -> DocumentFit:
    r"""Maximise the bound of each document over its responsibilities and topic frequencies.

    .. math:: \max_{r, \theta} \; \sum_u c_u \sum_k r_{uk} (C_{ku} - \log r_{uk})
              + E_q[\log p(z \mid \pi) + \log p(\pi) - \log q(\pi)], \qquad
              \lvert \{k : r_{uk} > 0\} \rvert \le L

    Cost per document of U words: O(U K) for the first sweeps, ten at most, until at most 64 topics
    are active, and O(U A) for each further one on its active topics. A is one of a few sizes that
    code is compiled for, the least that holds the active topics of all documents of a block; so
    no document loses one. Code is compiled once for all L and efforts.

    Args:
        log_probs: Log probability of each word in each topic, or its expectation, (V, K).
        concentration: Dirichlet concentration of the topic frequencies, (K,).
        words: Distinct words of each document, integers in [0, V), (N, U).
        word_counts: Tokens of each, whole numbers, 0 for an empty slot, (N, U).
        num_active: Largest number L of topics with positive responsibility for a word.
        effort: How hard to solve.
        initial: Topic counts to start from, (N, K); None starts from the prior mean.
    """
    log_probs, concentration = jnp.asarray(log_probs), jnp.asarray(concentration)
    words, word_counts = jnp.asarray(words), jnp.asarray(word_counts, log_probs.dtype)
    num_docs, num_words = words.shape
    topics = Topics(log_probs, concentration, gammaln(concentration))
    if initial is None and num_docs * num_words >= log_probs.shape[0]:  # they use most words
        topics = topics._replace(probs=_relative_probs(log_probs))

    def solve(block: tuple[Array, ...]) -> DocumentFit:
        words, word_counts, *start = block
        counts = start[0] if start else _start(topics, words, word_counts)

        def at(size: int) -> DocumentFit:
            document, own = take_active(topics, words, word_counts, counts, size)
            found = search(document, own, num_active, Effort(*effort))

            def all_topics(values: Array) -> Array:
                return jnp.put_along_axis(
                    jnp.zeros_like(counts), document.topics, values, axis=1, inplace=False
                )

            return DocumentFit(found.bound, all_topics(found.counts), all_topics(found.basis))

        return at_least_size(at, counts)

    inputs = (words, word_counts) if initial is None else (words, word_counts, initial)
    fits = lax.map(solve, in_blocks(inputs, block_size_for(num_docs)))
    found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_docs], fits)
    return found._replace(bound=found.bound + length_term(concentration, word_counts))


def block_size_for(num_docs: int) -> int:
    """Documents solved together: on a CPU what a core's cache holds, elsewhere many."""
    return min(num_docs, 16 if jax.default_backend() == "cpu" else 512)


def in_blocks(arrays: tuple[Array, ...], size: int) -> tuple[Array, ...]:
    """Fold (N, X) to (N / size, size, X); documents that fill the last block are empty."""
    num_docs = arrays[0].shape[0]
    num_blocks = -(-num_docs // size)
    padding = ((0, num_blocks * size - num_docs), (0, 0))
    return tuple(jnp.pad(x, padding).reshape(num_blocks, size, x.shape[1]) for x in arrays)


def at_least_size(solve: Callable[[int], T], counts: Array) -> T:
    """Solve at the least size that holds the active topics of all documents of a block (B, K)."""
    num_topics = counts.shape[1]
    small, middle = SIZES
    sizes = [small] * (small < num_topics) + [middle] * (4 * middle <= num_topics) + [num_topics]
    index = (num_active_topics(counts).max() > jnp.array(sizes)).sum()
    return lax.switch(index, [partial(solve, size) for size in sizes])


def take_active(
    topics: Topics, words: Array, word_counts: Array, counts: Array, size: int
) -> tuple[ActiveTopics, Array]:
    """See documents through their ``size`` largest topics; also the counts of these, (B, A)."""
    if size == topics.num_topics:
        ids, own = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), counts.shape), counts
    else:
        own, ids = lax.top_k(counts, size)
    columns = topics.table[words[:, :, None], ids[:, None, :]].swapaxes(1, 2)
    is_active = (num_active_topics(own[..., None]) > 0)[..., None]
    shift = finite_max(jnp.where(is_active, columns, -jnp.inf), axis=1)
    document = ActiveTopics(
        topics=ids,
        word_counts=word_counts,
        probs=jnp.where(is_active, jnp.exp(columns - shift), 0),
        shift=shift[:, 0],
        concentration=topics.concentration[ids],
        log_gamma=topics.log_gamma[ids],
    )
    return document, own


def _relative_probs(log_probs: Array) -> Array:
    """Probabilities of each word over the largest of it."""
    return jnp.exp(log_probs - finite_max(log_probs, axis=-1))


def _start(topics: Topics, words: Array, word_counts: Array) -> Array:
    """Counts of a block after some sweeps from the prior mean, (B, K)."""
    start = partial(_start_document, topics)
    if jax.default_backend() == "cpu":  # the rows of one document fill a cache
        return lax.map(start, (words, word_counts))
    return lax.map(start, (words, word_counts), batch_size=64)


def _start_document(topics: Topics, document: tuple[Array, Array]) -> Array:
    """Sweep a document over all topics until few are active, and then over these."""
    words, word_counts = document
    table = topics.table if topics.probs is None else topics.probs
    rows = _relative_probs(table[words]) if topics.probs is None else table[words]

    def weighted(rows: Array, weights: Array) -> Array:
        norm = jnp.dot(rows, weights, precision="highest")
        ratios = jnp.where(norm > 0, word_counts / norm, 0)
        return weights * jnp.dot(ratios, rows, precision="highest")

    def sweeps(rows: Array, concentration: Array, counts: Array, enough: int) -> Array:
        def is_wide(state: tuple[Array, Array]) -> Array:
            return (state[0] < FIRST_SWEEPS) & (num_active_topics(state[1]) > enough)

        def one(state: tuple[Array, Array]) -> tuple[Array, Array]:
            return state[0] + 1, weighted(rows, topic_weights(state[1], concentration))

        return lax.while_loop(is_wide, one, (jnp.array(0), counts))[1]

    prior = topics.concentration / topics.concentration.max()
    counts = weighted(rows, jnp.maximum(prior, jnp.exp(least_log_weight(rows.dtype))))
    if topics.num_topics <= SIZES[0]:
        return counts
    if topics.num_topics <= LOOSE:
        return sweeps(rows, topics.concentration, counts, SIZES[0])
    counts = sweeps(rows, topics.concentration, counts, LOOSE)
    own, ids = lax.top_k(counts, LOOSE)
    own = sweeps(rows[:, ids], topics.concentration[ids], own, SIZES[0])
    few = jnp.zeros_like(counts).at[ids].set(own)
    return jnp.where(num_active_topics(counts) <= LOOSE, few, counts)
