# SPDX-License-Identifier: Apache-2.0
"""Expected counts of words in topics, from documents whose topic counts are known."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_largecat.ops.topics.document_fit import (
    Topics,
    at_least_size,
    block_size_for,
    in_blocks,
    over_all_topics,
    take_active,
)
from numpyro_largecat.ops.topics.sweeps import (
    ActiveTopics,
    active_topics,
    largest_topics,
    next_largest,
    num_active_topics,
    num_places,
    order_keys,
    responsibilities,
    topic_weights,
)

FEW = 32  # up to so many topics of a word its entries are added one by one, else as a row


class _Block(NamedTuple):
    """Some documents, and the counts that their responsibilities are computed from."""

    words: Array  # (B, U)
    word_counts: Array  # (B, U)
    basis: Array  # (B, K)

    def take_active(
        self, topics: Topics, size: int, *, largest: bool = False
    ) -> tuple[ActiveTopics, Array]:
        """See documents through their topics, ``size`` at most."""
        find = largest_topics if largest else active_topics
        return take_active(topics, self.words, self.word_counts, self.basis, size, find)


@partial(jax.jit, static_argnames=("num_active", "size"))
def word_topic_counts(
    log_probs: Array,
    concentration: Array,
    words: Array,
    word_counts: Array,
    basis: Array,
    *,
    num_active: int,
    scale: Array | None = None,
    size: int | None = None,
) -> Array:
    r"""Sum the expected tokens of each word in each topic over documents, (V, K).

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
        size: Number of topics that holds the active ones of each document, as ``least_size`` gives
            it; None to find it for each block.
    """
    topics = Topics(log_probs, concentration, None)
    scale = jnp.ones(words.shape[0], log_probs.dtype) if scale is None else scale

    def add(table: Array, block: tuple[Array, ...]) -> tuple[Array, None]:
        *arrays, scale = block
        documents = _Block(*arrays)
        tokens = (scale * documents.word_counts)[:, None]
        if num_active <= FEW:
            shares, ids = _largest_shares(topics, num_active, documents, size)
            return table.at[documents.words[:, None], ids].add(shares * tokens), None
        shares = _all_shares(topics, num_active, documents, size) * tokens
        return table.at[documents.words].add(shares.swapaxes(1, 2)), None

    word_counts = word_counts.astype(log_probs.dtype)
    order = num_active_topics(basis).argsort()  # so that few blocks need a large size
    documents = (x[order] for x in (words, word_counts, basis, scale[:, None]))
    blocks = in_blocks(tuple(documents), block_size_for(len(words)))
    return lax.scan(add, jnp.zeros_like(log_probs), blocks)[0]


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
    topics = Topics(log_probs, concentration, None)

    def solve(block: tuple[Array, ...]) -> tuple[Array, Array]:
        return _largest_shares(topics, num_active, _Block(*block), None, all_different=True)

    inputs = words, word_counts.astype(log_probs.dtype), basis
    shares, ids = lax.map(solve, in_blocks(inputs, block_size_for(len(words))))
    return tuple(x.reshape(-1, *x.shape[2:])[: len(words)].swapaxes(1, 2) for x in (shares, ids))


def _largest_shares(
    topics: Topics,
    num_active: int,
    block: _Block,
    size: int | None,
    *,
    all_different: bool = False,
) -> tuple[Array, Array]:
    """Responsibilities of each word's L topics, largest first, and which these are, (B, L, U).

    Where a word has fewer, some topic may be there twice unless they are to be ``all_different``.
    """

    def at(size: int) -> tuple[Array, Array]:
        if all_different:
            size = max(size, min(num_active, topics.num_topics))
        document, own = block.take_active(topics, size, largest=all_different)
        weights = topic_weights(own, document.concentration)[..., None] * document.probs
        keys = order_keys(weights)
        last = jnp.full_like(keys[:, 0], np.iinfo(keys.dtype).max)

        def following(last: Array, _: None) -> tuple[Array, Array]:
            following = next_largest(keys, last)
            return following, size - 1 - (following & (num_places(size) - 1))

        places = lax.scan(following, last, length=min(num_active, size))[1].swapaxes(0, 1)
        values = jnp.take_along_axis(weights, places, axis=1)
        norm = values.sum(axis=1, keepdims=True)
        is_word = (document.word_counts > 0)[:, None] & (norm > 0)
        values = jnp.where(is_word, values / norm, 0)
        ids = jnp.take_along_axis(document.topics[..., None], places, axis=1)
        missing = (0, 0), (0, num_active - places.shape[1]), (0, 0)
        return jnp.pad(values, missing), jnp.pad(ids, missing)

    return at_least_size(at, block.basis, size)


def _all_shares(topics: Topics, num_active: int, block: _Block, size: int | None) -> Array:
    """Responsibilities of all topics, (B, K, U)."""

    def at(size: int) -> Array:
        document, own = block.take_active(topics, size)
        shares = responsibilities(document, own, num_active)
        return over_all_topics(document.topics, shares, topics.num_topics)

    return at_least_size(at, block.basis, size)
