# SPDX-License-Identifier: Apache-2.0
"""A partition of the observations in minibatches, and draws of classes for all of them at once."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.ops.subsampling import draw_integers, skip_labels, sorted_distinct


class FixedBatches(NamedTuple):
    """J minibatches of B observations, the last one padded."""

    rows: Array  # (J, B), row ids, padded with N
    labels: Array  # (J, B), sorted distinct labels, padded with K
    label_rows: Array  # (J, B), place of each observation's label among them
    num_labels: Array  # (J,)


@partial(jax.jit, static_argnames=("batch_size", "num_categories"))
def fixed_batches(
    rng_key: Array, y: Array, *, batch_size: int, num_categories: int
) -> FixedBatches:
    """Partition N observations at random. Cost: O(N log N).

    References:
        Unbiased scalable softmax optimization, Appendix F.3.1.
    """
    num_batches = -(-len(y) // batch_size)
    rows = (
        jnp.full(num_batches * batch_size, len(y))
        .at[: len(y)]
        .set(jax.random.permutation(rng_key, len(y)))
    )
    rows = rows.reshape(num_batches, batch_size)
    own = y.at[rows].get(mode="fill", fill_value=num_categories)
    labels = jax.vmap(lambda row: sorted_distinct(row, num_categories))(own)
    label_rows = jax.vmap(jnp.searchsorted)(labels, own).astype(jnp.int32)
    return FixedBatches(rows, labels, label_rows, (labels < num_categories).sum(1))


@partial(jax.jit, static_argnames=("num_sampled", "num_categories"))
def draw_other_classes(
    rng_key: Array, batches: FixedBatches, *, num_sampled: int, num_categories: int
) -> Array:
    """Draw S distinct classes that are no labels for each batch, uniformly; shape (J, S).

    Cost: O(J S (S + log B)). ``num_sampled`` must be at most K - B.

    References:
        Bentley and Floyd, A sample of brilliance, Communications of the ACM 30, 1987, algorithm F2.
    """
    num_batches = batches.rows.shape[0]
    population = num_categories - batches.num_labels

    def draw(place: int, ranks: Array) -> Array:
        highest = population - num_sampled + place
        key = jax.random.fold_in(rng_key, place)
        rank = draw_integers(key, num_batches, highest + 1)
        is_taken = (ranks == rank[:, None]).any(1)
        return ranks.at[:, place].set(jnp.where(is_taken, highest, rank).astype(jnp.int32))

    none = jnp.full((num_batches, num_sampled), -1, jnp.int32)
    ranks = lax.fori_loop(0, num_sampled, draw, none)
    return jax.vmap(partial(skip_labels, num_categories=num_categories))(ranks, batches.labels)


def batch_touch_probability(
    batches: FixedBatches, *, num_sampled: int, num_categories: int
) -> Array:
    r"""Probability that a step on a random batch touches the row of each class, shape (K,).

    .. math:: \frac1J \sum_j \Big\{[k \in \mathrm{labels}_j]
              + [k \notin \mathrm{labels}_j]\,\frac{S}{K - U_j}\Big\}

    with U_j distinct labels in batch j. Cost: O(N + K).

    References:
        Unbiased scalable softmax optimization, Appendix F.3.1, the inverse of beta.
    """
    by_draw = num_sampled / (num_categories - batches.num_labels)  # (J,)
    more = jnp.broadcast_to((1 - by_draw)[:, None], batches.labels.shape)
    total = jnp.full(num_categories, by_draw.sum()).at[batches.labels].add(more, mode="drop")
    return total / len(by_draw)
