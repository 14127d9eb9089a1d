# SPDX-License-Identifier: Apache-2.0
"""Fits and predictions of several threads, which share NumPyro's stack of handlers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc

K, N, NUM_THREADS = 40, 200, 4
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 2)).astype(np.float32), RNG.integers(0, K, N)


def model(x, y=None, rows=None):
    with lc.class_plate("classes", K, y, num_sampled=5) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with lc.data_plate("data", N, rows) as rows:
        lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)


def fit(seed):
    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adagrad(0.1), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(X, Y, batch_size=20)
    return svi, svi.run(jax.random.key(seed), 10, batches=batches, progress_bar=False)


def in_threads(fn, arguments):
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(fn, arguments))


@pytest.mark.parametrize("over_draws", [False, True])
def test_predictions_of_several_threads_are_those_of_one(over_draws):
    """Of two fits in turns, so that the values of one would be seen in the other."""
    options = {"rng_key": jax.random.key(1), "num_draws": 3} if over_draws else {}
    fits = [lc.Fitted.from_svi(*fit(seed)) for seed in range(2)]

    def ask(place):
        return fits[place % 2].on(X[: 3 + place // 2]).top_classes(4, **options)

    alone = [ask(place) for place in range(8)]
    for found, wanted in zip(in_threads(ask, list(range(8)) * 3), alone * 3, strict=True):
        np.testing.assert_array_equal(found.classes, wanted.classes)
        np.testing.assert_array_equal(found.log_probs, wanted.log_probs)


def test_fits_of_several_threads_are_those_of_one():
    alone = [fit(seed)[1] for seed in range(NUM_THREADS)]
    for found, wanted in zip(in_threads(fit, range(NUM_THREADS)), alone, strict=True):
        np.testing.assert_array_equal(found[1].losses, wanted.losses)
