# SPDX-License-Identifier: Apache-2.0
"""Mistakes that would give a wrong fit without an error, and what is said of them."""

from __future__ import annotations

import jax.numpy as jnp
import jax.random as random
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_largecat as lc
from tests import reference

N, K = 12, 50
X = random.normal(random.key(0), (N,))
Y = random.randint(random.key(1), (N,), 0, 10)


def init(model, *args):
    svi = lc.SubsampledSVI(model, AutoDelta(model), optax.sgd(0.1), Trace_ELBO())
    return svi, svi.init(random.key(0), *args)


def test_labels_in_a_column_are_refused():
    def model(y):
        with lc.class_plate("classes", K, y, 5) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", N, jnp.arange(N)) as rows:
            lc.sample_choice("y", X[:, None] * w, classes=classes, rows=rows, obs=y)

    with pytest.raises(ValueError, match=r"obs.shape=\(12, 1\).*squeeze"):
        init(model, Y[:, None])


def test_a_subset_of_classes_that_is_not_named_is_refused():
    def model(y):
        with lc.class_plate("classes", K, y, 5):
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", N, jnp.arange(N)) as rows:
            lc.sample_choice("y", X[:, None] * w, rows=rows, obs=y)

    with pytest.raises(ValueError, match=r"17 classes, as many as plate 'classes'.*`classes=`"):
        init(model, Y)


def two_choices(x, y=None, z=None, rows=None):
    with lc.class_plate("many", K, y, 5) as many:
        v = numpyro.sample("v", dist.Normal(0, 1))
    with lc.class_plate("few", 7, z, 2) as few:
        w = numpyro.sample("w", dist.Normal(0, 1))
    with lc.data_plate("data", N, rows) as rows:
        lc.sample_choice("y", x[:, None] * v, classes=many, rows=rows, obs=y)
        lc.sample_choice("z", x[:, None] * w, classes=few, rows=rows, noise="normal", obs=z)


def test_one_of_two_choices_is_predicted_without_labels_of_either():
    """The probit's log probabilities are those of brute force over all its classes."""
    svi, state = init(two_choices, X, Y, Y % 7, jnp.arange(N))
    params = svi.get_params(state)
    new = jnp.array([0.5, -1.0])
    first = lc.top_classes(two_choices, svi.guide, params, new, site="y", plate="many")
    np.testing.assert_array_equal(
        first.classes[0, 0], jnp.argmax(params["v_auto_loc"]), strict=False
    )
    second = lc.top_classes(
        two_choices, svi.guide, params, new, site="z", plate="few", num_top=7, chunk_size=3
    )
    for n in range(2):
        for k, log_prob in zip(second.classes[n], second.log_probs[n], strict=True):
            utilities = new[n] * params["w_auto_loc"]
            exact = reference.choice_log_prob(utilities, int(k), "normal")
            np.testing.assert_allclose(log_prob, exact, rtol=1e-4)


def test_parameters_that_are_missing_are_named():
    svi, _ = init(two_choices, X, Y, Y % 7, jnp.arange(N))
    with pytest.raises(ValueError, match=r"lacks the parameters \['v_auto_loc', 'w_auto_loc'\]"):
        lc.top_classes(two_choices, svi.guide, {}, X, site="y", plate="many")
    with pytest.raises(TypeError, match=r"`params` must be a dict.*result.params"):
        lc.top_classes(two_choices, svi.guide, (), X, site="y", plate="many")


def test_a_data_plate_larger_than_the_batches_is_refused():
    def model(x, y, rows):
        with lc.class_plate("classes", K, y, 5) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", 10 * N, rows) as rows:
            lc.sample_choice("y", x[:, None] * w, classes=classes, rows=rows, obs=y)

    svi = lc.SubsampledSVI(model, AutoDelta(model), optax.sgd(0.1), Trace_ELBO())
    batches = lc.ArrayBatches(X, Y, batch_size=4)
    with pytest.raises(ValueError, match=r"`rows` of plate 'data'.*must be 12.*got 120.*120 / 4"):
        svi.run(random.key(0), 3, batches=batches, progress_bar=False)
