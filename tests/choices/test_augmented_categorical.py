# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.test_util import check_grads
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy.stats import multivariate_normal

import numpyro_largecat as lc
from numpyro_largecat.choices.error_families import FAMILIES
from tests import reference
from tests.choices.subsets import CHUNK, SUBSET, WEIGHTS

NOISES = sorted(FAMILIES)
rng = np.random.default_rng(0)

UTILITIES = rng.normal(size=(3, 6)).astype(np.float32) * 2
ERROR = np.array([3.0, 0.5, -1.0], np.float32)
# Of each case: classes, values, and the row of each value among the utilities.
CASES = {
    "all": (None, np.array([0, 5, 2]), np.array([0, 5, 2])),
    "subset": (SUBSET, np.array([30, 7, 30]), np.array([1, 0, 1])),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
noises = pytest.mark.parametrize("noise", NOISES)


def log_prob_of(utilities, error, row, noise, weights):
    """sum_{m != y} w_m log Phi(error + psi_y - psi_m)."""
    ahead = error + np.float64(utilities[row]) - np.asarray(utilities, np.float64)
    terms = weights * reference.LOG_CDFS[noise](ahead)
    return float(sum(term for m, term in enumerate(terms) if m != row))


def expected_log_prob(case, noise, rows=None):
    classes, _, own_rows = case
    weights = np.ones(6) if classes is None else WEIGHTS
    rows = own_rows if rows is None else np.broadcast_to(rows, 3)
    entries = zip(UTILITIES, ERROR, rows, strict=True)
    return np.array([log_prob_of(x, e, row, noise, weights) for x, e, row in entries])


def make(case, noise, utilities=UTILITIES, error=ERROR):
    return lc.AugmentedCategorical(utilities, case[0], noise, error=error)


@pytest.mark.smoke
@noises
@cases
def test_log_prob_is_the_equation(case, noise):
    d = make(case, noise)
    assert (d.batch_shape, d.event_shape) == ((3,), ())
    np.testing.assert_allclose(d.log_prob(case[1]), expected_log_prob(case, noise), rtol=1e-5)
    many = np.broadcast_to(case[1], (4, 3))
    expected = np.broadcast_to(expected_log_prob(case, noise), (4, 3))
    np.testing.assert_allclose(d.log_prob(many), expected, rtol=1e-5)
    one = d.log_prob(int(case[1][0]))
    np.testing.assert_allclose(one, expected_log_prob(case, noise, case[2][0]), rtol=1e-5)


@cases
def test_jit_and_pytree_round_trip(case):
    expected = expected_log_prob(case, "normal")
    made_inside = jax.jit(lambda x, e, v: make(case, "normal", x, e).log_prob(v))
    np.testing.assert_allclose(made_inside(UTILITIES, ERROR, case[1]), expected, rtol=1e-5)
    d = make(case, "normal")
    passed_in = jax.jit(lambda d, v: d.log_prob(v))(d, case[1])
    np.testing.assert_allclose(passed_in, expected, rtol=1e-5)
    leaves, structure = jax.tree.flatten(d)
    again = jax.tree.unflatten(structure, leaves)
    assert (again.batch_shape, again.noise, again.num_categories) == (
        d.batch_shape,
        d.noise,
        d.num_categories,
    )
    np.testing.assert_array_equal(again.log_prob(case[1]), d.log_prob(case[1]))


@cases
def test_vmap_over_arguments_and_over_distributions(case):
    expected = expected_log_prob(case, "logistic")
    over_arguments = jax.vmap(lambda x, e, v: make(case, "logistic", x, e).log_prob(v))
    np.testing.assert_allclose(over_arguments(UTILITIES, ERROR, case[1]), expected, rtol=1e-5)
    many = jax.vmap(lambda x, e: make(case, "logistic", x, e))(UTILITIES, ERROR)
    log_probs = jax.vmap(lambda d, v: d.log_prob(v))(many, jnp.array(case[1]))
    np.testing.assert_allclose(log_probs, expected, rtol=1e-5)


@cases
def test_expand_to_event_and_mask(case):
    d, expected = make(case, "gumbel"), expected_log_prob(case, "gumbel")
    expanded = d.expand((2, 3))
    log_prob = expanded.log_prob(np.broadcast_to(case[1], (2, 3)))
    np.testing.assert_allclose(log_prob, np.broadcast_to(expected, (2, 3)), rtol=1e-5)
    np.testing.assert_allclose(d.to_event(1).log_prob(case[1]), expected.sum(), rtol=1e-5)
    mask = np.array([True, False, True])
    masked = jax.jit(lambda v: make(case, "gumbel").mask(mask).log_prob(v))(case[1])
    np.testing.assert_allclose(masked, np.where(mask, expected, 0), rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1)])
def test_the_error_broadcasts_with_the_utilities(shape):
    d = lc.AugmentedCategorical(UTILITIES, noise="normal", error=jnp.full(shape, 0.7))
    assert d.batch_shape == np.broadcast_shapes(shape, (3,))
    expected = [log_prob_of(x, 0.7, 4, "normal", np.ones(6)) for x in UTILITIES]
    np.testing.assert_allclose(d.log_prob(4), np.broadcast_to(expected, d.batch_shape), rtol=1e-5)


def test_shapes_are_inferred():
    assert lc.AugmentedCategorical.infer_shapes(utilities=(2, 1, 6), error=(3,)) == ((2, 3), ())


@noises
@cases
def test_gradients_agree_with_finite_differences(case, noise, x64):
    def log_prob(utilities, error):
        return make(case, noise, utilities, error).log_prob(jnp.array(case[1]))

    arguments = jnp.array(UTILITIES, jnp.float64), jnp.array(ERROR, jnp.float64)
    check_grads(jax.jit(log_prob), arguments, order=1, modes=["rev"], rtol=1e-6)
    assert log_prob(*arguments).dtype == jnp.float64
    np.testing.assert_allclose(log_prob(*arguments), expected_log_prob(case, noise), rtol=1e-12)


# The error integrated out.


def probabilities(utilities, noise):
    """Integral over the error of its density times the choice given it, for each class."""
    error = jnp.linspace(-40, 80, 60_001)
    log_density_of_error = lc.error_distribution(noise).log_prob(error)
    values = jnp.arange(utilities.shape[0])

    def of_class(value):
        d = lc.AugmentedCategorical(utilities, noise=noise, error=error)
        return jnp.exp(log_density_of_error + d.log_prob(value)).sum() * (error[1] - error[0])

    return jax.jit(jax.vmap(of_class))(values)


@noises
def test_probabilities_of_all_classes_sum_to_one(noise, x64):
    utilities = jnp.array(np.random.default_rng(1).normal(size=6) * 2)
    np.testing.assert_allclose(probabilities(utilities, noise).sum(), 1, rtol=1e-9)


def test_gumbel_errors_give_the_softmax(x64):
    utilities = jnp.array(np.random.default_rng(2).normal(size=5) * 2)
    expected = [math.exp(reference.softmax_log_prob(utilities, k)) for k in range(5)]
    np.testing.assert_allclose(probabilities(utilities, "gumbel"), expected, rtol=1e-9)


def test_normal_errors_give_orthant_probabilities(x64):
    """Class k is chosen if the Gaussian vector of e_j - e_k, j != k, is below psi_k - psi_j."""
    utilities = np.array([0.3, -0.8, 1.1])
    covariance = np.array([[2.0, 1.0], [1.0, 2.0]])
    expected = [
        multivariate_normal.cdf(utilities[k] - np.delete(utilities, k), np.zeros(2), covariance)
        for k in range(3)
    ]
    np.testing.assert_allclose(probabilities(jnp.array(utilities), "normal"), expected, rtol=1e-5)


def test_logistic_errors_give_the_cdf_of_their_difference(x64):
    """P(e_1 - e_0 < d) of two logistic errors is r (r - 1 - d) / (r - 1)^2, with r = exp(d)."""
    ratio = math.exp(1.3)
    first = ratio * (ratio - 1 - 1.3) / (ratio - 1) ** 2
    found = probabilities(jnp.array([1.3, 0.0]), "logistic")
    np.testing.assert_allclose(found, [first, 1 - first], rtol=1e-9)


@noises
def test_a_model_with_the_error_as_a_site_has_the_joint_density(noise, x64):
    def model():
        error = numpyro.sample("y_error", lc.error_distribution(noise))
        choice = lc.AugmentedCategorical(jnp.array([0.5, 1.0, -1.0]), noise=noise, error=error)
        numpyro.sample("y", choice, obs=1)

    joint, _ = log_density(handlers.seed(model, 0), (), {}, {"y_error": jnp.array(0.4)})
    expected = reference.choice_log_joint([0.5, 1.0, -1.0], 1, noise, 0.4)
    np.testing.assert_allclose(joint, expected, rtol=1e-12)


def test_a_users_own_family_of_errors(x64):
    """Laplace errors, whose probabilities sum to 1 too."""

    def laplace_log_cdf(error):
        above = jnp.log1p(-0.5 * jnp.exp(-jnp.maximum(error, 0)))
        return jnp.where(error > 0, above, jnp.minimum(error, 0) - math.log(2))

    family = lc.choices.ErrorFamily("laplace", lambda: dist.Laplace(0, 1), laplace_log_cdf)
    utilities = jnp.array([0.5, 1.0, -1.0])
    np.testing.assert_allclose(probabilities(utilities, family).sum(), 1, rtol=1e-5)


# Subsets.


@noises
@pytest.mark.parametrize(("labels", "num_sampled"), [([1, 4], 2), ([3], 1), ([0, 2], 4)])
def test_value_and_gradients_are_unbiased(labels, num_sampled, noise, x64):
    """Their means over every subset of 6 classes are those of all classes."""
    table, error = jnp.array(np.random.default_rng(1).normal(size=6)), jnp.array(1.3)

    @jax.jit
    @jax.value_and_grad
    def log_prob(arguments, classes, rows):
        table, error = arguments
        utilities = table if rows is None else table[rows]
        return lc.AugmentedCategorical(utilities, classes, noise, error=error).log_prob(labels[0])

    def stacked(classes, rows):
        value, (in_table, in_error) = log_prob((table, error), classes, rows)
        return np.append(in_table, [value, in_error])

    def of_subset(indices, weights):
        distinct = jnp.array(sorted(set(labels)), jnp.int32)
        rows, weights = jnp.array(indices, jnp.int32), jnp.array(weights)
        return stacked(lc.plates.ClassSubset(rows, weights, distinct, 6, "sample"), rows)

    mean = reference.mean_over_subsets(of_subset, labels, 6, num_sampled)
    np.testing.assert_allclose(mean, stacked(None, None), rtol=1e-12, atol=1e-12)


# Extremes.


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("noise", ["normal", "logistic"])
@cases
def test_huge_utilities_give_finite_values_and_gradients(case, noise, dtype, x64):
    """With errors near 0, from which the chosen class is up to 2e4 away."""
    utilities = jnp.array(
        [[1e4, -1e4, 0.0, 1e4, 1e4, -1e4], [-1e4, 1e4, 1e4, -1e4, 0.0, 0.0], [-1e4] + [1e4] * 5],
        dtype,
    )

    def total(utilities, error):
        log_prob = make(case, noise, utilities, error).log_prob(jnp.array(case[1]))
        return log_prob.sum(), log_prob

    both = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, log_prob), gradients = both(utilities, jnp.zeros(3, dtype))
    assert log_prob.dtype == dtype
    assert jnp.isfinite(log_prob).all()
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)


def test_gumbel_errors_that_are_all_but_impossible():
    """A class 20,000 below another needs an error near 20,000, where the log probability is -1."""
    utilities = jnp.array([1e4, -1e4, 0.0])
    d = lc.AugmentedCategorical(utilities, noise="gumbel", error=jnp.array([0.0, 2e4]))
    far, near = d.log_prob(1)
    assert far < -1e20  # not NaN
    np.testing.assert_allclose(near, -1, rtol=1e-5)


@noises
def test_a_class_that_is_not_available_counts_nothing(noise):
    """A utility of -inf, at an error so low that even its own log Phi would not be finite."""
    for error in (0.3, -200.0):
        some = lc.AugmentedCategorical(jnp.array([0.5, 300.0]), noise=noise, error=error)
        utilities = jnp.array([0.5, -jnp.inf, 300.0])
        value, gradient = jax.value_and_grad(
            lambda x, error=error: lc.AugmentedCategorical(x, noise=noise, error=error).log_prob(2)
        )(utilities)
        np.testing.assert_allclose(value, some.log_prob(1), rtol=1e-6)
        assert jnp.isfinite(gradient).all()
        assert gradient[1] == 0


@cases
def test_bad_values_under_jit_are_nan(case):
    log_prob = jax.jit(lambda v: make(case, "logistic").log_prob(v))
    num_categories = make(case, "logistic").num_categories
    for bad in (-1, num_categories) + (() if case[0] is None else (2,)):
        values = np.array([case[1][0], bad, case[1][2]])
        assert np.isnan(np.asarray(log_prob(values))).tolist() == [False, True, False]


BAD_ARGUMENTS = {
    "error of another shape": (
        dict(utilities=jnp.zeros((3, 6)), error=jnp.zeros(2)),
        ValueError,
        r"`error` must have one entry for each observation.*error.shape=\(2,\)",
    ),
    "unknown noise": (
        dict(utilities=jnp.zeros(6), noise="cauchy", error=0.0),
        ValueError,
        "`noise` must be one of .*gumbel.*; got 'cauchy'",
    ),
    "another number of classes": (
        dict(utilities=jnp.zeros((3, 5)), classes=SUBSET, error=0.0),
        ValueError,
        r"one column for each row of the class plate, 6, on its last axis; got shape \(3, 5\)",
    ),
    "error that is not a number": (
        dict(utilities=jnp.zeros(6), error=jnp.nan, validate_args=True),
        ValueError,
        "error",
    ),
}


@pytest.mark.parametrize(("kwargs", "error", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_are_refused(kwargs, error, message):
    with pytest.raises(error, match=message):
        lc.AugmentedCategorical(**kwargs)


def test_draws_and_chunks_are_refused():
    d = lc.AugmentedCategorical(UTILITIES, error=ERROR)
    with pytest.raises(NotImplementedError, match=r"cannot draw a class.*lc.UtilityCategorical"):
        d.sample(jax.random.key(0))
    chunk = lc.AugmentedCategorical(UTILITIES, CHUNK, error=ERROR)
    with pytest.raises(NotImplementedError, match=r"log_prob needs all classes.*holds a chunk"):
        chunk.log_prob(np.array([0, 1, 2]))


def test_error_distributions_are_standard_and_unknown_ones_refused():
    for noise in NOISES:
        found = lc.error_distribution(noise).log_prob(0.7)
        np.testing.assert_allclose(found, reference.LOG_DENSITIES[noise](0.7), rtol=1e-6)
    with pytest.raises(ValueError, match="`noise` must be one of"):
        lc.error_distribution("cauchy")
