# SPDX-License-Identifier: Apache-2.0
"""Predictions of a model with two huge tables: classes to choose from, and users read by id."""

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

K, U, D, N = 23, 31, 3, 200
RNG = np.random.default_rng(0)
USERS, OBS = RNG.integers(0, U - 1, N), RNG.integers(0, K, N)  # the last user has no row
HISTORY = np.where(RNG.random((N, 4)) < 0.3, -1, RNG.integers(0, U - 1, (N, 4)))
COUNTS = lc.EntityCounts.of(U, USERS, HISTORY)
TABLES = {"v": RNG.normal(size=(U, D)), "w": RNG.normal(size=(K, D))}


def two_sided(users, history, y=None, rows=None):
    """The taste of a user, and of those before, for what the classes offer."""
    with lc.entity_plate("users", U, (users, history), COUNTS) as read:
        v = numpyro.sample("v", dist.Normal(0, 1).expand([D]).to_event(1))
    with lc.class_plate("classes", K, y, num_sampled=4) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    taste = read.rows_of(v, users) + read.rows_of(v, history).mean(1)
    with lc.data_plate("data", N, rows) as rows:
        lc.sample_choice("y", taste @ w.T, classes=classes, rows=rows, obs=y)


def log_probs(v, w, users=USERS, history=HISTORY):
    """Of all classes, (..., N, K), by plain NumPy."""
    v, w = (np.asarray(table, np.float64) for table in (v, w))
    before = np.where((history == -1)[..., None], 0, v[..., history, :]).mean(-2)
    psi = (v[..., users, :] + before) @ np.swapaxes(w, -1, -2)
    largest = psi.max(-1, keepdims=True)
    return psi - largest - np.log(np.exp(psi - largest).sum(-1, keepdims=True))


BY_HAND = normals_of(users=(U, {"v": (D,)}), classes=(K, {"w": (D,)}))


def fitted(guide=BY_HAND, **options):
    params = {f"{name}_auto_loc": jnp.asarray(table) for name, table in TABLES.items()}
    params |= {f"{name}_auto_scale": jnp.full(table.shape, 0.3) for name, table in TABLES.items()}
    return lc.Fitted(two_sided, guide, params, **options)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("chunk_size", [5, 23, 8192])
def test_log_likelihood_is_that_of_numpy(chunk_size: int) -> None:
    """In and out of `jit`."""
    fit = fitted(chunk_size=chunk_size)
    expected = log_probs(**TABLES)[np.arange(N), OBS]
    np.testing.assert_allclose(fit.on(USERS, HISTORY).log_likelihood(OBS), expected, atol=1e-5)
    under_jit = jax.jit(lambda users, history: fit.on(users, history).log_likelihood(OBS))
    np.testing.assert_allclose(under_jit(USERS, HISTORY), expected, atol=1e-5)


@pytest.mark.slow
def test_top_classes_are_those_of_numpy() -> None:
    top = fitted(chunk_size=5).on(USERS, HISTORY).top_classes(3)
    order = np.argsort(-log_probs(**TABLES), axis=1)[:, :3]
    np.testing.assert_array_equal(top.classes, order)


@pytest.mark.slow
def test_likelihood_over_draws_is_that_of_numpy_at_the_same_draws() -> None:
    """Which ArviZ is shown; users that are asked for twice are drawn once.

    Most are others than those of the step that made the guide.
    """
    guide = AutoNormal(two_sided)
    numpyro.handlers.seed(guide, 0)(USERS[:5], HISTORY[:5], OBS[:5], np.arange(5))
    fit = fitted(guide, chunk_size=5)
    shown = fit.on(USERS, HISTORY).to_arviz(rng_key=jax.random.key(0), obs=OBS, num_draws=3)
    v, w = (shown["posterior"][name].values[0] for name in ("v", "w"))
    assert v.shape == (3, U, D) and np.ptp(v, axis=0).min() > 0
    expected = log_probs(v, w)[:, np.arange(N), OBS]
    np.testing.assert_allclose(shown["log_likelihood"]["y"][0], expected, atol=1e-5)


@pytest.mark.slow
def test_arviz_shows_users_by_name_beside_those_of_the_observations() -> None:
    """Their draws are those that the likelihood is of."""
    fit, shown = fitted(chunk_size=5), [3, U - 1]
    arguments = {"obs": OBS[:6], "num_draws": 2, "rows": {"users": shown}}
    data = fit.on(USERS[:6], HISTORY[:6]).to_arviz(rng_key=jax.random.key(0), **arguments)
    every = fit.on(USERS, HISTORY).to_arviz(rng_key=jax.random.key(0), obs=OBS, num_draws=2)
    v = data["posterior"]["v"]
    assert v.shape == (1, 2, 2, D) and v["users"].values.tolist() == shown
    found, wanted = (fit_of["log_likelihood"]["y"].values for fit_of in (data, every))
    assert found.shape == (1, 2, 6) and np.isfinite(found).all()
    assert wanted.shape == (1, 2, N)


@pytest.mark.slow
def test_a_user_without_observations_is_read_too() -> None:
    """What its guide holds is up to how that was initialised."""
    users, history = np.array([U - 1]), np.full((1, 4), -1)
    found = fitted().on(users, history).log_likelihood(OBS[:1])
    expected = log_probs(**TABLES, users=users, history=history)
    np.testing.assert_allclose(found, expected[0, OBS[:1]], atol=1e-5)


@pytest.mark.slow
def test_bad_ids_are_refused_and_nan_under_jit() -> None:
    """And no class is taken for the best."""
    fit = fitted(chunk_size=5)
    users = USERS.copy()
    users[3] = U
    match = r"`ids` of plate 'users' must be entities.*got 31 at position 3"
    with pytest.raises(ValueError, match=match):
        fit.on(users, HISTORY).log_likelihood(OBS)
    found = jax.jit(lambda users: fit.on(users, HISTORY).log_likelihood(OBS))(users)
    assert np.isnan(found[3])
    classes = jax.jit(lambda users: fit.on(users, HISTORY).top_classes(1).classes)(users)
    assert classes[3, 0] == -1
