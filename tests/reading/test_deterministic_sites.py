# SPDX-License-Identifier: Apache-2.0
"""Deterministic sites in ArviZ: those that the rows shown are enough to know."""

from __future__ import annotations

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_largecat as lc

K, N, D, U, G = 1_500, 30, 2, 1_200, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D)).astype(np.float32)
Y, USERS = RNG.integers(0, K, N), RNG.integers(0, U, N)
COUNTS = lc.EntityCounts.of(U, USERS)


@lc.not_centred
def model(x, users, y=None, rows=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    numpyro.deterministic("variance", tau**2)
    with numpyro.plate("groups", G):
        a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.deterministic("contrast", a - a.mean())
    with lc.class_plate("classes", K, y, 5) as classes:
        loc = a[classes.indices % G, None] + np.zeros(D)
        w = numpyro.sample("w", dist.Normal(loc, tau).to_event(1))
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.deterministic("norm", (w**2).sum(-1))
        numpyro.deterministic("centred", b - b.mean())
        numpyro.deterministic("reference", b.at[0].set(0.0))
    numpyro.deterministic("mean", b.mean())
    with lc.entity_plate("users", U, users, COUNTS) as read:
        v = numpyro.sample("v", dist.Normal(0, spread).expand([D]).to_event(1))
    own = read.rows_of(v, users)
    numpyro.deterministic("after_reading", tau + 1)
    with lc.data_plate("data", N, rows) as rows:
        numpyro.deterministic("of_data", x[:, 0])
        lc.sample_choice("y", (x + own) @ w.T + b, classes=classes, rows=rows, obs=y)


@pytest.fixture(scope="module")
def fitted():
    guide = lc.AutoRowNormal(model)
    svi = lc.SubsampledSVI(model, guide, optax.adam(0.05), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(X, USERS, Y, batch_size=10)
    result = svi.run(jax.random.key(0), 5, batches=batches, progress_bar=False)
    return lc.Fitted.from_svi(svi, result)


LATENT = {"tau", "spread", "a", "w_decentered", "b"}


def posterior_of(fitted, **options):
    data = fitted.on(X[:4], USERS[:4]).to_arviz(rng_key=jax.random.key(1), num_draws=3, **options)
    return data["posterior"]


def test_a_site_written_around_its_prior_is_there_with_its_factors(fitted):
    found = posterior_of(fitted, rows={"classes": [7, 3, 9], "users": [1, 4]})
    assert set(found) == LATENT | {"v_decentered", "v", "w", "norm", "variance", "contrast"}
    assert found["w"].dims == ("chain", "draw", "classes", "w_dim_0")
    assert found["w"].classes.values.tolist() == [7, 3, 9]
    tau, a = (found[name].values for name in ("tau", "a"))
    w = a[..., [1, 0, 0], None] + tau[..., None, None] * found["w_decentered"].values
    np.testing.assert_allclose(found["w"], w, rtol=1e-5)
    np.testing.assert_allclose(found["norm"], (w**2).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(found["variance"], tau**2, rtol=1e-6)
    spread = found["spread"].values[..., None, None]
    np.testing.assert_allclose(found["v"], spread * found["v_decentered"].values, rtol=1e-6)


@pytest.mark.parametrize("rows", [{"classes": [7]}, {"classes": [0]}])
def test_what_follows_rows_that_are_not_shown_is_left_out(fitted, rows):
    """A mean over the one row shown would be that row."""
    found = posterior_of(fitted, rows=rows)
    assert set(found) == LATENT | {"w", "norm", "variance", "contrast", "after_reading"}


def test_without_rows_there_is_what_depends_on_none(fitted):
    found = posterior_of(fitted)
    assert set(found) == {"tau", "spread", "a", "variance", "contrast", "after_reading"}
    assert found["contrast"].dims == ("chain", "draw", "groups")
    np.testing.assert_allclose(found["contrast"].mean("groups"), 0, atol=1e-6)


def test_with_observations_it_follows_the_draws_of_their_log_likelihood(fitted):
    found = posterior_of(fitted, obs=Y[:4])
    tau, a = (found[name].values for name in ("tau", "a"))
    groups = found.classes.values % G
    w = a[..., groups, None] + tau[..., None, None] * found["w_decentered"].values
    np.testing.assert_allclose(found["w"], w, rtol=1e-5)


def test_all_rows_of_a_small_plate_may_follow_each_other():
    def few(y=None):
        with lc.class_plate("classes", 4) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.deterministic("centred", b - b.mean())
        with numpyro.plate("data", 5):
            numpyro.sample("y", lc.UtilityCategorical(b, classes), obs=y)

    guide = lc.AutoRowNormal(few)
    svi = lc.SubsampledSVI(few, guide, optax.adam(0.05), TraceMeanField_ELBO())
    result = svi.run(jax.random.key(0), 5, np.arange(5) % 4, progress_bar=False)
    read = lc.Fitted.from_svi(svi, result).on(np.arange(5) % 4)
    draws = {"rng_key": jax.random.key(1), "num_draws": 3}
    found = read.to_arviz(**draws)["posterior"]
    b = found["b"].values
    np.testing.assert_allclose(found["centred"], b - b.mean(-1, keepdims=True), atol=1e-6)
    assert "centred" not in read.to_arviz(**draws, rows={"classes": [1, 2]})["posterior"]


ACROSS = {
    "sd": lambda b: b.std(),
    "range": lambda b: b.max() - b.min(),
    "greatest": lambda b: b.max(),
    "below the greatest": lambda b: b - b.max(),
    "above the least": lambda b: b - b.min(),
    "is greatest": lambda b: b == b.max(),
    "first": lambda b: b[0],
    "above the first": lambda b: b - b[0],
    "share above 0": lambda b: (b > 0).mean(),
    "softmax": lambda b: jax.nn.softmax(b),
}


@pytest.mark.parametrize("guide", [lc.AutoRowNormal, AutoDelta], ids=["normal", "point"])
def test_nothing_over_all_rows_is_shown_where_some_are(guide):
    def model(y=None):
        a = numpyro.sample("a", dist.Normal(0, 1))
        counts = numpyro.sample("counts", dist.Poisson(3.0), obs=None if y is None else 2)
        numpyro.deterministic("more", counts + 1)
        numpyro.deterministic("twice", 2 * a)
        with lc.class_plate("classes", K, y, 5) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
            for name, across in ACROSS.items():
                numpyro.deterministic(f"inside {name}", across(b))
            numpyro.deterministic("square", b**2)
        for name, across in ACROSS.items():
            numpyro.deterministic(name, across(b))
        with numpyro.plate("data", 5):
            numpyro.sample("y", lc.UtilityCategorical(b + a, classes), obs=y)

    y = np.arange(5) % 4
    svi = lc.SubsampledSVI(model, guide(model), optax.adam(0.05), TraceMeanField_ELBO())
    result = svi.run(jax.random.key(0), 5, y, progress_bar=False)
    read = lc.Fitted.from_svi(svi, result).on()
    draws = {"rng_key": jax.random.key(1), "num_draws": 3}
    for rows in ([3, 7], list(range(20)), list(range(1, K))):
        found = set(read.to_arviz(**draws, rows={"classes": rows})["posterior"])
        assert found == {"a", "b", "twice", "square"}
    assert set(read.to_arviz(**draws)["posterior"]) == {"a", "twice"}
