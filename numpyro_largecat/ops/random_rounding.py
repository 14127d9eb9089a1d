# SPDX-License-Identifier: Apache-2.0
"""Rounding up or down at random, so that small changes are not lost on average."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat.ops.hash_bits import hash_bits

DROPPED_BITS = 16  # of a float32's 32 that bfloat16 has not


def round_to_bfloat16(x: Array, salt: ArrayLike) -> Array:
    r"""Round each number to one of the two nearest of bfloat16, with the right mean.

    .. math:: P(\mathrm{up}) = \frac{x - x_-}{x_+ - x_-}, \qquad E[\mathrm{rounded}] = x

    bfloat16 has the exponent of float32 and 8 bits of precision. Rounded to the nearest, a number
    to which less than 0.2 % is added never changes, so the steps of a small learning rate would be
    lost. The draws are pseudo-random: they follow from ``salt`` and from the bits of the number, so
    that equal numbers are rounded alike under one salt, wherever they are in an array.

    Infinities and NaN stay. Float64 is rounded to float32 first.

    Cost: O(size), some ten integer operations for each number.

    Args:
        x: Floating point numbers, any shape.
        salt: An integer, another for each call, such as the number of the step.

    Returns:
        Numbers in bfloat16, of the same shape.
    """
    x = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    noise = hash_bits(bits ^ hash_bits(jnp.asarray(salt).astype(jnp.uint32) + 1))
    up = bits + (noise >> DROPPED_BITS)  # carries into the bits that stay
    kept = (up >> DROPPED_BITS).astype(jnp.uint16)
    rounded = lax.bitcast_convert_type(kept, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
