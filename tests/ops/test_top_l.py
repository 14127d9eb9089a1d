# SPDX-License-Identifier: Apache-2.0
"""The L largest weights are the best L-sparse posterior."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_largecat.ops.top_l import log_sum, take_last, top_l
from tests import reference_top_l as reference
from tests.memory import temp_bytes

top, total = jax.jit(top_l, static_argnums=1), jax.jit(log_sum)
rng = np.random.default_rng(0)
WEIGHTS = rng.normal(size=(5, 8)) * np.array([0.1, 1, 5, 50, 1])[:, None]
WEIGHTS[4, [1, 6]] = -np.inf


@pytest.mark.smoke
@pytest.mark.parametrize("num_active", range(1, 9))
@pytest.mark.some_cases(3)
def test_no_support_is_better_than_the_largest_weights(num_active, x64):
    """Brute force over all supports of 8 outcomes."""
    indices, values = top(WEIGHTS, num_active)
    sums = np.asarray(total(values))
    for row, ids, found in zip(WEIGHTS, np.asarray(indices), sums, strict=True):
        q, best = reference.best_sparse(np.maximum(row, -1e300), num_active)
        assert found == pytest.approx(best, rel=1e-12)
        np.testing.assert_allclose(reference.on_support(ids, row), q, atol=1e-12)


def test_no_posterior_on_a_support_is_better_than_the_softmax(x64):
    """The maximum of Eq. (8), against 2000 posteriors at random and near the best."""
    for row in WEIGHTS[:4]:
        indices, values = map(np.asarray, top(row, 3))
        best = total(values).item()
        softmax = np.exp(values - best)
        for spread in (1, 10, 1e4):
            near = rng.dirichlet(1 + spread * softmax, size=700)
            worth = [reference.objective(q, row[indices]) for q in near]
            assert max(worth) <= best + 1e-12


@pytest.mark.slow
def test_the_bound_rises_with_the_number_of_outcomes_to_the_sum_of_all():
    bounds = [log_sum(top_l(jnp.array(WEIGHTS), n)[1]) for n in range(1, 9)]
    assert (np.diff(bounds, axis=0) >= 0).all()
    np.testing.assert_allclose(bounds[-1], jax.nn.logsumexp(WEIGHTS, axis=-1), rtol=1e-6)


def test_order_ties_and_dtypes():
    weights = np.float32([[1.0, 3.0, 3.0, 2.0], [-np.inf, 0.0, -np.inf, -np.inf]])
    indices, values = top(weights, 3)
    np.testing.assert_array_equal(indices, [[1, 2, 3], [1, 0, 2]])
    np.testing.assert_array_equal(values, np.take_along_axis(weights, indices, 1))
    assert indices.dtype == jnp.int32
    assert values.dtype == jnp.float32


def test_neither_result_is_differentiated():
    slope = jax.jit(jax.grad(lambda w: top_l(w, 2)[1].sum()))(np.array([1.0, 3.0, 2.0]))
    np.testing.assert_array_equal(slope, 0)


def test_weights_of_zero_stay_out_of_the_gradient():
    weights = np.float32([[-np.inf, 0.0, 1.0], [-np.inf, -np.inf, -np.inf]])
    found, pull_back = jax.vjp(total, weights)
    np.testing.assert_allclose(found, [np.log(1 + np.e), -np.inf], rtol=1e-6)
    share = 1 / (1 + np.exp(-1))
    expected = [[0, 1 - share, share], [0, 0, 0]]
    np.testing.assert_allclose(pull_back(jnp.ones(2))[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("table", "indices"), [((6,), (4, 2)), ((4, 6), (2,)), ((3, 1, 6), (4, 2)), ((4, 6), (4, 2))]
)
def test_entries_of_a_table_broadcast(table, indices):
    table, indices = rng.normal(size=table), rng.integers(6, size=indices)
    shape = np.broadcast_shapes(table.shape[:-1], indices.shape[:-1])
    whole = np.broadcast_to(table, (*shape, 6))
    expected = np.take_along_axis(whole, np.broadcast_to(indices, (*shape, 2)), -1)
    np.testing.assert_allclose(jax.jit(take_last)(table, indices), expected, rtol=1e-6)


def test_entries_of_a_table_cost_no_copy_of_it():
    indices = np.zeros((100, 4), int)
    assert temp_bytes(take_last, np.zeros(10**4, np.float32), indices) == 0


@pytest.mark.parametrize(
    ("weights", "num_active", "error", "message"),
    [
        (np.zeros(3), 0, ValueError, "at least 1; got 0"),
        (np.zeros(3), 4, ValueError, "at most 3, the number of outcomes; got 4"),
        (np.zeros(3), 2.0, TypeError, "`num_active` must be a Python int"),
        (
            np.zeros((2, 0)),
            1,
            ValueError,
            r"with K at least 1, outcomes last; got shape \(2, 0\)",
        ),
        (np.array([[0, 1], [0, np.nan]]), 1, ValueError, r"got nan at position \(1, 1\)"),
        (np.array([0, np.inf]), 1, ValueError, "got inf at position 1, and 1 of 2"),
        (np.arange(3), 1, TypeError, "must be floats"),
    ],
)
def test_bad_input_is_refused(weights, num_active, error, message):
    with pytest.raises(error, match=message):
        top_l(weights, num_active)


def test_nan_comes_first_under_jit():
    """So that it is not lost: the bound is NaN."""
    values = jax.jit(lambda w: top_l(w, 2)[1])(jnp.array([1.0, jnp.nan, 3.0]))
    assert np.isnan(values[0])
