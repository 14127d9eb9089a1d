# SPDX-License-Identifier: Apache-2.0
"""Families of errors: what may be one, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy.stats import norm

import numpyro_largecat as lc
from numpyro_largecat.choices.error_families import FAMILIES
from tests.slow_cases import slow_case


def family_of(name, distribution):
    return lc.choices.ErrorFamily(name, distribution, lambda x: jnp.log(distribution().cdf(x)))


@pytest.mark.parametrize(
    "distribution",
    [
        lambda: dist.Laplace(0, 0.3),
        *(slow_case(family.distribution) for family in FAMILIES.values()),
    ],
)
def test_probabilities_of_a_log_concave_family_sum_to_one(distribution):
    d = lc.UtilityCategorical(jnp.array([0.0, 0.5, -1.0]), noise=family_of("own", distribution))
    log_probs = jax.jit(lambda values: d.log_prob(values))(np.arange(3))
    # Coarse, as the logarithm of a CDF is.
    assert np.exp(log_probs).sum() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_slope_of_the_log_cdf_is_the_density_over_the_cdf(family):
    """Gradients of exact probabilities need it; a kink, as at 0, would give a wrong one."""

    @jax.jit
    def both(errors):
        density_over_cdf = jnp.exp(family.log_prob(errors) - family.log_cdf(errors))
        return jax.vmap(jax.grad(family.log_cdf))(errors), density_over_cdf

    slope, expected = both(np.arange(-20, 81, dtype=np.float32) / 4)
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    "distribution",
    [lambda: dist.StudentT(3.0), lambda: dist.StudentT(30.0), lambda: dist.Cauchy(0, 1)],
)
def test_heavy_tails_are_refused_also_under_jit(distribution):
    """Their probabilities would not sum to one."""
    family = family_of("heavy", distribution)

    @jax.jit
    def log_prob(psi):
        return lc.UtilityCategorical(psi, noise=family).log_prob(0)

    with pytest.raises(ValueError, match=r"'heavy' must have a concave log density.*Student's t"):
        log_prob(jnp.zeros(3))


@pytest.mark.slow
def test_a_family_may_have_a_scale_that_is_learned():
    """Its density depends on a tracer, under ``jit`` and in a gradient."""

    @jax.jit
    def log_prob(scale):
        family = family_of("scaled", lambda: dist.Normal(0, scale))
        return lc.UtilityCategorical(jnp.array([0.0, 1.0]), noise=family).log_prob(1)

    np.testing.assert_allclose(jnp.exp(log_prob(1.0)), norm.cdf(0.5**0.5), rtol=1e-4)


def test_a_distribution_in_place_of_its_function_is_refused():
    with pytest.raises(TypeError, match=r"a function.*`lambda: dist.Laplace\(0, 1\)`; got"):
        lc.choices.ErrorFamily("laplace", dist.Laplace(0, 1), lambda x: x)


def test_a_bound_is_not_drawn_from():
    with pytest.raises(NotImplementedError, match=r"OneVsEach is no distribution to draw from"):
        lc.bounds.OneVsEach(jnp.zeros(3)).sample(jax.random.key(0))
