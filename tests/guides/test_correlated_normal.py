# SPDX-License-Identifier: Apache-2.0
"""The normal with a covariance that row-wise guides draw, beside NumPyro's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.distributions.kl import kl_divergence

from numpyro_largecat.guides.correlated_normal import CorrelatedNormal
from numpyro_largecat.ops.lower_triangle import FullTriangle, LowRankTriangle

RNG = np.random.default_rng(0)
LOC, SCALE = RNG.normal(size=(5, 2, 3)), np.exp(RNG.normal(size=(5, 2, 3)))
LEFT, RIGHT = RNG.normal(size=(2, 5, 6, 2))
LOWER = np.tril(LEFT @ RIGHT.swapaxes(1, 2), -1)
FACTOR = SCALE.reshape(5, 6, 1) * (np.eye(6) + LOWER)  # of the covariance
POINTS = RNG.normal(size=(5, 2, 3))


KINDS = {
    "full": lambda: FullTriangle(jnp.asarray(LOWER, float)),
    "low rank": lambda: LowRankTriangle(jnp.asarray(LEFT, float), jnp.asarray(RIGHT, float)),
}


def make(event_dim=2, kind="full"):
    loc, scale = jnp.asarray(LOC, float), jnp.asarray(SCALE, float)
    return CorrelatedNormal(loc, scale, KINDS[kind](), event_dim=event_dim, joint_dim=2)


def plain():
    """The same normal as NumPyro has it, of values with one axis."""
    return dist.MultivariateNormal(LOC.reshape(5, 6), scale_tril=FACTOR)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("event_dim", [0, 1, 2])
def test_log_densities_sum_to_those_of_the_joint(event_dim, kind, x64):
    """With some of the joint axes in the batch: of an entry given those before it."""

    @jax.jit
    def log_probs(points):
        found = make(event_dim, kind).log_prob(points)
        return found, plain().log_prob(points.reshape(5, 6))

    found, expected = map(np.asarray, log_probs(POINTS))
    assert found.shape == (5, 2, 3)[: 3 - event_dim]
    np.testing.assert_allclose(found.reshape(5, -1).sum(-1), expected, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_has_the_log_density_that_its_noise_gives(kind, x64):

    @jax.jit
    def draw(key):
        fn = make(kind=kind)
        value, intermediates = fn.sample_with_intermediates(key, (4,))
        return value, fn.log_prob(value, intermediates), fn.log_prob(value)

    value, of_noise, of_value = draw(jax.random.key(0))
    assert value.shape == (4, 5, 2, 3)
    np.testing.assert_allclose(of_noise, of_value, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_those_of_the_factor(kind):
    """Each of 30 variances of 40,000 draws is within 6 of its standard errors."""

    @jax.jit
    def draws_and_moments(key):
        fn = make(kind=kind)
        return fn.sample(key, (40_000,)).reshape(-1, 5, 6), fn.mean, fn.variance.reshape(5, 6)

    draws, mean, variance = map(np.asarray, draws_and_moments(jax.random.key(1)))
    np.testing.assert_allclose(mean, LOC, rtol=1e-6)
    np.testing.assert_allclose(variance, (FACTOR**2).sum(-1), rtol=1e-5)
    for row in range(5):
        covariance = np.cov(draws[:, row].T)
        expected = FACTOR[row] @ FACTOR[row].T
        size = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
        assert (np.abs(covariance - expected) < 6 * (2 / 40_000) ** 0.5 * size).all()


PRIORS = {  # of locations and scales
    "rows": lambda loc, scale: dist.Normal(loc, scale).to_event(2),
    "alike": lambda loc, scale: dist.Normal(loc[0], scale[0]).to_event(2).expand((5,)),
    "one number": lambda loc, scale: dist.Normal(0, 2.0).expand([5, 2, 3]).to_event(2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_to_normals_is_that_of_numpyro(kind, x64):
    @jax.jit
    def divergences(loc, scale):
        found = {}
        for name, make_prior in PRIORS.items():
            base = prior = make_prior(loc, scale)
            while not isinstance(base, dist.Normal):
                base = base.base_dist
            of_all = (jnp.broadcast_to(x, (5, 2, 3)).reshape(5, 6) for x in (base.loc, base.scale))
            own_loc, own_scale = of_all
            same = dist.MultivariateNormal(own_loc, scale_tril=jax.vmap(jnp.diag)(own_scale))
            found[name] = kl_divergence(make(kind=kind), prior), kl_divergence(plain(), same)
        return found

    for name, (found, expected) in divergences(POINTS, np.exp(POINTS)).items():
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "prior",
    [
        lambda: dist.StudentT(3.0).expand([5, 2, 3]).to_event(2),
        lambda: dist.Normal(0, 1).expand([5, 2, 3]).mask(np.ones((5, 2, 3), bool)).to_event(2),
        lambda: dist.Normal(0, 1).expand([5, 3]).to_event(1),
    ],
    ids=["Student", "masked", "other shape"],
)
def test_other_priors_are_left_to_the_draw(prior):
    with pytest.raises(NotImplementedError):
        jax.eval_shape(lambda: kl_divergence(make(), prior()))


def test_it_goes_through_jit_and_vmap():
    fn = make()
    log_prob = jax.jit(lambda fn, x: fn.log_prob(x))(fn, np.float32(POINTS))
    assert log_prob.shape == (5,)
    again = jax.tree.unflatten(jax.tree.structure(fn), jax.tree.leaves(fn))
    assert (again.joint_dim, again.event_shape) == (2, (2, 3))
