# SPDX-License-Identifier: Apache-2.0
"""Topics of the words of documents with frequencies and topics integrated out (CVB0).

How likely topic k is for a token of word u is what all other tokens say, those of its document and
those of its word, with their expected number in the topic in place of the number:

    r[u, k] proportional to (S[u, k] - r[u, k] + b) / (S[k] + V b) (a[k] + N[k] - r[u, k])
    N[k]    = sum_u c[u] r[u, k],

where S counts the tokens of a word in a topic. A token's share leaves S[u, k] as the last visit of
the document left it there, and not the sum S[k] over words, which hardly knows it. Without that, a
rare word holds itself in the topic that it started in.

Documents come in pieces of as many words, and some of them are a block, so that one program serves
documents of all lengths and little of it is padding. A block is solved by two programs:
``through_largest`` looks at all K topics and finds the A that each document uses, and
``collapsed_fit`` sweeps these. The second is most of the code and does not depend on K, so it is
compiled once for a fit that begins with more topics than it ends with.

See Asuncion, Welling, Smyth and Teh, On Smoothing and Inference for Topic Models, 2009, on CVB0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from numpy.typing import NDArray

from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.sweeps import (
    einsum,
    next_largest,
    num_places,
    order_keys,
)

FIRST_SWEEPS = 10  # over all topics, before the largest go on
FEWER_SWEEPS = 3  # as few times over the L topics of a word, which hardly move from there
MOST_TOPICS = 32  # that go on, of a document that has no more than
WORDS_PER_TOPIC = 16  # as many words for each; of a longer one more
AnyArray = Array | NDArray[Any]


class Pieces(NamedTuple):
    """A block of whole documents, each cut into pieces of P words, R pieces in all."""

    words: AnyArray  # (R, P), rows of the topics
    counts: AnyArray  # (R, P), tokens of each; 0 in an empty slot
    owners: AnyArray  # (R,), the document of a piece: its number in the block, ascending


class TopicProbs(NamedTuple):
    """Probabilities of words in topics."""

    probs: Array  # (V, K), posterior means
    of_token: Array  # (K,), of one token in ``probs``
    least: Array  # (K,), of any word, by the prior alone


class Assignments(NamedTuple):
    """Topics of the words of documents, of which each has at most L."""

    shares: Array | NDArray[np.floating]  # (R, P, L), of a token of the word; 0 in empty slots
    topics: Array | NDArray[np.int32]  # (R, P, L), which topics


class Largest(NamedTuple):
    """R documents at most, each seen through its A largest topics, largest first."""

    topics: Array  # (R, A), which topics
    probs: Array  # (R, P, A), of each word without the token that it is about; 0 in empty slots
    concentration: Array  # (R, A)
    counts: Array  # (R, A), expected tokens after the first sweeps


class CollapsedFit(NamedTuple):
    """Topics of the words of R documents at most."""

    topics: Array  # (R, A), the topics that were in question
    counts: Array  # (R, A), expected tokens of these; of all others 0
    assignments: Assignments


def through_largest(
    topics: TopicProbs,
    concentration: Array | NDArray[np.floating],
    pieces: Pieces,
    last: Assignments,
    is_warm: bool | Array,
    num_sweeps: int | Array,
    *,
    most: int,
) -> Largest:
    """The largest topics of each document, ``most`` or all.

    Cost: O(K) for each slot of a word and each sweep, and O(R P K) memory.

    Args:
        topics: Probability of each word in each topic, positive.
        concentration: Dirichlet concentration of the topic frequencies, (K,).
        pieces: The documents, with words in [0, V).
        last: What the last visit found, which is in ``topics``; ``no_assignments`` if there was
            none.
        is_warm: Start from ``last``. Code is compiled once for both.
        num_sweeps: Over all topics, to find the largest: one is enough from a warm start.
        most: Number of topics.
    """
    words, counts, owners = map(jnp.asarray, pieces)
    shares, last_topics = map(jnp.asarray, last)
    a, tokens = jnp.asarray(concentration), counts.astype(topics.probs.dtype)
    rows = _rows_without(topics, words, tokens, (shares, last_topics))
    start = jnp.where(is_warm, shares, 0), last_topics
    found = _first_counts(rows, a, (tokens, owners), start, jnp.asarray(num_sweeps))
    own, ids = lax.top_k(found, min(most, found.shape[1]))
    rows = jnp.take_along_axis(rows, ids[owners][:, None], axis=2)
    return Largest(ids, rows, a[ids], own)


def collapsed_fit(
    documents: Largest, pieces: Pieces, num_active: int, effort: Effort
) -> CollapsedFit:
    """Sweep documents until their counts are those of their responsibilities, L topics a word.

    Topics that are not among those of ``documents`` have none of a document.

    Cost: O(A) for each slot of a word and each sweep, of which there are a third as many again once
    words have L topics.

    Args:
        documents: From ``through_largest``.
        pieces: As there.
        num_active: Largest number L of topics of a word.
        effort: How hard to solve; there are no restarts.
    """
    ids, rows, a, own = documents
    tokens, owners = jnp.asarray(pieces.counts, rows.dtype), jnp.asarray(pieces.owners)
    start = _normalised(rows * (a + own)[owners][:, None])
    done = _converge_on_few(rows, a, (tokens, owners), start, num_active, effort)
    shares, counts, places = done
    found = jnp.take_along_axis(shares, places, axis=2)
    topics = jnp.take_along_axis(ids[owners][:, None], places, axis=2)
    missing = (0, 0), (0, 0), (0, num_active - places.shape[2])
    assignments = Assignments(jnp.pad(found, missing), jnp.pad(topics, missing))
    return CollapsedFit(ids, counts, assignments)


def no_assignments(shape: tuple[int, ...], num_active: int, dtype: DTypeLike) -> Assignments:
    """Of words of this shape that were never visited; arrays of NumPy."""
    shape = (*shape, num_active)
    return Assignments(np.zeros(shape, dtype), np.zeros(shape, np.int32))


def most_topics(num_words: int) -> int:
    """Topics of a document with so many different words that go on after the first sweeps."""
    return max(MOST_TOPICS, num_words // WORDS_PER_TOPIC)


def _rows_without(
    topics: TopicProbs, words: Array, tokens: Array, last: tuple[Array, Array]
) -> Array:
    """Probabilities of words (R, P, K) without the token that each is about; 0 in empty slots."""
    r, p = jnp.ogrid[: words.shape[0], : words.shape[1]]
    shares, last_topics = last
    own = shares * topics.of_token[last_topics]
    rows = topics.probs[words].at[r[..., None], p[..., None], last_topics].add(-own)
    rows = jnp.maximum(rows, topics.least)  # after rounding
    return jnp.where(tokens[..., None] > 0, rows, 0)


def _first_counts(
    rows: Array,
    concentration: Array,
    documents: tuple[Array, Array],
    start: tuple[Array, Array],
    num_sweeps: Array,
) -> Array:
    """Counts (R, K) that show which topics a document uses: with a token's own share in them.

    The weights of topics are then those of all words, and a sweep is two products of matrices.
    """
    tokens, owners = documents

    def sweep(_: Array, counts: Array) -> Array:
        weights = concentration + counts
        norm = einsum("rpk,rk->rp", rows, weights[owners])
        ratios = jnp.where(tokens > 0, tokens / norm, 0)
        return weights * _of_documents(einsum("rpk,rp->rk", rows, ratios), owners)

    shares, topics = start
    counts = jnp.zeros((len(rows), len(concentration)), rows.dtype)
    counts = counts.at[owners[:, None, None], topics].add(tokens[..., None] * shares)
    return lax.fori_loop(0, num_sweeps, sweep, counts)


def _of_documents(of_pieces: Array, owners: Array) -> Array:
    """Sums over the pieces of each document, (R, X)."""
    return jax.ops.segment_sum(of_pieces, owners, len(owners), indices_are_sorted=True)


def _converge_on_few(
    rows: Array,
    a: Array,
    documents: tuple[Array, Array],
    shares: Array,
    num_active: int,
    effort: Effort,
) -> tuple[Array, Array, Array]:
    """Shares (R, P, A) of which a word has few, their counts (R, A), and where they are, (R, P, L).

    All topics go to where they converge, and then the largest of each word by fewer sweeps.
    """
    num = min(num_active, shares.shape[2])
    State = tuple[Array, Array, Array, Array]

    def go_on(state: State) -> State:
        rows, shares, counts, _ = state
        places, is_largest = _largest_of(shares, num)
        rows = jnp.where(is_largest, rows, 0)
        return rows, _normalised(jnp.where(rows > 0, shares, 0)), counts, places

    def stage(i: Array, state: State) -> State:
        rows, shares, _, places = lax.cond(i == 0, lambda state: state, go_on, state)
        num_sweeps = jnp.where(i == 0, effort.num_sweeps, effort.num_sweeps // FEWER_SWEEPS)
        own = effort._replace(num_sweeps=num_sweeps)
        return rows, *_converge(rows, a, documents, shares, own), places

    # A loop, so that the code of a sweep is compiled once.
    everywhere = jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), (*shares.shape[:2], num))
    num_stages = 1 + (num < shares.shape[2])
    start = rows, shares, jnp.zeros(a.shape, shares.dtype), everywhere
    return lax.fori_loop(0, num_stages, stage, start)[1:]


class _State(NamedTuple):
    """Where each document of a block is."""

    number: Array  # of sweeps
    shares: Array  # (R, P, A)
    counts: Array  # (R, A)
    goes_on: Array  # (R,), whether its counts still change


def _converge(
    rows: Array, a: Array, documents: tuple[Array, Array], shares: Array, effort: Effort
) -> tuple[Array, Array]:
    """Sweep until no count (R, A) changes by ``tolerance`` tokens, for shares (R, P, A) and these.

    A document that is done waits, so that its result does not depend on those beside it.
    """
    owners = documents[1]
    a_of_words = a[owners][:, None]

    def sweep(state: _State) -> _State:
        of_others = state.counts[owners][:, None] - state.shares
        of_others = jnp.maximum(of_others, 0)  # rounding may take a little more than there is
        shares = _normalised(rows * (a_of_words + of_others))
        shares = jnp.where(state.goes_on[owners][:, None, None], shares, state.shares)
        counts = _counts_of(shares, documents)
        change = jnp.abs(counts - state.counts).max(axis=1)
        return _State(state.number + 1, shares, counts, change > effort.tolerance)

    counts, goes_on = _counts_of(shares, documents), jnp.ones(len(shares), bool)
    done = lax.while_loop(
        lambda state: (state.number < effort.num_sweeps) & state.goes_on.any(),
        sweep,
        _State(jnp.array(0), shares, counts, goes_on),
    )
    return done.shares, done.counts


def _counts_of(shares: Array, documents: tuple[Array, Array]) -> Array:
    tokens, owners = documents
    return _of_documents(einsum("rp,rpa->ra", tokens, shares), owners)


def _normalised(weights: Array) -> Array:
    """Shares that sum to 1; 0 where no weight is above 0, as in an empty slot."""
    norm = weights.sum(axis=2, keepdims=True)
    return jnp.where(norm > 0, weights / norm, 0)


def _largest_of(shares: Array, num: int) -> tuple[Array, Array]:
    """Where so many largest shares of each word are, and whether each is one of them.

    Places are (R, P, num), largest first; of equal ones the first is larger.

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
