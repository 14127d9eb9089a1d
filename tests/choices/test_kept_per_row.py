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
UTILITIES = jnp.array(np.random.default_rng(0).normal(size=(3, K))) * 2
Y = jnp.array([4, 0, 2])
EVERYTHING = lc.plates.ClassSubset(jnp.arange(K), jnp.ones(K), jnp.arange(K), K, "sample")
KEEPS_U = pytest.mark.parametrize("noise", ["gumbel", "logistic"])


def state_of(noise, utilities=UTILITIES):
    return kept_per_row(utilities, EVERYTHING, FAMILIES[noise], Y)


@pytest.mark.some_cases(1)
@KEEPS_U
def test_the_first_visit_ends_at_the_best_u(noise):
    """Of these classes: all later visits take a part of the way."""
    state = state_of(noise)
    start = jnp.broadcast_to(state.start, Y.shape)
    rule = state.update_rule
    first, kept = rule.update(start, rule.init(start), lambda u: state.statistic(u, 0.0))
    best = lc.UtilityCategorical(UTILITIES, EVERYTHING, noise).optimal_u(Y)
    np.testing.assert_allclose(first, best, rtol=2e-3)
    np.testing.assert_array_equal(kept.visits, 1)


@KEEPS_U
def test_u_below_zero_is_taken_as_zero(noise):
    """eta, of which u is the logarithm, counts the class itself, so that it is at least 1."""
    state = state_of(noise)
    u = jnp.array([-2.0, -1e-3, 0.5])
    expected = lc.UtilityCategorical(UTILITIES, EVERYTHING, noise, u=jnp.array([0, 0, 0.5]))
    np.testing.assert_array_equal(state.bound(u).log_prob(Y), expected.log_prob(Y))
    at_zero = state.statistic(jnp.zeros(3), 0.0).log_eta_hat
    np.testing.assert_allclose(state.statistic(u, 0.0).log_eta_hat[:2], at_zero[:2], rtol=1e-6)


@KEEPS_U
def test_the_least_u_counts_each_class_at_hand_once(noise):
    """So it is no more than the best u of all classes, whatever their weights."""
    heavy = replace(EVERYTHING, weights=jnp.array([1, 1, 1, 1, 1, 50.0]))
    u = jnp.ones(3)
    estimate = kept_per_row(UTILITIES, heavy, FAMILIES[noise], Y).statistic(u, 0.0)
    np.testing.assert_array_equal(estimate.log_least, state_of(noise).statistic(u, 0.0).log_eta_hat)
    assert (estimate.log_least < estimate.log_eta_hat).all()


@pytest.mark.parametrize("distance", [0.0, 0.7])
@pytest.mark.parametrize("form", ["gumbel", "logistic", "variances"])
def test_the_noise_is_that_of_independent_draws_of_the_classes(form, distance):
    """sum_k w_k (w_k - 1) g_k^2 / eta^2, g_k the derivative of eta_hat in the weight of class k."""
    u, weights = jnp.array([1.0, 2.0, 3.0]), np.array([1, 1, 1, 7.0, 3.5, 50.0])
    some = replace(EVERYTHING, indices=jnp.array([0, 2, 4, 1, 3, 5]), labels=jnp.array([0, 2, 4]))
    spread = jnp.linspace(0.1, 0.9, K) if form == "variances" else None
    noise = "logistic" if form == "logistic" else "gumbel"

    def estimate(weights):
        classes = replace(some, weights=weights)
        kept = kept_per_row(UTILITIES, classes, FAMILIES[noise], Y, spread)
        return kept.statistic(u, distance)

    by_weight = jax.jacfwd(lambda weights: jnp.exp(estimate(weights).log_eta_hat))(weights)
    eta = jnp.exp(best_u_at(u, distance))
    by_weight *= jnp.exp(-distance)  # at the draw
    expected = (by_weight**2) @ (weights * (weights - 1)) / eta**2
    np.testing.assert_allclose(jnp.exp(estimate(weights).log_noise), expected, rtol=1e-3)


def test_nothing_is_drawn_where_all_classes_are_at_hand():
    np.testing.assert_array_equal(
        state_of("gumbel").statistic(jnp.ones(3), 0.0).log_noise, -jnp.inf
    )


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("noise", FAMILIES)
def test_statistics_pass_no_gradient_to_the_utilities(noise):
    state = state_of(noise)
    value = jnp.broadcast_to(state.start, (3, *state.start.shape))

    def total(utilities):
        statistic = state_of(noise, utilities).statistic(value, 0.0)
        return sum(part.sum() for part in jax.tree.leaves(statistic))

    np.testing.assert_array_equal(jax.grad(total)(UTILITIES), 0)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("own", "most"), [(-3.0, 0.001), (0.0, 0.02), (3.0, 0.15), (6.0, 0.3)])
def test_the_shift_of_logistic_errors_is_near_the_derivative_of_the_best_u(own, most, x64):
    """It is that of Gumbel errors; the two come apart only where the choice is almost certain."""
    utilities = jnp.array(np.random.default_rng(1).normal(size=200)) * 1.5
    utilities, weights = utilities.at[7].set(0), jnp.ones(200).at[7].set(0)

    def best(raised):
        return best_u_logistic(raised - utilities, weights)

    slope = (best(own + 1e-3) - best(own - 1e-3)) / 2e-3
    off = float(jax.grad(best_u_at, argnums=1)(best(own), 0.0) - slope)
    assert -most < off < 0
