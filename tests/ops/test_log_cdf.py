# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_expit, log_ndtr

from numpyro_largecat.ops.log_cdf import gumbel_log_cdf, logistic_log_cdf, normal_log_cdf

ERRORS = np.concatenate([-np.geomspace(1e4, 1e-6, 400), [0.0], np.geomspace(1e-6, 30.0, 400)])
TINY = 1e-37  # smaller results are not normal numbers in float32


def normal_slope(x):
    return np.exp(-0.5 * x**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(x))


@pytest.mark.parametrize(
    ("log_cdf", "expected"), [(normal_log_cdf, log_ndtr), (logistic_log_cdf, log_expit)]
)
def test_relative_accuracy_in_both_tails(log_cdf, expected):
    """In float32, also between 2 and 5, where the logarithm of one minus a little cancels."""
    errors = ERRORS.astype(np.float32)
    exact = expected(errors.astype(np.float64))
    normal = np.abs(exact) > TINY
    np.testing.assert_allclose(log_cdf(jnp.array(errors))[normal], exact[normal], rtol=2e-6)


@pytest.mark.parametrize(
    ("log_cdf", "expected"), [(normal_log_cdf, log_ndtr), (logistic_log_cdf, log_expit)]
)
def test_relative_accuracy_in_double_precision(x64, log_cdf, expected):
    np.testing.assert_allclose(log_cdf(jnp.array(ERRORS)), expected(ERRORS), rtol=1e-12)


def test_the_normal_slope_and_curvature_keep_their_accuracy():
    errors = ERRORS[np.abs(ERRORS) < 10].astype(np.float32)
    exact = normal_slope(errors.astype(np.float64))
    slope = jax.vmap(jax.grad(normal_log_cdf))
    np.testing.assert_allclose(slope(jnp.array(errors)), exact, rtol=1e-5, atol=TINY)
    curvature = jax.vmap(jax.grad(jax.grad(normal_log_cdf)))(jnp.array(errors))
    far = errors > -4  # further out the reference cancels
    np.testing.assert_allclose(
        curvature[far], -(exact * (exact + errors))[far], rtol=1e-4, atol=TINY
    )


def test_far_in_the_left_tail_the_normal_slope_is_the_distance_and_its_derivative_minus_one():
    slope = jax.grad(normal_log_cdf)
    np.testing.assert_allclose(slope(-1e4), 1e4, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(slope)(-1e4), -1.0, rtol=1e-5)


@pytest.mark.parametrize("log_cdf", [gumbel_log_cdf, normal_log_cdf, logistic_log_cdf])
def test_at_plus_infinity_value_and_gradient_are_zero(log_cdf):
    assert jax.value_and_grad(log_cdf)(jnp.inf) == (0.0, 0.0)
    assert jax.grad(jax.grad(log_cdf))(1e4) == 0


@pytest.mark.parametrize("log_cdf", [gumbel_log_cdf, normal_log_cdf, logistic_log_cdf])
@pytest.mark.parametrize("error", [-1e4, -100.0, 100.0, 1e4])
def test_value_and_gradients_are_finite_far_out(log_cdf, error):
    value, slope = jax.value_and_grad(log_cdf)(error)
    assert np.isfinite([value, slope, jax.grad(jax.grad(log_cdf))(error)]).all()


def test_gumbel_is_minus_the_exponential():
    errors = jnp.linspace(-50, 50, 101)
    np.testing.assert_allclose(gumbel_log_cdf(errors), -np.exp(-errors), rtol=1e-6)
