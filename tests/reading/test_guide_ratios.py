# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal
from scipy import stats
from scipy.special import log_softmax

import numpyro_largecat as lc
from numpyro_largecat.handlers.row_noise import InnerNoise
from numpyro_largecat.reading import guide_ratios
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.guide_ratios import (
    FreeValues,
    _ratios,
    class_ratios,
    pareto_k,
    small_site_ratios,
)
from numpyro_largecat.reading.observed_choice import Observed, RowWeights, observed_choice
from numpyro_largecat.reading.parts_check import check_on_batches
from numpyro_largecat.reading.remedies import Remedies
from tests.models import normals_of

K, N, S = 5, 6, 100
X = np.linspace(-1, 1, N)
Y = np.array([0, 2, 2, 4, 1, 2])
ROW_IDS = np.arange(N)
LOC = np.array([0.3, -0.2, 0.5, 1.0, -1.0])
NARROW = 1e-6  # draws that are points, for the rest of the latent values


def model(x, y=None, rows=None):
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    with lc.class_plate("classes", K, y, num_sampled=2) as classes:
        w = numpyro.sample("w", dist.Normal(0, jnp.exp(slope)))
    with lc.data_plate("data", 40 * N, rows):
        numpyro.sample("y", lc.UtilityCategorical(slope * x[:, None] * w, classes), obs=y)


GUIDE = normals_of({"slope": ()}, classes=(K, {"w": ()}))


def make_fit(slope_scale, w_scale, w_loc=LOC, args=(X, Y, ROW_IDS)):
    params = {"slope_auto_loc": 0.4, "slope_auto_scale": slope_scale}
    params |= {"w_auto_loc": w_loc, "w_auto_scale": w_scale}
    params = {name: np.asarray(value, np.float32) for name, value in params.items()}
    return lc.Fitted(model, GUIDE, params, chunk_size=2).on(*args)._fit


def log_joint(slope, w, weights):
    """Log density of everything, for one slope and the weights of all classes."""
    prior = stats.norm.logpdf(slope, 0, 2) + stats.norm.logpdf(w, 0, np.exp(slope)).sum()
    return prior + weights @ log_softmax(slope * X[:, None] * w, axis=1)[np.arange(N), Y]


def differences(values):
    return np.asarray(values) - np.mean(values)


WEIGHTS = np.array([1.0, 1, 1, 3, 3, 3])
OBSERVED = Observed(jnp.asarray(Y), RowWeights(jnp.asarray(WEIGHTS), jnp.asarray(WEIGHTS)))


@pytest.mark.slow
def test_ratios_of_a_small_site_are_those_of_dense_arithmetic():
    """With chunks of 2 of 5 classes, and a slope that moves both the prior and the utilities."""
    utilities = ChunkedUtilities.of(make_fit(0.5, np.full(K, NARROW)))
    found = small_site_ratios(utilities, OBSERVED, jax.random.key(1), S, 1, 0.5)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), 0), S)
    noise = InnerNoise(keys[0], frozenset({"classes", "data"}))
    slopes = jax.lax.map(lambda k: utilities.runs.traces(0, 2, k, noise)[0]["slope"]["value"], keys)
    expected = [log_joint(s, LOC, WEIGHTS) - stats.norm.logpdf(s, 0.4, 0.5) for s in slopes]
    np.testing.assert_allclose(differences(found.log_ratios[0]), differences(expected), atol=1e-4)


def test_a_scale_of_rows_moves_their_prior_and_no_utilities(monkeypatch):
    """They are not formed; where the rows are points the ratios are those of the prior."""

    def model(x, y=None, rows=None):
        log_scale = numpyro.sample("log_scale", dist.Normal(0, 1))
        with lc.class_plate("classes", K, y, num_sampled=2) as classes:
            w = numpyro.sample("w", dist.Normal(0, jnp.exp(log_scale)))
        with lc.data_plate("data", 40 * N, rows):
            numpyro.sample("y", lc.UtilityCategorical(x[:, None] * w, classes), obs=y)

    def forms_utilities(*_):
        pytest.fail("utilities are formed")

    monkeypatch.setattr(guide_ratios, "own_utilities", forms_utilities)
    guide = normals_of({"log_scale": ()}, classes=(K, {"w": ()}))
    params = {"log_scale_auto_loc": jnp.array(0.2), "log_scale_auto_scale": jnp.array(0.3)}
    params |= {"w_auto_loc": jnp.asarray(LOC), "w_auto_scale": jnp.full(K, NARROW)}
    utilities = ChunkedUtilities.of(
        lc.Fitted(model, guide, params, chunk_size=2).on(X, Y, ROW_IDS)._fit
    )
    found = small_site_ratios(utilities, OBSERVED, jax.random.key(1), S, 1, 0.5)
    logs = found.drawn.values["log_scale"][0]
    of_rows = stats.norm.logpdf(LOC, 0, np.exp(logs)[:, None]).sum(axis=1)
    expected = stats.norm.logpdf(logs) + of_rows - stats.norm.logpdf(logs, 0.2, 0.3)
    np.testing.assert_allclose(differences(found.log_ratios[0]), differences(expected), atol=1e-4)
    assert np.std(logs) > 0.2 and found.noise.tolist() == [0]


@pytest.mark.slow
def test_ratios_of_classes_are_those_of_dense_arithmetic():
    """Two classes: one that draws, and one that is a point."""
    w_scale = np.where(np.arange(K) == 2, 0.7, NARROW)
    utilities = ChunkedUtilities.of(make_fit(NARROW, w_scale))
    classes = jnp.array([2, 4])
    found = class_ratios(utilities, OBSERVED, classes, jax.random.key(1), S, 1)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), 0), S)

    def draw(key):
        noise = InnerNoise(key, frozenset({"classes"}))
        return utilities.runs.traces(2, 1, keys[0], noise)[0]["w"]["value"][0]

    drawn = np.asarray(jax.lax.map(draw, keys))
    assert np.std(drawn) > 0.5
    points = [np.where(np.arange(K) == 2, w, LOC) for w in drawn]
    joint = [log_joint(0.4, w, WEIGHTS) for w in points]
    expected = joint - stats.norm.logpdf(drawn, LOC[2], 0.7)
    np.testing.assert_allclose(differences(found.log_ratios[0]), differences(expected), atol=1e-4)


def test_k_of_a_normal_that_is_too_narrow():
    """Where the likelihood says nothing, k = 1 - scale**2, and all ratios are equal at scale 1.

    FALSE_ALARM = 1e-5: the estimate from 1000 draws has a standard error of about 0.1.
    """
    w_scale = np.exp(0.4) * np.array([1, 1, 0.3, 0.3, 1])
    utilities = ChunkedUtilities.of(make_fit(NARROW, w_scale, np.zeros(K)))
    nothing = Observed(jnp.asarray(Y), RowWeights(jnp.zeros(N), jnp.ones(N)))
    found = class_ratios(utilities, nothing, jnp.arange(K), jax.random.key(1), 1000, 1)
    k = pareto_k(found.log_ratios)
    assert (np.abs(k[[2, 3]] - 0.91) < 0.45).all()
    assert (k[[0, 1, 4]] < 0.5).all()


NO_PRIOR, NO_VALUES = np.zeros((1, 1, 50)), FreeValues({}, np.zeros(1))


def test_the_noise_of_a_sample_of_rows_is_its_standard_deviation():
    """Of weighted sums over 20 of 100 rows, against sums over many such samples."""
    rng = np.random.default_rng(0)
    by_row = rng.normal(size=(1, 50, 100))
    weights = np.full(20, 5.0)
    rows = RowWeights(jnp.asarray(weights), jnp.asarray(weights))
    sums, noises = [], []
    for _ in range(300):
        some = rng.choice(100, 20, replace=False)
        ratios = _ratios(NO_PRIOR, by_row[None][..., some], rows, NO_VALUES)
        sums.append(differences(ratios.log_ratios[0]))
        noises.append(ratios.noise[0])
    assert np.sqrt(np.mean(np.square(noises))) == pytest.approx(
        np.std(sums, axis=0).mean(), rel=0.1
    )


@pytest.mark.parametrize("axis", [-1, -2])
def test_the_noise_of_rows_of_several_choices_is_that_of_rows(axis):
    """Two choices of one row that say the same are no more than one that counts twice."""
    by_row = np.random.default_rng(0).normal(size=(1, 50, 20))
    once = RowWeights(jnp.full(20, 10.0), jnp.full(20, 5.0))
    shape = (2, 20) if axis == -1 else (20, 2)
    twice = RowWeights(jnp.full(shape, 5.0), jnp.full(shape, 5.0), axis)
    repeated = np.stack([by_row, by_row], axis=axis - 1 if axis == -1 else -1)
    noise_of = [
        _ratios(NO_PRIOR, found[None], rows, NO_VALUES).noise
        for found, rows in ((by_row, once), (repeated, twice))
    ]
    np.testing.assert_allclose(*noise_of)


@pytest.mark.slow
def test_rows_of_the_classes_and_a_sample_of_others_stand_for_all(monkeypatch):
    """Too few of the others to tell about the slope, where all rows do."""
    fit = make_fit(0.5, np.full(K, 0.5), args=())
    x, y = np.tile(X, 40), np.tile(Y, 40)
    batches = lc.ArrayBatches(x, y, batch_size=10)
    everything = observed_choice(fit.followed_by(batches.take(jnp.arange(40 * N))), "y")
    check = partial(check_on_batches, jax.random.key(0), fit, everything, K, batches, 100)
    few = check(45)
    assert np.isnan(few.small_sites)
    assert len(few.classes) == 4  # class 2 has more than 45 rows
    assert few.rows_needed is not None and few.rows_needed > 45
    assert np.isfinite(check(few.rows_needed).small_sites)
    advice = few.findings("", Remedies("", ""))[0].advice
    assert f"`num_rows={few.rows_needed}`" in advice
    many = few._replace(num_rows=10 * few.rows_needed).findings("", Remedies("", ""))[0].advice
    assert many.endswith(f"give `num_rows={few.rows_needed}` or more")
    monkeypatch.setattr(guide_ratios, "MUCH_WORK", 0)
    looked_at = check(45)  # by 16 draws, which do not go on
    assert np.isnan(looked_at.small_sites) and looked_at.log_sds == few.log_sds
    assert looked_at.small_noise == pytest.approx(few.small_noise, rel=0.5)
    every = check(1000)
    assert np.isfinite(every.small_sites) and every.rows_needed is None
    assert len(every.classes) == K and np.isfinite(every.classes).all()


@pytest.mark.slow
def test_a_second_plate_that_is_read_leaves_the_small_sites_a_figure():
    """Most of its rows are not there, so they are left out of the ratio of the small sites."""

    def model(x, y, users):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.1))
        with lc.class_plate("users", 50, users, 1) as read:
            v = numpyro.sample("v", dist.Normal(0, 1))
        with lc.class_plate("classes", K, y, 1) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        utilities = (scale * x + v[read.place(users)])[:, None] * w
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", lc.UtilityCategorical(utilities, classes), obs=y)

    args = jnp.asarray(X), jnp.asarray(Y), jnp.asarray([7, 7, 40, 1, 0, 1])
    guide, params = AutoNormal(model), {}
    numpyro.handlers.seed(guide, 0)(*(arg[:2] for arg in args))
    for name, shape in (("scale", ()), ("v", (50,)), ("w", (K,))):
        params |= {f"{name}_auto_loc": jnp.zeros(shape), f"{name}_auto_scale": jnp.ones(shape)}
    fit = lc.Fitted(model, guide, params).on(*args)._fit
    observed = observed_choice(fit, "y")
    found = small_site_ratios(ChunkedUtilities.of(fit), observed, jax.random.key(0), 10, 1, 0.5)
    assert np.isfinite(found.log_ratios).all() and found.noise.tolist() == [0]


def scaled_model(x, y=None, rows=None, *, scale, size):
    with lc.class_plate("classes", K, y, num_sampled=2) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1))
    with lc.data_plate("data", size, rows), numpyro.handlers.scale(scale=scale):
        numpyro.sample("y", lc.UtilityCategorical(x[:, None] * w, classes), obs=y)


def checked(times, scale, num_rows=1000):
    """Parts of a guide on data that are there so many times, each of them scaled."""
    own = partial(scaled_model, scale=scale, size=times * 4 * N)
    x, y = np.tile(X, 4 * times), np.tile(Y, 4 * times)
    guide = normals_of(classes=(K, {"w": ()}))
    params = {"w_auto_loc": LOC, "w_auto_scale": np.full(K, 0.3)}
    fit = lc.Fitted(own, guide, params).on()._fit
    batches = lc.ArrayBatches(x, y, batch_size=10)
    everything = observed_choice(fit.followed_by(batches.take(jnp.arange(len(x)))), "y")
    key = jax.random.key(0)
    return check_on_batches(key, fit, everything, K, batches, 100, num_rows)


@pytest.mark.slow
def test_scaled_observations_weigh_as_if_they_were_there_so_often():
    repeated, scaled = checked(3, 1.0), checked(1, 3.0)
    np.testing.assert_allclose(scaled.classes, repeated.classes, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(scaled.class_shares, repeated.class_shares, rtol=1e-3)


def test_a_scale_is_no_subsample():
    """Which rows are a sample follows from the plates alone."""
    for scale, rows in ((0.1, np.arange(6)), (5.0, None)):
        own = partial(scaled_model, scale=scale, size=6 if rows is None else 60)
        fit = lc.Fitted(own, lambda *args: None, {}).on(X, Y, rows)._fit
        found = observed_choice(fit, "y").rows
        np.testing.assert_allclose(found.stands_for, 1 if rows is None else 10)
        np.testing.assert_allclose(found.weights, scale * found.stands_for, rtol=1e-6)
        assert found.is_sampled.all() == (rows is not None)
