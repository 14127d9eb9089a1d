# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import digamma, gammaln

from numpyro_largecat.ops.topics.gamma_rises import digamma_rise, log_gamma_rise

CONCENTRATIONS = np.array([1e-30, 1e-5, 0.01, 0.5, 3.0, 50.0, 1e3, 1e5, 1e7, 1e12])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 20_000])
def test_rises_are_sums_over_tokens(dtype, num_tokens):
    """log(Gamma(a + n) / Gamma(a)) is the sum of log(a + i) over i < n."""
    with jax.enable_x64(dtype == "float64"):
        a = np.asarray(CONCENTRATIONS, dtype)
        found = [np.asarray(jax.jit(f)(a, np.asarray(num_tokens, dtype))) for f in RISES]
    each = a.astype(np.float64)[:, None] + np.arange(num_tokens)
    tolerance = 16 * np.finfo(dtype).eps if dtype == "float32" else 1e-10
    log_size = np.abs(np.log(each)).sum(axis=1)
    assert (np.abs(found[0] - np.log(each).sum(axis=1)) <= tolerance * log_size + 1e-30).all()
    np.testing.assert_allclose(found[1], (1 / each).sum(axis=1), rtol=tolerance)


RISES = log_gamma_rise, digamma_rise


@pytest.mark.parametrize("num_tokens", [2e8, 2e9, 1e12])
def test_rises_of_very_many_tokens_are_finite_in_float32(num_tokens):
    a = np.array([1e-5, 0.3, 50.0], np.float32)
    for rise, function in zip(RISES, (gammaln, digamma), strict=True):
        expected = function(a.astype(float) + num_tokens) - function(a.astype(float))
        np.testing.assert_allclose(rise(a, np.float32(num_tokens)), expected, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [1e-6, 0.3, 2.7, 1234.5])
def test_rises_of_parts_of_tokens_are_differences(num_tokens, x64):
    a = CONCENTRATIONS[1:6]
    for rise, function in zip(RISES, (gammaln, digamma), strict=True):
        difference = function(a + num_tokens) - function(a)
        np.testing.assert_allclose(rise(a, num_tokens), difference, rtol=1e-9, atol=2e-9)


def test_the_one_is_the_derivative_of_the_other(x64):
    a, n = jnp.array([0.02, 4.0, 300.0]), 5.5
    by_jax = jax.vmap(jax.grad(log_gamma_rise), in_axes=(0, None))(a, n)
    np.testing.assert_allclose(by_jax, digamma_rise(a, n), rtol=1e-8)
