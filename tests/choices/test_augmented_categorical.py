# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy.stats import multivariate_normal

import numpyro_largecat as lc
from numpyro_largecat.choices.error_families import FAMILIES
from tests import reference

NOISES = sorted(FAMILIES)
UTILITIES = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32) * 2
noises = pytest.mark.parametrize("noise", NOISES)


def log_prob_of(utilities, error, row, noise, weights):
    """sum_{m != y} w_m log Phi(error + psi_y - psi_m)."""
    ahead = error + np.float64(utilities[row]) - np.asarray(utilities, np.float64)
    terms = weights * reference.LOG_CDFS[noise](ahead)
    return float(sum(term for m, term in enumerate(terms) if m != row))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1)])
@pytest.mark.some_cases(1)
def test_the_error_broadcasts_with_the_utilities(shape):
    d = lc.AugmentedCategorical(UTILITIES, noise="normal", error=jnp.full(shape, 0.7))
    assert d.batch_shape == np.broadcast_shapes(shape, (3,))
    expected = [log_prob_of(x, 0.7, 4, "normal", np.ones(6)) for x in UTILITIES]
    np.testing.assert_allclose(d.log_prob(4), np.broadcast_to(expected, d.batch_shape), rtol=1e-5)


def test_shapes_are_inferred():
    assert lc.AugmentedCategorical.infer_shapes(utilities=(2, 1, 6), error=(3,)) == ((2, 3), ())


# The error integrated out.


def probabilities(utilities, noise):
    """Integral over the error of its density times the choice given it, for each class."""
    error = np.linspace(-40, 80, 60_001)

    @jax.jit
    def of_each(utilities, error):
        d = lc.AugmentedCategorical(utilities, noise=noise, error=error)
        log_densities = lc.error_distribution(noise).log_prob(error)
        return jax.vmap(lambda value: jnp.exp(log_densities + d.log_prob(value)).sum())(
            jnp.arange(len(utilities))
        )

    return np.asarray(of_each(utilities, error)) * (error[1] - error[0])


@noises
@pytest.mark.some_cases(1)
def test_probabilities_of_all_classes_sum_to_one(noise, x64):
    utilities = np.random.default_rng(1).normal(size=6) * 2
    np.testing.assert_allclose(probabilities(utilities, noise).sum(), 1, rtol=1e-9)


def test_gumbel_errors_give_the_softmax(x64):
    utilities = np.random.default_rng(2).normal(size=5) * 2
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
    np.testing.assert_allclose(probabilities(utilities, "normal"), expected, rtol=1e-5)


def test_logistic_errors_give_the_cdf_of_their_difference(x64):
    """P(e_1 - e_0 < d) of two logistic errors is r (r - 1 - d) / (r - 1)^2, with r = exp(d)."""
    ratio = math.exp(1.3)
    first = ratio * (ratio - 1 - 1.3) / (ratio - 1) ** 2
    found = probabilities(np.array([1.3, 0.0]), "logistic")
    np.testing.assert_allclose(found, [first, 1 - first], rtol=1e-9)


@noises
def test_a_model_with_the_error_as_a_site_has_the_joint_density(noise, x64):
    def model():
        error = numpyro.sample("y_error", lc.error_distribution(noise))
        choice = lc.AugmentedCategorical(jnp.array([0.5, 1.0, -1.0]), noise=noise, error=error)
        numpyro.sample("y", choice, obs=1)

    def log_joint(error):
        return log_density(handlers.seed(model, 0), (), {}, {"y_error": error})[0]

    joint = jax.jit(log_joint)(0.4)
    expected = reference.choice_log_joint([0.5, 1.0, -1.0], 1, noise, 0.4)
    np.testing.assert_allclose(joint, expected, rtol=1e-12)


def test_a_users_own_family_of_errors(x64):
    """Laplace errors, whose probabilities sum to 1 too."""

    def laplace_log_cdf(error):
        above = jnp.log1p(-0.5 * jnp.exp(-jnp.maximum(error, 0)))
        return jnp.where(error > 0, above, jnp.minimum(error, 0) - math.log(2))

    family = lc.choices.ErrorFamily("laplace", lambda: dist.Laplace(0, 1), laplace_log_cdf)
    utilities = np.array([0.5, 1.0, -1.0])
    np.testing.assert_allclose(probabilities(utilities, family).sum(), 1, rtol=1e-5)


def test_gumbel_errors_that_are_all_but_impossible():
    """A class 20,000 below another needs an error near 20,000, where the log probability is -1."""

    @jax.jit
    def log_prob(utilities, error):
        return lc.AugmentedCategorical(utilities, noise="gumbel", error=error).log_prob(1)

    far, near = np.asarray(log_prob(np.array([1e4, -1e4, 0.0]), np.array([0.0, 2e4])))
    assert far < -1e20  # not NaN
    np.testing.assert_allclose(near, -1, rtol=1e-5)


@noises
@pytest.mark.some_cases(1)
def test_a_class_that_is_not_available_counts_nothing(noise):
    """A utility of -inf, at an error so low that even its own log Phi would not be finite."""

    @jax.jit
    @jax.value_and_grad
    def of_last(utilities, error):
        d = lc.AugmentedCategorical(utilities, noise=noise, error=error)
        return d.log_prob(len(utilities) - 1)

    for error in (0.3, -200.0):
        some, _ = of_last(np.array([0.5, 300.0]), error)
        value, gradient = of_last(np.array([0.5, -np.inf, 300.0]), error)
        np.testing.assert_allclose(value, some, rtol=1e-6)
        assert np.isfinite(gradient).all()
        assert gradient[1] == 0


BAD_ARGUMENTS = {
    "unknown noise": (
        dict(utilities=jnp.zeros(6), noise="cauchy", error=0.0),
        ValueError,
        "`noise` must be one of .*gumbel.*; got 'cauchy'",
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


def test_draws_are_refused():
    d = lc.AugmentedCategorical(UTILITIES, error=0.0)
    with pytest.raises(NotImplementedError, match=r"cannot draw a class.*lc.UtilityCategorical"):
        d.sample(jax.random.key(0))


def test_error_distributions_are_standard_and_unknown_ones_refused():
    for noise in NOISES:
        found = lc.error_distribution(noise).log_prob(0.7)
        np.testing.assert_allclose(found, reference.LOG_DENSITIES[noise](0.7), rtol=1e-6)
    with pytest.raises(ValueError, match="`noise` must be one of"):
        lc.error_distribution("cauchy")
