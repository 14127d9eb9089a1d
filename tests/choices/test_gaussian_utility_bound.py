# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import numpyro_largecat as lc
from tests import reference
from tests.choices.subsets import CHUNK, INDICES, SUBSET, WEIGHTS

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


@pytest.mark.smoke
@cases
def test_log_prob_is_the_equation_and_values_broadcast(rows, weights, make):
    d = make(MEANS, VARIANCES, U, SLOPE)
    values, expected = values_of(rows, weights), expected_bounds(rows, weights)
    assert (d.batch_shape, d.event_shape) == ((3,), ())
    np.testing.assert_allclose(d.log_prob(values), expected, rtol=1e-5)
    one = d.log_prob(int(values[0]))
    np.testing.assert_allclose(one, expected_bounds([rows[0]] * 3, weights), rtol=1e-5)
    many = d.log_prob(np.broadcast_to(values, (4, 3)))
    np.testing.assert_allclose(many, np.broadcast_to(expected, (4, 3)), rtol=1e-5)


@cases
def test_without_u_it_takes_the_best_one(rows, weights, make):
    values = values_of(rows, weights)
    d = make(MEANS, VARIANCES, None, SLOPE)
    np.testing.assert_allclose(d.log_prob(values), expected_bounds(rows, weights, None), rtol=1e-5)
    best = d.optimal_u(values)
    np.testing.assert_allclose(best, -expected_bounds(rows, weights, None), rtol=1e-5)
    at_best = make(MEANS, VARIANCES, best, SLOPE).log_prob(values)
    np.testing.assert_allclose(at_best, d.log_prob(values), rtol=1e-5)


def test_slope_zero_is_the_default_and_the_own_term_is_then_one():
    d = lc.bounds.GaussianUtilityBound(jnp.array([1.0, -jnp.inf]), jnp.array([9.0, 1.0]), u=0.3)
    np.testing.assert_allclose(d.log_prob(0), 1 - 0.3 - math.exp(-0.3), rtol=1e-6)


@cases
def test_without_variance_it_is_the_bound_of_the_utilities(rows, weights, make):
    values, nothing = values_of(rows, weights), np.zeros_like(VARIANCES)
    found = make(MEANS, nothing, U, SLOPE).log_prob(values)
    if weights is None:
        triples = zip(MEANS, rows, U, strict=True)
        expected = [reference.softmax_bound(*args) for args in triples]
    else:
        expected = lc.UtilityCategorical(MEANS, SUBSET, u=U).log_prob(values)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@cases
def test_jit_vmap_and_pytree_round_trip(rows, weights, make):
    values = values_of(rows, weights)
    arguments = MEANS, VARIANCES, U, SLOPE, values
    expected = partial(np.testing.assert_allclose, desired=expected_bounds(rows, weights))
    made_inside = jax.jit(lambda *args: make(*args[:-1]).log_prob(args[-1]))
    expected(made_inside(*arguments), rtol=1e-5)
    expected(jax.jit(jax.vmap(made_inside))(*arguments), rtol=1e-5)
    many = jax.vmap(make)(*arguments[:-1])
    expected(jax.vmap(lambda d, v: d.log_prob(v))(many, jnp.array(values)), rtol=1e-5)
    d = make(*arguments[:-1])
    again = jax.tree.unflatten(jax.tree.structure(d), jax.tree.leaves(d))
    assert (again.batch_shape, again.num_categories) == ((3,), d.num_categories)
    expected(again.log_prob(values), rtol=1e-5)


@cases
def test_expand_mask_and_to_event(rows, weights, make):
    d, expected = make(MEANS, VARIANCES, U, SLOPE), expected_bounds(rows, weights)
    values = values_of(rows, weights)
    expanded = d.expand((2, 3)).log_prob(np.broadcast_to(values, (2, 3)))
    np.testing.assert_allclose(expanded, np.broadcast_to(expected, (2, 3)), rtol=1e-5)
    np.testing.assert_allclose(d.to_event(1).log_prob(values), expected.sum(), rtol=1e-5)
    masked = d.mask(np.array([True, False, True])).log_prob(values)
    np.testing.assert_allclose(masked, [expected[0], 0, expected[2]], rtol=1e-5)


@cases
def test_gradients_agree_with_finite_differences_in_float64(rows, weights, make, x64):
    values = jnp.array(values_of(rows, weights))
    arguments = [jnp.array(a, jnp.float64) for a in (MEANS, VARIANCES, U, SLOPE)]
    log_prob = jax.jit(lambda *args: make(*args).log_prob(values))
    check_grads(log_prob, arguments, order=1, modes=["rev"], rtol=1e-6)
    assert log_prob(*arguments).dtype == jnp.float64
    np.testing.assert_allclose(log_prob(*arguments), expected_bounds(rows, weights), rtol=1e-12)


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
    found = np.asarray(make(means, variances, u, slope).log_prob(row))
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


def value_and_gradient(classes, indices):
    """Of all observations, in the moments of all 9 classes; and the value at the best u."""

    def total(table, u):
        means, variances = table[0][indices], table[1][indices] ** 2
        rows = [jnp.broadcast_to(part, (3, len(indices))) for part in (means, variances)]
        d = lc.bounds.GaussianUtilityBound(*rows, classes, u=u, slope=jnp.array([0.0, -0.5, -1.0]))
        return d.log_prob(jnp.array(LABELS)).sum()

    table = jnp.array(TABLE)
    value, gradient = jax.value_and_grad(total)(table, jnp.array([1.0, 2.5, 0.5]))
    return jnp.append(gradient.ravel(), value), total(table, None)


@jax.jit
def on_subset(indices, weights):
    distinct = jnp.array([1, 4], jnp.int32)
    classes = lc.plates.ClassSubset(indices, weights, distinct, 9, "sample")
    return jnp.append(*value_and_gradient(classes, indices))


def test_mean_over_every_subset(x64):
    """Given u, it is the value on all classes and its gradient; at the best u it lies above."""
    full, at_best = jax.jit(partial(value_and_gradient, None))(jnp.arange(9))
    means = [reference.mean_over_subsets(on_subset, LABELS, 9, size) for size in (1, 7)]
    for mean in means:
        np.testing.assert_allclose(mean[:-1], full, rtol=1e-11, atol=1e-11)
    assert means[0][-1] > at_best + 0.02
    np.testing.assert_allclose(means[1][-1], at_best, rtol=1e-12)


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize(("classes", "values"), [(None, [[0], [5]]), (SUBSET, [[7], [30]])])
def test_huge_utilities_give_finite_values_and_gradients(classes, values, dtype):
    """Means in [-1e4, 1e4] and variances up to 1e4, far from what u expects."""
    extremes = np.array([[1e4, -1e4, 0.0, 1e4, 1e4, -1e4], [-1e4, 1e4, 1e4, -1e4, 0.0, 0.0]])
    with jax.enable_x64(dtype == jnp.float64):
        means = jnp.array(np.concatenate([extremes, -extremes, np.full((2, 6), 1e4)]), dtype)
        u = jnp.array([-1e4, -5e3, 0.0, 5e3, 1e4, 1.0], dtype)
        slope = jnp.array([0.0, -0.5, -1.0, 0.0, -0.5, -1.0], dtype)

        @jax.jit
        @partial(jax.vmap, in_axes=(None, 0))
        @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
        def total(means, variances):
            at_u, at_best = (make(means, variances, x, slope, classes) for x in (u, None))
            log_probs = at_u.log_prob(jnp.array(values)), at_best.log_prob(jnp.array(values))
            return sum(x.sum() for x in log_probs), log_probs

        variances = jnp.stack([jnp.zeros((6, 6), dtype), jnp.full((6, 6), 1e4, dtype)])
        (_, log_probs), gradients = total(means, variances)
        assert {x.dtype for x in log_probs} == {jnp.dtype(dtype)}
        assert all(jnp.isfinite(x).all() for x in (*log_probs, *gradients))


@pytest.mark.parametrize("u", [None, U])
def test_classes_that_are_not_available(u):
    """They change nothing but the value of their own choice, -inf, which moves no utility."""
    means = np.concatenate([MEANS, MEANS[:1]])
    means[:, 4] = -np.inf  # another class
    means[2, 2] = -np.inf  # the chosen class
    means[3] = -np.inf  # everything
    values = jnp.array([0, 5, 2, 0])
    moments = jnp.array(means), jnp.concatenate([VARIANCES, VARIANCES[:1]])

    @jax.jit
    def log_prob(means, variances):
        local = None if u is None else jnp.append(u, 0.0)
        return make(means, variances, local, jnp.append(SLOPE, 0.0)).log_prob(values)

    value, pull_back = jax.vjp(log_prob, *moments)
    kept = np.delete(np.arange(6), 4)
    rows = [np.searchsorted(kept, row) for row in (0, 5)]
    etas = [eta(MEANS[n, kept], VARIANCES[n, kept], rows[n], SLOPE[n]) for n in range(2)]
    at_u = [
        -math.log(e) if u is None else 1 - u[n] - math.exp(-u[n]) * e for n, e in enumerate(etas)
    ]
    np.testing.assert_allclose(value, [*at_u, -np.inf, -np.inf], rtol=1e-5)
    for gradient in pull_back(jnp.ones(4)):
        assert jnp.isfinite(gradient).all()
        assert (gradient[:2, 4] == 0).all()
        assert (gradient[2:] == 0).all()


def test_bad_values_under_jit_are_nan():
    log_prob = jax.jit(make(MEANS, VARIANCES, U, SLOPE).log_prob)(np.array([-1, 6, 9]))
    np.testing.assert_array_equal(log_prob, np.nan)


BAD = {
    "one class": (lambda: make(np.zeros((3, 1)), np.zeros((3, 1)), U, 0), ValueError, "at least 2"),
    "other columns than the plate": (
        lambda: make(np.zeros((3, 5)), np.zeros((3, 5)), U, 0, SUBSET),
        ValueError,
        "one column for each row of the class plate, 6",
    ),
    "a variance for each observation": (
        lambda: make(MEANS, np.ones((3, 1)), U, 0),
        ValueError,
        r"`variances` must have one entry for each of `utilities`.*\(3, 6\).*got shape \(3, 1\)",
    ),
    "one variance": (lambda: make(MEANS, 1.0, U, 0), ValueError, r"got shape \(\)"),
    "variances of more observations": (
        lambda: make(MEANS, np.ones((2, 3, 6)), U, 0),
        ValueError,
        r"got shape \(2, 3, 6\)",
    ),
    "u of another shape": (
        lambda: make(MEANS, VARIANCES, np.zeros(2), 0),
        ValueError,
        r"`u` must have one entry for each observation.*u.shape=\(2,\)",
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
    "classes that are no plate's": (
        lambda: make(MEANS, VARIANCES, U, 0, jnp.arange(6)),
        TypeError,
        "`classes` must be what `with lc",
    ),
    "a value that is no class": (
        lambda: make(MEANS, VARIANCES, U, 0).log_prob(np.array([0, 6, 1])),
        ValueError,
        r"`value` must be classes.*got 6 at position 1",
    ),
    "values that are no integers": (
        lambda: make(MEANS, VARIANCES, U, 0).log_prob(np.zeros(3)),
        TypeError,
        "`value` must be integers",
    ),
    "a chunk": (
        lambda: make(MEANS, VARIANCES, U, 0, CHUNK).log_prob(np.array([0, 1, 2])),
        NotImplementedError,
        "log_prob needs all classes",
    ),
    "a draw from a subset": (
        lambda: make(MEANS, VARIANCES, U, 0, SUBSET).sample(jax.random.key(0)),
        NotImplementedError,
        "cannot draw a class from a subset",
    ),
}


@pytest.mark.parametrize(("action", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused(action, error, message):
    with pytest.raises(error, match=message):
        action()
