# SPDX-License-Identifier: Apache-2.0
"""Draw classes that are not labels, all equally likely."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_largecat.ops.subsampling import draw_from_intervals, skip_labels


class DrawnClasses(NamedTuple):
    """Classes that were drawn, and their weights."""

    classes: Array  # (S,), integers in [0, K); any where the weight is 0
    weights: Array  # (S,), 0 for padding


@partial(jax.jit, static_argnums=(2, 3))
def draw_uniform(
    rng_key: Array, present: Array, num_categories: int, num_sampled: int
) -> DrawnClasses:
    """Draw one class from each of S intervals of the classes that are not present.

    A class stands for its interval, see ``draw_from_intervals``. If fewer than ``num_sampled``
    remain, all of them come, with weight 1, and then padding.

    Cost: O(S log B), without a sort or a loop.

    Args:
        rng_key: A JAX random key.
        present: Sorted distinct classes, then padding equal to K, shape (B,).
        num_categories: Number of classes K.
        num_sampled: Number of draws S.
    """
    num_others = num_categories - (present < num_categories).sum(dtype=jnp.int32)
    ranks, weights = draw_from_intervals(rng_key, num_others, num_sampled)
    classes = skip_labels(ranks, present, num_categories)
    return DrawnClasses(jnp.where(weights > 0, classes, 0), weights.astype(jnp.result_type(float)))


@partial(jax.jit, static_argnums=(2, 3))
def draw_own(rng_key: Array, labels: Array, num_categories: int, num_sampled: int) -> DrawnClasses:
    """Draw for each label one class from each of S intervals of the other K - 1 classes.

    Shapes: classes (B, S); weights (S,), the same for each observation.

    Cost: O(B S).
    """

    def draw(rng_key: Array) -> tuple[Array, Array]:
        return draw_from_intervals(rng_key, num_categories - 1, num_sampled)

    ranks, weights = jax.vmap(draw)(jax.random.split(rng_key, labels.shape[0]))
    classes = ranks + (ranks >= labels[:, None])
    return DrawnClasses(classes, weights[0].astype(jnp.result_type(float)))
