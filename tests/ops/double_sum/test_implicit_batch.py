# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import logsumexp, wrightomega

from numpyro_largecat.ops.double_sum.implicit_batch import implicit_batch_step
from numpyro_largecat.ops.double_sum.implicit_step import implicit_step

B, M = 5, 7


def problem(num_features, spread=1.0, rate=2.0, seed=0):
    """Two observations share a label; one observation and one row are padding."""
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(B, num_features)), spread * rng.normal(size=(M, num_features))
    weights, keep = np.array([1, 1, 1, 0, 1, 30, 30.0]), rng.uniform(0.3, 1, M)
    rates = np.array([rate] * (B - 1) + [0])
    return rng.gamma(2, 2, B), x, w, np.array([0, 1, 1, 2, 3]), weights, keep, rates


def solve(u, x, w, label_rows, weights, keep, rates, dtype="float64"):
    floats = [jnp.asarray(a, dtype) for a in (u, x @ w.T, x @ x.T, weights, keep, rates)]
    return implicit_batch_step(*floats[:3], jnp.asarray(label_rows), *floats[3:])


@pytest.mark.parametrize("num_features", [2, 8])
def test_it_agrees_with_minimisation_over_all_parameters(x64, num_features):
    """Also with fewer features than observations, where the Gram matrix is singular."""
    u, x, w, label_rows, weights, keep, rates = arguments = problem(num_features)

    def objective(theta):
        v, rows = theta[:B], theta[B:].reshape(M, num_features)
        utilities = x @ rows.T
        gaps = utilities - utilities[np.arange(B), label_rows][:, None]
        value = rates @ (v + np.exp(logsumexp(gaps, b=weights, axis=1) - v))
        value += np.square(v - u).sum() / 2
        return value + (np.square(rows - w).sum(1) / (2 * keep)).sum()

    start = np.concatenate([u + 5, w.ravel()])
    best = minimize(objective, start, method="BFGS", options={"gtol": 1e-8}).x
    step = solve(*arguments)
    rows = w - keep[:, None] * (step.forces.T @ x)
    assert float(step.residual) < 1e-10
    np.testing.assert_allclose(step.u, best[:B], atol=2e-5)
    np.testing.assert_allclose(rows, best[B:].reshape(M, num_features), atol=2e-5)


def error_of_rows(u, x, w, label_rows, weights, keep, rates, forces):
    """Length of the gradient in the rows, each times sqrt(keep), over that of its first term.

    All in float64, with the u that is best for the rows that the forces lead to.
    """
    forces = np.asarray(forces, np.float64)
    utilities = x @ (w - keep[:, None] * (forces.T @ x)).T
    gaps = utilities - utilities[np.arange(B), label_rows][:, None]
    log_eta = logsumexp(gaps, b=weights, axis=1)
    with np.errstate(divide="ignore"):
        pulls = wrightomega(log_eta + np.log(rates) - u + rates).real
    asked = weights * np.exp(gaps - log_eta[:, None])
    asked[np.arange(B), label_rows] -= 1
    asked *= pulls[:, None]
    first, rest = (np.sqrt(keep) * (x.T @ part) for part in (asked, asked - forces))
    return np.linalg.norm(rest) / np.linalg.norm(first)


@pytest.mark.parametrize(
    ("dtype", "spread", "rate", "most"),
    [
        ("float64", 1.0, 1e-3, 1e-13),
        ("float64", 30.0, 1.0, 1e-10),
        ("float64", 100.0, 1e3, 1e-10),
        ("float32", 1.0, 1e-3, 3e-6),
        ("float32", 3.0, 1.0, 1e-5),
        ("float32", 100.0, 10.0, 1e-3),
    ],
)
def test_the_optimality_condition_holds(x64, dtype, spread, rate, most):
    """By formulas of its own; float32 cannot resolve more where utilities are a thousand."""
    for seed in range(3):
        arguments = problem(8, spread, rate, seed)
        step = solve(*arguments, dtype=dtype)
        error = error_of_rows(*arguments, step.forces)
        assert max(error, float(step.residual)) < most


def long_step(utilities, rate):
    """Five observations with labels and u of their own, the u fitting the labels."""
    gram = np.full((5, 5), 0.3) + 0.7 * np.eye(5)
    floats = np.zeros(5), utilities, gram, np.ones(10), np.ones(10), np.full(5, rate)
    floats = [jnp.asarray(a, jnp.float32) for a in floats]
    return implicit_batch_step(*floats[:3], jnp.arange(5), *floats[3:])


@pytest.mark.parametrize("seed", [327, 485, 550, 623])
def test_a_long_step_from_one_wrong_label_does_not_go_round_in_circles(seed):
    """Newton steps that may raise the objective do, in one of a hundred such states."""
    utilities = np.random.default_rng(seed).uniform(-60, -10, (5, 10))
    utilities[range(5), range(5)], utilities[2, 8] = 0, 6
    step = long_step(utilities, 2000.0)
    assert float(step.residual) < 1e-5
    assert int(step.num_steps) < 30


def test_float32_resolves_long_steps_on_labels_that_are_nearly_certain():
    """The share of the other classes, 1e-7, is not what rounding leaves of 1."""
    utilities = np.random.default_rng(10).normal(size=(5, 10))
    utilities[range(5), range(5)] += 15
    assert float(long_step(utilities, 1300.0).residual) < 1e-5


def test_one_observation_and_class_are_the_step_for_a_pair(x64):
    u, gap, norm, rate, others = 2.0, 3.0, 1.7, 4.0, 50.0
    arrays = [jnp.array(a) for a in ([u], [[0.0, gap]], [[norm]])]
    more = [jnp.array(a) for a in ([1.0, others], [0.5, 0.25], [rate])]
    step = implicit_batch_step(*arrays, jnp.array([0]), *more)
    pair = (u, gap, norm * 0.75, rate, np.log(others))
    new_u, force = implicit_step(*(jnp.array(a) for a in pair))
    np.testing.assert_allclose(step.u[0], new_u, rtol=1e-10)
    np.testing.assert_allclose(step.forces[0], [-force, force], rtol=1e-9)


def test_rows_without_features_need_no_solver():
    """Their forces move nothing, so they are no error, whatever they are."""
    u, x, *rest = problem(4)
    step = solve(u, 0 * x, *rest, dtype="float32")
    assert float(step.residual) == 0
    assert int(step.num_steps) <= 2


@pytest.mark.parametrize("rate", [1e-12, 1e-30, 1e-38])
def test_rates_near_the_least_float_leave_no_nan(rate):
    """Squares of such forces are 0."""
    step = solve(*problem(4, rate=rate), dtype="float32")
    assert jnp.isfinite(step.forces).all()
    assert jnp.isfinite(step.residual)


def test_padding_is_left_alone():
    step = solve(*problem(4), dtype="float32")
    assert not step.forces[-1].any()
    assert not step.forces[:, 3].any()
