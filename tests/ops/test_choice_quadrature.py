# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_ndtr

from numpyro_largecat.choices.error_families import FAMILIES
from numpyro_largecat.ops import choice_quadrature
from numpyro_largecat.ops.choice_quadrature import choice_log_prob
from tests import reference
from tests.memory import temp_bytes
from tests.slow_cases import slow_case

FALSE_ALARM = 1e-5  # how often a correct program fails the check of the importance sampler
STANDARD_ERRORS = 5.5
NOISES = sorted(FAMILIES)


def log_prob(utilities, labels, noise):
    family = FAMILIES[noise]
    utilities = jnp.asarray(utilities)
    return choice_log_prob(utilities, jnp.asarray(labels), family.log_prob, family.log_cdf)


@partial(jax.jit, static_argnames="noise")
def value_and_grad(utilities, label, noise):
    """In one compiled program for each shape."""
    return jax.value_and_grad(log_prob)(utilities, label, noise)


def random_utilities(num_categories):
    rng = np.random.default_rng(num_categories)
    return rng.normal(size=(12, num_categories)) * rng.choice([0.3, 1.0, 3.0, 8.0], (12, 1))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("num_categories", [5, slow_case(2), slow_case(40)])
@pytest.mark.some_cases(1)
def test_equals_brute_force_and_sums_to_one_over_the_classes(x64, noise, num_categories):
    utilities, labels = random_utilities(num_categories), np.arange(num_categories)
    exact = [reference.choice_log_prob(psi, 1, noise) for psi in utilities]
    double = log_prob(utilities, np.ones(12, int), noise)
    np.testing.assert_allclose(double, exact, rtol=1e-8, atol=1e-8)
    single = log_prob(utilities.astype(np.float32)[:, None], labels, noise)
    exact = [reference.choice_log_prob(psi.astype(np.float32), 1, noise) for psi in utilities]
    np.testing.assert_allclose(single[:, 1], exact, rtol=2e-6, atol=1e-5)
    np.testing.assert_allclose(np.exp(single).sum(axis=-1), 1, rtol=2e-5)


@pytest.mark.slow
def test_gumbel_errors_give_the_softmax():
    utilities = random_utilities(300).astype(np.float32)
    labels = np.arange(12)
    expected = jax.nn.log_softmax(utilities)[np.arange(12), labels]
    np.testing.assert_allclose(
        log_prob(utilities, labels, "gumbel"), expected, rtol=2e-6, atol=1e-5
    )


@pytest.mark.parametrize("distance", [-1e4, -300.0, -5.0, 0.0, 5.0, 300.0, 1e4])
@pytest.mark.slow
def test_two_classes_with_normal_errors(distance):
    """Phi(distance / sqrt 2), also where it is 0 or 1 to all digits."""
    value = log_prob([distance, 0.0], 0, "normal")
    np.testing.assert_allclose(value, log_ndtr(distance / np.sqrt(2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("noise", ["normal", "logistic"])
@pytest.mark.slow
def test_agrees_with_the_importance_sampler_of_the_paper(noise):
    """1000 draws of the error from Normal(5, 5)."""
    utilities = random_utilities(30)[:4]
    error = np.random.default_rng(0).normal(5, 5, 1000)
    log_proposal = -0.5 * ((error - 5) / 5) ** 2 - np.log(5 * np.sqrt(2 * np.pi))
    for psi in utilities:
        label = int(psi.argmax())
        weights = np.exp(reference.choice_log_joint(psi, label, noise, error) - log_proposal)
        exact = np.exp(float(log_prob(psi, label, noise)))
        standard_error = weights.std(ddof=1) / np.sqrt(1000)
        assert abs(weights.mean() - exact) < STANDARD_ERRORS * standard_error


@pytest.mark.parametrize("noise", ["logistic", slow_case("gumbel"), slow_case("normal")])
@pytest.mark.slow
def test_gradients_agree_with_finite_differences_and_sum_to_zero(x64, noise):
    psi = random_utilities(6)[5]
    _, gradient = value_and_grad(jnp.array(psi), 2, noise)
    step = 1e-5 * np.eye(6)
    above, below = (
        np.array([reference.choice_log_prob(psi + sign * h, 2, noise) for h in step])
        for sign in (1, -1)
    )
    differences = (above - below) / 2e-5
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradient.sum(), 0, atol=1e-12)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.some_cases(1)
def test_second_derivatives_are_those_of_the_gradient(x64, noise):
    """Also between two classes that lose, and with one that is not available."""
    utilities = np.array([0.0, 0.5, -np.inf, 1.0, -3.0])

    @jax.jit
    def derivatives(utilities):
        return jax.grad(log_prob)(utilities, 3, noise), jax.hessian(log_prob)(utilities, 3, noise)

    hessian = derivatives(utilities)[1]
    for k in (0, 1, 3, 4):
        step = 1e-4 * np.eye(5)[k]
        up, down = (derivatives(utilities + sign * step)[0] for sign in (1, -1))
        np.testing.assert_allclose(hessian[k], (up - down) / 2e-4, atol=1e-7)
    assert (hessian[2] == 0).all() and (hessian[:, 2] == 0).all()


@pytest.mark.slow
def test_derivatives_of_functions_of_the_probability_are_right_too(x64):
    """Of a mixture and of a product; and the third: p(1) is Phi((psi_1 - psi_0) / sqrt 2)."""
    utilities = jnp.array([0.0, 1.0])

    def found(psi):
        return jnp.exp(log_prob(psi, 1, "normal"))

    def exact(psi):
        return jax.scipy.stats.norm.cdf((psi[1] - psi[0]) / jnp.sqrt(2.0))

    for of in (
        lambda p: jax.hessian(lambda psi: jnp.log(0.5 * p(psi) + 0.5 * p(2 * psi))),
        lambda p: jax.jacfwd(lambda psi: p(psi) * jax.grad(p)(psi)),
        lambda p: jax.jacfwd(jax.hessian(lambda psi: jnp.log(p(psi)))),
    ):
        np.testing.assert_allclose(of(found)(utilities), of(exact)(utilities), atol=1e-9)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.some_cases(1)
def test_utilities_far_apart_leave_value_and_gradient_finite(noise):
    psi = jnp.array([1e4, -1e4, 0.0, 9999.0])
    for y in range(4):
        value, gradient = value_and_grad(psi, y, noise)
        assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.some_cases(1)
def test_classes_that_are_not_available_change_nothing(noise):
    with_gap = jnp.array([0.5, -jnp.inf, 1.0, -0.3])
    value, gradient = value_and_grad(with_gap, 2, noise)
    expected, slopes = value_and_grad(jnp.array([0.5, 1.0, -0.3]), 1, noise)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(np.delete(gradient, 1), slopes, rtol=1e-4, atol=1e-6)
    assert gradient[1] == 0
    assert value_and_grad(with_gap, 1, noise)[0] == -jnp.inf


@pytest.mark.slow
def test_the_size_of_chunks_changes_nothing(monkeypatch):
    utilities = random_utilities(50).astype(np.float32)
    whole = log_prob(utilities, np.arange(12), "normal")
    monkeypatch.setattr(choice_quadrature, "MAX_NODE_ENTRIES", 11 * 12 * 7)
    chunked = log_prob(utilities[:11], np.arange(11), "normal")  # a shape not compiled before
    np.testing.assert_allclose(chunked, whole[:11], rtol=1e-5)


@pytest.mark.slow
def test_memory_beside_the_utilities_does_not_grow_with_the_classes():
    def value(utilities):
        return log_prob(utilities, jnp.zeros(4, int), "normal").sum()

    shapes = [jax.ShapeDtypeStruct((4, k), jnp.float32) for k in (10**6, 4 * 10**6)]
    sizes = [temp_bytes(value, shape) for shape in shapes]
    assert sizes[0] == sizes[1] < 20 * 10**6  # five arrays of `MAX_NODE_ENTRIES` entries
