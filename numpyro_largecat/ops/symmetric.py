# SPDX-License-Identifier: Apache-2.0
"""Symmetric matrices stored as their upper triangles, and their log determinants."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike


def packed_products(x: Array) -> Array:
    """Products x_i x_j for i <= j, shape (..., D (D + 1) / 2)."""
    rows, columns = np.triu_indices(x.shape[-1])
    return x[..., rows] * x[..., columns]


def pack(matrix: ArrayLike) -> Array:
    """Upper triangle of a symmetric matrix, row by row: (..., D, D) to (..., D (D + 1) / 2)."""
    rows, columns = np.triu_indices(jnp.shape(matrix)[-1])
    return jnp.asarray(matrix)[..., rows, columns]


def unpack(packed: Array) -> Array:
    """Undo ``pack``. Its derivative in an entry off the diagonal counts both copies."""
    size = (math.isqrt(8 * packed.shape[-1] + 1) - 1) // 2
    rows, columns = np.triu_indices(size)
    place = np.zeros((size, size), int)
    place[rows, columns] = place[columns, rows] = np.arange(len(rows))
    return packed[..., place]


@jax.custom_jvp
def log_det(matrix: Array) -> Array:
    """Log determinant of a positive definite matrix (D, D); NaN if it is not positive definite.

    The gradient is the inverse. Cost: O(D^3), in D rank-one updates. These are ordinary operations.
    On a CPU, batches of LAPACK's factors share a pool of threads with the operations around them:
    slow where other programs run, and two batches at once may wait for each other for ever.
    """
    return _inverse_and_log_det(matrix)[1]


@log_det.defjvp
def _log_det_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse, value = _inverse_and_log_det(primals[0])
    return value, (inverse * tangents[0]).sum()


def _inverse_and_log_det(matrix: Array) -> tuple[Array, Array]:
    """Eliminate the rows in turn; the pivots are those of the Cholesky factor, squared."""
    places = jnp.arange(matrix.shape[-1])

    def eliminate(j: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, log_pivots = state
        is_row, pivot = places == j, rest[j, j]
        row = jnp.where(is_row, 1, rest[j]) / pivot
        others = jnp.where(is_row, 0, rest) - rest[:, j, None] * row
        return jnp.where(is_row[:, None], row, others), log_pivots + jnp.log(pivot)

    start = matrix, jnp.zeros_like(matrix[0, 0])
    return lax.fori_loop(0, len(places), eliminate, start)
