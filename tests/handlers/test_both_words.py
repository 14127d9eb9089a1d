# SPDX-License-Identifier: Apache-2.0
"""Draws of guides by both words of each block of Threefry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import seed, trace

from numpyro_largecat.handlers.both_words import draw_by_both_words

ONES = jnp.ones(3)
KEYS = {
    "typed": jax.random.key(3),
    "legacy": jax.random.PRNGKey(3),
    "rbg": jax.random.key(3, impl="rbg"),
}


class OfRawKeys(dist.Normal):
    """One of a user's, which takes the key for an array where it is one."""

    def sample(self, key, sample_shape=()):
        raw = key if jnp.issubdtype(key.dtype, jnp.uint32) else jax.random.key_data(key)
        return jax.random.normal(jax.random.wrap_key_data(raw[:2]), self.batch_shape)


class OfPoissonNumbers(dist.Normal):
    """One of a user's, whose sampler takes JAX's own keys alone."""

    def sample(self, key, sample_shape=()):
        return self.loc + jax.random.poisson(key, 3.0, self.batch_shape)


DISTRIBUTIONS = {
    "normal": dist.Normal(ONES, 2.0).to_event(1),
    "transformed": dist.LogNormal(ONES, 0.5),
    "expanded": dist.Normal(0, 1).expand([4, 3]).mask(False),
    "multivariate": dist.MultivariateNormal(ONES, jnp.eye(3)),
    "low rank": dist.LowRankMultivariateNormal(ONES, jnp.ones((3, 1)), ONES),
    "truncated": dist.TruncatedNormal(ONES, low=0.0),
    "gamma": dist.Gamma(ONES),
    "dirichlet": dist.Dirichlet(ONES),
    "student": dist.StudentT(4.0, ONES),
    "mixture": dist.MixtureSameFamily(dist.Categorical(ONES / 3), dist.Normal(ONES, 1.0)),
    "delta": dist.Delta(ONES),
    "poisson": dist.Poisson(ONES),
    "negative binomial": dist.NegativeBinomial2(1.0, ONES),
    "raw keys": OfRawKeys(ONES, 1.0),
    "poisson noise": OfPoissonNumbers(ONES, 1.0).to_event(1),
}


NOT_BY_RBG = {"poisson", "negative binomial", "poisson noise"}  # JAX has no sampler of these
CASES = [
    (name, kind)
    for name in DISTRIBUTIONS
    for kind in KEYS
    if kind != "rbg" or name not in NOT_BY_RBG
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_draws_are_those_of_jax_by_both_words(name, kind) -> None:
    """Whatever a sampler does with its key, which the site keeps."""

    def guide():
        numpyro.sample("x", DISTRIBUTIONS[name])

    with jax.threefry_partitionable(False):
        expected = trace(seed(guide, KEYS[kind])).get_trace()["x"]
        key = expected["kwargs"]["rng_key"]
    site = trace(draw_by_both_words(seed(guide, KEYS[kind]))).get_trace()["x"]
    own = site["kwargs"]["rng_key"]
    assert own.dtype == key.dtype
    with jax.threefry_partitionable(False):
        value = DISTRIBUTIONS[name](rng_key=own)
    np.testing.assert_array_equal(site["value"], value)


def test_normals_of_typed_keys_take_one_loop_less() -> None:
    def guide():
        return numpyro.sample("x", dist.Normal(0, 1).expand([1000]))

    def num_loops(fn, key) -> int:
        return jax.jit(lambda key: seed(fn, key)()).lower(key).as_text().count("stablehlo.while")

    own = draw_by_both_words(guide)
    assert num_loops(own, KEYS["typed"]) < num_loops(guide, KEYS["typed"])
    assert num_loops(own, KEYS["legacy"]) == num_loops(guide, KEYS["legacy"])
