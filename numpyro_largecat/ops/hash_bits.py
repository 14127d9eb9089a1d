# SPDX-License-Identifier: Apache-2.0
"""Pseudo-random bits that follow from other bits."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def hash_bits(x: Array) -> Array:
    """Mix all bits of 32-bit integers, as the last steps of MurmurHash3 do."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
