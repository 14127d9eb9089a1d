# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_largecat as lc
from tests.infer.models import NUM_CATEGORIES, NUM_FEATURES, hierarchical, make_data


@pytest.fixture(scope="module")
def fitted():
    x, y = make_data()
    model = hierarchical(num_sampled=4)
    guide = AutoNormal(model)
    svi = lc.SubsampledSVI(model, guide, optax.adagrad(0.1), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(x, y, batch_size=8)
    return model, guide, svi.run(jax.random.key(0), 30, batches=batches, progress_bar=False).params


def dense_log_probs(params, x):
    psi = np.asarray(x, np.float64) @ np.asarray(params["w_auto_loc"], np.float64).T
    psi += np.asarray(params["b_auto_loc"], np.float64)
    return psi - np.log(np.exp(psi).sum(axis=1, keepdims=True))


@pytest.mark.smoke
@pytest.mark.parametrize("chunk_size", [1, 5, NUM_CATEGORIES, 1000])
def test_predictions_equal_dense_arithmetic_whatever_the_chunk(fitted, chunk_size):
    model, guide, params = fitted
    x = jax.random.normal(jax.random.key(5), (7, NUM_FEATURES))
    obs = jnp.array([0, 11, 3, 3, 7, 10, 1])
    predict = jax.jit(partial(lc.predict_choice, model, guide, num_top=3, chunk_size=chunk_size))
    found = predict(params, x, obs=obs)
    expected = dense_log_probs(params, x)
    order = np.argsort(-expected, axis=1)[:, :3]
    np.testing.assert_array_equal(found.top_classes, order)
    np.testing.assert_allclose(
        found.top_log_probs, np.take_along_axis(expected, order, 1), atol=1e-5
    )
    np.testing.assert_allclose(found.log_prob, expected[np.arange(7), obs], atol=1e-5)


def test_probabilities_of_all_classes_sum_to_one(fitted):
    model, guide, params = fitted
    found = lc.predict_choice(
        model, guide, params, jnp.ones((2, NUM_FEATURES)), num_top=NUM_CATEGORIES, chunk_size=5
    )
    np.testing.assert_allclose(np.exp(found.top_log_probs).sum(axis=1), 1, rtol=1e-5)
    assert found.log_prob is None
    assert sorted(found.top_classes[0].tolist()) == list(range(NUM_CATEGORIES))


def test_an_exact_model_predicts_the_same_from_the_same_parameters(fitted):
    _, _, params = fitted
    x, y = make_data()
    model = hierarchical(num_sampled=None)
    guide = AutoNormal(model)
    numpyro.handlers.seed(guide, 0)(x, y)
    found = lc.predict_choice(model, guide, params, x[:4], num_top=1, chunk_size=7)
    expected = dense_log_probs(params, x[:4])
    np.testing.assert_array_equal(found.top_classes[:, 0], expected.argmax(axis=1))


def test_memory_follows_the_chunk_and_not_the_classes():
    def temp_bytes(num_categories):
        model = hierarchical(num_sampled=4, num_categories=num_categories)
        guide = AutoDelta(model)
        x, y = make_data()
        svi = lc.SubsampledSVI(model, guide, optax.sgd(0.1), TraceMeanField_ELBO())
        params = svi.get_params(svi.init(jax.random.key(0), x, y))
        predict = jax.jit(partial(lc.predict_choice, model, guide, chunk_size=64))
        return predict.lower(params, x).compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(1_000) == pytest.approx(temp_bytes(100_000), rel=0.01)


def test_rows_of_the_training_data_can_be_predicted_by_their_ids():
    """A latent value for each row is known for training rows, and refused for new ones."""
    y = jnp.array([1, 4, 4])

    def model(y=None, rows=None):
        with lc.class_plate("classes", 6, y, num_sampled=2) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", 3, rows) as rows:
            z = numpyro.sample("z", dist.Normal(0, 1))
            lc.sample_choice("y", z[:, None] * w, classes=classes, rows=rows, obs=y)

    guide = AutoDelta(model)
    svi = lc.SubsampledSVI(model, guide, optax.sgd(0.1), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), y))
    params["z_auto_loc"] = jnp.array([1.0, -2.0, 3.0])
    params["w_auto_loc"] = jnp.arange(6.0)
    found = lc.predict_choice(model, guide, params, rows=jnp.array([2, 1]), num_top=1)
    assert found.top_classes[:, 0].tolist() == [5, 0]
    with pytest.raises(NotImplementedError, match="site 'z' has a value for each row"):
        lc.predict_choice(model, guide, params)


def test_bad_arguments_are_described(fitted):
    model, guide, params = fitted
    x = jnp.ones((2, NUM_FEATURES))
    predict = partial(lc.predict_choice, model, guide, params, x)
    with pytest.raises(ValueError, match=r"`site` must name a UtilityCategorical.*'nope'"):
        predict(site="nope")
    with pytest.raises(ValueError, match=r"`plate` must name a class plate.*got 'nope'.*'classes'"):
        predict(plate="nope")
    with pytest.raises(ValueError, match="`num_top` must be at most the number of classes, 12"):
        predict(num_top=13)
    with pytest.raises(ValueError, match=r"`obs` must be classes.*got 12 at position 1"):
        predict(obs=jnp.array([0, 12]))


def test_numpy_arrays_may_be_indexed_by_classes():
    """A model that takes a table of NumPy's by ``classes.indices`` trains, so it must predict."""
    table = np.arange(12.0).reshape(3, 4)

    def model(table, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with lc.class_plate("classes", 4, y, 2) as classes:
            pass
        with lc.data_plate("data", 3) as rows:
            psi = slope * table[:, classes.indices]
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    guide = AutoDelta(model)
    svi = lc.SubsampledSVI(model, guide, optax.sgd(0.0), Trace_ELBO())
    svi.init(jax.random.key(0), table, jnp.array([0, 1, 3]))
    params = {"slope_auto_loc": jnp.array(1.0)}
    new = lc.predict_choice(model, guide, params, table, num_top=1)
    assert new.top_classes[:, 0].tolist() == [3, 3, 3]
    data = lc.to_arviz(jax.random.key(1), model, guide, params, table, y=np.zeros(3, int))
    assert data["posterior"]["slope"].shape == (1, 500)
