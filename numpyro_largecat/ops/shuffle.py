# SPDX-License-Identifier: Apache-2.0
"""A random order of very many items of which any part can be had on its own."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.ops.hash_bits import hash_bits

NUM_ROUNDS = 24  # with 16, the orders of six items are not equally likely to 4 %


@partial(jax.jit, static_argnames="size")
def shuffled(rng_key: Array, places: Array, size: int) -> Array:
    """The items at some places of a random order of [0, size), which is never made whole.

    An item is a pair of digits. Each round shifts one digit by a hash of the other and of a random
    number, which can be undone, so that the rounds map all pairs one to one (a Feistel network). A
    pair past the last item goes through the rounds again until it is an item. The order is
    pseudo-random: all of it follows from the 64 bits of a key.

    Cost: O(places) time and memory, whatever ``size``.

    Args:
        rng_key: A JAX random key, which fixes the order.
        places: Integers in [0, size), any shape.
        size: Number of items, a Python int of at most 2**31 - 1.

    Returns:
        Integers in [0, size), int32, distinct for distinct places.

    References:
        Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002 (the generalised
        Feistel cipher, and cycle walking).
    """
    upper = math.isqrt(size - 1) + 1
    lower = -(-size // (2 * upper)) * 2  # even: else only half of all orders could come
    salts = jax.random.bits(rng_key, (NUM_ROUNDS,), jnp.uint32)

    def encipher(item: Array) -> Array:
        a, b = item // lower, item % lower
        for place in range(0, NUM_ROUNDS, 2):
            a = (a + hash_bits(b ^ salts[place]) % upper) % upper
            b = (b + hash_bits(a ^ salts[place + 1]) % lower) % lower
        return a * lower + b

    def again(state: tuple[Array, Array]) -> tuple[Array, Array]:
        items, goes_on = state
        items = jnp.where(goes_on, encipher(items), items)
        return items, items >= size

    items = jnp.asarray(places, jnp.uint32)
    # The first time is in the loop too, since the code of the rounds takes long to compile.
    start = items, jnp.ones(items.shape, bool)
    items, _ = lax.while_loop(lambda state: state[1].any(), again, start)
    return items.astype(jnp.int32)
