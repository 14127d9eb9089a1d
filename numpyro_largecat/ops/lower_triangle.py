# SPDX-License-Identifier: Apache-2.0
"""Strictly lower triangular matrices stored as D (D - 1) / 2 numbers, and products with them."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def num_below_diagonal(size: int) -> int:
    """How many entries a matrix of ``size`` rows has below its diagonal."""
    return size * (size - 1) // 2


def strictly_lower(packed: Array, size: int) -> Array:
    """The matrix (..., D, D) of D (D - 1) / 2 numbers (..., D (D - 1) / 2), D = ``size``.

    Row D - 1 starts the numbers, and the other rows follow from both ends of what is left. So the
    matrix is made by joining, reshaping and masking: a scatter, and the scatter that a gather has
    as its derivative, are slow on a CPU.
    """
    if size == 1:
        return jnp.zeros((*packed.shape[:-1], 1, 1), packed.dtype)
    inner = size - 1
    square = jnp.concatenate([packed[..., inner:], packed[..., ::-1]], axis=-1)
    square = jnp.tril(square.reshape(*packed.shape[:-1], inner, inner))
    return jnp.pad(square, [(0, 0)] * (packed.ndim - 1) + [(1, 0), (0, 1)])


def apply(matrices: Array, vectors: Array) -> Array:
    """Each matrix times its own vector: (..., D, E) and (..., E) to (..., D)."""
    return (matrices * vectors[..., None, :]).sum(axis=-1)
