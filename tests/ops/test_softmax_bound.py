# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from numpyro_largecat.ops.softmax_bound import (
    log_eta_hat,
    log_variance_of_sum,
    softmax_bound,
    take_row,
)
from tests import reference

bound_of = jax.jit(softmax_bound)
UTILITIES = arrays(np.float32, 5, elements=st.floats(-10, 10, width=32))


@given(utilities=UTILITIES, label=st.integers(0, 4))
def test_bound_is_exact_at_the_best_u(utilities, label):
    log_eta = log_eta_hat(utilities, label, np.ones(5, np.float32))
    exact = reference.softmax_log_prob(utilities, label)
    np.testing.assert_allclose(bound_of(log_eta, log_eta), exact, rtol=1e-5, atol=2e-6)


@given(utilities=UTILITIES, label=st.integers(0, 4), u=st.floats(-5, 25, width=32))
def test_bound_is_the_equation_and_below_the_exact_value(utilities, label, u):
    log_eta = log_eta_hat(utilities, label, np.ones(5, np.float32))
    bound = float(bound_of(log_eta, np.float32(u)))
    expected = reference.softmax_bound(utilities, label, u)
    np.testing.assert_allclose(bound, expected, rtol=2e-5, atol=1e-5)
    exact = reference.softmax_log_prob(utilities, label)
    assert bound <= exact + 1e-5 * max(1, abs(exact))


@given(
    utilities=UTILITIES,
    label=st.integers(0, 4),
    weights=arrays(np.float32, 5, elements=st.floats(0, 1000, width=32)),
)
def test_log_eta_hat_is_the_weighted_sum(utilities, label, weights):
    weights[label] = 1
    value = float(log_eta_hat(utilities, label, weights))
    expected = math.log(reference.weighted_eta(utilities, range(5), weights, label))
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=2e-6)
    assert value >= -2e-6  # the label's own term is 1


@pytest.mark.parametrize("num_classes", [512, 513, 1027])
def test_the_highest_of_many_utilities_may_be_anywhere(num_classes):
    utilities = 1e4 * np.eye(num_classes, dtype=np.float32)  # its exponential overflows
    labels = np.zeros(num_classes, np.int32)
    value = log_eta_hat(utilities, labels, np.ones(num_classes, np.float32))
    expected = np.full(num_classes, 1e4)
    expected[0] = 0  # the label is the highest
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_padding_of_weight_zero_changes_neither_value_nor_gradient():
    utilities, weights = np.float32([0.3, -1.0, 2.0]), np.float32([1.0, 4.0, 4.0])
    padded, no_weight = np.append(utilities, 1e4), np.append(weights, 0.0)
    fn = jax.jit(jax.value_and_grad(log_eta_hat))
    value, gradient = fn(utilities, 0, weights)
    value_padded, gradient_padded = fn(padded, 0, no_weight)
    np.testing.assert_allclose(value_padded, value, rtol=1e-6)
    np.testing.assert_allclose(gradient_padded, np.append(gradient, 0.0), rtol=1e-6)


def test_gradient_in_u_is_the_missing_mass():
    """d bound / du = exp(log eta_hat - u) - 1, which is zero at the best u."""
    log_eta, u = np.array([2.0, 2.0, 2.0]), np.array([1.0, 2.0, 3.5])
    gradient = jax.jit(jax.vmap(jax.grad(softmax_bound, argnums=1)))(log_eta, u)
    np.testing.assert_allclose(gradient, np.exp([1.0, 0.0, -1.5]) - 1, rtol=1e-6)


def test_gradient_in_the_utilities_at_the_best_u_is_that_of_softmax():
    utilities, label, weights = np.float32([0.5, -1.0, 3.0, 0.0]), 1, np.ones(4, np.float32)
    best = log_eta_hat(utilities, label, weights)

    def bound(utilities):
        return softmax_bound(log_eta_hat(utilities, label, weights), best)

    one_hot = np.arange(4) == 1
    expected = one_hot - np.exp([reference.softmax_log_prob(utilities, k) for k in range(4)])
    np.testing.assert_allclose(jax.jit(jax.grad(bound))(utilities), expected, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_far_utilities_give_finite_values_at_a_u_to_match(scale):
    utilities = np.float32([0.0, scale, scale])
    log_eta = log_eta_hat(utilities, 0, np.ones(3, np.float32))
    expected = scale + math.log(2) if scale > 0 else 0.0
    np.testing.assert_allclose(log_eta, expected, rtol=1e-6)
    np.testing.assert_allclose(bound_of(log_eta, log_eta), -expected, rtol=1e-6)


def test_take_row_reads_one_entry_and_ignores_the_others():
    utilities = jnp.array([[1.0, jnp.inf, 3.0], [-jnp.inf, jnp.nan, 6.0]])
    assert take_row(utilities, jnp.array([0, 2])).tolist() == [1.0, 6.0]
    assert take_row(utilities[0], jnp.array(2)).tolist() == 3.0
    gradient = jax.jit(jax.grad(lambda x: take_row(x, jnp.array([0, 2])) @ jnp.array([2.0, 5.0])))
    np.testing.assert_array_equal(gradient(utilities), [[2.0, 0, 0], [0, 0, 5.0]])


def test_the_variance_of_a_sum_is_estimated_without_bias(x64):
    """Over all subsets of terms, each drawn with probability 1 / w on its own."""
    x, weights = np.array([0.3, -1.0, 2.0, 0.0]), np.array([1.0, 2.5, 4.0, 1.5])
    sums, estimates, probabilities = [], [], []
    for drawn in itertools.product([0, 1], repeat=4):
        kept = np.array(drawn) * weights
        probabilities.append(np.where(drawn, 1 / weights, 1 - 1 / weights).prod())
        sums.append(kept @ np.exp(x))
        estimates.append(np.exp(log_variance_of_sum(x, kept)))
    mean = np.dot(probabilities, sums)
    variance = np.dot(probabilities, (np.array(sums) - mean) ** 2)
    np.testing.assert_allclose(np.dot(probabilities, estimates), variance, rtol=1e-12)


def test_a_sum_of_which_nothing_is_drawn_has_no_variance():
    x = jnp.array([[0.0, 900.0], [-jnp.inf, -jnp.inf]])
    assert log_variance_of_sum(x, jnp.array([1.0, 0.0])).tolist() == [-jnp.inf] * 2
    found = log_variance_of_sum(x, jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(found, [1800 + math.log(6), -np.inf], rtol=1e-6)
