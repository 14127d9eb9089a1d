# SPDX-License-Identifier: Apache-2.0
"""The mean softmax of Gaussian utilities, beside sums and integrals done plainly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_expit, logsumexp, ndtr
from scipy.stats import chi2

from numpyro_largecat.ops.gaussian_softmax import (
    add_log_sums,
    full_number,
    log_mean_sigmoid,
    log_sums_of_draws,
    log_sums_of_others,
    stratified_normals,
)

normals_of = jax.jit(stratified_normals, static_argnums=(2, 3))


def log_mean_sigmoid_by_sums(loc, variance):
    z = np.linspace(-30, 30, 60_001)  # steps of 0.001, float64
    terms = log_expit(loc + np.sqrt(variance) * z) - 0.5 * z**2
    return logsumexp(terms) + np.log((z[1] - z[0]) / np.sqrt(2 * np.pi))


@pytest.mark.parametrize(
    ("variance", "atol"),
    [
        (0.0, 1e-5),
        (0.3, 1e-5),
        (2.0, 1e-5),
        (9.0, 1e-5),
        (200.0, 1e-5),
        (400.0, 3e-4),
        (900.0, 0.01),
    ],
)
def test_log_mean_sigmoid_is_the_integral(variance, atol):
    loc = np.array([-80.0, -20.0, -3.0, -0.1, 0.0, 2.0, 30.0])
    found = jax.jit(log_mean_sigmoid)(np.float32(loc), np.full(7, variance, np.float32))
    expected = [log_mean_sigmoid_by_sums(mean, variance) for mean in loc]
    np.testing.assert_allclose(found, expected, atol=atol, rtol=1e-5)


def test_an_unknown_variance_leaves_the_other_integrals_as_they_are():
    mean_sigmoid = jax.jit(log_mean_sigmoid)
    one = mean_sigmoid(np.full(2, -50.0, np.float32), np.float32([100, 1]))
    other = mean_sigmoid(np.full(2, -50.0, np.float32), np.float32([100, np.nan]))
    assert one[0] == other[0] and np.isnan(other[1])


def test_the_sum_of_others_does_not_cancel():
    values = np.array([[0.0, 30.0, -2.0], [5.0, 5.0, 5.0], [-np.inf, 1.0, -np.inf]])
    found = np.asarray(jax.jit(log_sums_of_others)(np.float32(values)))
    for row, of_row in zip(values, found, strict=True):
        for k in range(3):
            expected = logsumexp(np.delete(row, k))
            np.testing.assert_allclose(of_row[k], expected, rtol=1e-5)


def test_one_value_has_no_others():
    np.testing.assert_array_equal(jax.jit(log_sums_of_others)(np.ones((2, 1))), -np.inf)


@pytest.mark.parametrize("spread", [0.1, 3.0, 100.0, 1e4])
def test_log_sums_neither_overflow_nor_underflow(spread):
    rng = np.random.default_rng(0)
    mean, scale = rng.normal(size=(4, 50)), spread * rng.gamma(2, size=(4, 50))
    normals = rng.normal(size=(3, 50))
    found = jax.jit(log_sums_of_draws)(*map(np.float32, (mean, scale, normals)))
    expected = logsumexp(mean + scale * normals[:, None], axis=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("before", ["nothing", "near", "far below", "far above", "far apart"])
def test_more_classes_are_added_wherever_the_sums_are(before):
    rng = np.random.default_rng(0)
    mean, scale, normals = (rng.normal(size=shape) for shape in [(4, 50), (4, 50), (3, 50)])
    scale = abs(scale)
    known = {
        "nothing": np.full((3, 4), -np.inf),
        "near": rng.normal(size=(3, 4)),
        "far below": np.full((3, 4), -200.0),
        "far above": np.full((3, 4), 200.0),
        "far apart": np.linspace(-100, 100, 3)[:, None] + np.zeros(4),
    }[before]
    arrays = (known, mean, scale, normals)
    found = jax.jit(add_log_sums)(*map(np.float32, arrays))
    more = logsumexp(mean + scale * normals[:, None], axis=-1)
    np.testing.assert_allclose(found, np.logaddexp(known, more), rtol=1e-5)


def test_classes_that_are_left_out_count_for_nothing():
    mean = np.float32([[-np.inf, 1.0, -np.inf], [-np.inf] * 3])
    found = jax.jit(log_sums_of_draws)(mean, np.ones((2, 3)), np.zeros((1, 3)))
    np.testing.assert_allclose(found, [[1.0, -np.inf]])


def strata_of(draws):
    """In which interval of as many as draws are full each draw is."""
    number = full_number(len(draws))
    return np.floor(number * ndtr(np.asarray(draws, np.float64))).astype(int)


@pytest.mark.parametrize("num_draws", [8, 41, 101])
def test_draws_of_an_id_are_in_strata_and_its_own(num_draws):
    ids = np.array([[3, 9, 3], [0, 2**31 - 1, 9]])
    draws = np.asarray(normals_of(jax.random.key(0), ids, num_draws, jnp.float32))
    strata = strata_of(draws)
    expected = np.broadcast_to(np.arange(num_draws)[:, None, None], strata.shape)
    np.testing.assert_array_equal(np.sort(strata, axis=0), expected)
    np.testing.assert_array_equal(draws[:, 0, 0], draws[:, 0, 2])
    np.testing.assert_array_equal(draws[:, 0, 1], draws[:, 1, 2])
    assert len(np.unique(draws)) == num_draws * 4


def test_a_full_number_of_draws_is_a_prime_if_they_are_many():
    numbers = [1, 4, 32, 33, 100, 101, 1000, 65_519, 65_520]
    full = [1, 4, 32, 41, 101, 101, 1013, 65_519, 2 * 32_771]
    assert [full_number(number) for number in numbers] == full


@pytest.mark.parametrize("num_draws", [5, 41, 45])
def test_two_draws_of_an_id_are_in_any_two_strata(num_draws):
    """FALSE_ALARM = 1e-6, by chi-squared of 40,000 ids over all pairs of different strata.

    So means over draws vary no more than with random orders.
    """
    draws = normals_of(jax.random.key(3), np.arange(40_000), num_draws, jnp.float32)
    strata, number = strata_of(draws), full_number(num_draws)
    for one, other in ((0, 1), (1, num_draws - 1)):
        pairs = np.bincount(strata[one] * number + strata[other], minlength=number**2)
        assert (pairs.reshape(number, number).diagonal() == 0).all()
        expected = 40_000 / (number * (number - 1))
        statistic = (pairs**2 / expected).sum() - 40_000
        assert chi2.sf(statistic, number * (number - 1) - 1) > 1e-6 / 6


def test_strata_of_two_ids_do_not_depend_on_each_other():
    """FALSE_ALARM = 1e-6, by chi-squared of pairs of neighbours and their strata in one draw."""
    strata = strata_of(normals_of(jax.random.key(4), np.arange(80_000), 41, jnp.float32))
    for draw in (0, 17):
        pairs = np.bincount(41 * strata[draw, ::2] + strata[draw, 1::2], minlength=41**2)
        statistic = (pairs**2 * (41**2 / 40_000)).sum() - 40_000
        assert chi2.sf(statistic, 41**2 - 1) > 1e-6 / 2


def test_draws_of_no_two_ids_move_together():
    """Means of products have the kurtosis of random orders, 2.9 to 3.0 here; by lines it is 11.

    FALSE_ALARM = 1e-9: its standard error is .035, of 20,000 pairs of ids.
    """
    draws = np.asarray(normals_of(jax.random.key(5), np.arange(40_000), 101, jnp.float32))
    means = (draws[:, ::2] * draws[:, 1::2]).mean(0)
    assert (means**4).mean() / (means**2).mean() ** 2 < 3.3


def test_very_many_draws_are_made_in_halves():
    draws = normals_of(jax.random.key(0), np.arange(3), 2 * 32_771, jnp.float32)
    halves = np.split(np.asarray(draws), 2)
    expected = np.broadcast_to(np.arange(32_771)[:, None], (32_771, 3))
    for half in halves:
        # Next to an end of an interval the inverse is off by rounding.
        np.testing.assert_allclose(np.sort(strata_of(half), axis=0), expected, atol=1)


def test_draws_of_ids_are_standard_normal_and_uncorrelated():
    """FALSE_ALARM = 1e-5: moments of 20,000 ids within five standard errors."""
    draws = np.asarray(normals_of(jax.random.key(1), np.arange(20_000), 4, jnp.float32))
    assert abs(draws[0].mean()) < 5 / 20_000**0.5
    assert abs((draws[0] ** 2).mean() - 1) < 5 * (2 / 20_000) ** 0.5
    assert abs((draws[0, ::2] * draws[0, 1::2]).mean()) < 5 / 10_000**0.5


def test_narrow_types_round_the_same_draws():
    ids = np.arange(50)
    narrow = normals_of(jax.random.key(2), ids, 64, jnp.bfloat16)
    exact = normals_of(jax.random.key(2), ids, 64, jnp.float32)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, np.asarray(exact).astype(jnp.bfloat16))
