# SPDX-License-Identifier: Apache-2.0
"""Networks of Flax in a model, through NumPyro's own wrappers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen, nnx
from numpyro.contrib import module
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc

N, F, K, D = 40, 5, 12, 3
X = np.random.default_rng(0).normal(size=(N, F)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, K, N)
UNIT = dist.Normal(0, 1)


class Network(nnx.Module):
    """With a running mean and noise, which ``nnx`` keeps beside its parameters."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(params=0, dropout=1)
        self.first, self.second = nnx.Linear(F, 6, rngs=rngs), nnx.Linear(6, D, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(6, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(jnp.tanh(self.norm(self.first(x)))))


LINEN = linen.Sequential([linen.Dense(6), jnp.tanh, linen.Dense(D)])
PLAIN = nnx.Linear(F, D, rngs=nnx.Rngs(0))
NETWORKS = {
    "nnx": lambda: module.nnx_module("network", PLAIN),
    "nnx with state": lambda: module.nnx_module("network", Network()),
    "random nnx": lambda: module.random_nnx_module("network", PLAIN, prior=UNIT),
    "random linen": lambda: module.random_flax_module(
        "network", LINEN, prior=UNIT, input_shape=(1, F)
    ),
}


def make_svi(name: str, guide=AutoNormal) -> lc.SubsampledSVI:
    def model(x, y=None, rows=None):
        network = NETWORKS[name]()
        with lc.class_plate("classes", K, y, 4) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", network(x) @ w.T, classes=classes, rows=rows, obs=y)

    return lc.SubsampledSVI(model, guide(model), optax.adam(0.01), TraceMeanField_ELBO())


def run(svi, num_steps: int, **options):
    batches = lc.ArrayBatches(X, Y, batch_size=20)
    return svi.run(jax.random.key(0), num_steps, batches=batches, progress_bar=False, **options)


@pytest.mark.parametrize("name", ["nnx with state", "random nnx", "random linen"])
@pytest.mark.slow
def test_a_fit_goes_on_from_disk_with_its_network(name, tmp_path) -> None:
    """Also one of which all is random, whose parameter has nothing in it."""
    checkpoints = lc.Checkpoints(tmp_path)
    run(make_svi(name), 3, checkpoints=checkpoints)
    svi = make_svi(name)
    found = run(svi, 6, checkpoints=checkpoints, resume=True)
    whole = run(make_svi(name), 6)
    np.testing.assert_allclose(found.losses, whole.losses, rtol=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (found.params, whole.params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    fitted = lc.Fitted.from_svi(svi, found).on(X)
    assert np.isfinite(fitted.log_likelihood(Y)).all()


@pytest.mark.slow
def test_a_network_is_fitted_and_read() -> None:
    """Its parameters move, and predictions are those of the network that was fitted."""
    svi = make_svi("nnx")
    start, result = svi.init(jax.random.key(0), X, Y), run(svi, 20)
    moved = [svi.get_params(state)["network$params"] for state in (start, result.state)]
    for one, other in zip(*map(jax.tree.leaves, moved), strict=True):
        assert (np.asarray(one) != np.asarray(other)).all()
    params = result.params["network$params"]
    features = X @ np.asarray(params["kernel"]) + np.asarray(params["bias"])
    log_probs = jax.nn.log_softmax(features @ np.asarray(result.params["w_auto_loc"]).T)
    found = lc.Fitted.from_svi(svi, result).on(X).log_likelihood(Y)
    np.testing.assert_allclose(found, log_probs[np.arange(N), Y], rtol=1e-4)


class Normed(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        return linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)


@pytest.mark.slow
def test_a_running_mean_that_is_not_given_does_not_start_anew() -> None:
    svi = make_svi("nnx with state")
    state = svi.init(jax.random.key(0), X[:9], Y[:9], np.arange(9))
    params = svi.get_params(state)
    with pytest.raises(ValueError, match=r"mutable sites, \['network\$state'\].*from_svi"):
        lc.Fitted(svi.model, svi.guide, params).on(X).log_likelihood(Y)


@pytest.mark.slow
def test_running_means_are_read_as_they_were_at_the_end() -> None:
    """They are no parameters, and are learned in the steps all the same."""

    def model(x, y=None, rows=None, train=True):
        norm = module.flax_module(
            "norm", Normed(), input_shape=(1, F), mutable=["batch_stats"], train=True
        )
        with lc.class_plate("classes", K, y, 4) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([F]).to_event(1))
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", norm(x, train=train) @ w.T, classes=classes, rows=rows, obs=y)

    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.01), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(3 * X + 5, Y, batch_size=20)
    result = svi.run(jax.random.key(0), 20, batches=batches, progress_bar=False)
    (kept,) = jax.tree.leaves(
        result.state.mutable_state, is_leaf=lambda node: isinstance(node, dict) and "mean" in node
    )
    assert (np.abs(kept["mean"]) > 1).all()  # they have learned that the rows are far from 0
    (own,) = jax.tree.leaves(
        result.params["norm$params"], is_leaf=lambda node: isinstance(node, dict) and "bias" in node
    )
    new = 3 * X + 5
    features = (new - kept["mean"]) / np.sqrt(kept["var"] + 1e-5) * own["scale"] + own["bias"]
    log_probs = jax.nn.log_softmax(features @ np.asarray(result.params["w_auto_loc"]).T)
    found = lc.Fitted.from_svi(svi, result).on(new, train=False).log_likelihood(Y)
    np.testing.assert_allclose(found, log_probs[np.arange(N), Y], rtol=1e-4)
