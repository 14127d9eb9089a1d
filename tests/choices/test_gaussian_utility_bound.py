# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_largecat as lc
from tests import reference
from tests.choices.subsets import INDICES, SUBSET, WEIGHTS

# A correct program fails one of a test's comparisons, at most 40 means each compared at 5.5
# standard errors, with probability below this.
STANDARD_ERRORS = 5.5
FALSE_ALARM = 1e-5
rng = np.random.default_rng(0)

MEANS = (2 * rng.normal(size=(3, 6))).astype(np.float32)
VARIANCES = rng.exponential(size=(3, 6)).astype(np.float32)
U = np.array([0.5, 2.5, 1.5], np.float32)
SLOPE = np.array([0.0, -0.6, -1.0], np.float32)


def eta(means, variances, row, slope=0.0, weights=None):
    """Sum of w_k E[exp(psi_k - psi_y - slope (psi_y - m_y))], in float64."""
    weights = np.ones(len(means)) if weights is None else weights
    m, v, slope = np.asarray(means, float), np.asarray(variances, float), float(slope)
    total = math.exp(slope**2 * v[row] / 2)
    for k in range(len(m)):
        if k != row and weights[k] > 0:
            mean, variance = m[k] - m[row], v[k] + (1 + slope) ** 2 * v[row]
            total += weights[k] * math.exp(mean + variance / 2)
    return total


def expected_bounds(rows, weights=None, u=tuple(U)):
    """1 - u - exp(-u) eta of each observation, at the best u if there is none."""
    etas = [eta(*args, weights) for args in zip(MEANS, VARIANCES, rows, SLOPE, strict=True)]
    if u is None:
        return -np.log(etas)
    u = np.array(u, float)
    return 1 - u - np.exp(-u) * np.array(etas)


def make(means, variances, u, slope, classes=None):
    return lc.bounds.GaussianUtilityBound(means, variances, classes, u=u, slope=slope)


# Rows of the observed classes; the bounds of these; the distribution of arrays of shape (3, 6).
CASES: dict[str, Any] = {
    "all": ((0, 5, 2), None, make),
    "subset": ((1, 0, 1), WEIGHTS, partial(make, classes=SUBSET)),
}
cases = pytest.mark.parametrize(("rows", "weights", "make"), CASES.values(), ids=CASES)


def values_of(rows, weights):
    return np.array(rows) if weights is None else INDICES[list(rows)]


@cases
def test_without_u_it_takes_the_best_one(rows, weights, make):
    @jax.jit
    def bounds(values):
        d = make(MEANS, VARIANCES, None, SLOPE)
        best = d.optimal_u(values)
        return d.log_prob(values), best, make(MEANS, VARIANCES, best, SLOPE).log_prob(values)

    found, best, at_best = bounds(values_of(rows, weights))
    np.testing.assert_allclose(found, expected_bounds(rows, weights, None), rtol=1e-5)
    np.testing.assert_allclose(best, -expected_bounds(rows, weights, None), rtol=1e-5)
    np.testing.assert_allclose(at_best, found, rtol=1e-5)


def test_slope_zero_is_the_default_and_the_own_term_is_then_one():
    d = lc.bounds.GaussianUtilityBound(jnp.array([1.0, -jnp.inf]), jnp.array([9.0, 1.0]), u=0.3)
    np.testing.assert_allclose(d.log_prob(0), 1 - 0.3 - math.exp(-0.3), rtol=1e-6)


@cases
def test_without_variance_it_is_the_bound_of_the_utilities(rows, weights, make):
    values, nothing = values_of(rows, weights), np.zeros_like(VARIANCES)
    found = jax.jit(lambda values: make(MEANS, nothing, U, SLOPE).log_prob(values))(values)
    weights = np.ones(6) if weights is None else weights
    triples = zip(MEANS, rows, np.float64(U), strict=True)
    expected = [
        1 - u - math.exp(-u) * reference.weighted_eta(means, range(6), weights, row)
        for means, row, u in triples
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@cases
@pytest.mark.some_cases(2)
def test_values_and_gradients_without_variance_of_equal_and_of_huge_utilities(
    rows, weights, make, dtype
):
    """Where all utilities are 0 each class counts its weight."""
    values = values_of(rows, weights)

    @jax.jit
    @jax.vmap
    def both(means, variances):
        def total(means, variances):
            slope = jnp.array(SLOPE, dtype)
            at = [make(means, variances, u, slope) for u in (jnp.array(U, dtype), None)]
            log_prob = jnp.stack([d.log_prob(values) for d in at])
            return log_prob.sum(), log_prob

        return jax.value_and_grad(total, (0, 1), has_aux=True)(means, variances)

    huge = [[1e4, -1e4, 0, 1e4, 1e4, -1e4], [-1e4, 1e4, 1e4, -1e4, 0, 0], [1e4] * 6]
    with jax.enable_x64(dtype == "float64"):
        means = jnp.array([np.zeros((3, 6)), huge, np.negative(huge)], dtype)
        (_, log_prob), gradients = both(means, jnp.zeros_like(means))
    assert log_prob.dtype == dtype
    assert all(jnp.isfinite(x).all() for x in (log_prob, *gradients))
    eta = 6 if weights is None else weights.sum()
    at_u, slope = np.float64(U), np.float64(SLOPE)
    expected = [1 - at_u - np.exp(-at_u) * eta, np.full(3, -math.log(eta))]
    np.testing.assert_allclose(log_prob[0], expected, rtol=1e-5)
    # The own class has the derivative of exp(slope^2 v / 2) + exp((1 + slope)^2 v / 2) (eta - 1).
    own = (slope**2 + (1 + slope) ** 2 * (eta - 1)) / 2
    in_own = -(np.exp(-at_u) + 1 / eta) * own
    np.testing.assert_allclose(np.asarray(gradients[1])[0, range(3), rows], in_own, rtol=1e-5)


def test_shapes_are_inferred_and_variances_broadcast():
    shapes = dict(utilities=(2, 1, 6), variances=(2, 1, 6), u=(3,))
    assert lc.bounds.GaussianUtilityBound.infer_shapes(**shapes) == ((2, 3), ())
    assert make(np.zeros((2, 1, 6)), np.ones(6), U, 0.0).batch_shape == (2, 3)
    whole_numbers = lc.bounds.GaussianUtilityBound(np.array([0, 1]), np.array([0, 2])).log_prob(0)
    np.testing.assert_allclose(whole_numbers, -math.log(1 + math.exp(2)), rtol=1e-6)


# What it is the expectation of.


def test_it_is_the_mean_of_the_bound_over_gaussian_utilities_and_below_that_of_the_softmax():
    """By 50,000 draws for each of 12 settings of moments, u and slope; u follows the draw."""
    num_draws, row = 50_000, 2
    random = np.random.default_rng(1)
    means, variances = random.normal(size=(12, 5)), random.exponential(0.5, (12, 5))
    slope = np.resize([0.0, -0.3, -0.8], 12)
    u = random.uniform(0.5, 2.5, 12)

    @jax.jit
    @jax.vmap
    def moments(rng_key, means, variances, u, slope):
        psi = means + jnp.sqrt(variances) * jax.random.normal(rng_key, (num_draws, 5))
        own = psi[:, row]
        followed = u + slope * (own - means[row])
        bound = 1 - followed - jnp.exp(jax.nn.logsumexp(psi, axis=-1) - own - followed)
        gap = jax.nn.log_softmax(psi)[:, row] - bound
        return jnp.stack([bound.mean(), bound.std() / math.sqrt(num_draws), gap.min()])

    keys = jax.random.split(jax.random.key(0), 12)
    mean, error, least_gap = np.asarray(moments(keys, means, variances, u, slope)).T
    found = np.asarray(jax.jit(lambda *a: make(*a).log_prob(row))(means, variances, u, slope))
    assert (np.abs(found - mean) <= STANDARD_ERRORS * error + 1e-4).all()
    assert (least_gap > -1e-4).all()  # it is a bound for each draw, so also on average


def test_what_the_bound_loses_to_first_order_in_the_variances(x64):
    """The expected log softmax has the derivatives -p_k (1 - p_k) / 2 in the variances, at 0."""
    p = np.array([0.1, 0.5, 0.15, 0.25])
    row, exact = 2, -p * (1 - p) / 2

    @jax.jit
    @jax.grad
    def gradient(variances, slope):
        return lc.bounds.GaussianUtilityBound(jnp.log(p), variances, slope=slope).log_prob(
            jnp.array(row)
        )

    derivatives = partial(gradient, jnp.zeros(4))

    others = p**2 / 2 * (np.arange(4) != row)
    own = np.eye(4)[row] * (1 - p[row]) ** 2 / 2
    np.testing.assert_allclose(exact - derivatives(0.0), others + own, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(exact - derivatives(p[row] - 1), others, rtol=1e-10, atol=1e-12)


LABELS, TABLE = np.array([4, 1, 4]), np.random.default_rng(2).normal(size=(2, 9)) * 1.5


def test_at_the_best_u_of_a_subset_it_is_biased_upwards(x64):
    """Its mean over every subset lies above the value on all classes; if all are there it is it."""

    @jax.jit
    def at_best(indices, weights, distinct=(1, 4)):
        distinct = jnp.array(distinct, jnp.int32)
        classes = lc.plates.ClassSubset(indices, weights, distinct, 9, "sample")
        means, variances = jnp.array(TABLE[0])[indices], jnp.array(TABLE[1])[indices] ** 2
        moments = [jnp.broadcast_to(part, (3, len(indices))) for part in (means, variances)]
        d = lc.bounds.GaussianUtilityBound(*moments, classes, slope=jnp.array([0.0, -0.5, -1.0]))
        return d.log_prob(jnp.array(LABELS)).sum()

    full = at_best(jnp.arange(9), jnp.ones(9), jnp.arange(9))
    few, all_of_them = (reference.mean_over_subsets(at_best, LABELS, 9, size) for size in (1, 7))
    assert few > full + 0.02
    np.testing.assert_allclose(all_of_them, full, rtol=1e-12)


def test_draws_have_the_mean_probabilities_over_gaussian_utilities():
    num_draws = 20_000
    means, variances = jnp.array([0.0, 1.0, -jnp.inf, -0.5]), jnp.array([1.0, 4, 1, 0])

    @jax.jit
    def probabilities_and_draws(rng_key):
        keys = jax.random.split(rng_key)
        psi = means + jnp.sqrt(variances) * jax.random.normal(keys[0], (num_draws, 4))
        d = lc.bounds.GaussianUtilityBound(means, variances, slope=jnp.zeros(1))
        return jax.nn.softmax(psi), d.sample(keys[1], (num_draws,))

    probabilities, drawn = (np.asarray(a) for a in probabilities_and_draws(jax.random.key(0)))
    assert drawn.shape == (num_draws, 1)
    gap = probabilities - (drawn == np.arange(4))
    error = gap.std(axis=0) / math.sqrt(num_draws)
    assert (np.abs(gap.mean(axis=0)) <= STANDARD_ERRORS * error + 1e-5).all()
    assert (drawn != 2).all()


# Hard input.


BAD = {
    "a variance for each observation": (
        lambda: make(MEANS, np.ones((3, 1)), U, 0),
        ValueError,
        r"`variances` must have shape \(\.\.\., 6\), .*got shape \(3, 1\)",
    ),
    "one variance": (lambda: make(MEANS, 1.0, U, 0), ValueError, r"got shape \(\)"),
    "variances of more observations": (
        lambda: make(MEANS, np.ones((2, 3, 6)), U, 0),
        ValueError,
        r"got shape \(2, 3, 6\)",
    ),
    "negative variances": (
        lambda: lc.bounds.GaussianUtilityBound(MEANS, -VARIANCES, validate_args=True),
        ValueError,
        "variances",
    ),
    "slope above 0": (
        lambda: lc.bounds.GaussianUtilityBound(MEANS, VARIANCES, slope=0.5, validate_args=True),
        ValueError,
        "slope",
    ),
    "NaN": (
        lambda: lc.bounds.GaussianUtilityBound(MEANS * np.nan, VARIANCES, validate_args=True),
        ValueError,
        "utilities",
    ),
    "a draw from a subset": (
        lambda: make(MEANS, VARIANCES, U, 0, SUBSET).sample(jax.random.key(0)),
        NotImplementedError,
        "sample needs all classes",
    ),
}


@pytest.mark.parametrize(("action", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused(action, error, message):
    with pytest.raises(error, match=message):
        action()
