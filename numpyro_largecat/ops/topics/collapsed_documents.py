# SPDX-License-Identifier: Apache-2.0
"""Topics of the words of documents with frequencies and topics integrated out (CVB0).

How likely topic k is for a token of word u is what all other tokens say, those of its document and
those of its word, with their expected number in the topic in place of the number:

    r[u, k] proportional to (S[u, k] - r[u, k] + b) / (S[k] + V b) (a[k] + N[k] - r[u, k])
    N[k]    = sum_u c[u] r[u, k],

where S counts the tokens of a word in a topic. A token's share leaves S[u, k] as the last visit of
the document left it there, and not the sum S[k] over words, which hardly knows it. Without that, a
rare word holds itself in the topic that it started in.

A document is solved in two programs: ``through_largest`` looks at all K topics and finds the A that
the document uses, and ``collapsed_fit`` sweeps these. The second is most of the code and does not
depend on K, so it is compiled once for a fit that begins with more topics than it ends with.

See Asuncion, Welling, Smyth and Teh, On Smoothing and Inference for Topic Models, 2009, on CVB0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from numpy.typing import NDArray

from numpyro_largecat.ops.finfo import finfo
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.document_fit import block_size_for, in_blocks
from numpyro_largecat.ops.topics.sweeps import (
    einsum,
    next_largest,
    num_places,
    order_keys,
)

FIRST_SWEEPS = 10  # over all topics, before the largest go on
MOST_TOPICS = 32  # that go on, of a document that has no more than
WORDS_PER_TOPIC = 8  # as many words for each; of a longer one more
NUMBERS_IN_CACHE = 2**21  # words times topics of a block of documents on a CPU
NUMBERS_ELSEWHERE = 2**27
T = TypeVar("T")


class TopicProbs(NamedTuple):
    """Probabilities of words in topics."""

    probs: Array  # (V, K), posterior means
    of_token: Array  # (K,), of one token in ``probs``
    least: Array  # (K,), of any word, by the prior alone


class Assignments(NamedTuple):
    """Topics of the words of documents, of which each has at most L."""

    shares: Array | NDArray[np.floating]  # (N, U, L), of a token of the word; 0 in empty slots
    topics: Array | NDArray[np.int32]  # (N, U, L), which topics


class Largest(NamedTuple):
    """N documents, each seen through its A largest topics."""

    topics: Array  # (N, A), which topics
    probs: Array  # (N, U, A), of each word without the token that it is about; 0 in empty slots
    concentration: Array  # (N, A)
    counts: Array  # (N, A), expected tokens after the first sweeps


class CollapsedFit(NamedTuple):
    """Topics of the words of N documents."""

    topics: Array  # (N, A), the topics that were in question
    counts: Array  # (N, A), expected tokens of these; of all others 0
    assignments: Assignments


def through_largest(
    topics: TopicProbs,
    concentration: Array | NDArray[np.floating],
    words: Array,
    word_counts: Array,
    last: Assignments,
    is_warm: bool | Array,
) -> Largest:
    """The A largest topics of each document, 32 or an eighth of its slots for words if more.

    Cost per document of U words: O(U K) for each of ten first sweeps, one from a warm start. Memory
    is O(U K) for a document at a time, and O(U A) for each.

    Args:
        topics: Probability of each word in each topic, positive.
        concentration: Dirichlet concentration of the topic frequencies, (K,).
        words: Distinct words of each document, integers in [0, V), (N, U).
        word_counts: Tokens of each, 0 for an empty slot, (N, U).
        last: What the last visit found, which is in ``topics``; ``no_assignments`` if there was
            none.
        is_warm: Start from ``last``. Code is compiled once for both.
    """
    word_counts = word_counts.astype(topics.probs.dtype)
    a = jnp.asarray(concentration)

    def look(block: tuple[Array, Array, Assignments]) -> Largest:
        words, tokens, last = block
        rows = _rows_without(topics, words, tokens, last)
        counts = _first_counts(rows, a, tokens, last, is_warm)
        own, ids = lax.top_k(counts, min(most_topics(words.shape[1]), counts.shape[1]))
        rows = jnp.take_along_axis(rows, ids[:, None], axis=2)
        return Largest(ids, rows, a[ids], own)

    num_docs, num_slots = words.shape
    size = _block_size(num_docs, num_slots, topics.probs.shape[1])
    return _map_blocks(look, size, (words, word_counts, last))


def collapsed_fit(
    documents: Largest, word_counts: Array, num_active: int, effort: Effort
) -> CollapsedFit:
    """Sweep documents until their counts are those of their responsibilities, L topics a word.

    Topics that are not among those of ``documents`` have none of a document.

    Cost per document of U words: O(U A) for each sweep. Memory beside the arguments is that of a
    few documents at a time, and of what is returned.

    Args:
        documents: From ``through_largest``.
        word_counts: Tokens of each word, 0 for an empty slot, (N, U).
        num_active: Largest number L of topics of a word.
        effort: How hard to solve; there are no restarts.
    """
    word_counts = word_counts.astype(documents.probs.dtype)

    def solve(block: tuple[Largest, Array]) -> CollapsedFit:
        (ids, rows, a, own), tokens = block
        start = _normalised(rows * (a + own)[:, None])
        shares, places = _converge_on_few(rows, a, tokens, start, num_active, effort)
        largest = jnp.take_along_axis(shares, places, axis=2)
        topics = jnp.take_along_axis(ids[:, None], places, axis=2)
        missing = (0, 0), (0, 0), (0, num_active - places.shape[2])
        found = Assignments(jnp.pad(largest, missing), jnp.pad(topics, missing))
        return CollapsedFit(ids, _counts_of(shares, tokens), found)

    size = _block_size(*documents.probs.shape)
    return _map_blocks(solve, size, (documents, word_counts))


def no_assignments(shape: tuple[int, ...], num_active: int, dtype: DTypeLike) -> Assignments:
    """Of documents (N, U) that were never visited; arrays of NumPy."""
    shape = (*shape, num_active)
    return Assignments(np.zeros(shape, dtype), np.zeros(shape, np.int32))


def most_topics(num_slots: int) -> int:
    """Topics of a document with so many slots for words that go on after the first sweeps."""
    return max(MOST_TOPICS, num_slots // WORDS_PER_TOPIC)


def _block_size(num_docs: int, num_slots: int, num_topics: int) -> int:
    """Documents solved together: fewer where there are many topics."""
    most = NUMBERS_IN_CACHE if jax.default_backend() == "cpu" else NUMBERS_ELSEWHERE
    return min(block_size_for(num_docs), max(1, most // (num_slots * num_topics)))


def _map_blocks(function: Callable[[Any], T], size: int, documents: Any) -> T:
    """``function`` of so many documents at a time; documents that fill the last block are empty."""
    num_docs = len(jax.tree.leaves(documents)[0])

    def fold(values: Array) -> Array:  # (N, ...) to (N / size, size, ...)
        (folded,) = in_blocks((values.reshape(num_docs, -1),), size)
        return folded.reshape(*folded.shape[:2], *values.shape[1:])

    found = lax.map(function, jax.tree.map(fold, documents))
    unfolded: T = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_docs], found)
    return unfolded


def _rows_without(topics: TopicProbs, words: Array, tokens: Array, last: Assignments) -> Array:
    """Probabilities of words (B, U, K) without the token that each is about; 0 in empty slots."""
    b, u = jnp.ogrid[: words.shape[0], : words.shape[1]]
    own = last.shares * topics.of_token[last.topics]
    rows = topics.probs[words].at[b[..., None], u[..., None], last.topics].add(-own)
    rows = jnp.maximum(rows, topics.least)  # after rounding
    return jnp.where(tokens[..., None] > 0, rows, 0)


def _first_counts(
    rows: Array, concentration: Array, tokens: Array, last: Assignments, is_warm: bool | Array
) -> Array:
    """Counts (B, K) that show which topics a document uses: with a token's own share in them.

    The weights of topics are then those of all words, and a sweep is two products of matrices.
    """

    def sweep(_: Array, counts: Array) -> Array:
        weights = concentration + counts
        norm = einsum("buk,bk->bu", rows, weights)
        ratios = jnp.where(tokens > 0, tokens / norm, 0)
        return weights * einsum("buk,bu->bk", rows, ratios)

    places = jnp.arange(len(rows))[:, None, None], last.topics
    shares = jnp.where(is_warm, last.shares, 0)
    counts = jnp.zeros((len(rows), len(concentration)), rows.dtype)
    counts = counts.at[places].add(tokens[..., None] * shares)
    is_whole = is_warm | (most_topics(rows.shape[1]) >= rows.shape[2])
    return lax.fori_loop(0, jnp.where(is_whole, 1, FIRST_SWEEPS), sweep, counts)


def _converge_on_few(
    rows: Array, a: Array, tokens: Array, shares: Array, num_active: int, effort: Effort
) -> tuple[Array, Array]:
    """Shares (B, U, A) of which a word has few, and where these are, (B, U, L).

    All topics go to where they converge, and then the largest of each word.
    """
    num = min(num_active, shares.shape[2])

    def go_on(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rows, shares, _ = state
        places, is_largest = _largest_of(shares, num)
        rows = jnp.where(is_largest, rows, 0)
        return rows, _normalised(jnp.where(rows > 0, shares, 0)), places

    def stage(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rows, shares, places = lax.cond(i == 0, lambda state: state, go_on, state)
        return rows, _converge(rows, a, tokens, shares, effort), places

    # A loop, so that the code of a sweep is compiled once.
    everywhere = jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), (*shares.shape[:2], num))
    num_stages = 1 + (num < shares.shape[2])
    _, shares, places = lax.fori_loop(0, num_stages, stage, (rows, shares, everywhere))
    return shares, places


class _State(NamedTuple):
    """Where each of B documents is."""

    number: Array  # of sweeps
    shares: Array  # (B, U, A)
    counts: Array  # (B, A)
    goes_on: Array  # (B,), whether its counts still change


def _converge(rows: Array, a: Array, tokens: Array, shares: Array, effort: Effort) -> Array:
    """Sweep until no topic's count changes by ``tolerance`` tokens, for shares (B, U, A).

    A document that is done waits, so that its result does not depend on those beside it.
    """
    tiny = finfo(shares.dtype).tiny  # rounding may take a little more than there is

    def sweep(state: _State) -> _State:
        of_others = (a + state.counts)[:, None] - state.shares
        shares = _normalised(rows * jnp.maximum(of_others, tiny))
        shares = jnp.where(state.goes_on[:, None, None], shares, state.shares)
        counts = _counts_of(shares, tokens)
        change = jnp.abs(counts - state.counts).max(axis=1)
        return _State(state.number + 1, shares, counts, change > effort.tolerance)

    counts, goes_on = _counts_of(shares, tokens), jnp.ones(len(shares), bool)
    done = lax.while_loop(
        lambda state: (state.number < effort.num_sweeps) & state.goes_on.any(),
        sweep,
        _State(jnp.array(0), shares, counts, goes_on),
    )
    return done.shares


def _counts_of(shares: Array, tokens: Array) -> Array:
    return einsum("bu,bua->ba", tokens, shares)


def _normalised(weights: Array) -> Array:
    """Shares that sum to 1; 0 where no weight is above 0, as in an empty slot."""
    norm = weights.sum(axis=2, keepdims=True)
    return jnp.where(norm > 0, weights / norm, 0)


def _largest_of(shares: Array, num: int) -> tuple[Array, Array]:
    """Where so many largest shares of each word are, and whether each is one of them.

    Places are (B, U, num), largest first; of equal ones the first is larger.

    Cost: a pass over the shares for each, a fifth of the time of ``lax.top_k`` on a CPU.
    """
    num_topics = shares.shape[2]
    keys = order_keys(shares.swapaxes(1, 2))

    def following(last: Array, _: None) -> tuple[Array, Array]:
        found = next_largest(keys, last)
        place = num_topics - 1 - (found & (num_places(num_topics) - 1))
        return found, place.astype(jnp.int32)

    above = jnp.full_like(keys[:, 0], np.iinfo(keys.dtype).max)
    least, places = lax.scan(following, above, length=num)
    return jnp.moveaxis(places, 0, 2), (keys >= least[:, None]).swapaxes(1, 2)
