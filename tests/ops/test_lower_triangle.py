# SPDX-License-Identifier: Apache-2.0
"""Strictly lower triangular matrices of packed numbers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_largecat.ops.lower_triangle import apply, num_below_diagonal, strictly_lower


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_each_number_has_one_place_below_the_diagonal(size):
    packed = np.arange(1.0, 1 + num_below_diagonal(size))
    packed = np.stack([packed, -packed])
    matrices = np.asarray(strictly_lower(jnp.asarray(packed), size))
    assert matrices.shape == (2, size, size)
    below = np.tril_indices(size, -1)
    for numbers, matrix in zip(packed, matrices, strict=True):
        np.testing.assert_array_equal(np.sort(matrix[below]), np.sort(numbers))
        assert not np.triu(matrix).any()


def test_apply_multiplies_each_matrix_with_its_own_vector():
    rng = np.random.default_rng(0)
    matrices, vectors = rng.normal(size=(4, 3, 2)), rng.normal(size=(4, 2))
    expected = np.stack([m @ v for m, v in zip(matrices, vectors, strict=True)])
    np.testing.assert_allclose(apply(jnp.asarray(matrices), jnp.asarray(vectors)), expected, 1e-5)
