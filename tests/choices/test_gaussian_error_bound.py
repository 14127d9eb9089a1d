# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpyro import handlers

import numpyro_largecat as lc
from numpyro_largecat.choices.error_families import FAMILIES
from numpyro_largecat.choices.kept_per_row import kept_per_row
from numpyro_largecat.choices.update_rules import GaussianNaturalGradient
from tests import reference
from tests.slow_cases import slow_case

NOISES = sorted(FAMILIES)


def of_gaussian(utilities, noise, q, num_nodes):
    loc, scale = q[0], jnp.exp(-0.5 * q[1])
    return lc.bounds.GaussianErrorBound(
        utilities, noise=noise, loc=loc, scale=scale, num_nodes=num_nodes
    )


def best_gaussian(utilities, value, noise, num_nodes=20, num_steps=10):
    """Location and log precision of the Gaussian that the rule finds with all classes."""

    def derivatives(q):
        return of_gaussian(utilities, noise, q, num_nodes).expected_derivatives(value)

    def step(_, q):
        visits, rule = jnp.array(0), GaussianNaturalGradient()  # new rows take Newton steps
        return rule.update(q, visits, derivatives)[0]

    return lax.fori_loop(0, num_steps, step, jnp.zeros(2))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.some_cases(1)
def test_it_is_a_bound_for_any_gaussian(x64, noise):
    rng = np.random.default_rng(0)
    utilities = rng.normal(size=(50, 7)) * rng.choice([0.3, 1.0, 3.0], (50, 1))
    q = jnp.array(np.stack([rng.uniform(-3, 5, 50), rng.uniform(-1, 4, 50)], axis=-1))
    bounds = jax.jit(jax.vmap(lambda psi, q: of_gaussian(psi, noise, q, 20).log_prob(3)))(
        utilities, q
    )
    exact = [reference.choice_log_prob(psi, 3, noise) for psi in utilities]
    assert (np.asarray(bounds) <= np.array(exact) + 1e-6).all()


@pytest.mark.slow
@pytest.mark.parametrize(("num_nodes", "spreads"), [(3, [0.5, 1.0, 2.0]), (20, [0.5, 2.0, 8.0])])
@pytest.mark.parametrize("noise", NOISES)
def test_the_best_gaussian_is_close_to_the_exact_log_probability(x64, noise, num_nodes, spreads):
    """The gap is what the posterior of the error is not Gaussian: 0.06 nats for Gumbel errors."""
    rng = np.random.default_rng(1)
    utilities = rng.normal(size=(20, 6)) * rng.choice(spreads, (20, 1))

    def best(psi):
        q = best_gaussian(psi, 2, noise, num_nodes)
        return of_gaussian(psi, noise, q, num_nodes).log_prob(2)

    exact = [reference.choice_log_prob(psi, 2, noise) for psi in utilities]
    gaps = np.array(exact) - np.asarray(jax.jit(jax.vmap(best))(utilities))
    assert (gaps > (-1e-6 if num_nodes == 20 else -0.03)).all()
    assert gaps.max() < (0.05 if noise == "normal" else 0.11)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.some_cases(1)
def test_derivatives_are_those_of_the_expectation(x64, noise):
    """In the location, and twice that in the variance."""
    psi = np.array([0.3, -1.0, 2.0, 0.1])

    def expected(loc, variance):
        q = jnp.stack([loc, -jnp.log(variance)])
        return of_gaussian(psi, noise, q, 3).log_prob(1) - 0.5 * jnp.log(variance)

    @jax.jit
    def both(loc, variance):
        q = jnp.stack([loc, -jnp.log(variance)])
        found = of_gaussian(psi, noise, q, 3).expected_derivatives(1)
        return found, jax.grad(expected, argnums=(0, 1))(loc, variance)

    (slope, curvature), (by_loc, by_variance) = both(0.7, 0.5)
    np.testing.assert_allclose(slope, by_loc, rtol=1e-6)
    np.testing.assert_allclose(curvature, 2 * float(by_variance), rtol=1e-5)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("label_at", [-1e4, slow_case(-30.0), 0.0, slow_case(30.0), 1e4])
@pytest.mark.some_cases(1)
def test_the_first_visit_of_a_row_leaves_everything_finite(noise, label_at):
    """From the start of ``sample_choice``, with the label far below or far above 10**5 classes."""
    psi, labels = np.zeros((1, 51), np.float32), np.array([1])
    psi[0, 0] = label_at

    @jax.jit
    def first_visit(psi):
        with handlers.seed(rng_seed=0):
            classes = lc.class_plate("classes", 10**5, labels, 50).classes
        local = kept_per_row(psi, classes, FAMILIES[noise], labels)
        rule, start = local.update_rule, local.start[None]
        q, _ = rule.update(start, rule.init(start), lambda q: local.statistic(q, 0.0))

        def bound(psi):
            return kept_per_row(psi, classes, FAMILIES[noise], labels).bound(q).log_prob(labels)

        return q, jax.value_and_grad(lambda psi: bound(psi).sum())(psi)

    assert all(np.isfinite(x).all() for x in jax.tree.leaves(first_visit(psi)))


def test_the_shift_is_the_derivative_of_the_best_location(x64):
    """In the utility of the observed class, with all classes as a subset; to first order in q."""
    psi = jnp.array([0.5, -1.0, 0.7, 0.0, 1.0, -0.5, 0.2])

    @jax.jit
    def best_and_moved(raised):
        with handlers.seed(rng_seed=0):
            classes = lc.class_plate("classes", 7, np.arange(6), 1).classes
        q = best_gaussian(psi.at[2].add(raised), 2, "normal", num_nodes=3)
        kept = kept_per_row(psi[None], classes, FAMILIES["normal"], np.array([2]))
        return q, kept.at_distance(q, 1.0)

    q, moved = map(np.asarray, best_and_moved(0.0))
    up, down = (np.asarray(best_and_moved(raised)[0]) for raised in (1e-3, -1e-3))
    derivative = (up - down)[0] / 2e-3
    np.testing.assert_allclose(moved[0] - q[0], derivative, atol=0.05)
    assert moved[1] == q[1]
