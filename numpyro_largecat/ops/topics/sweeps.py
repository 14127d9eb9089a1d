# SPDX-License-Identifier: Apache-2.0
"""Sweeps over the responsibilities and topic counts of a few documents, on their active topics.

A document has distinct words u = 1..U with counts c[u], topics k with log probabilities
C[k, u] of its words, and a Dirichlet prior a[k] of its topic frequencies. With E[log pi[k]] =
digamma(a[k] + N[k]) up to a constant that is the same for all k, a sweep is

    r[k, u] proportional to exp(E[log pi[k]] + C[k, u]) on the L largest of each word, else 0
    N[k]    = sum_u c[u] r[k, u].

No exponential of size U x K is needed: exp(E[log pi[k]]) exp(C[k, u]) is a product, so a sweep is
two matrix-vector products.

Products underflow where the only topics that explain a word have almost no mass. Therefore no
E[log pi] is taken for lower than a third of the smallest exponent below the largest one, 29 nats in
float32. A topic as far down has responsibilities of 1e-13 and leaves anyhow, unless it alone
explains a word; then the word lifts it in the same sweep. Since counts are 1 at least, some topic
that explains a word keeps a K-th of a token of it, and the products stay representable.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_largecat.ops.topics.gamma_rises import log_gamma_rise

LEAST_COUNT = 1e-6  # tokens; a topic with no more has left the document
einsum = partial(jnp.einsum, precision="highest")


class ActiveTopics(NamedTuple):
    """B documents, each seen through A of its topics."""

    topics: Array  # (B, A), which topics
    word_counts: Array  # (B, U), 0 where a slot is empty
    probs: Array  # (B, A, U), exp(C - shift)
    shift: Array  # (B, U), the largest C of each word over topics in the document
    concentration: Array  # (B, A)


class Sweep(NamedTuple):
    """One update of the responsibilities, r = weights exp(C - shift) / norm."""

    counts: Array  # (B, A), N
    weights: Array  # (B, A), exp(E[log pi]), the largest 1; 0 for topics that have left
    norm: Array  # (B, U)


def digamma(x: Array) -> Array:
    """Digamma for x > 0, to the precision of float32; to 1e-9 in float64.

    The asymptotic series at x + 6, less the sum of 1 / (x + i) for i = 0..5, of which pairs have
    y = x (x + 5), y + 4 and y + 6 below. Half the time of the library's, which also covers negative
    numbers; a sweep over many topics is mostly digammas. And few divisions: XLA compiles each as a
    program of its own.
    """
    few = jnp.minimum(x, 1e15)  # above it pairs add nothing, and squares would be infinite
    y, inverse = few * (few + 5), 1 / (x + 6)
    z = inverse * inverse
    series = z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z / 132))))
    pairs = (2 * few + 5) * (1 / y + 2 * (y + 5) / ((y + 4) * (y + 6)))
    return jnp.log(x + 6) - 0.5 * inverse - series - pairs


def topic_weights(counts: Array, concentration: Array) -> Array:
    """exp(E[log pi]) over its largest value; 0 for topics that have left the document."""
    is_active = counts > LEAST_COUNT
    lowest = jnp.finfo(counts.dtype).min  # not -inf, which would be the largest if none is active
    log_weights = jnp.where(is_active, digamma(concentration + counts), lowest)
    log_weights -= log_weights.max(axis=-1, keepdims=True)
    least = least_log_weight(log_weights.dtype)
    return jnp.where(is_active, jnp.exp(jnp.maximum(log_weights, least)), 0)


def least_log_weight(dtype: jnp.dtype) -> float:
    """A third of the exponent of the smallest number: what three such factors still represent."""
    return float(np.log(jnp.finfo(dtype).tiny)) / 3


def finite_max(values: Array, axis: int) -> Array:
    """The largest value along an axis, which is kept; 0 where all are -inf."""
    largest = values.max(axis=axis, keepdims=True)
    return jnp.where(jnp.isfinite(largest), largest, 0)


def num_active_topics(counts: Array) -> Array:
    """Number of topics that are in a document."""
    return (counts > LEAST_COUNT).sum(axis=-1)


def active_topics(counts: Array, size: int) -> tuple[Array, Array]:
    """The topics of each document, (B, K), and their counts, each (B, size).

    They keep their order. Places that are left over have topic 0 and no count: so arrays over all
    topics are made by adding. Twice to five times as fast as the ``size`` largest on a CPU.
    """
    is_active = counts > LEAST_COUNT
    (ids,) = jax.vmap(partial(jnp.nonzero, size=size, fill_value=0))(is_active)
    ids = ids.astype(jnp.int32)
    is_taken = jnp.arange(size) < is_active.sum(axis=-1, keepdims=True)
    return ids, jnp.where(is_taken, jnp.take_along_axis(counts, ids, axis=-1), 0)


def largest_topics(counts: Array, size: int) -> tuple[Array, Array]:
    """The ``size`` largest topics of each document, all different, and their counts."""
    own, ids = lax.top_k(counts, size)
    return ids, own


def order_keys(weights: Array) -> Array:
    """Integers in the order of weights (B, A, U) of 0 or more, all different along axis 1.

    The last bits of a weight give way to its position, so that of equal weights, and of those that
    differ by less than A units in the last place, the first is the largest. An integer's
    remainder by ``num_places(A)`` is A - 1 less its position.
    """
    kind = jnp.int64 if weights.dtype == jnp.float64 else jnp.int32
    num_topics = weights.shape[1]
    bits = lax.bitcast_convert_type(weights, kind)
    places = jnp.arange(num_topics - 1, -1, -1, dtype=kind)[:, None]
    return (bits & -num_places(num_topics)) | places


def num_places(num_topics: int) -> int:
    """The power of two that positions of so many topics need."""
    return 1 << (num_topics - 1).bit_length()


def next_largest(keys: Array, last: Array) -> Array:
    """The largest of keys (B, A, U) that is below ``last`` (B, U); -1 if there is none."""
    return jnp.where(keys < last[:, None], keys, -1).max(axis=1)


def select(document: ActiveTopics, counts: Array, num_active: int | Array) -> Array:
    """Let each word use the ``num_active`` topics of largest weight, ties by position.

    Cost: a pass over (B, A, U) for each of them, and none if no document has more topics.

    Returns:
        The probabilities (B, A, U), 0 where a topic was not taken.
    """
    weights = topic_weights(counts, document.concentration)
    keys = order_keys(weights[..., None] * document.probs)
    is_free = num_active >= num_active_topics(counts).max()
    threshold = lax.fori_loop(
        0,
        jnp.where(is_free, 0, num_active),
        lambda _, last: next_largest(keys, last),
        jnp.full_like(keys[:, 0], np.iinfo(keys.dtype).max),
    )
    return jnp.where(is_free | (keys >= threshold[:, None]), document.probs, 0)


def sweep(document: ActiveTopics, probs: Array, counts: Array) -> Sweep:
    """Update the responsibilities given the counts, and then the counts.

    Args:
        document: The documents.
        probs: Their probabilities of the topics that each word may use, from ``select``.
        counts: (B, A).
    """
    weights = topic_weights(counts, document.concentration)
    norm = einsum("ba,bau->bu", weights, probs)
    ratios = jnp.where(norm > 0, document.word_counts / norm, 0)
    return Sweep(weights * einsum("bau,bu->ba", probs, ratios), weights, norm)


def length_term(total: Array, word_counts: Array) -> Array:
    """The part of the bounds that only depends on the lengths of documents (N, U), (N,).

    ``total`` is the sum of the concentrations of all topics.
    """
    num_tokens = word_counts.sum(axis=1)
    return -log_gamma_rise(total, num_tokens)


def bound(document: ActiveTopics, done: Sweep) -> Array:
    """The bound of each document at the responsibilities of a sweep and their best Dirichlet, (B,).

    With theta = a + N the second line of Eq. 48 vanishes; C[k, u] - log r[k, u] is
    log(norm[u]) + shift[u] - log(weights[k]) wherever r > 0, so that data and entropy need no U x A
    terms:

        sum_u c[u] (log(norm[u]) + shift[u]) - sum_k N[k] log(weights[k])
        + sum_k log(Gamma(a[k] + N[k]) / Gamma(a[k]))

    and a constant of the document, ``length_term``, which is left out.
    """
    c, a, n = document.word_counts, document.concentration, done.counts
    log_norm = jnp.log(jnp.where(c > 0, done.norm, 1)) + document.shift
    words = (c * jnp.where(c > 0, log_norm, 0)).sum(axis=1)
    entropy = (n * jnp.log(jnp.where(done.weights > 0, done.weights, 1))).sum(axis=1)
    prior = log_gamma_rise(a, n)
    return words - entropy + prior.sum(axis=1)


def responsibilities(document: ActiveTopics, counts: Array, num_active: int | Array) -> Array:
    """Best responsibilities given the counts, (B, A, U); 0 in empty slots."""
    probs = select(document, counts, num_active)
    done = sweep(document, probs, counts)
    is_word = (document.word_counts > 0) & (done.norm > 0)
    return done.weights[..., None] * probs * jnp.where(is_word, 1 / done.norm, 0)[:, None]
