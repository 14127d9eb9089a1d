# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad

from numpyro_largecat.ops.logistic_bound import (
    best_u_logistic,
    log_eta_hat_logistic,
    logistic_bound,
)
from tests import reference


def competitors(utilities, value):
    """Distances and weights with all classes, as ``ChoiceDistribution.competitors`` gives them."""
    weights = np.ones(len(utilities))
    weights[value] = 0
    return jnp.asarray(utilities[value] - utilities), jnp.asarray(weights)


bound_of, grad_in_u = jax.jit(logistic_bound), jax.jit(jax.grad(logistic_bound, argnums=2))
best_u, log_eta_hat = jax.jit(best_u_logistic), jax.jit(log_eta_hat_logistic)


def integral(utilities, value, u):
    """The bound of any q by its definition, E_q[log joint - log q], by adaptive quadrature."""
    a = np.exp(u)

    def log_cdf(error):
        return -np.logaddexp(0, -error)

    def log_density(error):
        return -error - 2 * np.logaddexp(0, -error)

    others = np.delete(utilities, value)

    def integrand(error):
        log_q = u + log_density(error) + (a - 1) * log_cdf(error)
        joint = log_density(error) + log_cdf(error + utilities[value] - others).sum()
        return np.exp(log_q) * (joint - log_q)

    return quad(integrand, -30, u + 40, points=[0, u], limit=500)[0]


@pytest.mark.parametrize("u", [0.0, 0.4, 1.5, 4.0, 9.0])
def test_it_is_the_expectation_that_defines_a_bound(x64, u):
    """Up to the error of three nodes, which for a large u is 0.2 at most for a far competitor."""
    utilities = np.array([0.3, -1.0, 1.2, 0.0, 0.7])
    bound = bound_of(*competitors(utilities, 1), u)
    assert float(bound) == pytest.approx(integral(utilities, 1, u), rel=0.03)


@pytest.mark.parametrize("num_categories", [2, 10, 10**5])
@pytest.mark.some_cases(1)
def test_it_is_exact_for_equal_utilities(num_categories):
    distances, weights = competitors(np.zeros(num_categories), 1)
    u = best_u(distances, weights)
    np.testing.assert_allclose(u, np.log(num_categories), rtol=1e-5)
    np.testing.assert_allclose(bound_of(distances, weights, u), -u, rtol=1e-5)


def test_it_is_exact_where_the_choice_is_certain():
    distances, weights = competitors(np.array([30.0, 0.0, -5.0]), 0)
    u = best_u(distances, weights)
    np.testing.assert_allclose(bound_of(distances, weights, u), 0, atol=1e-6)


@pytest.mark.parametrize(("size", "most"), [(2, 0.2), (6, 0.15), (20, 0.1), (100, 0.02)])
@pytest.mark.some_cases(1)
def test_the_gap_at_the_best_u_is_a_small_part_of_the_log_probability(x64, size, most):
    """It is largest where one class is so far above the observed one that only these two matter."""
    rng = np.random.default_rng(0)
    for spread in (0.3, 1.0, 3.0, 10.0) * 4:
        utilities = rng.normal(0, spread, size)
        distances, weights = competitors(utilities, 1)
        bound = bound_of(distances, weights, best_u(distances, weights))
        exact = reference.choice_log_prob(utilities, 1, "logistic")
        assert exact * (1 + most) <= float(bound) <= exact + 1e-4


@pytest.mark.parametrize("u", [0.0, 0.5, 3.0, 12.0])
def test_the_natural_gradient_is_the_derivative_in_u(x64, u):
    distances, weights = competitors(np.array([0.3, -1.0, 1.2, 9.0, -0.7]), 1)
    slope = grad_in_u(distances, weights, u)
    growth = np.exp(log_eta_hat(distances, weights, u) - u) - 1
    np.testing.assert_allclose(slope, growth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("own", [-1e4, -200.0, -30.0, 0.0, 30.0, 1e4])
def test_the_search_for_the_best_u_ends_there(own):
    """With one class or 10**5 - 1 at 0 against the class in question; in float32."""
    for count in (1.0, 1e5 - 1):
        distances, weights = jnp.array([own, 0.0]), jnp.array([count, 0.0])
        u = best_u(distances, weights)
        slope = grad_in_u(distances, weights, u)
        assert np.isfinite(u)
        assert abs(float(slope)) < 1e-5 * max(1, abs(own))  # one part in 10**5 of u


@pytest.mark.parametrize("distance", [-300.0, -60.0, 60.0, 1e4])
@pytest.mark.parametrize("u", [0.0, 3.0, 100.0, 1e4])
def test_far_from_the_best_u_everything_is_finite(distance, u):
    distances, weights = jnp.array([distance, 0.0, -1.0]), jnp.array([1e6, 0.0, 1.0])
    for of in (bound_of, grad_in_u, log_eta_hat):
        assert np.isfinite(of(distances, weights, u))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_types_are_as_good_as_their_rounding(dtype):
    """The first of these was 21 nats off in float16, where Newton steps divided by rounding."""
    rng = np.random.default_rng(0)
    distances = jnp.asarray(4 * rng.normal(size=(200, 12)), dtype)
    of_class = np.r_[0.0, np.ones(5), np.full(6, 6.5)]
    weights = jnp.asarray(np.broadcast_to(of_class, distances.shape), dtype)

    @jax.jit
    def at_best(distances, weights):
        u = best_u_logistic(distances, weights)
        return logistic_bound(distances, weights, u), log_eta_hat_logistic(distances, weights, u)

    found = at_best(distances, weights)
    exact = at_best(distances.astype(jnp.float32), weights.astype(jnp.float32))
    assert found[0].dtype == dtype
    for own, wanted in zip(found, exact, strict=True):
        np.testing.assert_allclose(own.astype(jnp.float32), wanted, rtol=0.01, atol=0.01)


def test_second_derivatives_at_the_best_u_know_how_it_moves(x64):
    rng = np.random.default_rng(0)
    distances = 2 * rng.normal(size=6)
    weights = np.array([0.0, 1.0, 1.0, 6.5, 6.5, 6.5])

    def best_bound(distances):
        return logistic_bound(distances, weights, best_u_logistic(distances, weights))

    @jax.jit
    def derivatives(distances):
        return jax.grad(best_bound)(distances), jax.hessian(best_bound)(distances)

    hessian = derivatives(distances)[1]
    for k, step in enumerate(1e-4 * np.eye(6)):
        slope = (derivatives(distances + step)[0] - derivatives(distances - step)[0]) / 2e-4
        np.testing.assert_allclose(hessian[k], slope, atol=1e-7)
