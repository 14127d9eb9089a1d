# SPDX-License-Identifier: Apache-2.0
"""Strictly lower triangular matrices, full or of low rank, and products with them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


def num_below_diagonal(size: int) -> int:
    """How many entries a matrix of ``size`` rows has below its diagonal."""
    return size * (size - 1) // 2


class FullTriangle(NamedTuple):
    """Any strictly lower triangular matrices."""

    matrix: Array  # (..., D, D)

    @classmethod
    def of_packed(cls, packed: Array, size: int) -> FullTriangle:
        """The matrices of D (D - 1) / 2 numbers (..., D (D - 1) / 2), D = ``size``.

        Row D - 1 starts the numbers, and the other rows follow from both ends of what is left. So
        a matrix is made by joining, reshaping and masking: a scatter, and the scatter that a gather
        has as its derivative, are slow on a CPU.
        """
        if size == 1:
            return cls(jnp.zeros((*packed.shape[:-1], 1, 1), packed.dtype))
        inner = size - 1
        square = jnp.concatenate([packed[..., inner:], packed[..., ::-1]], axis=-1)
        square = jnp.tril(square.reshape(*packed.shape[:-1], inner, inner))
        return cls(jnp.pad(square, [(0, 0)] * (packed.ndim - 1) + [(1, 0), (0, 1)]))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the vectors that they multiply, (..., D)."""
        return self.matrix.shape[:-1]

    def apply(self, vectors: Array) -> Array:
        """Each matrix times its own vector, (..., D)."""
        return apply(self.matrix, vectors)

    def squared_norms(self) -> Array:
        """Of each row of the matrices, (..., D)."""
        return (self.matrix**2).sum(axis=-1)


class LowRankTriangle(NamedTuple):
    r"""What is below the diagonal of matrices of rank R, :math:`U V^T`.

    With a diagonal besides, these are the Cholesky factors of a diagonal and a matrix of rank R,
    and more.
    """

    left: Array  # (..., D, R), U
    right: Array  # (..., D, R), V

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the vectors that they multiply, (..., D)."""
        return self.left.shape[:-1]

    @property
    def matrix(self) -> Array:
        """The matrices themselves, (..., D, D)."""
        product = jnp.matmul(self.left, self.right.swapaxes(-1, -2), precision="highest")
        return jnp.tril(product, -1)

    def apply(self, vectors: Array) -> Array:
        """Each matrix times its own vector, (..., D); no matrix is made."""
        return (self.left * _sums_before(self.right * vectors[..., None])).sum(axis=-1)

    def squared_norms(self) -> Array:
        """Of each row of the matrices, (..., D): R^2 numbers for each, and no matrix is made."""
        products = self.right[..., :, None] * self.right[..., None, :]
        flat = products.reshape(*products.shape[:-2], -1)
        before = _sums_before(flat).reshape(products.shape)
        return (self.left[..., :, None] * self.left[..., None, :] * before).sum(axis=(-2, -1))


def _sums_before(values: Array) -> Array:
    """For each entry of the last axis but one, the sum of those before it: (..., D, R)."""
    size = values.shape[-2]
    are_before = jnp.tril(jnp.ones((size, size), values.dtype), -1)
    return jnp.einsum("de,...er->...dr", are_before, values, precision=lax.Precision.HIGHEST)


def apply(matrices: Array, vectors: Array) -> Array:
    """Each matrix times its own vector: (..., D, E) and (..., E) to (..., D)."""
    return (matrices * vectors[..., None, :]).sum(axis=-1)
