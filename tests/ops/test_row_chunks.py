# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_largecat.ops.row_chunks import map_rows

TABLE = np.arange(14, dtype=np.float32).reshape(7, 2)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 100])
def test_chunks_change_neither_results_nor_gradients(chunk_size):
    def total(table):
        both = map_rows(lambda r: (jnp.sin(table[r]), 2 * r), 7, chunk_size)
        return both[0].sum(), both

    slope, (found, doubled) = jax.jit(jax.grad(total, has_aux=True))(TABLE)
    np.testing.assert_array_equal(doubled, 2 * np.arange(7))
    np.testing.assert_allclose(found, np.sin(TABLE), rtol=1e-6)
    np.testing.assert_allclose(slope, np.cos(TABLE), rtol=1e-5)


def test_chunks_are_of_equal_size():
    """So that the last is not nearly all padding."""
    sizes = []
    jax.eval_shape(lambda: map_rows(lambda r: sizes.append(r.shape[0]) or r, 9, 8))
    assert set(sizes) == {5}
