# SPDX-License-Identifier: Apache-2.0
"""Rounding up or down at random, so that small changes are not lost on average."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat.ops.hash_bits import hash_bits

DROPPED_BITS = 16  # of a float32's 32 that bfloat16 has not
LARGEST = 0x7F7FFFFF  # bits of the largest finite float32


def round_to_bfloat16(x: Array, salt: ArrayLike) -> Array:
    r"""Round each number to one of the two nearest of bfloat16, with the right mean.

    .. math:: P(\mathrm{up}) = \frac{x - x_-}{x_+ - x_-}, \qquad E[\mathrm{rounded}] = x

    bfloat16 has the exponent of float32 and 8 bits of precision. Rounded to the nearest, a number
    to which less than 0.2 % is added never changes, so the steps of a small learning rate would be
    lost. The draws are pseudo-random: they follow from ``salt``, from the place of a number in the
    array and from its bits, and so differ among equal numbers.

    Infinities and NaN stay, and what is finite stays finite: numbers beyond the largest of bfloat16
    are rounded to it. Float64 is rounded to float32 first.

    Cost: O(size), some twenty integer operations for each number.

    Args:
        x: Floating point numbers, any shape.
        salt: 32 random bits, others for each call.

    Returns:
        Numbers in bfloat16, of the same shape.
    """
    x = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = bits & jnp.uint32(1 << 31)
    size = bits ^ sign
    place = lax.iota(jnp.uint32, math.prod(x.shape)).reshape(x.shape)
    noise = hash_bits(bits ^ hash_bits(place + jnp.asarray(salt, jnp.uint32)))
    up = size + (noise >> DROPPED_BITS)  # carries into the bits that stay
    kept = (sign | jnp.minimum(up, jnp.uint32(LARGEST))) >> DROPPED_BITS
    rounded = lax.bitcast_convert_type(kept.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
