# SPDX-License-Identifier: Apache-2.0
"""Statistics to start from: one observation for each component."""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_largecat._checks import check_one_of
from numpyro_largecat.mixtures.conjugate_family import ConjugateFamily
from numpyro_largecat.mixtures.global_step import Statistics, map_in_groups

Start = Literal["kmeans++", "random"]
CANDIDATES = 5  # rows to choose from, for each component
LEAST_CANDIDATES = 1000


def num_candidates(num_components: int) -> int:
    """Rows that ``seed_statistics`` wants to choose from."""
    return max(CANDIDATES * num_components, LEAST_CANDIDATES)


def seed_statistics(
    rng_key: Array, family: ConjugateFamily, rows: np.ndarray, num_components: int, start: Start
) -> Statistics:
    """Give each component one row, with weight one; where rows run out, the prior alone.

    Cost: none for "random"; for "kmeans++" O(K) divergences for each of the rows.
    """
    check_one_of("start", start, ("kmeans++", "random"), or_else=" or an earlier fit")
    num_seeds = min(num_components, len(rows))
    with jax.enable_x64(True):
        rows = np.asarray(rows, np.float64)
        if start == "kmeans++":
            rows = rows[np.asarray(_spread_seeds(family, rows, rng_key, num_seeds=num_seeds))]
        features = np.asarray(family.features(jnp.asarray(rows[:num_seeds])))
    statistics = np.zeros((num_components, features.shape[1]))
    statistics[:num_seeds] = features
    return Statistics((np.arange(num_components) < num_seeds).astype(np.float64), statistics)


@partial(jax.jit, static_argnames="num_seeds")
def _spread_seeds(family: ConjugateFamily, rows: Array, rng_key: Array, *, num_seeds: int) -> Array:
    """Choose rows by k-means++ with the Bregman divergence of ``family.divergence``.

    Each observation stands for the prior with that observation added, since alone it may have no
    estimate. The next row is drawn with probability proportional to its divergence from the nearest
    one so far.
    """
    natural = family.prior() + family.features(rows)
    of_slope = jax.value_and_grad(family.max_log_density)
    own = map_in_groups(family.max_log_density, natural)

    def choose(place: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        chosen, nearest = state
        # Where no row is left that differs, any will do.
        is_left = (nearest > 0) & (place > 0)
        logits = jnp.where(is_left.any(), jnp.log(jnp.where(is_left, nearest, 0)), 0)
        row = jax.random.categorical(jax.random.fold_in(rng_key, place), logits)
        value, slope = of_slope(natural[row])
        divergence = own - value - (natural @ slope - natural[row] @ slope)
        nearest = jnp.minimum(nearest, jnp.maximum(divergence, 0))
        return chosen.at[place].set(row), nearest.at[row].set(0)

    start = jnp.zeros(num_seeds, int), jnp.full(len(rows), jnp.inf, natural.dtype)
    return lax.fori_loop(0, num_seeds, choose, start)[0]
