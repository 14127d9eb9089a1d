# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from scipy.special import log_expit, log_ndtr

from numpyro_largecat.ops.log_cdf import gumbel_log_cdf, logistic_log_cdf, normal_log_cdf

ERRORS = np.concatenate([-np.geomspace(1e4, 1e-6, 400), [0.0], np.geomspace(1e-6, 30.0, 400)])
TINY = 1e-37  # smaller results are not normal numbers in float32


@partial(jax.jit, static_argnums=0)
def derivatives(log_cdf, errors):
    """Values, slopes and curvatures."""
    slope = jax.grad(log_cdf)
    return [jax.vmap(fn)(errors) for fn in (log_cdf, slope, jax.grad(slope))]


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
    found = np.asarray(jax.jit(log_cdf)(errors))
    np.testing.assert_allclose(found[normal], exact[normal], rtol=2e-6)


@pytest.mark.parametrize(
    ("log_cdf", "expected"), [(normal_log_cdf, log_ndtr), (logistic_log_cdf, log_expit)]
)
def test_relative_accuracy_in_double_precision(x64, log_cdf, expected):
    np.testing.assert_allclose(jax.jit(log_cdf)(ERRORS), expected(ERRORS), rtol=1e-12)


def test_the_normal_slope_and_curvature_keep_their_accuracy():
    errors = ERRORS[np.abs(ERRORS) < 10].astype(np.float32)
    exact = normal_slope(errors.astype(np.float64))
    _, slope, curvature = map(np.asarray, derivatives(normal_log_cdf, errors))
    np.testing.assert_allclose(slope, exact, rtol=1e-5, atol=TINY)
    far = errors > -4  # further out the reference cancels
    np.testing.assert_allclose(
        curvature[far], -(exact * (exact + errors))[far], rtol=1e-4, atol=TINY
    )


def test_far_in_the_left_tail_the_normal_slope_is_the_distance_and_its_derivative_minus_one():
    _, slope, curvature = derivatives(normal_log_cdf, np.array([-1e4]))
    np.testing.assert_allclose(slope, 1e4, rtol=1e-5)
    np.testing.assert_allclose(curvature, -1.0, rtol=1e-5)


@pytest.mark.parametrize("log_cdf", [gumbel_log_cdf, normal_log_cdf, logistic_log_cdf])
def test_at_plus_infinity_value_and_gradient_are_zero(log_cdf):
    value, slope, curvature = derivatives(log_cdf, np.array([np.inf, 1e4]))
    assert value[0] == slope[0] == curvature[1] == 0


@pytest.mark.parametrize("log_cdf", [gumbel_log_cdf, normal_log_cdf, logistic_log_cdf])
def test_value_and_gradients_are_finite_far_out(log_cdf):
    assert np.isfinite(derivatives(log_cdf, np.array([-1e4, -100.0, 100.0, 1e4]))).all()


def test_gumbel_is_minus_the_exponential():
    errors = np.linspace(-50, 50, 101, dtype=np.float32)
    np.testing.assert_allclose(gumbel_log_cdf(errors), -np.exp(-errors), rtol=1e-6)
