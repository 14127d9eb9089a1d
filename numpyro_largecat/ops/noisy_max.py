# SPDX-License-Identifier: Apache-2.0
"""Draws of a choice as the arg max of noisy utilities, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

MAX_NOISE_ENTRIES = 2**21  # at once; XLA needs several arrays of this size


def draw_gumbel(rng_key: Array, shape: tuple[int, ...]) -> Array:
    """Draw standard Gumbel noise of high dynamic range.

    With the usual range of ``jax.random.gumbel`` the top values of 10**6 draws in float32 tie, and
    ties would favour low classes.
    """
    return jax.random.gumbel(rng_key, shape, mode="high")


def noisy_max(
    rng_key: Array,
    utilities: Array,
    draw_noise: Callable[[Array, tuple[int, ...]], Array] = draw_gumbel,
    sample_shape: tuple[int, ...] = (),
) -> Array:
    """Draw the class whose utility plus noise is highest; from the softmax, with Gumbel noise.

    The maximum over classes is kept across chunks of classes, so that noise for all draws and all
    classes never exists at once.

    Cost: O(draws * K) time; memory for several times ``MAX_NOISE_ENTRIES`` entries of noise (or one
    class for each draw, if that is more).

    Args:
        rng_key: A JAX random key.
        utilities: Utilities, shape batch_shape + (K,); -inf for classes that are not available.
        draw_noise: Function of a random key and a shape.
        sample_shape: Leading shape of the draws.

    Returns:
        Classes, int32, shape sample_shape + batch_shape.
    """
    num_categories = utilities.shape[-1]
    shape = sample_shape + utilities.shape[:-1]
    size = min(num_categories, max(1, MAX_NOISE_ENTRIES // max(1, math.prod(shape))))
    num_chunks = -(-num_categories // size)

    def keep_best(best: tuple[Array, Array], chunk: Array) -> tuple[tuple[Array, Array], None]:
        start = jnp.minimum(chunk * size, num_categories - size)
        classes = start + jnp.arange(size)
        noise = draw_noise(jax.random.fold_in(rng_key, chunk), (*shape, size))
        noisy = lax.dynamic_slice_in_dim(utilities, start, size, axis=-1)
        noisy = noisy + noise.astype(utilities.dtype)
        noisy = jnp.where(classes >= chunk * size, noisy, -jnp.inf)  # the last chunk overlaps
        highest = noisy.max(axis=-1)
        arg = start + noisy.argmax(axis=-1)
        better = highest > best[0]
        kept = (jnp.where(better, highest, best[0]), jnp.where(better, arg, best[1]))
        return (kept[0], kept[1].astype(jnp.int32)), None

    start = (jnp.full(shape, -jnp.inf, utilities.dtype), jnp.zeros(shape, jnp.int32))
    (_, classes), _ = lax.scan(keep_best, start, jnp.arange(num_chunks))
    return classes
