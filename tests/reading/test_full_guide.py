# SPDX-License-Identifier: Apache-2.0
"""NumPyro's own tools on a fit of sampled classes, by the guide of the full model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpyro.handlers import seed
from numpyro.infer import Predictive, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from tests.models import hierarchical, make_data

K, N = 50, 6
X, Y = make_data(num_rows=N, num_categories=K)


@pytest.fixture(scope="module")
def fitted():
    """Guide and parameters of a fit with 4 sampled classes."""
    model = hierarchical(4, K, N)
    svi = lc.SubsampledSVI(
        model, AutoNormal(model, init_scale=1e-4), optax.adagrad(0.1), TraceMeanField_ELBO()
    )
    result = svi.run(jax.random.key(0), 3, X, Y, progress_bar=False)
    return svi.guide, result.params


@pytest.mark.slow
def test_predictive_with_the_guide_of_sampled_classes_says_what_to_do(fitted):
    guide, params = fitted
    predict = Predictive(hierarchical(None, K, N), guide=guide, params=params, num_samples=2)
    message = (
        r"site '[bw]' inside plate 'classes' must have the plate's 50 rows at axis -[12]; got a "
        r"value of shape \(10.*top_classes.*Predictive.*without `num_sampled` and run it once"
    )
    with pytest.raises(ValueError, match=message):
        predict(jax.random.key(1), X)


@pytest.mark.slow
def test_the_guide_of_the_full_model_takes_the_parameters_of_the_fit(fitted):
    """Its draws are nearly the locations, in the order of the classes, in all of NumPyro's tools.

    The scale of the guide is about 1e-4, so that no entry is off by 1e-2 in any draw.
    """
    of_subset, params = fitted
    full_model = hierarchical(None, K, N)
    guide = AutoNormal(full_model)
    seed(guide, 0)(X[:2], Y[:2], jnp.arange(2))
    predict = Predictive(
        full_model, guide=guide, params=params, num_samples=3, return_sites=["w", "y"]
    )
    draws = predict(jax.random.key(1), X)
    np.testing.assert_allclose(draws["w"] - params["w_auto_loc"], np.zeros((3, K, 3)), atol=1e-2)
    best = lc.Fitted(full_model, guide, params).on(X).top_classes(K)
    assert draws["y"].shape == (3, N) and best.classes.shape == (N, K)
    for either in (guide, of_subset):  # what asks for no rows works with both
        np.testing.assert_array_equal(either.median(params)["w"], params["w_auto_loc"])
    assert guide.quantiles(params, [0.1, 0.9])["b"].shape == (2, K)
    assert guide.sample_posterior(jax.random.key(2), params)["w"].shape == (K, 3)
