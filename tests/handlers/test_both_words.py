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

ONES = np.ones(3, np.float32)
KEYS = {
    "typed": lambda: jax.random.key(3),
    "legacy": lambda: jax.random.PRNGKey(3),
    "rbg": lambda: jax.random.key(3, impl="rbg"),
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
    "normal": lambda: dist.Normal(ONES, 2.0).to_event(1),
    "transformed": lambda: dist.LogNormal(ONES, 0.5),
    "expanded": lambda: dist.Normal(0, 1).expand([4, 3]).mask(False),
    "multivariate": lambda: dist.MultivariateNormal(ONES, np.eye(3, dtype=np.float32)),
    "low rank": lambda: dist.LowRankMultivariateNormal(ONES, ONES[:, None], ONES),
    "truncated": lambda: dist.TruncatedNormal(ONES, low=0.0),
    "gamma": lambda: dist.Gamma(ONES),
    "dirichlet": lambda: dist.Dirichlet(ONES),
    "student": lambda: dist.StudentT(4.0, ONES),
    "mixture": lambda: dist.MixtureSameFamily(dist.Categorical(ONES / 3), dist.Normal(ONES, 1.0)),
    "delta": lambda: dist.Delta(ONES),
    "poisson": lambda: dist.Poisson(ONES),
    "negative binomial": lambda: dist.NegativeBinomial2(1.0, ONES),
    "raw keys": lambda: OfRawKeys(ONES, 1.0),
    "poisson noise": lambda: OfPoissonNumbers(ONES, 1.0).to_event(1),
}


NOT_BY_RBG = {"poisson", "negative binomial", "poisson noise"}  # JAX has no sampler of these
# Of samplers that take a key once, in loops and in parts, and of a user's own; "typed" of all.
OF_EACH_KIND = {"normal", "gamma", "mixture", "poisson", "raw keys", "poisson noise"}
CASES = [
    (name, kind)
    for name in DISTRIBUTIONS
    for kind in KEYS
    if kind == "typed" or name in OF_EACH_KIND - (NOT_BY_RBG if kind == "rbg" else set())
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_draws_are_those_of_jax_by_both_words(name, kind) -> None:
    """Whatever a sampler does with its key, which the site keeps."""

    fn, given = DISTRIBUTIONS[name](), KEYS[kind]()

    def guide():
        numpyro.sample("x", fn)

    site = trace(draw_by_both_words(seed(guide, given))).get_trace()["x"]
    own = site["kwargs"]["rng_key"]
    assert own.dtype == given.dtype
    with jax.threefry_partitionable(False):
        value = fn(rng_key=own)
    np.testing.assert_array_equal(site["value"], value)


def test_normals_of_typed_keys_take_one_loop_less() -> None:
    def guide():
        return numpyro.sample("x", dist.Normal(0, 1).expand([1000]))

    def num_loops(fn, key) -> int:
        return jax.jit(lambda key: seed(fn, key)()).lower(key).as_text().count("stablehlo.while")

    own = draw_by_both_words(guide)
    typed, legacy = KEYS["typed"](), KEYS["legacy"]()
    assert num_loops(own, typed) < num_loops(guide, typed)
    assert num_loops(own, legacy) == num_loops(guide, legacy)
