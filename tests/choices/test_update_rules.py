# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from scipy.stats import norm

import numpyro_largecat as lc
from numpyro_largecat.choices.update_rules import Averaged, NaturalGradient, UpdateRule
from numpyro_largecat.ops.softmax_bound import softmax_bound

FALSE_ALARM = 1e-5  # how often a correct program fails a random check


def step_size(visits, exponent):
    return (1 + visits) ** -exponent


def says(log_eta_hat, log_noise=jnp.inf):
    """A statistic that is the same at any u."""
    return lambda u: lc.update_rules.EtaEstimate(
        jnp.asarray(log_eta_hat), jnp.zeros_like(log_eta_hat), log_noise
    )


def after(visits, noise=1e4):
    """What is kept of rows, by default of such whose estimates are of little worth."""
    visits = np.asarray(visits, np.int32)
    return Averaged(visits, np.full(visits.shape, noise, np.float32))


@partial(jax.jit, static_argnums=0)
def update(rule, u, state, log_eta_hat, log_noise=jnp.inf):
    """Take one step, in one program for each rule and shape."""
    return rule.update(u, state, says(log_eta_hat, log_noise))


@given(
    u=st.floats(-10, 10, width=32),
    statistic=st.floats(-10, 10, width=32),
    visits=st.integers(0, 1000),
    exponent=st.floats(0.51, 1.0),
)
def test_a_step_averages_eta(u, statistic, visits, exponent):
    """eta <- (1 - alpha) eta + alpha eta_hat, with alpha = (1 + visits)**-exponent."""
    moved, counted = NaturalGradient(exponent).update(
        jnp.float32(u), after(visits), says(jnp.float32(statistic))
    )
    alpha = step_size(visits, exponent)
    expected = math.log((1 - alpha) * math.exp(u) + alpha * math.exp(statistic))
    np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-5)
    assert int(counted.visits) == visits + 1


def test_a_step_follows_the_gradient_of_the_observations_own_bound():
    """u <- u + log1p(alpha g), g = d bound / du."""
    u, statistic = np.float32([0.0, 1.0, 3.0]), np.float32([2.0, 1.0, 0.5])
    gradient = jax.jit(jax.vmap(jax.grad(softmax_bound, argnums=1)))(statistic, u)
    alpha = step_size(np.array([1, 4, 9]), 0.7)
    moved, _ = update(NaturalGradient(0.7), u, after([1, 4, 9]), statistic)
    np.testing.assert_allclose(moved, u + np.log1p(alpha * gradient), rtol=1e-5)


@pytest.mark.parametrize("start", [0.0, 1e4, -1e4])
def test_the_first_visit_takes_the_estimate_as_it_is(start):
    moved, state = update(NaturalGradient(), np.array([start]), after([0]), np.array([3.25]))
    assert moved.tolist() == [3.25]
    assert state.visits.tolist() == [1]


def test_visits_are_counted_for_each_row_alone():
    rule = NaturalGradient(1.0)
    u, log_eta_hat = np.zeros((2, 2)), np.full((2, 2), math.log(9.0))
    moved, state = update(rule, u, after([[0, 1], [2, 3]]), log_eta_hat)
    # eta = 1 + alpha (9 - 1) with alpha = 1, 1/2, 1/3, 1/4
    np.testing.assert_allclose(np.exp(moved), [[9, 5], [1 + 8 / 3, 3]], rtol=1e-5)
    assert state.visits.tolist() == [[1, 2], [3, 4]]


def run_steps(rule, log_eta_hats, start):
    """Take one step for each of ``log_eta_hats``, shape (steps, rows)."""

    def step(carry, statistic):
        return rule.update(*carry, says(statistic)), None

    @jax.jit
    def steps(start, log_eta_hats):
        return lax.scan(step, (start, rule.init(start)), log_eta_hats)[0]

    return steps(start, log_eta_hats)


@pytest.mark.smoke
def test_with_exponent_one_eta_is_the_mean_of_all_estimates(x64):
    eta_hats = np.random.default_rng(0).gamma(2.0, 3.0, (50, 4))
    u, state = run_steps(NaturalGradient(1.0), np.log(eta_hats), np.full(4, 7.0))
    np.testing.assert_allclose(u, np.log(eta_hats.mean(axis=0)), rtol=1e-10)
    assert state.visits.tolist() == [50] * 4


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("exponent", [0.6, 0.9, 1.0])
def test_u_converges_to_the_logarithm_of_the_mean_estimate(x64, exponent):
    """Not to the mean of log eta_hat, 0.58 lower, which a step in u instead of eta would reach.

    The spread of the last eta follows from its weights of the 2000 independent estimates.
    """
    steps, rows, scale = 2000, 300, 40.0
    eta_hats = np.random.default_rng(1).exponential(scale, (steps, rows))
    u, _ = run_steps(NaturalGradient(exponent), np.log(eta_hats), np.zeros(rows))
    alphas = step_size(np.arange(steps), exponent)
    kept = np.append(np.cumprod((1 - alphas)[::-1])[::-1][1:], 1.0)
    spread = scale * math.sqrt(((alphas * kept) ** 2).sum() / rows)
    tolerance = norm.isf(FALSE_ALARM / 2) * spread
    assert tolerance < 0.05 * scale
    assert abs(float(np.exp(u).mean()) - scale) < tolerance


@pytest.mark.parametrize("u", [1e4, -1e4])
@pytest.mark.parametrize("statistic", [1e4, 0.0, -1e4])
@pytest.mark.parametrize("visits", [0, 1, 10**6])
def test_far_off_values_stay_finite(u, statistic, visits):
    moved, _ = NaturalGradient().update(jnp.array(u), after(visits), says(jnp.array(statistic)))
    alpha = step_size(visits, 0.9)
    kept = -np.inf if alpha == 1 else math.log1p(-alpha)
    expected = np.logaddexp(kept + u, math.log(alpha) + statistic)
    np.testing.assert_allclose(moved, expected, rtol=1e-5)


def test_after_a_step_the_gradient_of_the_bound_is_at_most_one_over_alpha():
    """exp(-u) eta_hat <= 1 / alpha, so a u that is far too small does no harm."""
    state = after(np.arange(1, 6))
    moved, _ = update(NaturalGradient(), np.full(5, -50.0), state, np.full(5, 30.0))
    weight = np.exp(30.0 - np.asarray(moved))
    np.testing.assert_allclose(weight, 1 / step_size(np.arange(1, 6), 0.9), rtol=1e-5)


@pytest.mark.parametrize("exponent", [0.5, 0.0, -1.0, 1.01, math.nan])
def test_exponents_that_break_the_robbins_monro_conditions_are_refused(exponent):
    with pytest.raises(ValueError, match=rf"`exponent` must be in \(0.5, 1\].*got {exponent}"):
        NaturalGradient(exponent)


@pytest.mark.parametrize("exponent", [0.501, 1, 1.0])
def test_exponents_that_satisfy_them_are_taken(exponent):
    assert NaturalGradient(exponent).exponent == exponent


def test_newton_steps_find_on_the_first_visit_what_the_statistic_leaves_where_it_is():
    """log(2 + e^u / 2) is u at log 4; without Newton steps one visit goes half of the way."""
    rule = NaturalGradient(newton_steps=8)

    @jax.jit
    @jax.vmap
    def from_start(u):
        return rule.update(
            u, after([0, 3]), lambda u: lc.update_rules.EtaEstimate(jnp.log(2 + jnp.exp(u) / 2), u)
        )

    moved, _ = from_start(np.repeat([[-2.0], [0.0], [6.0]], 2, axis=1))
    np.testing.assert_allclose(moved[:, 0], np.log(4), rtol=1e-5)
    assert (np.abs(moved[:, 1] - np.log(4)) > 0.1).all()  # a later visit takes one step


def test_the_rule_is_an_update_rule_and_says_its_exponent():
    rule = lc.update_rules.NaturalGradient(0.75)
    assert isinstance(rule, UpdateRule)
    assert repr(rule) == "NaturalGradient(exponent=0.75, excess=0.002, newton_steps=0)"
    assert not isinstance(object(), UpdateRule)


def test_state_and_value_keep_their_types():
    rule = NaturalGradient()
    for dtype in (jnp.float32, jnp.float16):
        value = jnp.zeros((3, 2), dtype)
        state = rule.init(value)
        assert state.visits.shape == state.noise.shape == (3, 2)
        assert (state.visits.dtype, state.noise.dtype) == (jnp.int32, jnp.float32)
        moved, new = update(rule, value, state, jnp.ones((3, 2), dtype))
        assert moved.dtype == dtype
        assert (new.visits.dtype, new.noise.dtype) == (jnp.int32, jnp.float32)
        assert np.isfinite(new.noise).all()
    np.testing.assert_array_equal(new.visits, 1)


@pytest.mark.parametrize("excess", [-1e-3, math.inf, math.nan])
def test_an_excess_that_is_none_is_refused(excess):
    with pytest.raises(ValueError, match=r"`excess` must be in \[0, inf\), nats; got"):
        NaturalGradient(excess=excess)


@pytest.mark.parametrize(
    ("variance", "alpha"), [(0.0, 1.0), (0.001, 1.0), (0.01, 0.2), (1.0, step_size(99, 0.9))]
)
def test_u_takes_as_much_of_an_estimate_as_its_noise_allows(variance, alpha):
    """alpha * v = 0.002 if that is more than the share of this visit, and no more than 1."""
    u, statistic = 2.0, 3.0
    with np.errstate(divide="ignore"):
        statistic_of = says(statistic, np.log(variance))
    moved, _ = NaturalGradient().update(jnp.array(u), after(99, variance), statistic_of)
    expected = math.log((1 - alpha) * math.exp(u) + alpha * math.exp(statistic))
    np.testing.assert_allclose(moved, expected, rtol=1e-5)


@pytest.mark.parametrize("log_noise", [jnp.nan, jnp.inf, -jnp.inf, 1e4])
def test_the_noise_that_is_kept_stays_finite(log_noise):
    rule = NaturalGradient()
    _, state = update(rule, np.zeros(1), after([1], 0.0), np.ones(1), log_noise)
    assert np.isfinite(state.noise).all()


def test_the_noise_that_is_kept_is_the_mean_over_visits(x64):
    """Of the first visit relative to its own estimate, later as the statistic says."""
    rule, u = NaturalGradient(1.0, excess=0.0), np.full(1, 2.0)
    state = rule.init(u)
    for noise in (0.08, 0.2, 0.5):
        u, state = update(rule, u, state, np.full(1, 3.0), math.log(noise))
    np.testing.assert_allclose(state.noise, (0.08 * np.exp(-2) + 0.2 + 0.5) / 3, rtol=1e-12)


@jax.jit
def visit_seldom(is_drawn, weight, c):
    """Visits, (steps, rows), of rows with a class of that weight that adds c to their eta."""
    rule, u = NaturalGradient(), jnp.zeros(is_drawn.shape[1])
    drawn = jnp.log1p(weight * c), jnp.log(weight * (weight - 1.0)) + 2 * jnp.log(c)

    def visit(carry, is_drawn):
        log_eta_hat = jnp.where(is_drawn, drawn[0], 0.0)
        log_variance = jnp.where(is_drawn, drawn[1], -jnp.inf)
        u, state = rule.update(
            *carry,
            lambda u: lc.update_rules.EtaEstimate(
                log_eta_hat, jnp.zeros_like(u), log_variance - 2 * u
            ),
        )
        return (u, state), softmax_bound(log_eta_hat, u).mean()

    (_, state), bounds = lax.scan(visit, (u, rule.init(u)), is_drawn)
    return state.noise, rule.step_sizes(state), bounds


@pytest.mark.parametrize(("weight", "share"), [(1000, 0.5), (1000, 0.05), (30, 0.5)])
def test_a_class_that_is_seldom_drawn_and_then_most_of_the_sum_shows(weight, share):
    """Else u would be that of each draw, in nearly all of which the class is missing.

    eta is 1 + c with c of one class, drawn in one of ``weight`` visits. FALSE_ALARM = 1e-5.
    """
    c, rows = share / (1 - share), 2_000
    is_drawn = np.random.default_rng(0).random((4 * weight, rows), np.float32) < 1 / weight
    noise, step_sizes, bounds = map(np.asarray, visit_seldom(is_drawn, float(weight), c))
    was_drawn = noise > 0
    assert was_drawn.mean() > 0.9
    assert (step_sizes[was_drawn] < 0.02).mean() > 0.98
    # It is known from its visits alone, so the bound is too high while they are few.
    exact = -math.log1p(c)
    assert abs(float(bounds[2 * weight :].mean()) / exact - 1) < 0.35


@pytest.mark.parametrize("excess", [0.002, 0.02])
def test_the_bound_exceeds_what_it_should_be_by_what_is_allowed(x64, excess):
    """E[1 - u' - exp(-u') eta_hat] + u is v (alpha - alpha^2 / 2) to first order in v."""
    variance, number = 0.09, 200_000
    rule = NaturalGradient(excess=excess)
    alpha = excess / variance
    noise = np.random.default_rng(0).gamma(1 / variance, variance, number)  # mean 1
    log_eta_hat = 2 + np.log(noise)
    state = after(np.full(number, 10**6), variance)
    u, _ = update(rule, np.full(number, 2.0), state, log_eta_hat, math.log(variance))
    bounds = np.asarray(jax.jit(softmax_bound)(log_eta_hat, u))
    found = bounds + 2 + (noise - 1)  # without noise of mean 0
    error = float(found.std()) / math.sqrt(number)
    expected = variance * (alpha - alpha**2 / 2)
    assert abs(float(found.mean()) - expected) < norm.isf(FALSE_ALARM / 2) * error + 0.1 * expected
    assert error < 0.05 * expected
