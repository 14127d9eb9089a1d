# SPDX-License-Identifier: Apache-2.0
"""Utilities of -inf mark classes that are not available to an observation."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO, init_to_feasible
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from scipy.special import log_softmax

import numpyro_largecat as lc
from numpyro_largecat.choices.error_families import FAMILIES
from tests.reference import choice_log_prob, mean_over_subsets, softmax_bound
from tests.slow_cases import slow_case

NUM_ROWS, NUM_CATEGORIES, NUM_FEATURES = 30, 9, 2
REMOVED = (2, 7)  # available to nobody
KEPT = np.delete(np.arange(NUM_CATEGORIES), REMOVED)


def make_data():
    """Features, what is available to each observation, and a choice among that."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, NUM_FEATURES)).astype(np.float32)
    w = rng.normal(size=(NUM_CATEGORIES, NUM_FEATURES)).astype(np.float32)
    available = rng.random((NUM_ROWS, NUM_CATEGORIES)) < 0.6
    available[:, 0], available[:, REMOVED] = True, False
    utilities = np.where(available, x @ w.T, -np.float32(np.inf))
    return x, available, utilities, (utilities + rng.gumbel(size=utilities.shape)).argmax(axis=1)


X, AVAILABLE, UTILITIES, Y = make_data()


def make_model(num_sampled, num_categories=NUM_CATEGORIES):
    """Softmax regression in which each observation has its own set of classes."""

    def model(x, available, y=None, rows=None):
        with lc.class_plate("classes", num_categories, y, num_sampled) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([NUM_FEATURES]).to_event(1))
        is_there = jnp.asarray(available)[:, classes.indices]
        utilities = jnp.where(is_there, x @ w.T, -jnp.inf)
        with lc.data_plate("data", NUM_ROWS, rows) as rows:
            lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=y)

    return model


NOISES = pytest.mark.parametrize("noise", sorted(FAMILIES))


@partial(jax.jit, static_argnames="noise")
def exact_and_gradient(utilities, y, noise="gumbel"):
    def log_prob(utilities, y):
        return lc.UtilityCategorical(utilities, noise=noise).log_prob(y)

    return jax.vmap(jax.value_and_grad(log_prob))(utilities, y)


@pytest.mark.parametrize("noise", ["gumbel", slow_case("logistic"), slow_case("normal")])
def test_log_prob_is_that_of_the_available_classes_alone(noise):
    found, gradient = map(np.asarray, exact_and_gradient(UTILITIES, Y, noise))
    for n in range(5):
        ids = np.flatnonzero(AVAILABLE[n])
        place = int(np.searchsorted(ids, Y[n]))
        expected = choice_log_prob(np.asarray(UTILITIES[n, ids], float), place, noise)
        np.testing.assert_allclose(found[n], expected, rtol=1e-5)
    assert (gradient[~AVAILABLE] == 0).all()
    np.testing.assert_allclose(gradient.sum(axis=1), 0, atol=1e-5)


def test_log_prob_in_float64(x64):
    utilities = UTILITIES.astype(float)
    found, gradient = exact_and_gradient(utilities, Y)
    expected = log_softmax(utilities, axis=1)[np.arange(NUM_ROWS), Y]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert found.dtype == gradient.dtype == jnp.float64


@NOISES
@pytest.mark.some_cases(1)
def test_far_utilities_beside_unavailable_classes_have_finite_gradients(noise):
    far = np.where(AVAILABLE, 1e4 * np.sign(UTILITIES), -np.float32(np.inf))
    value, gradient = exact_and_gradient(far, Y, noise)
    assert np.isfinite(value).all()
    assert np.isfinite(gradient).all()


@NOISES
@pytest.mark.some_cases(1)
def test_probabilities_of_unavailable_classes_are_zero_and_the_others_sum_to_one(noise):
    @jax.jit
    def log_prob(utilities, values):
        return lc.UtilityCategorical(utilities, noise=noise).log_prob(values)

    log_probs = np.asarray(log_prob(UTILITIES, np.arange(NUM_CATEGORIES)[:, None])).T
    assert (log_probs[~AVAILABLE] == -np.inf).all()
    np.testing.assert_allclose(np.exp(log_probs).sum(axis=1), 1, rtol=1e-5)


@NOISES
def test_unavailable_classes_are_never_drawn(noise):
    @jax.jit
    def sample(key):
        return lc.UtilityCategorical(UTILITIES, noise=noise).sample(key, (500,))

    assert AVAILABLE[np.arange(NUM_ROWS), sample(jax.random.key(1))].all()


def test_bound_on_a_subset_is_unbiased_for_that_of_the_available_classes():
    """The mean over all subsets that the plate may draw, for one observation and fixed u."""
    labels, u = [int(Y[0]), int(Y[1])], 1.3

    @jax.jit
    def bound(indices, weights):
        classes = lc.plates.ClassSubset(
            indices, weights, jnp.array(sorted(labels)), NUM_CATEGORIES, "sample"
        )
        psi = jnp.asarray(UTILITIES)[0, indices]
        return lc.UtilityCategorical(psi, classes, u=u).log_prob(Y[0])

    found = mean_over_subsets(bound, labels, NUM_CATEGORIES, num_sampled=2)
    ids = np.flatnonzero(AVAILABLE[0])
    expected = softmax_bound(UTILITIES[0, ids], int(np.searchsorted(ids, Y[0])), u)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


FORMS = pytest.mark.parametrize("num_sampled", [None, 2], ids=["exact", "subset"])


@cache
def fitted(num_sampled):
    """A fit on minibatches, with a posterior over the weights."""
    model = make_model(num_sampled)
    guide = AutoNormal(model, init_loc_fn=init_to_feasible)
    svi = lc.SubsampledSVI(model, guide, optax.adagrad(0.1), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(X, AVAILABLE, Y, batch_size=6)
    return model, guide, svi.run(jax.random.key(2), 60, batches=batches, progress_bar=False)


@pytest.mark.slow
@FORMS
def test_a_fit_on_minibatches_has_finite_losses_and_parameters(num_sampled):
    _, _, result = fitted(num_sampled)
    assert np.isfinite(result.losses).all()
    for value in result.params.values():
        assert np.isfinite(value).all()


def points(x, available, y):
    num_categories = available.shape[1]
    with numpyro.plate("classes", num_categories):
        w = numpyro.param("w_auto_loc", jnp.zeros((num_categories, NUM_FEATURES)), event_dim=1)
        numpyro.sample("w", dist.Delta(w, event_dim=1))


def point_fit(model, x, available, y, num_steps=200, guide=points):
    svi = lc.SubsampledSVI(model, guide, optax.adam(0.05), Trace_ELBO())
    params = {"w_auto_loc": jnp.full((available.shape[1], NUM_FEATURES), 0.1)}
    key = jax.random.key(3)
    result = svi.run(key, num_steps, x, available, y, init_params=params, progress_bar=False)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "subset"])
def test_a_fit_equals_that_without_the_classes_that_nobody_has(exact):
    """Here a subset holds all classes, so that both fits see the same, whatever is drawn."""
    others = None if exact else NUM_CATEGORIES - 1
    whole = point_fit(make_model(others), X, AVAILABLE, Y)
    others = None if exact else len(KEPT) - 1
    y = np.searchsorted(KEPT, Y)
    part = point_fit(make_model(others, len(KEPT)), X, AVAILABLE[:, KEPT], y)
    np.testing.assert_allclose(
        whole.params["w_auto_loc"][KEPT], part.params["w_auto_loc"], atol=2e-5
    )
    # The removed classes have their prior alone, which draws them to 0.
    removed = whole.params["w_auto_loc"][jnp.array(REMOVED)]
    assert jnp.abs(removed).max() < 0.02
    prior = -dist.Normal(0, 1).log_prob(removed).sum()
    np.testing.assert_allclose(whole.losses[-1] - prior, part.losses[-1], atol=2e-3)


@pytest.mark.slow
@FORMS
def test_predictions_give_unavailable_classes_no_probability(num_sampled):
    model, guide, result = fitted(num_sampled)
    w = result.params["w_auto_loc"]
    expected = jax.nn.log_softmax(jnp.where(AVAILABLE, X @ w.T, -jnp.inf))
    new = lc.Fitted(model, guide, result.params, chunk_size=4).on(X, AVAILABLE)
    observed, top = new.log_likelihood(Y), new.top_classes(NUM_CATEGORIES)
    np.testing.assert_allclose(observed, expected[jnp.arange(NUM_ROWS), Y], rtol=1e-4)
    found = np.full((NUM_ROWS, NUM_CATEGORIES), -np.inf)
    for n, (classes, log_probs) in enumerate(zip(*top, strict=True)):
        possible = np.isfinite(log_probs)
        found[n, classes[possible]] = log_probs[possible]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_choice_that_is_not_available_stops_the_fit():
    y = Y.copy()
    y[3] = AVAILABLE[3].argmin()
    needed = r"valid initial parameters[\s\S]*at site 'y' is -inf in row 3 of plate 'data'"
    with pytest.raises(RuntimeError, match=needed):
        guide = AutoDelta(model := make_model(None), init_loc_fn=init_to_feasible)
        point_fit(model, X, AVAILABLE, y, num_steps=5, guide=guide)


@pytest.mark.slow
def test_coefficients_that_all_classes_share_are_fitted_on_a_subset():
    """Features of the pair (observation, class), with a vector of slopes: (B, M, F) @ (F,)."""
    places = jnp.linspace(-1, 1, NUM_CATEGORIES)

    def model(x, available, y):
        slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
        with lc.class_plate("classes", NUM_CATEGORIES, y, num_sampled=2) as classes:
            pass
        features = jnp.abs(x[:, None, :] - places[classes.indices, None])
        is_there = jnp.asarray(available)[:, classes.indices]
        utilities = jnp.where(is_there, features @ slopes, -jnp.inf)
        with lc.data_plate("data", NUM_ROWS) as rows:
            lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=y)

    def guide(x, available, y):
        slopes = numpyro.param("slopes_loc", jnp.zeros(2))
        numpyro.sample("slopes", dist.Delta(slopes, event_dim=1))

    svi = lc.SubsampledSVI(model, guide, optax.adam(0.05), Trace_ELBO())
    result = svi.run(jax.random.key(4), 20, X, AVAILABLE, Y, progress_bar=False)
    assert np.isfinite(result.losses).all()
