# SPDX-License-Identifier: Apache-2.0
"""L-sparse mixtures in NumPyro models, under SVI and SubsampledSVI."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from numpyro.infer.initialization import init_to_sample

import numpyro_largecat as lc

N, K, D = 60, 6, 2
rng = np.random.default_rng(2)
CENTRES = 8.0 * np.array([(k % 3, k // 3) for k in range(K)])
Z = rng.integers(K, size=N)
X = jnp.array(CENTRES[Z] + rng.normal(size=(N, D)), jnp.float32)
COUNTS = jnp.array(rng.poisson(1 + Z), jnp.int32)
SEEN = jnp.array(rng.random(N) < 0.8)


def sparse(num_active, mixing, components):
    return lc.TopLMixture(mixing, components, num_active)


def two_mixtures(make, x, counts, seen, rows=None):
    """Hierarchical priors, a plate of components, two mixtures with one set of weights, masks."""
    scale = numpyro.sample("scale", dist.HalfNormal(5.0))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(K)))
    with numpyro.plate("components", K):
        loc = numpyro.sample("loc", dist.Normal(0, scale).expand([D]).to_event(1))
        spread = numpyro.sample("spread", dist.HalfNormal(2.0))
        rate = numpyro.sample("rate", dist.Gamma(2.0, 0.5))
    mixing = dist.Categorical(probs=weights)
    with lc.data_plate("data", N, rows):
        points = dist.MultivariateNormal(loc, scale_tril=spread[:, None, None] * jnp.eye(D))
        with handlers.mask(mask=seen):
            numpyro.sample("x", make(mixing, points), obs=x)
        numpyro.sample("counts", make(mixing, dist.Poisson(rate)), obs=counts)


# One guide for all: the mixtures differ in what is observed alone, and to start a guide is dear.
GUIDE = AutoNormal(partial(two_mixtures, dist.MixtureSameFamily), init_loc_fn=init_to_sample)


def at_the_start(svi_type, make, *data):
    """SVI and its first state."""
    svi = svi_type(partial(two_mixtures, make), GUIDE, optax.sgd(1.0), TraceMeanField_ELBO())
    return svi, svi.init(jax.random.key(3), *data)


def first_step(svi_type, make, *data):
    """Loss of the first step and its gradient, in all parameters."""
    svi, state = at_the_start(svi_type, make, *data)
    before = svi.get_params(state)
    state, loss = jax.jit(svi.update)(state, *data)
    return loss, jax.tree.map(jnp.subtract, svi.get_params(state), before)


@pytest.mark.some_cases(1)
@pytest.mark.smoke
@pytest.mark.parametrize("svi_type", [pytest.param(SVI, marks=pytest.mark.slow), lc.SubsampledSVI])
def test_all_components_take_the_steps_of_the_dense_mixture(svi_type):
    """With subsampled observations under SubsampledSVI."""
    rows = jnp.array([5, 17, 2, 40]) if svi_type is lc.SubsampledSVI else None
    data = (X, COUNTS, SEEN) if rows is None else (X[rows], COUNTS[rows], SEEN[rows], rows)
    value, step = first_step(svi_type, partial(sparse, K), *data)
    expected, expected_step = first_step(svi_type, dist.MixtureSameFamily, *data)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name, wanted in expected_step.items():
        np.testing.assert_allclose(step[name], wanted, rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.slow
def test_few_components_bound_the_dense_loss_from_above():
    losses = []
    for num_active in (1, 2, K):
        svi, state = at_the_start(SVI, partial(sparse, num_active), X, COUNTS, SEEN)
        losses.append(jax.jit(svi.evaluate)(state, X, COUNTS, SEEN))
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.slow
def test_a_fit_finds_the_components():
    """From a start near them, by point estimates and minibatches."""

    def model(x, rows=None):
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(K)))
        with numpyro.plate("components", K):
            loc = numpyro.sample("loc", dist.Normal(0, 10.0).expand([D]).to_event(1))
        with lc.data_plate("data", N, rows):
            mixture = lc.TopLMixture(
                dist.Categorical(probs=weights), dist.Normal(loc, 1.0).to_event(1), 2
            )
            numpyro.sample("x", mixture, obs=x)

    start = {"loc": jnp.array(CENTRES + rng.normal(size=(K, D)), jnp.float32)}
    guide = AutoDelta(model, init_loc_fn=numpyro.infer.init_to_value(values=start))
    svi = lc.SubsampledSVI(model, guide, optax.adam(0.05), Trace_ELBO())
    batches = lc.ArrayBatches(X, batch_size=20)
    result = svi.run(jax.random.key(0), 300, batches=batches, progress_bar=False)
    for k in np.unique(Z):
        mean = X[Z == k].mean(0)
        np.testing.assert_allclose(result.params["loc_auto_loc"][k], mean, atol=0.2)
    weights = result.params["weights_auto_loc"]
    mixture = lc.TopLMixture(
        dist.Categorical(probs=weights),
        dist.Normal(result.params["loc_auto_loc"], 1.0).to_event(1),
        2,
    )
    assert (mixture.responsibilities(X).mode == Z).mean() == 1
    draws = Predictive(model, guide=guide, params=result.params, num_samples=3)
    assert draws(jax.random.key(1), None)["x"].shape == (3, N, D)
