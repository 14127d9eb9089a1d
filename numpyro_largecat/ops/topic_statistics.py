# SPDX-License-Identifier: Apache-2.0
"""Expected counts of words in topics, from documents whose topic counts are known."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.ops.topic_document import (
    SIZES,
    Topics,
    block_size_for,
    in_blocks,
    num_active_topics,
    share_topics,
    take_active,
)
from numpyro_largecat.ops.topic_sweeps import ActiveTopics, responsibilities, select, sweep

FEW = 32  # up to so many topics of a word its entries are added one by one, else as a row


@partial(jax.jit, static_argnames="num_active", donate_argnames="initial")
def word_topic_counts(
    log_probs: Array,
    concentration: Array,
    words: Array,
    word_counts: Array,
    basis: Array,
    *,
    num_active: int,
    scale: Array | None = None,
    initial: Array | None = None,
) -> Array:
    r"""Add the expected tokens of each word in each topic over documents, (V, K).

    .. math:: S_{vk} = \sum_d s_d \sum_{u : v_{du} = v} c_{du} r_{duk}

    with the responsibilities that follow from ``basis``, as ``fit_documents`` gives it. This is
    the summary step, and also the gradient of the sum of s_d times the bound of each document in
    ``log_probs``.

    Cost: O(U A) per document, and O(U L) entries added to the table, which is the only array with
    V or K rows.

    Args:
        log_probs: As for ``fit_documents``, (V, K); so the next three.
        concentration: (K,).
        words: (N, U).
        word_counts: (N, U).
        basis: Counts that the responsibilities are computed from, (N, K).
        num_active: L.
        scale: Weight of each document, (N,); None for 1.
        initial: What to add to, (V, K); None for zeros.
    """
    topics = share_topics(log_probs, concentration, exponentiate=False)
    scale = jnp.ones(words.shape[0], log_probs.dtype) if scale is None else scale
    table = jnp.zeros_like(log_probs) if initial is None else initial
    num_slots = min(num_active, topics.num_topics)

    def tokens(size: int, words: Array, word_counts: Array, basis: Array) -> tuple[Array, Array]:
        """Responsibilities (B, S, U), and their topics of the same shape unless S is K."""
        block = words, word_counts, basis
        if num_slots <= FEW:
            return _sparse(topics, num_active, size, *block)
        document, shares = _shares(topics, num_active, size, *block)
        rows = jnp.zeros((len(words), topics.num_topics, words.shape[1]), shares.dtype)
        return rows.at[jnp.arange(len(words))[:, None], document.topics].set(shares), rows[:0]

    def add(table: Array, block: tuple[Array, ...]) -> tuple[Array, None]:
        words, word_counts, basis, scale = block
        sizes = (*(size for size in SIZES if size < topics.num_topics), topics.num_topics)
        index = (num_active_topics(basis).max() > jnp.array(sizes)).sum()
        branches = [partial(tokens, size) for size in sizes]
        shares, ids = lax.switch(index, branches, words, word_counts, basis)
        shares = shares * (scale * word_counts)[:, None]
        if num_slots > FEW:
            return table.at[words].add(shares.swapaxes(1, 2)), None
        return table.at[words[:, None], ids].add(shares), None

    word_counts = word_counts.astype(log_probs.dtype)
    size = block_size_for(words.shape[0])
    blocks = in_blocks((words, word_counts, basis, scale[:, None]), size)
    return lax.scan(add, table, blocks)[0]


def word_topics(
    log_probs: Array,
    concentration: Array,
    words: Array,
    word_counts: Array,
    basis: Array,
    *,
    num_active: int,
) -> tuple[Array, Array]:
    """Responsibilities of each word's L topics, and which these are, each (N, U, L).

    Cost: O(U A) per document. Arguments as for ``word_topic_counts``.
    """
    topics = share_topics(log_probs, concentration, exponentiate=False)

    def solve(block: tuple[Array, ...]) -> tuple[Array, Array]:
        sizes = (*(size for size in SIZES if size < topics.num_topics), topics.num_topics)
        index = (num_active_topics(block[2]).max() > jnp.array(sizes)).sum()
        return lax.switch(
            index, [partial(_sparse, topics, num_active, size) for size in sizes], *block
        )

    inputs = words, word_counts.astype(log_probs.dtype), basis
    shares, ids = lax.map(solve, in_blocks(inputs, block_size_for(len(words))))
    return tuple(x.reshape(-1, *x.shape[2:])[: len(words)].swapaxes(1, 2) for x in (shares, ids))


def _shares(
    topics: Topics, num_active: int, size: int, words: Array, word_counts: Array, basis: Array
) -> tuple[ActiveTopics, Array]:
    """Responsibilities on the active topics, (B, A, U)."""
    document, own = take_active(topics, words, word_counts, basis, size)
    selection = select(document, own, num_active)
    return document, responsibilities(document, selection, sweep(document, selection, own))


def _sparse(
    topics: Topics, num_active: int, size: int, words: Array, word_counts: Array, basis: Array
) -> tuple[Array, Array]:
    """Responsibilities of each word's topics, and which these are, (B, L, U)."""
    document, shares = _shares(topics, num_active, size, words, word_counts, basis)
    if size > num_active:
        return _entries(shares, document.topics, num_active)
    empty = ((0, 0), (0, num_active - size), (0, 0))
    ids = jnp.broadcast_to(document.topics[..., None], shares.shape)
    return jnp.pad(shares, empty), jnp.pad(ids, empty)


def _entries(shares: Array, topics: Array, num_slots: int) -> tuple[Array, Array]:
    """The ``num_slots`` largest of (B, A, U), and their topics, each (B, S, U)."""
    num_docs, num_topics, num_words = shares.shape
    places = jnp.arange(num_topics)[:, None]

    def take(slot: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rest, values, ids = state
        largest = rest.max(axis=1)
        place = jnp.where(rest == largest[:, None], places, num_topics).min(axis=1)
        values = values.at[:, slot].set(jnp.maximum(largest, 0))
        ids = ids.at[:, slot].set(jnp.take_along_axis(topics, place, axis=1))
        return jnp.where(places == place[:, None], -1, rest), values, ids

    shape = num_docs, num_slots, num_words
    state = shares, jnp.zeros(shape, shares.dtype), jnp.zeros(shape, topics.dtype)
    _, values, ids = lax.fori_loop(0, num_slots, take, state)
    return values, ids
