# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from scipy.optimize import minimize

from numpyro_largecat.ops.double_sum.implicit_step import best_u, implicit_step
from numpyro_largecat.ops.wright_omega import wright_omega

EXTREMES = 20_000  # random states


def extreme_states(dtype):
    """States (u, gap, curvature, rate, log_others): half moderate, half with 1e4; K up to 1e7."""
    rng = np.random.default_rng(0)

    def mixed(moderate):
        far = rng.choice([-1, 1], EXTREMES) * 10 ** rng.uniform(-2, 4, EXTREMES)
        return np.where(rng.random(EXTREMES) < 0.5, moderate, far)

    states = (
        mixed(rng.gamma(2, 5, EXTREMES)),
        mixed(rng.normal(0, 3, EXTREMES)),
        10 ** rng.uniform(-6, 6, EXTREMES),
        10 ** rng.uniform(-8, 8, EXTREMES),
        np.log(10 ** rng.uniform(0.31, 7, EXTREMES) - 1),
    )
    return [jnp.asarray(state.astype(np.float32), dtype) for state in states]


def residuals(u, gap, curvature, rate, log_others, new_u, force):
    """Both optimality conditions in float64, relative to the largest of their terms.

    That of the rows is ``log(force) = log(rate) + log_others + new gap - new u``. It is left out
    where the force is too small to be a float.
    """
    u, gap, curvature, rate, log_others, new_u, force = (
        np.asarray(a, np.float64) for a in (u, gap, curvature, rate, log_others, new_u, force)
    )
    of_u = -rate * np.expm1(-new_u) + new_u - u - force
    of_u /= rate * (1 + np.exp(-new_u)) + abs(new_u) + abs(u) + force
    fall = curvature * force
    log_force = np.log(rate) + log_others + gap - fall - new_u
    seen = log_force > -60
    of_rows = np.log(np.where(force > 0, force, 1)) - log_force
    of_rows /= 1 + abs(np.log(rate)) + abs(gap) + fall + abs(new_u)
    return abs(of_u).max(), abs(of_rows[seen]).max()


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-6), ("float64", 1e-14)])
def test_it_satisfies_the_optimality_conditions_at_extreme_states(x64, dtype, most):
    states = extreme_states(dtype)
    new_u, force = implicit_step(*states)
    assert new_u.dtype == force.dtype == dtype
    assert max(residuals(*states, new_u, force)) < most


def test_it_agrees_with_minimisation_over_all_parameters(x64):
    """The reference moves u and two rows of three weights each, with a ridge."""
    rng = np.random.default_rng(1)
    for _ in range(10):
        x, rows, u = rng.normal(size=3), rng.normal(size=(2, 3)), rng.gamma(2, 2)
        rate, others, penalties = rng.gamma(1, 3), 50.0, rng.gamma(1, 1, size=2)

        def objective(theta, x=x, rows=rows, u=u, rate=rate, others=others, penalties=penalties):
            v, (w_k, w_y) = theta[0], theta[1:].reshape(2, 3)
            value = rate * (v + np.exp(-v) + others * np.exp(x @ (w_k - w_y) - v))
            value += (penalties * np.square(theta[1:].reshape(2, 3)).sum(1)).sum() / 2
            return value + (v - u) ** 2 / 2 + np.square(theta[1:] - rows.ravel()).sum() / 2

        start = np.concatenate([[max(u, 8)], rows.ravel()])
        best = minimize(objective, start, method="BFGS", options={"gtol": 1e-9}).x
        keep = 1 / (1 + penalties)
        gap, curvature = x @ (keep[:, None] * rows).T @ [1, -1], x @ x * keep.sum()
        arguments = (u, gap, curvature, rate, np.log(others))
        new_u, force = implicit_step(*(jnp.asarray(a) for a in arguments))
        np.testing.assert_allclose(new_u, best[0], atol=1e-5)
        moved = keep[:, None] * (rows + float(force) * np.array([[-1], [1]]) * x)
        np.testing.assert_allclose(moved.ravel(), best[1:], atol=1e-5)


def test_it_is_no_longer_than_proposition_2_allows(x64):
    """Half the fall is at most log of what plain SGD takes, or rate * |x|^2 where u falls."""
    u, gap, curvature, rate, log_others = states = extreme_states("float64")
    new_u, force = implicit_step(*states)
    fall = curvature * force
    plain = wright_omega(jnp.log(curvature * rate) + log_others + gap - u)
    bound = jnp.where(new_u >= u, plain, rate * curvature)
    assert bool((fall <= bound * (1 + 1e-9)).all())


def test_u_stays_at_0_or_above():
    u, *others = extreme_states("float32")
    new_u, _ = implicit_step(jnp.abs(u), *others)
    assert float(new_u.min()) >= -1e-6


@pytest.mark.parametrize(("curvature", "rate"), [(0.0, 2.0), (2.0, 0.0)])
def test_no_features_or_no_step_size_leave_the_rows(curvature, rate):
    states = (jnp.array(a) for a in (3.0, 1.0, curvature, rate, 4.0))
    new_u, force = implicit_step(*states)
    assert jnp.isfinite(new_u)
    assert float(curvature * force) == 0
    if rate == 0:
        assert float(new_u) == 3


def test_it_is_the_same_under_vmap_and_scan():
    states = [a[:50] for a in extreme_states("float32")]
    expected = implicit_step(*states)
    for got in (
        jax.vmap(implicit_step)(*states),
        jax.lax.scan(lambda _, state: (None, implicit_step(*state)), None, tuple(states))[1],
    ):
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-4, atol=1e-6)


def test_best_u_at_its_own_optimum_stays(x64):
    """At u = log eta the objective itself is smallest, so the distance adds nothing."""
    log_eta = jnp.array([0.0, 1.0, 20.0, 1e4])
    for rate in (1e-6, 1.0, 1e6):
        best = best_u(log_eta, log_eta, jnp.full(4, rate))
        np.testing.assert_allclose(best.u, log_eta, rtol=1e-12, atol=1e-9)
        np.testing.assert_allclose(best.force, rate, rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wright_omega_is_accurate_everywhere(x64, dtype):
    grid = np.concatenate([-np.logspace(2, -3, 500), np.linspace(-3, 3, 501), np.logspace(0, 9)])
    z = grid.astype(dtype)
    expected = scipy.special.wrightomega(z.astype(np.float64)).real
    normal = expected > np.finfo(dtype).tiny
    error = np.asarray(wright_omega(jnp.asarray(z)), np.float64)[normal] / expected[normal] - 1
    assert (abs(error) < 2.5 * np.finfo(dtype).eps * np.maximum(1, -z[normal])).all()
    assert float(wright_omega(jnp.array(-jnp.inf))) == 0
