# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_largecat.ops.running_top import RunningTop

start = jax.jit(RunningTop.start, static_argnums=range(4))
include, finish = jax.jit(RunningTop.include), jax.jit(RunningTop.finish)


@pytest.mark.parametrize("num_top", [1, 3, 30])
@pytest.mark.parametrize("num_values", [5, 64, 1003, 1024])
def test_the_largest_values_of_all_chunks_are_kept(num_top, num_values):
    """Also where some are -inf or next to each other in one block; of ties the first."""
    rng = np.random.default_rng(0)
    chunks = rng.normal(size=(3, 2, num_values)).astype(np.float32)
    chunks[1, 0, : num_values // 2] = np.sort(9 + chunks[1, 0, : num_values // 2])
    chunks[:, 1] = np.round(3 * chunks[:, 1])  # ties
    chunks[2, 1] = -np.inf
    if num_top == 30:
        chunks[:, 1, 2:] = -np.inf
    best = start((2,), num_top, num_values, jnp.float32)
    for i, values in enumerate(chunks):
        best = include(best, values, i * num_values)
    together = chunks.transpose(1, 0, 2).reshape(2, -1)
    order = np.argsort(-together, axis=1, kind="stable")[:, :num_top]
    found, ids = map(np.asarray, finish(best))
    width = order.shape[1]  # fewer values than places: the last places hold -inf
    np.testing.assert_array_equal(found[:, :width], np.take_along_axis(together, order, 1))
    np.testing.assert_array_equal(ids[:, :width], order)


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_what_is_not_known_comes_first_whatever_its_sign(nan):
    """So that no row of it names classes; a processor gives -inf - -inf the other sign."""
    values = np.float32([[1, 2, nan, 4, 0, 0, 0, 0], [nan] * 8])
    found, ids = finish(include(start((2,), 2, 8, jnp.float32), values, 0))
    np.testing.assert_array_equal(np.isnan(found), [[True, False], [True, True]])
    assert ids.tolist() == [[2, 3], [0, 1]]
