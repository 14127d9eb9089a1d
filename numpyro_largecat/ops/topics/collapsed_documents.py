# SPDX-License-Identifier: Apache-2.0
"""Topics of the words of documents with frequencies and topics integrated out (CVB0).

How likely topic k is for a token of word u is what all other tokens say, those of its document and
those of its word, with their expected number in the topic in place of the number:

    r[u, k] proportional to (S[u, k] - r[u, k] + b) / (S[k] + V b) (a[k] + N[k] - r[u, k])
    N[k]    = sum_u c[u] r[u, k],

where S counts the tokens of a word in a topic. A token's share leaves S[u, k] as the last visit of
the document left it there, and not the sum S[k] over words, which hardly knows it. Without that, a
rare word holds itself in the topic that it started in.

See Asuncion, Welling, Smyth and Teh, On Smoothing and Inference for Topic Models, 2009, on CVB0.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import gammaln

from numpyro_largecat.ops.finfo import finfo
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.document_fit import block_size_for, in_blocks
from numpyro_largecat.ops.topics.sweeps import (
    einsum,
    length_term,
    next_largest,
    num_places,
    order_keys,
)

FIRST_SWEEPS = 10  # over all topics, before the largest go on
MOST_TOPICS = 32  # that go on, of a document that has no more than
WORDS_PER_TOPIC = 8  # as many words for each; of a longer one more
NUMBERS_IN_CACHE = 2**21  # words times topics of a block of documents on a CPU
NUMBERS_ELSEWHERE = 2**27


class TopicProbs(NamedTuple):
    """Probabilities of words in topics."""

    probs: Array  # (V, K), posterior means
    of_token: Array  # (K,), of one token in ``probs``
    least: Array  # (K,), of any word, by the prior alone


class Assignments(NamedTuple):
    """Topics of the words of documents, of which each has at most L."""

    shares: Array  # (N, U, L), of a token of the word; 0 in empty slots
    topics: Array  # (N, U, L), which topics


class CollapsedFit(NamedTuple):
    """Topics of the words of N documents."""

    counts: Array  # (N, K), expected tokens of each topic
    assignments: Assignments
    rest: Array  # (N,), the mean-field bound less that of log phi, nats


@partial(jax.jit, static_argnames="num_active")
def collapsed_fit(
    topics: TopicProbs,
    concentration: Array,
    words: Array,
    word_counts: Array,
    num_active: int,
    effort: Effort,
    last: Assignments | None = None,
    is_warm: bool | Array = False,
) -> CollapsedFit:
    """Sweep documents until their counts are those of their responsibilities, L topics a word.

    Cost per document of U words: O(U K) for each of ten first sweeps, one from a warm start; then
    the A largest topics go on, 32 or an eighth of the slots for words, whichever is more, at O(U A)
    for each further sweep. Others leave the document. Memory is O(U K) for a document at a time.

    Args:
        topics: Probability of each word in each topic, positive.
        concentration: Dirichlet concentration of the topic frequencies, (K,).
        words: Distinct words of each document, integers in [0, V), (N, U).
        word_counts: Tokens of each, 0 for an empty slot, (N, U).
        num_active: Largest number L of topics of a word.
        effort: How hard to solve; there are no restarts.
        last: What the last visit found, which is in ``topics``; None if they do not have it.
        is_warm: Start from ``last``. Code is compiled once for both.
    """
    word_counts = word_counts.astype(topics.probs.dtype)
    last = no_assignments(words.shape, num_active, topics.probs.dtype) if last is None else last

    def solve(block: tuple[Array, Array, Assignments]) -> CollapsedFit:
        words, tokens, last = block
        rows = _rows_without(topics, words, tokens, last)
        counts = _first_counts(rows, concentration, tokens, last, is_warm)
        own, ids = lax.top_k(counts, most_topics(words.shape[1], counts.shape[1]))
        rows, a = jnp.take_along_axis(rows, ids[:, None], axis=2), concentration[ids]
        shares = _converge(rows, a, tokens, _normalised(rows * (a + own)[:, None]), effort)
        places = _places_of_largest(shares, min(num_active, shares.shape[2]))
        if num_active < shares.shape[2]:
            rows = jnp.where(_is_in(places, shares.shape[2]), rows, 0)
            start = _normalised(jnp.where(rows > 0, shares, 0))
            shares = _converge(rows, a, tokens, start, effort)
        return _summary(shares, a, tokens, ids, places, (num_active, counts.shape))

    num_docs, num_slots = words.shape
    size = _block_size(num_docs, num_slots, topics.probs.shape[1])
    inputs = jax.tree.map(partial(_in_blocks, size), (words, word_counts, last))
    fits = lax.map(solve, inputs)
    found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: len(words)], fits)
    return found._replace(rest=found.rest + length_term(concentration, word_counts))


def no_assignments(shape: tuple[int, ...], num_active: int, dtype: jnp.dtype) -> Assignments:
    """Of documents (N, U) that were never visited."""
    shape = (*shape, num_active)
    return Assignments(jnp.zeros(shape, dtype), jnp.zeros(shape, jnp.int32))


def most_topics(num_slots: int, num_topics: int) -> int:
    """Topics of a document with so many slots for words that go on after the first sweeps."""
    return min(max(MOST_TOPICS, num_slots // WORDS_PER_TOPIC), num_topics)


def _block_size(num_docs: int, num_slots: int, num_topics: int) -> int:
    """Documents solved together: fewer where there are many topics."""
    most = NUMBERS_IN_CACHE if jax.default_backend() == "cpu" else NUMBERS_ELSEWHERE
    return min(block_size_for(num_docs), max(1, most // (num_slots * num_topics)))


def _in_blocks(size: int, values: Array) -> Array:
    """Fold (N, ...) to (N / size, size, ...) as ``in_blocks`` does, also with more axes."""
    (folded,) = in_blocks((values.reshape(len(values), -1),), size)
    return folded.reshape(*folded.shape[:2], *values.shape[1:])


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
    is_whole = is_warm | (most_topics(rows.shape[1], rows.shape[2]) == rows.shape[2])
    return lax.fori_loop(0, jnp.where(is_whole, 1, FIRST_SWEEPS), sweep, counts)


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


def _places_of_largest(shares: Array, num: int) -> Array:
    """Where so many largest shares of each word are, (B, U, num), largest first, ties by position.

    Cost: a pass over the shares for each, a fifth of the time of ``lax.top_k`` on a CPU.
    """
    num_topics = shares.shape[2]
    if num == num_topics:
        return jnp.broadcast_to(jnp.arange(num), shares.shape)
    keys = order_keys(shares.swapaxes(1, 2))

    def following(last: Array, _: None) -> tuple[Array, Array]:
        found = next_largest(keys, last)
        return found, num_topics - 1 - (found & (num_places(num_topics) - 1))

    above = jnp.full_like(keys[:, 0], np.iinfo(keys.dtype).max)
    return jnp.moveaxis(lax.scan(following, above, length=num)[1], 0, 2)


def _is_in(places: Array, num_topics: int) -> Array:
    """Whether a topic is at one of the places (B, U, L) of a word, (B, U, A)."""
    topics = jnp.arange(num_topics)

    def either(n: int, found: Array) -> Array:
        return found | (places[..., n, None] == topics)

    none = jnp.zeros((*places.shape[:2], num_topics), bool)
    return lax.fori_loop(0, places.shape[2], either, none)


def _summary(
    shares: Array,
    a: Array,
    tokens: Array,
    ids: Array,
    places: Array,
    sizes: tuple[int, tuple[int, ...]],
) -> CollapsedFit:
    """What a block of documents leaves, of shares (B, U, A) of the topics ``ids`` (B, A).

    Each word has those at its ``places`` (B, U, L). ``sizes`` are L and the shape of counts (B, K).

    With q(z) these shares and q(pi) the best Dirichlet, a + N, the bound is

        sum_u c[u] sum_k r[u, k] (log phi[u, k] - log r[u, k])
        + sum_k log(Gamma(a[k] + N[k]) / Gamma(a[k])) + ``length_term``.
    """
    (num_active, shape), counts = sizes, _counts_of(shares, tokens)
    entropy = -einsum("bu,bua->b", tokens, jax.scipy.special.xlogy(shares, shares))
    rises = gammaln(a + counts) - gammaln(a)

    def of_all(values: Array) -> Array:
        none = jnp.zeros(shape, values.dtype)
        return jnp.put_along_axis(none, ids, values, axis=1, inplace=False)

    largest = jnp.take_along_axis(shares, places, axis=2)
    topics = jnp.take_along_axis(ids[:, None], places, axis=2)
    missing = (0, 0), (0, 0), (0, num_active - largest.shape[2])
    return CollapsedFit(
        of_all(counts),
        Assignments(jnp.pad(largest, missing), jnp.pad(topics, missing)),
        entropy + rises.sum(axis=1),
    )
