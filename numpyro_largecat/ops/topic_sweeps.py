# SPDX-License-Identifier: Apache-2.0
"""Sweeps over the responsibilities and topic counts of a few documents, on their active topics.

A document has distinct words u = 1..U with counts c[u], topics k with log probabilities
C[k, u] of its words, and a Dirichlet prior a[k] of its topic frequencies. With E[log pi[k]] =
digamma(a[k] + N[k]) up to a constant that is the same for all k, a sweep is

    r[k, u] proportional to exp(E[log pi[k]] + C[k, u]) on the L largest of each word, else 0
    N[k]    = sum_u c[u] r[k, u].

No exponential of size U x K is needed: exp(E[log pi[k]]) exp(C[k, u]) is a product, so a sweep is
two matrix-vector products.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import gammaln

LEAST_COUNT = 1e-6  # tokens; a topic with no more has left the document
RESELECT_EVERY = 10  # sweeps between two choices of each word's L topics


class ActiveTopics(NamedTuple):
    """B documents, each seen through A of its topics."""

    topics: Array  # (B, A), which topics
    words: Array  # (B, U), rows of the table
    word_counts: Array  # (B, U), 0 where a slot is empty
    probs: Array  # (B, A, U), exp(C - shift)
    shift: Array  # (B, U), the largest C of each word over the active topics
    concentration: Array  # (B, A)
    total_concentration: Array  # (B,), over all K topics
    table: Array  # (V, K), C of all words and topics; read only where products underflow


class Selection(NamedTuple):
    """The topics that each word may use."""

    mask: Array  # (B, A, U)
    probs: Array  # (B, A, U), those of the document where the mask is set, else 0


class Sweep(NamedTuple):
    """One update of the responsibilities, r = exp(log_weights + C - log_norm)."""

    counts: Array  # (B, A), N
    log_weights: Array  # (B, A), E[log pi] up to a constant; -inf for topics that have left
    log_norm: Array  # (B, U)


def digamma(x: Array) -> Array:
    """Digamma for x > 0, to the precision of float32; to 1e-10 in float64.

    The recurrence to x + 6 and the asymptotic series there: half the time of the library's, which
    also covers negative numbers, and a sweep over many topics is mostly digammas.
    """
    y = x + 6
    z = 1 / (y * y)
    series = z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z / 132))))
    steps = 1 / x + 1 / (x + 1) + 1 / (x + 2) + 1 / (x + 3) + 1 / (x + 4) + 1 / (x + 5)
    return jnp.log(y) - 0.5 / y - series - steps


def log_topic_weights(counts: Array, concentration: Array) -> Array:
    """E[log pi] up to a constant, -inf for topics that have left the document."""
    log_weights = digamma(concentration + counts)
    return jnp.where(counts > LEAST_COUNT, log_weights, -jnp.inf)


def exact_weights(document: ActiveTopics, log_weights: Array) -> Array:
    """Log posterior weight of each topic for each word (Eq. 10), without the shift, (B, A, U)."""
    columns = document.table[document.words[:, :, None], document.topics[:, None, :]]
    return columns.swapaxes(1, 2) + log_weights[..., None]


def topic_weights(log_weights: Array) -> tuple[Array, Array]:
    """exp(log_weights) over the largest of each document, (B, A), and the largest, (B, 1)."""
    largest = finite_max(log_weights, axis=1)
    return jnp.exp(log_weights - largest), largest


def finite_max(values: Array, axis: int) -> Array:
    """The largest value along an axis, which is kept; 0 where all are -inf."""
    largest = values.max(axis=axis, keepdims=True)
    return jnp.where(jnp.isfinite(largest), largest, 0)


def all_safe(norm: Array, word_counts: Array) -> Array:
    """Whether the sums of products of all words are far from the smallest number."""
    return ((norm > smallest_safe(norm.dtype)) | (word_counts == 0)).all()


def smallest_safe(dtype: jnp.dtype) -> float:
    """Sums of products above it have lost nothing that their precision would show."""
    return float(np.finfo(dtype).tiny) * 1e8


def select(document: ActiveTopics, counts: Array, num_active: int) -> Selection:
    """Let each word use the ``num_active`` topics of largest weight, ties by position."""
    log_weights = log_topic_weights(counts, document.concentration)
    if num_active >= counts.shape[1]:
        mask = jnp.broadcast_to((log_weights > -jnp.inf)[..., None], document.probs.shape)
    else:
        scale, _ = topic_weights(log_weights)
        products = scale[..., None] * document.probs

        def from_logarithms() -> Array:
            weights = exact_weights(document, log_weights)
            return jnp.exp(weights - finite_max(weights, axis=1))

        is_safe = all_safe(products.max(axis=1), document.word_counts)
        weights = lax.cond(is_safe, lambda: products, from_logarithms)
        mask = _largest(weights, document.word_counts > 0, num_active)
    return Selection(mask, jnp.where(mask, document.probs, 0))


def _largest(weights: Array, is_word: Array, num_active: int) -> Array:
    """Mask of the largest weights of each word, which are not negative; 0 is never taken.

    The threshold is found by taking away the largest value ``num_active`` times, which is two to
    five times faster here than bisection, and thirty than ``top_k``. Values that are equal go
    together; where that left too many, they are taken one by one.
    """

    def lower(_: int, threshold: Array) -> Array:
        return jnp.where(weights < threshold[:, None], weights, 0).max(axis=1)

    start = jnp.full_like(weights[:, 0], jnp.inf)
    threshold = lax.fori_loop(0, num_active, lower, start)[:, None]
    mask = (weights >= threshold) & (weights > 0)
    too_many = (mask.sum(axis=1) > num_active) & is_word

    def one_by_one() -> Array:
        def take(_: int, taken: Array) -> Array:
            return taken | _first_largest(jnp.where(taken, 0, weights))

        return lax.fori_loop(0, num_active, take, jnp.zeros_like(mask)) & (weights > 0)

    return lax.cond(too_many.any(), one_by_one, lambda: mask)


def _first_largest(weights: Array) -> Array:
    """Mask of one largest weight of each word."""
    positions = jnp.arange(weights.shape[1])[:, None]
    largest = weights == weights.max(axis=1, keepdims=True)
    first = jnp.where(largest, positions, weights.shape[1]).min(axis=1, keepdims=True)
    return positions == first


def sweep(document: ActiveTopics, selection: Selection, counts: Array) -> Sweep:
    """Update the responsibilities given the counts, and then the counts.

    Where all products of a word underflow, which happens to words that only topics with almost no
    mass explain, the sweep is done with logarithms.
    """
    log_weights = log_topic_weights(counts, document.concentration)
    scale, largest = topic_weights(log_weights)
    norm = jnp.einsum("ba,bau->bu", scale, selection.probs)

    def by_products() -> tuple[Array, Array]:
        ratios = jnp.where(document.word_counts > 0, document.word_counts / norm, 0)
        new = scale * jnp.einsum("bau,bu->ba", selection.probs, ratios)
        return new, document.shift + jnp.log(norm) + largest

    def by_logarithms() -> tuple[Array, Array]:
        weights = jnp.where(selection.mask, exact_weights(document, log_weights), -jnp.inf)
        log_norm = jax.nn.logsumexp(weights, axis=1)
        shares = jnp.exp(weights - jnp.where(jnp.isfinite(log_norm), log_norm, jnp.inf)[:, None])
        return jnp.einsum("bau,bu->ba", shares, document.word_counts), log_norm

    is_safe = all_safe(norm, document.word_counts)
    new, log_norm = lax.cond(is_safe, by_products, by_logarithms)
    return Sweep(new, log_weights, log_norm)


def bound(document: ActiveTopics, done: Sweep) -> Array:
    """The bound of each document at the responsibilities of a sweep and their best Dirichlet, (B,).

    With theta = a + N the second line of Eq. 48 vanishes; C[k, u] - log r[k, u] is
    log_norm[u] - log_weights[k] wherever r > 0, so that data and entropy need no U x A terms:

        sum_u c[u] log_norm[u] - sum_k N[k] log_weights[k]
        + log Gamma(sum a) - log Gamma(sum a + sum c) + sum_k log(Gamma(a[k] + N[k]) / Gamma(a[k]))
    """
    c, a, n = document.word_counts, document.concentration, done.counts
    words = (c * jnp.where(c > 0, done.log_norm, 0)).sum(axis=1)
    entropy = (n * jnp.where(n > 0, done.log_weights, 0)).sum(axis=1)
    total = document.total_concentration
    prior = gammaln(total) - gammaln(total + c.sum(axis=1))
    return words - entropy + prior + (gammaln(a + n) - gammaln(a)).sum(axis=1)


def responsibilities(document: ActiveTopics, selection: Selection, done: Sweep) -> Array:
    """Responsibilities of a sweep, (B, A, U); zero in empty slots."""
    log_norm = jnp.where(jnp.isfinite(done.log_norm), done.log_norm, jnp.inf)
    shares = jnp.exp(exact_weights(document, done.log_weights) - log_norm[:, None])
    return jnp.where(selection.mask & (document.word_counts > 0)[:, None], shares, 0)


def converge(
    document: ActiveTopics,
    counts: Array,
    is_done: Array,
    num_active: int,
    *,
    num_sweeps: int | Array,
    tolerance: float | Array,
) -> Array:
    """Sweep until no count of a document changes by ``tolerance``; each stops on its own."""

    def not_all_done(state: tuple[Array, Array, Array]) -> Array:
        index, _, is_done = state
        return (index < num_sweeps) & ~is_done.all()

    def some_sweeps(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        index, counts, is_done = state
        selection = select(document, counts, num_active)
        end = jnp.minimum(index + RESELECT_EVERY, num_sweeps)

        def one(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            index, counts, is_done = state
            new = sweep(document, selection, counts).counts
            new = jnp.where(is_done[:, None], counts, new)
            change = jnp.abs(new - counts).max(axis=1)
            return index + 1, new, is_done | (change < tolerance)

        return lax.while_loop(
            lambda state: (state[0] < end) & ~state[2].all(), one, (index, counts, is_done)
        )

    return lax.while_loop(not_all_done, some_sweeps, (jnp.array(0), counts, is_done))[1]
