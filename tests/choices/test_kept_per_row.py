# SPDX-License-Identifier: Apache-2.0
"""What ``sample_choice`` keeps for each observation, for each family of errors."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_largecat as lc
from numpyro_largecat.choices.error_families import FAMILIES
from numpyro_largecat.choices.kept_per_row import kept_per_row
from numpyro_largecat.choices.update_rules import best_u_at
from numpyro_largecat.ops.logistic_bound import best_u_logistic

K = 6
UTILITIES = jnp.array(2 * np.random.default_rng(0).normal(size=(3, K)))
Y = jnp.array([4, 0, 2])
ALL = jnp.array(np.arange(K))
EVERYTHING = lc.plates.ClassSubset(ALL, jnp.array(np.ones(K)), ALL, K, "sample")
KEEPS_U = pytest.mark.parametrize("noise", ["gumbel", "logistic"])


def state_of(noise, utilities=UTILITIES):
    return kept_per_row(utilities, EVERYTHING, FAMILIES[noise], Y)


@pytest.mark.some_cases(1)
@KEEPS_U
def test_the_first_visit_ends_at_the_best_u(noise):
    """Of these classes: all later visits take a part of the way."""

    @jax.jit
    def first_visit(utilities):
        state = state_of(noise, utilities)
        start = jnp.broadcast_to(state.start, Y.shape)
        rule = state.update_rule
        moved = rule.update(start, rule.init(start), lambda u: state.statistic(u, 0.0))
        return *moved, lc.UtilityCategorical(utilities, EVERYTHING, noise).optimal_u(Y)

    first, kept, best = first_visit(UTILITIES)
    np.testing.assert_allclose(first, best, rtol=2e-3)
    np.testing.assert_array_equal(kept.visits, 1)


@KEEPS_U
def test_u_below_zero_is_taken_as_zero(noise):
    """eta, of which u is the logarithm, counts the class itself, so that it is at least 1."""

    @jax.jit
    def at(u):
        state = state_of(noise)
        exact = lc.UtilityCategorical(UTILITIES, EVERYTHING, noise, u=u).log_prob(Y)
        return state.bound(u).log_prob(Y), state.statistic(u, 0.0).log_eta_hat, exact

    bounds, estimates, _ = at(np.float32([-2.0, -1e-3, 0.5]))
    _, at_zero, expected = at(np.float32([0, 0, 0.5]))
    np.testing.assert_array_equal(bounds, expected)
    np.testing.assert_allclose(estimates, at_zero, rtol=1e-6)


@KEEPS_U
def test_the_least_u_counts_each_class_at_hand_once(noise):
    """So it is no more than the best u of all classes, whatever their weights."""

    @jax.jit
    def estimate(weights):
        classes = replace(EVERYTHING, weights=weights)
        return kept_per_row(UTILITIES, classes, FAMILIES[noise], Y).statistic(jnp.ones(3), 0.0)

    heavy, once = estimate(np.float32([1, 1, 1, 1, 1, 50])), estimate(np.ones(6, np.float32))
    np.testing.assert_array_equal(heavy.log_least, once.log_eta_hat)
    assert (np.asarray(heavy.log_least) < heavy.log_eta_hat).all()


@pytest.mark.parametrize("form", ["gumbel", "logistic", "variances"])
def test_the_noise_is_that_of_independent_draws_of_the_classes(form):
    """sum_k w_k (w_k - 1) g_k^2 / eta^2, g_k the derivative of eta_hat in the weight of class k."""
    u, weights = np.float32([1.0, 2.0, 3.0]), np.array([1, 1, 1, 7.0, 3.5, 50.0])
    some = replace(EVERYTHING, indices=jnp.array([0, 2, 4, 1, 3, 5]), labels=jnp.array([0, 2, 4]))
    spread = jnp.linspace(0.1, 0.9, K) if form == "variances" else None
    noise = "logistic" if form == "logistic" else "gumbel"

    @jax.jit
    def derivatives_and_noise(weights, distance):
        def estimate(weights):
            classes = replace(some, weights=weights)
            kept = kept_per_row(UTILITIES, classes, FAMILIES[noise], Y, spread)
            return kept.statistic(u, distance)

        slopes = jax.jacfwd(lambda weights: jnp.exp(estimate(weights).log_eta_hat))(weights)
        return slopes, jnp.exp(estimate(weights).log_noise), jnp.exp(best_u_at(u, distance))

    for distance in (0.0, 0.7):
        by_weight, found, eta = map(np.asarray, derivatives_and_noise(weights, distance))
        by_weight = by_weight * np.exp(-distance)  # at the draw
        expected = (by_weight**2) @ (weights * (weights - 1)) / eta**2
        np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_nothing_is_drawn_where_all_classes_are_at_hand():
    found = jax.jit(lambda u: state_of("gumbel").statistic(u, 0.0).log_noise)(np.ones(3))
    np.testing.assert_array_equal(found, -np.inf)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("noise", FAMILIES)
def test_statistics_pass_no_gradient_to_the_utilities(noise):
    def total(utilities):
        state = state_of(noise, utilities)
        value = jnp.broadcast_to(state_of(noise).start, (3, *state.start.shape))
        return sum(part.sum() for part in jax.tree.leaves(state.statistic(value, 0.0)))

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(UTILITIES), 0)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("own", "most"), [(-3.0, 0.001), (0.0, 0.02), (3.0, 0.15), (6.0, 0.3)])
def test_the_shift_of_logistic_errors_is_near_the_derivative_of_the_best_u(own, most, x64):
    """It is that of Gumbel errors; the two come apart only where the choice is almost certain."""
    utilities, weights = 1.5 * np.random.default_rng(1).normal(size=200), np.ones(200)
    utilities[7] = weights[7] = 0

    @jax.jit
    def best_and_slope(raised):
        best = best_u_logistic(raised - utilities, weights)
        return best, jax.grad(best_u_at, argnums=1)(best, 0.0)

    up, down = (float(best_and_slope(own + step)[0]) for step in (1e-3, -1e-3))
    off = float(best_and_slope(own)[1]) - (up - down) / 2e-3
    assert -most < off < 0
