# SPDX-License-Identifier: Apache-2.0
"""Class plates that a model reads by id, beside the plate of its choice."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from scipy.special import log_softmax

import numpyro_largecat as lc
from tests.models import normals_of

K, U = 7, 9
USERS, OBS = np.array([0, 5, 8, 5]), np.array([1, 2, 3, 6])
GUIDE = normals_of(classes=(K, {"w": ()}), users=(U, {"v": ()}))


def by_place(users, v, u):
    return v[users.place(u)]


def by_branch(users, v, u):
    return v[users.place(u)] if users.labels is not None else v[u]


def choice_of_users(u, y=None, *, read=by_place, num_users=U, known=True, num_sampled=1):
    """Each user has a taste v for what the classes offer, w."""
    with lc.class_plate("classes", K, y, 3) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1))
    with lc.class_plate("users", num_users, u if known else None, num_sampled) as users:
        v = numpyro.sample("v", dist.Normal(0, 1))
    with lc.data_plate("data", 4) as rows:
        psi = read(users, v, u)[:, None] * w
        lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)


def locations(num_users=U):
    rng = np.random.default_rng(1)
    return {f"{site}_auto_loc": rng.normal(size=n) for site, n in (("w", K), ("v", num_users))}


def with_scales(params):
    return params | {n.replace("loc", "scale"): np.ones(len(loc)) for n, loc in params.items()}


def exact(w, v):
    """Log probabilities (..., 4, K)."""
    return log_softmax(v[..., USERS, None] * w[..., None, :], axis=-1)


@pytest.mark.parametrize(
    "options",
    [
        {"read": by_branch},
        {"read": by_branch, "known": False},
        {"num_sampled": None},
    ],
    ids=["branch", "no labels", "full"],
)
@pytest.mark.some_cases(1)
def test_rows_of_another_plate_are_those_that_are_read(options):
    model, params = partial(choice_of_users, **options), locations()
    fitted = lc.Fitted(model, GUIDE, with_scales(params), chunk_size=3)
    found = jax.jit(lambda users: fitted.on(users).log_likelihood(OBS))(USERS)
    expected = exact(params["w_auto_loc"], params["v_auto_loc"])[np.arange(4), OBS]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def written_guide(u, y=None):
    """With plates of its own, as the model has them."""
    for name, size, labels, site in (("classes", K, y, "w"), ("users", U, u, "v")):
        with lc.class_plate(name, size, labels, num_sampled=1 if name == "users" else 3):
            loc = numpyro.param(f"{site}_auto_loc", jnp.zeros(size), event_dim=0)
            numpyro.sample(site, dist.Normal(loc, 0.1))


def test_ids_out_of_range_are_refused_and_nan_under_jit():
    """With a guide that opens the class plates itself."""
    bad = np.where(np.arange(4) == 1, U, USERS)
    fitted = lc.Fitted(choice_of_users, written_guide, locations(), chunk_size=3)
    log_prob = jax.jit(lambda users: fitted.on(users).log_likelihood(OBS))
    expected = exact(*locations().values())[np.arange(4), OBS]
    np.testing.assert_allclose(log_prob(USERS), expected, rtol=1e-5)
    assert np.isnan(log_prob(bad)).all()
    with pytest.raises(ValueError, match=r"`labels` of plate 'users' must be.*got 9 at position 1"):
        fitted.on(bad).log_likelihood(OBS)


@pytest.mark.slow
@pytest.mark.parametrize("num_users", [U, 1200])
def test_draws_are_those_that_arviz_shows(num_users):
    """Each row of either plate is one draw, whichever the chunk; a large plate shows rows by name.

    So is that of a user that no observation has.
    """
    model = partial(choice_of_users, num_users=num_users)
    guide, params = AutoNormal(model), locations(num_users)
    numpyro.handlers.seed(guide, 0)(USERS, OBS)
    rows = None if num_users == U else {"users": np.arange(U)[::-1]}
    fitted = lc.Fitted(model, guide, with_scales(params), chunk_size=3)
    data = fitted.on(USERS).to_arviz(rng_key=jax.random.key(0), obs=OBS, num_draws=3, rows=rows)
    w, v = (data["posterior"][name] for name in ("w", "v"))
    assert v.shape == (1, 3, U)
    log_probs = exact(w.values[0], v.sel(users=np.arange(U)).values[0])
    expected = log_probs[:, np.arange(4), OBS]
    np.testing.assert_allclose(data["log_likelihood"]["y"][0], expected, atol=1e-5)


@pytest.mark.slow
def test_top_classes_have_the_log_predictive():
    params = with_scales(locations())
    new = lc.Fitted(choice_of_users, GUIDE, params, chunk_size=3).on(USERS)
    draws = {"rng_key": jax.random.key(2), "num_draws": 3}
    top = new.top_classes(1, **draws)
    found = new.log_predictive(top.classes[:, 0], **draws)
    np.testing.assert_allclose(found, top.log_probs[:, 0], rtol=1e-5)


@pytest.mark.slow
def test_a_sum_over_labels_alone_is_not_a_number():
    """It stands for all rows in a fit, where weights say so; here the others are not there."""

    def centred(users, v, u):
        own = v[users.place(u)] if users.kind != "sample" or known else v[:1]
        return own - (users.weights * v).sum()

    for known in (True, False):
        model, params = partial(choice_of_users, read=centred, known=known), locations()
        guide = AutoDelta(model)
        numpyro.handlers.seed(guide, 0)(USERS, OBS)
        found = lc.Fitted(model, guide, params).on(USERS).log_likelihood(OBS)
        v = params["v_auto_loc"]
        expected = exact(params["w_auto_loc"], v - v.sum())[np.arange(4), OBS]
        np.testing.assert_allclose(found, expected * (jnp.nan if known else 1), rtol=1e-4)


def test_places_in_each_kind_of_subset():
    ids = jnp.array([8, 0])
    full = lc.class_plate("a", U).classes
    assert full.place(ids).tolist() == [8, 0] and full.holds(ids).all()
    with lc.plates.class_chunk(name="a", start=0, size=3):
        chunk = lc.class_plate("a", U, ids, 2).classes
    assert chunk.holds(ids).tolist() == [False, True]
    with pytest.raises(ValueError, match=r"`classes.place` has no answer.*reads=ids"):
        chunk.place(ids)


def choice_beside_labels(u, y=None, *, negatives):
    """The label is the first of what an observation sees."""
    with lc.class_plate("classes", K, y, 3) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1))
    with lc.class_plate("users", U, u, 1, negatives=negatives) as users:
        v = numpyro.sample("v", dist.Normal(0, 1))
    with lc.data_plate("data", 4) as rows:
        psi = users.utilities(lambda u, v: v, (u,), (v,))[:, :1] * w
        lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("negatives", ["shared", "own"])
def test_posterior_draws_are_those_of_the_likelihood(negatives):
    """Observations of one label read one value in each draw."""
    model = partial(choice_beside_labels, negatives=negatives)
    fitted = lc.Fitted(model, GUIDE, with_scales(locations())).on(USERS, OBS)
    data = fitted.to_arviz(rng_key=jax.random.key(0), obs=OBS, num_draws=5)
    w, v = (data["posterior"][site].values[0] for site in ("w", "v"))
    expected = exact(w, v)[:, np.arange(4), OBS]
    found = data["log_likelihood"]["y"].values[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("negatives", ["shared", "own"])
def test_classes_of_each_observation_are_read_as_in_training(negatives):
    model = partial(choice_beside_labels, negatives=negatives)
    params = locations()
    found = lc.Fitted(model, GUIDE, with_scales(params)).on(USERS).log_likelihood(OBS)
    expected = exact(params["w_auto_loc"], params["v_auto_loc"])[np.arange(4), OBS]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_a_fit_of_both_plates_learns_and_predicts():
    """Two kinds of users take two classes; each is predicted from the rows of both tables."""
    u = jnp.tile(jnp.arange(U), 20)
    y = jnp.where(u < 4, 2, 5)

    def model(u, y=None, rows=None):
        with lc.class_plate("classes", K, y, 3) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with lc.class_plate("users", U, u, 1) as users:
            v = numpyro.sample("v", dist.Normal(0, 1).expand([2]).to_event(1))
        with lc.data_plate("data", len(y) if y is not None else len(u), rows) as rows:
            psi = v[users.place(u)] @ w.T
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    guide = AutoDelta(model)
    svi = lc.SubsampledSVI(model, guide, optax.adam(0.1), Trace_ELBO())
    result = svi.run(jax.random.key(0), 300, u, y, progress_bar=False)
    fitted = lc.Fitted.from_svi(svi, result, chunk_size=3)
    top = fitted.on(jnp.array([8, 1, 1])).top_classes(1)
    assert top.classes[:, 0].tolist() == [5, 2, 2]
