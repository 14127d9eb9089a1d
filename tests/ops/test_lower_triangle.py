# SPDX-License-Identifier: Apache-2.0
"""Strictly lower triangular matrices of packed numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_largecat.ops.lower_triangle import (
    FullTriangle,
    LowRankTriangle,
    apply,
    num_below_diagonal,
)
from tests.memory import temp_bytes


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_each_number_has_one_place_below_the_diagonal(size):
    packed = np.arange(1.0, 1 + num_below_diagonal(size))
    packed = np.stack([packed, -packed])
    matrices = np.asarray(jax.jit(lambda x: FullTriangle.of_packed(x, size).matrix)(packed))
    assert matrices.shape == (2, size, size)
    below = np.tril_indices(size, -1)
    for numbers, matrix in zip(packed, matrices, strict=True):
        np.testing.assert_array_equal(np.sort(matrix[below]), np.sort(numbers))
        assert not np.triu(matrix).any()


def test_apply_multiplies_each_matrix_with_its_own_vector():
    rng = np.random.default_rng(0)
    matrices, vectors = rng.normal(size=(4, 3, 2)), rng.normal(size=(4, 2))
    expected = np.stack([m @ v for m, v in zip(matrices, vectors, strict=True)])
    np.testing.assert_allclose(jax.jit(apply)(matrices, vectors), expected, 1e-5)


def low_rank(size=6, rank=2):
    left, right = np.random.default_rng(1).normal(size=(2, 5, size, rank)).astype(np.float32)
    return LowRankTriangle(jnp.asarray(left), jnp.asarray(right))


def test_low_rank_is_what_is_below_the_diagonal_of_a_product():
    lower = low_rank()
    expected = np.stack([np.tril(u @ v.T, -1) for u, v in zip(*lower, strict=True)])
    np.testing.assert_allclose(jax.jit(lambda lower: lower.matrix)(lower), expected, rtol=1e-5)


def test_low_rank_and_full_triangles_give_the_same():
    lower, vectors = low_rank(), np.random.default_rng(2).normal(size=(3, 5, 6)).astype(np.float32)

    @jax.jit
    def both(lower, vectors):
        full = FullTriangle(lower.matrix)
        assert lower.shape == full.shape == (5, 6)
        return [(x.apply(vectors), x.squared_norms()) for x in (lower, full)]

    (products, norms), (expected, own_norms) = both(lower, vectors)
    np.testing.assert_allclose(products, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norms, own_norms, rtol=1e-4)


def test_low_rank_makes_no_matrix_of_a_row():
    rows, size = 1_000, 100

    def used(left, right, vectors):
        lower = LowRankTriangle(left, right)
        return (lower.apply(vectors) + lower.squared_norms()).sum()

    arrays = [jax.ShapeDtypeStruct((rows, size, 2), jnp.float32)] * 2
    arrays.append(jax.ShapeDtypeStruct((rows, size), jnp.float32))
    assert temp_bytes(jax.grad(used), *arrays) < 4 * rows * size * size / 2
