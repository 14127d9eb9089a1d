# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numpyro_largecat.ops.table_rows import (
    gather_rows,
    merge_repeats,
    merge_values,
    scatter_rows,
)

SHAPE = (5, 4, 6, 3)
ROWS = {0: [4, 0, 2], 1: [3, 1], 2: [5, 2, 0, 1], 3: [1, 2]}
AXES = [(0,), (2,), (0, 1), (0, 2), (3, 1), (0, 1, 2, 3)]


gather, scatter = jax.jit(gather_rows), jax.jit(scatter_rows)


def table_and_rows(axes):
    table = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    return table, {axis: np.array(ROWS[axis]) for axis in axes}


def numpy_index(axes):
    return np.ix_(*(ROWS[a] if a in axes else range(n) for a, n in enumerate(SHAPE)))


@pytest.mark.parametrize("axes", AXES)
def test_the_product_of_the_rows_is_read_and_written_and_nothing_else(axes):
    table, rows = table_and_rows(axes)
    index = numpy_index(axes)
    np.testing.assert_array_equal(gather(table, rows), table[index])
    expected = table.copy()
    expected[index] = values = -1 - table[index]
    np.testing.assert_array_equal(scatter(table, rows, values), expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_past_the_end_read_the_last_and_write_none(axis):
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    size = table.shape[axis]
    rows = {axis: np.array([1, size, size + 1])}
    read = np.take(table, [1, size - 1, size - 1], axis=axis)
    np.testing.assert_array_equal(gather(table, rows), read)
    expected = table.copy()
    np.moveaxis(expected, axis, 0)[1] = 99
    np.testing.assert_array_equal(scatter(table, rows, np.full(read.shape, 99)), expected)


def test_padding_on_one_of_two_axes_writes_nothing_there():
    table = np.zeros((3, 2, 4))
    rows = {0: np.array([2, 3]), 2: np.array([4, 1, 0])}
    expected = np.zeros((3, 2, 4))
    expected[2, :, 1], expected[2, :, 0] = 7, 7
    np.testing.assert_array_equal(scatter(table, rows, np.full((2, 2, 3), 7)), expected)


def test_scatter_keeps_the_type_of_the_table():
    table = np.zeros(4, np.int32)
    written = scatter(table, {0: np.array([2])}, np.array([3.0]))
    assert written.dtype == jnp.int32
    assert written.tolist() == [0, 0, 3, 0]


def test_scatter_into_a_donated_table_copies_nothing():
    """A 32 MB table needs less than 10 kB of scratch to have 3 rows read and written."""

    def step(table, rows):
        return scatter_rows(table, {0: rows}, 2 * gather_rows(table, {0: rows}))

    table = jax.ShapeDtypeStruct((10**6, 8), jnp.float32)
    rows = jax.ShapeDtypeStruct((3,), jnp.int32)
    memory = jax.jit(step, donate_argnums=0).lower(table, rows).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 10_000
    assert memory.alias_size_in_bytes == 32_000_000


def test_gradient_of_gather_goes_to_the_rows_read():
    gradient = jax.grad(lambda t: gather(t, {0: np.array([3, 1])}).sum())(np.zeros((4, 2)))
    np.testing.assert_array_equal(gradient, [[0, 0], [1, 1], [0, 0], [1, 1]])


@jax.jit
def repeats_of_nine(indices):
    return merge_repeats(indices, 9)


@given(indices=st.lists(st.integers(0, 8), min_size=6, max_size=6))
def test_merge_repeats_finds_the_distinct_rows(indices):
    distinct, position = map(np.asarray, repeats_of_nine(np.array(indices)))
    count = len(set(indices))
    assert distinct.tolist() == sorted(set(indices)) + [9] * (6 - count)
    assert distinct[position].tolist() == indices


def test_merge_repeats_leaves_out_rows_past_the_end():
    distinct, position = map(np.asarray, repeats_of_nine(np.array([4, 9, 1, 4])))
    assert distinct.tolist() == [1, 4, 9, 9]
    assert distinct[position].tolist() == [4, 9, 1, 4]


def merged(values, axis=0):
    """Merge entries at positions 0, 2, 0, 1, 0; nothing is at 3 and 4."""
    return jax.jit(partial(merge_values, axis=axis))(np.array(values), np.array([0, 2, 0, 1, 0]))


def test_merged_floats_are_means():
    np.testing.assert_allclose(merged([1.0, 5.0, 4.0, -3.0, 7.0]), [4.0, -3.0, 5.0, 0.0, 0.0])


def test_merged_integers_are_the_largest():
    values = merged([1, 5, 4, 3, 2])
    assert values.dtype == jnp.int32
    assert values.tolist() == [4, 3, 5, 0, 0]


def test_merged_negative_integers_are_the_largest():
    assert merged([-1, -5, -4, -3, -2]).tolist() == [-1, -3, -5, 0, 0]


def test_merged_truth_values_stay_truth_values():
    values = merged([False, False, True, False, False])
    assert values.dtype == bool
    assert values.tolist() == [True, False, False, False, False]


def test_values_are_merged_along_the_axis_asked_for():
    rows = np.array([[1.0, 5.0, 4.0, -3.0, 7.0], [2.0, 10.0, 8.0, -6.0, 14.0]])
    expected = [[4.0, -3.0, 5.0, 0.0, 0.0], [8.0, -6.0, 10.0, 0.0, 0.0]]
    np.testing.assert_allclose(merged(rows, axis=1), expected)
    deep = np.broadcast_to(rows[:, :, None], (2, 5, 3))
    np.testing.assert_allclose(
        merged(deep, axis=1), np.broadcast_to(expected, (3, 2, 5)).transpose(1, 2, 0)
    )
