# SPDX-License-Identifier: Apache-2.0
"""Threefry-2x32 as one expression, which XLA compiles to one pass over the numbers.

JAX rolls the rounds of the cipher into a loop on a CPU, whose every turn reads and writes all
numbers. The bits are the same.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.random import define_prng_impl, threefry_prng_impl

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)
THREEFRY_ROUNDS = 20


def encrypt(key: Array, first: Array, second: Array) -> tuple[Array, Array]:
    """Both words of blocks of two words, 32-bit integers, under a key of two.

    References:
        Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, 2011, 5.2.
    """
    schedule = key[0], key[1], key[0] ^ key[1] ^ PARITY
    first, second = first + schedule[0], second + schedule[1]
    for four in range(THREEFRY_ROUNDS // 4):
        for bits in ROTATIONS[four % 2]:
            first = first + second
            second = first ^ ((second << np.uint32(bits)) | (second >> np.uint32(32 - bits)))
        first = first + schedule[(four + 1) % 3]
        second = second + schedule[(four + 2) % 3] + np.uint32(four + 1)
    return first, second


def _random_bits(key: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    """What JAX gives without ``jax_threefry_partitionable``: both words of each block."""
    size = math.prod(shape)
    if bit_width != 32 or not 0 < size < 2**31:
        with jax.threefry_partitionable(False):
            return threefry_prng_impl.random_bits(key, bit_width, shape)
    num_blocks = -(-size // 2)
    first = lax.iota(np.uint32, num_blocks)
    second = first + np.uint32(num_blocks)
    second = jnp.where(second < size, second, np.uint32(0))  # of the last block of an odd number
    return jnp.concatenate(encrypt(key, first, second))[:size].reshape(shape)


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    with jax.threefry_partitionable(False):
        return threefry_prng_impl.split(key, shape)


unrolled_threefry = define_prng_impl(
    key_shape=threefry_prng_impl.key_shape,
    seed=threefry_prng_impl.seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=threefry_prng_impl.fold_in,
    name="unrolled_threefry",
    tag="utf",
)
