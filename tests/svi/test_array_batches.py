# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import numpy as np
import pytest

import numpyro_largecat as lc


def rows_of(batches, num_steps):
    """Row ids of the first batches, shape (num_steps, B)."""
    return np.stack([batches.batch(step)[-1] for step in range(num_steps)])


@pytest.mark.parametrize(("size", "batch_size"), [(12, 4), (10, 4), (7, 7), (5, 1)])
def test_each_row_comes_once_in_a_pass_or_twice_in_its_last_two_batches(size, batch_size):
    batches = lc.ArrayBatches(np.arange(size), batch_size=batch_size)
    num_batches = -(-size // batch_size)
    rows = rows_of(batches, 3 * num_batches).reshape(3, num_batches, batch_size)
    assert all(len(set(batch)) == batch_size for batch in rows.reshape(-1, batch_size).tolist())
    for one_pass in rows:
        visits = np.bincount(one_pass.ravel(), minlength=size)
        assert set(visits) <= {1, 2}
        assert (visits == 2).sum() == num_batches * batch_size - size
        assert set(np.flatnonzero(visits == 2)) <= set(one_pass[-2:].ravel())


def test_passes_and_seeds_have_orders_of_their_own():
    """Of 40 rows: two orders are equal with probability 1 / 40!."""
    x = np.arange(40)
    first, second = rows_of(lc.ArrayBatches(x, batch_size=40), 2).tolist()
    (other,) = rows_of(lc.ArrayBatches(x, batch_size=40, seed=1), 1).tolist()
    assert first != second
    assert other not in (first, second)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.uint32])
def test_the_number_of_a_step_may_be_of_any_integer_type(dtype):
    batches = lc.ArrayBatches(np.arange(100_000), batch_size=1000)
    np.testing.assert_array_equal(batches.batch(dtype(99))[-1], batches.batch(99)[-1])


def test_what_is_no_number_of_a_step_or_seed_is_refused():
    batches = lc.ArrayBatches(np.arange(9), batch_size=2)
    with pytest.raises(TypeError, match="`step` must be integers; got dtype float32"):
        batches.batch(1.5)
    with pytest.raises(ValueError, match="`seed` must be at least 0; got -1"):
        lc.ArrayBatches(np.arange(9), batch_size=2, seed=-1)


def test_a_batch_holds_the_rows_of_all_arrays():
    x = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    batches = lc.ArrayBatches(x, np.arange(9) * 2, batch_size=4)
    for values, doubled, rows in (batches.batch(5), batches.draw(jax.random.key(0))):
        np.testing.assert_array_equal(values, x[rows])
        np.testing.assert_array_equal(doubled, rows * 2)
        assert len(set(rows.tolist())) == 4


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.ma.masked_array(np.arange(9), np.arange(9) > 6), "array 1 is masked; give its values"),
        (np.arange(9) * 1j, "array 1 must hold real numbers; got dtype complex128"),
    ],
)
def test_masked_and_complex_arrays_are_refused(array, match):
    with pytest.raises(TypeError, match=match):
        lc.ArrayBatches(np.arange(9), array, batch_size=2)


def test_a_tuple_of_arrays_is_refused():
    with pytest.raises(TypeError, match=r"must be one array; got (.|\n)*`lc.ArrayBatches\(x, y"):
        lc.ArrayBatches((np.ones((9, 2)), np.arange(9)), batch_size=2)


def test_batches_made_inside_of_jit_may_be_kept():
    """Their arrays and order are known there, as those that a function caches."""
    kept = []

    @jax.jit
    def traced(scale):
        kept.append(lc.ArrayBatches(np.arange(6), batch_size=2, seed=3))
        return scale * kept[0].batch(0)[0]

    traced(2)
    outside = lc.ArrayBatches(np.arange(6), batch_size=2, seed=3)
    for step in range(3):
        np.testing.assert_array_equal(kept[0].batch(step), outside.batch(step))


def test_traced_arrays_make_batches():
    rows = np.arange(12.0).reshape(2, 6)
    first = jax.vmap(lambda x: lc.ArrayBatches(x, batch_size=2).batch(0)[0])(rows)
    np.testing.assert_array_equal(first[1] - first[0], [6, 6])
