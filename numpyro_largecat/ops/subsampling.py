# SPDX-License-Identifier: Apache-2.0
"""Draws without replacement whose cost follows the draws, not the population."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax


@partial(jax.jit, static_argnames=("num_draws", "min_population", "max_population"))
def draw_without_replacement(
    rng_key: Array,
    population: Array | int,
    num_draws: int,
    *,
    min_population: int,
    max_population: int,
) -> Array:
    """Draw ``num_draws`` distinct integers, uniformly, from [0, population).

    Every subset of that size is equally likely: draws that repeat an earlier one are redrawn
    until none does, and since relabelling the population relabels the result, no subset can be
    favoured. Where the population may be less than three times the draws, so that redrawing would
    take long, a random permutation of it is cut instead.

    If ``population < num_draws``, the first ``population`` entries are all its members and the
    others are arbitrary.

    Cost: O(n log n) time and O(n) memory with n = num_draws + max_population - min_population,
    whatever ``population``.

    Args:
        rng_key: A JAX random key.
        population: Number of members, an int or an integer scalar that may be traced.
        num_draws: Number of draws, a Python int of at least 1.
        min_population: A Python int known to be at most ``population``.
        max_population: A Python int known to be at least ``population``.

    Returns:
        Distinct integers in no particular order, shape (num_draws,), int32.
    """
    if min_population >= 3 * num_draws:
        return _draw_by_rejection(rng_key, population, num_draws)
    return _draw_by_permutation(rng_key, population, num_draws, max_population)


def _draw_by_rejection(rng_key: Array, population: Array | int, num_draws: int) -> Array:
    def redraw(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rng_key, draws, repeated = state
        rng_key, draw_key = jax.random.split(rng_key)
        fresh = jax.random.randint(draw_key, (num_draws,), 0, population, jnp.int32)
        draws = jnp.where(repeated, fresh, draws)
        return rng_key, draws, _repeats_an_earlier_one(draws)

    start = (rng_key, jnp.zeros(num_draws, jnp.int32), jnp.ones(num_draws, bool))
    _, draws, _ = lax.while_loop(lambda state: state[2].any(), redraw, start)
    return draws


def _repeats_an_earlier_one(values: Array) -> Array:
    order = jnp.argsort(values, stable=True)
    ordered = values[order]
    same_as_previous = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] == ordered[:-1]])
    return jnp.zeros(values.shape, bool).at[order].set(same_as_previous, unique_indices=True)


def _draw_by_permutation(
    rng_key: Array, population: Array | int, num_draws: int, max_population: int
) -> Array:
    length = max(max_population, num_draws)
    members = jnp.arange(length, dtype=jnp.int32)
    priority = jax.random.permutation(rng_key, length)
    return jnp.argsort(jnp.where(members < population, priority, length))[:num_draws].astype(
        jnp.int32
    )


def skip_labels(ranks: Array, labels: Array, num_categories: int) -> Array:
    """Turn ranks among the classes that are not labels into class ids.

    With sorted distinct labels l_0 < l_1 < ..., exactly ``l_j - j`` of the other classes come
    before l_j, so the class of rank r is ``r + #{j : l_j - j <= r}``.

    Args:
        ranks: Ranks in [0, num_categories - U), shape (S,).
        labels: U sorted distinct labels, then padding equal to ``num_categories``, shape (B,).
        num_categories: Number of classes K.

    Returns:
        Class ids that are not labels, shape (S,).
    """
    others_before = jnp.where(
        labels < num_categories, labels - jnp.arange(labels.shape[0]), num_categories
    )
    return ranks + jnp.searchsorted(others_before, ranks, side="right").astype(ranks.dtype)
