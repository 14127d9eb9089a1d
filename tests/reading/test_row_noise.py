# SPDX-License-Identifier: Apache-2.0
"""Draws of the guide, one class at a time: whatever else the guide does, and independent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from tests.models import normals_of
from tests.slow_cases import slow_case

K, D, N = 11, 2, 6
X = np.random.default_rng(0).normal(size=(N, D))
OBS = np.arange(N)
W = np.random.default_rng(1).normal(size=(K, D)).astype(np.float32)
COVARIANCE = 0.1 * np.eye(K) + 0.05


def model(x, y=None, *, reads=None):
    with lc.class_plate("classes", K, reads=reads) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0, 1))
    with lc.data_plate("data", N) as rows:
        psi = x @ classes.scored(w).T + classes.scored(b)
        lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)


def log_probs(w, b):
    psi = X @ np.swapaxes(np.asarray(w, float), -1, -2) + np.asarray(b, float)[..., None, :]
    return psi - np.log(np.exp(psi).sum(-1, keepdims=True))


def whole_table(x, y=None):
    """All classes at once, outside of the plate, as one event."""
    numpyro.sample("w", dist.Normal(W, 0.1).to_event(2))
    numpyro.sample("b", dist.MultivariateNormal(jnp.zeros(K), COVARIANCE))


def in_two_plates(x, y=None):
    """Features are a plate of the guide, and an event in the model."""
    with numpyro.plate("features", D, dim=-1), numpyro.plate("classes", K, dim=-2):
        loc = numpyro.param("loc", W, event_dim=0)
        numpyro.sample("w", dist.Normal(loc, 0.1))
    with numpyro.plate("classes", K):
        numpyro.sample("b", dist.Normal(0, 0.1))


@pytest.mark.parametrize("chunk_size", [4, slow_case(K)])
@pytest.mark.parametrize("guide", [whole_table, in_two_plates])
@pytest.mark.some_cases(1)
def test_a_guide_with_other_plates_than_the_model_is_drawn(guide, chunk_size: int) -> None:
    fit = lc.Fitted(model, guide, {"loc": W}, chunk_size=chunk_size)
    shown = fit.on(X).to_arviz(rng_key=jax.random.key(0), obs=OBS, num_draws=3)
    w, b = (shown["posterior"][name].values[0] for name in ("w", "b"))
    assert w.shape == (3, K, D) and np.ptp(w, axis=0).min() > 0
    expected = log_probs(w, b)[:, np.arange(N), OBS]
    np.testing.assert_allclose(shown["log_likelihood"]["y"][0], expected, atol=1e-5)


def centred(x, y=None):
    """Each class less the mean of those that are there."""
    with lc.class_plate("classes", K):
        loc = numpyro.param("loc", W, event_dim=1)
        numpyro.sample("w", dist.Normal(loc - loc.mean(0), 0.1).to_event(1))
        numpyro.sample("b", dist.Normal(0, 0.1))


def test_a_guide_that_mixes_classes_is_refused() -> None:
    """Only at the centre, and with all classes at once, is it what it was in the fit."""
    at = {"rng_key": jax.random.key(0), "num_draws": 2}
    some, every = (lc.Fitted(model, centred, {"loc": W}, chunk_size=s).on(X) for s in (4, K))
    match = r"site 'w' of the guide has a value for class \d of plate 'classes' that depends on"
    for read in (some, every):
        with pytest.raises(ValueError, match=match):
            read.log_likelihood(OBS, **at)
    with pytest.raises(ValueError, match=match):
        some.log_likelihood(OBS)
    expected = log_probs(W - W.mean(0), np.zeros(K))[np.arange(N), OBS]
    np.testing.assert_allclose(every.log_likelihood(OBS), expected, atol=1e-5)
    under_jit = jax.jit(lambda x: lc.Fitted(model, centred, {"loc": W}).on(x).draw_choices(**at))
    assert (np.asarray(under_jit(X)) == -1).all()


def test_choices_are_drawn_independently_of_the_latent_values() -> None:
    """All classes are alike, so each has a sixth of 20,000 draws, for each observation.

    At 6 standard errors of 24 shares a correct program fails once in 10**7 times.
    """

    def alike(y=None):
        with lc.class_plate("classes", 6) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", 4) as rows:
            lc.sample_choice("y", jnp.zeros((4, 1)) + b, classes=classes, rows=rows, obs=y)

    def guide(y=None):
        with lc.class_plate("classes", 6):
            numpyro.sample("b", dist.Normal(0, 2))

    drawn = (
        lc.Fitted(alike, guide, {}).on().draw_choices(rng_key=jax.random.key(0), num_draws=20_000)
    )
    shares = np.stack([(np.asarray(drawn) == k).mean(axis=0) for k in range(6)])
    assert np.abs(shares - 1 / 6).max() < 6 * np.sqrt(1 / 6 * 5 / 6 / 20_000)


def test_reads_need_a_guide_of_all_sites_to_be_drawn() -> None:
    """What the model draws from its prior differs among chunks, and so would what is read."""

    def reading(x, y=None):
        model(x, y, reads=np.array([3]))

    guide = normals_of(classes=(K, {"w": (D,)}))
    params = {"w_auto_loc": W, "w_auto_scale": np.ones_like(W)}
    fit = lc.Fitted(reading, guide, params, chunk_size=4)
    with pytest.raises(NotImplementedError, match="site 'b' in plate 'classes' is not in the gui"):
        fit.on(X).log_likelihood(OBS, rng_key=jax.random.key(0), num_draws=2)


@pytest.mark.slow
def test_arviz_shows_rows_of_another_plate_that_is_read() -> None:
    """Also those that no observation reads: each has the value of its own row."""
    history = np.arange(0, 900, 6).reshape(50, 3)

    def two_tables(history, y=None, rows=None):
        with lc.class_plate("classes", K, y, 3) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.class_plate("words", 1500, num_sampled=2, reads=history) as words:
            u = numpyro.sample("u", dist.Normal(0, 1))
        with lc.data_plate("data", 50, rows) as rows:
            psi = words.rows_of(u, history).sum(1)[:, None] * b
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    guide, obs = AutoNormal(two_tables), np.resize(np.arange(K), 50)
    numpyro.handlers.seed(guide, 0)(history[:5], obs[:5], np.arange(5))
    params = {"u_auto_loc": jnp.arange(1500.0), "u_auto_scale": jnp.full(1500, 1e-3)}
    params |= {"b_auto_loc": jnp.ones(K), "b_auto_scale": jnp.full(K, 0.1)}
    shown = np.arange(100, 1400, 4)
    fit = lc.Fitted(two_tables, guide, params, chunk_size=4)
    rows = {"words": shown}
    data = fit.on(history).to_arviz(rng_key=jax.random.key(0), obs=obs, num_draws=1, rows=rows)
    np.testing.assert_allclose(data["posterior"]["u"].values[0, 0], shown, atol=0.01)
