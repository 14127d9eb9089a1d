# SPDX-License-Identifier: Apache-2.0
"""Symmetric matrices stored as their upper triangles, and their log determinants."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
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
    """Log determinant of a positive definite matrix; NaN where it is not positive definite."""
    return _log_diagonal(jnp.linalg.cholesky(matrix))


@log_det.defjvp
def _log_det_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (matrix,), (tangent,) = primals, tangents
    factor = jnp.linalg.cholesky(matrix)
    identity = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    half = jax.scipy.linalg.solve_triangular(factor, identity, lower=True)
    inverse = jnp.swapaxes(half, -1, -2) @ half
    return _log_diagonal(factor), (inverse * tangent).sum((-1, -2))


def _log_diagonal(factor: Array) -> Array:
    return 2 * jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum(-1)
