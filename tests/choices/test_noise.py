# SPDX-License-Identifier: Apache-2.0
"""Probit and logistic models through ``sample_choice`` and ``SubsampledSVI``."""

from __future__ import annotations

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
from numpyro_largecat.choices.error_families import FAMILIES
from tests import reference

COUNTS = np.array([400, 250, 150, 100, 60, 40])
K, N = len(COUNTS), COUNTS.sum()
Y = jnp.array(np.repeat(np.arange(K), COUNTS))


def intercepts(noise, num_sampled):
    """Utilities without covariates: with enough data the probabilities are the frequencies."""

    def model(y=None, rows=None):
        with lc.class_plate("classes", K, y, num_sampled) as classes:
            b = numpyro.sample("b", dist.Normal(0, 10))
        with lc.data_plate("data", N, rows) as rows:
            psi = jnp.broadcast_to(b, (N if y is None else len(y), *b.shape))
            lc.sample_choice("y", psi, classes=classes, rows=rows, noise=noise, obs=y)

    return model


def fit(model, guide, num_steps, rng_seed=0):
    rate = optax.exponential_decay(0.1, num_steps, 0.02)
    svi = lc.SubsampledSVI(model, guide, optax.adam(rate), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(Y, batch_size=100)
    return svi.run(jax.random.key(rng_seed), num_steps, batches=batches, progress_bar=False)


KEPT = pytest.mark.parametrize(
    ("noise", "kept", "shape"), [("normal", "y_error", (N, 2)), ("logistic", "y_u", (N,))]
)


@pytest.mark.slow
@KEPT
def test_a_fit_to_counts_gives_their_frequencies(noise, kept, shape):
    """The bound costs 0.02 in probability at most, the fit's own noise about 0.01."""
    model = intercepts(noise, 2)
    result = fit(model, AutoDelta(model), 4000)
    b = np.asarray(result.params["b_auto_loc"])
    probabilities = [np.exp(reference.choice_log_prob(b, k, noise)) for k in range(K)]
    np.testing.assert_allclose(probabilities, COUNTS / N, atol=0.035)
    assert result.params[kept].shape == shape


@KEPT
@pytest.mark.slow
def test_the_error_of_a_row_moves_when_it_is_visited_and_stays_otherwise(noise, kept, shape):
    def guide(*args):
        with numpyro.plate("classes", K):
            b = numpyro.param("b_loc", jnp.arange(float(K)), event_dim=0)
            numpyro.sample("b", dist.Normal(b, 0.1))

    svi = lc.SubsampledSVI(intercepts(noise, 2), guide, optax.adam(0.1), Trace_ELBO())
    rows = jnp.array([3, 999, 500])
    state = svi.init(jax.random.key(0), Y[rows], rows)
    before = np.asarray(svi.get_params(state)[kept]).reshape(N, -1)
    state, loss = jax.jit(svi.update)(state, Y[rows], rows)
    after = np.asarray(svi.get_params(state)[kept]).reshape(N, -1)
    moved = (before != after).any(axis=1)
    assert np.flatnonzero(moved).tolist() == sorted(rows.tolist())
    assert np.isfinite(loss)
    assert np.isfinite(after).all()


@pytest.mark.slow
def test_two_choices_with_different_errors_in_a_model_with_a_hierarchy():
    """Drawn weights of a learned scale, and K of 40 and 6."""
    num_rows, num_features = 60, 3
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (num_rows, num_features))
    labels = [
        jax.random.randint(key, (num_rows,), 0, k) for key, k in zip(keys[1:], (40, 6), strict=True)
    ]

    def model(x, first=None, second=None, rows=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with lc.class_plate("many", 40, first, 5) as many:
            v = numpyro.sample("v", dist.Normal(0, scale).expand([num_features]).to_event(1))
        with lc.class_plate("few", 6, second, 2) as few:
            w = numpyro.sample("w", dist.Normal(0, scale).expand([num_features]).to_event(1))
        with lc.data_plate("data", num_rows, rows) as rows:
            kwargs = {"rows": rows}
            lc.sample_choice("first", x @ v.T, classes=many, noise="normal", obs=first, **kwargs)
            lc.sample_choice("second", x @ w.T, classes=few, noise="gumbel", obs=second, **kwargs)

    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adagrad(0.1), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(x, *labels, batch_size=20)
    result = svi.run(jax.random.key(1), 100, batches=batches, progress_bar=False)
    assert np.isfinite(result.losses).all()
    assert np.mean(result.losses[-30:]) < np.mean(result.losses[:30])
    assert result.params["first_error"].shape == (num_rows, 2)
    assert result.params["second_u"].shape == (num_rows,)


NOISES = sorted(FAMILIES)


@pytest.mark.slow
def test_a_wide_guide_over_strong_features_keeps_every_step_finite():
    """Its draws put labels far above and below the centre of the guide, which all errors follow."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = 2.5 * jax.random.normal(keys[0], (200, 8))
    y = jax.random.randint(keys[1], (200,), 0, 50)

    def model(x, y, rows):
        with lc.class_plate("classes", 50, y, 10) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([8]).to_event(1))
        with lc.data_plate("data", 200, rows) as rows:
            for noise in NOISES:
                lc.sample_choice(noise, x @ w.T, classes=classes, rows=rows, noise=noise, obs=y)

    def guide(*args):
        with numpyro.plate("classes", 50):
            positive, start = dist.constraints.positive, jnp.zeros((50, 8))
            loc = numpyro.param("w_loc", start, event_dim=1)
            scale = numpyro.param("w_scale", start + 1, constraint=positive, event_dim=1)
            numpyro.sample("w", dist.Normal(loc, scale).to_event(1))

    svi = lc.SubsampledSVI(model, guide, optax.adagrad(0.1), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(x, y, batch_size=40)
    result = svi.run(jax.random.key(1), 60, batches=batches, progress_bar=False)
    assert np.isfinite(result.losses).all()
    assert len(result.losses) == 60


@pytest.mark.slow
def test_single_precision_data_stay_so_where_double_is_enabled(x64):
    x, y = jnp.ones((12, 2), jnp.float32), jnp.arange(12) % 5

    def model(x, y, rows):
        with lc.class_plate("classes", 50, y, 10) as classes:
            w = numpyro.param("w", jnp.zeros((50, 2), jnp.float32), event_dim=1)
        with lc.data_plate("data", 12, rows) as rows:
            for noise in NOISES:
                lc.sample_choice(noise, x @ w.T, classes=classes, rows=rows, noise=noise, obs=y)

    svi = lc.SubsampledSVI(model, lambda *args: None, optax.sgd(0.1), Trace_ELBO())
    result = svi.run(jax.random.key(0), 3, x, y, jnp.arange(12), progress_bar=False)
    assert np.isfinite(result.losses).all()
    assert {v.dtype for v in result.params.values()} == {np.dtype("float32")}
    assert {"gumbel_u", "logistic_u", "normal_error"} < result.params.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "masked"), [("gumbel", "normal"), ("normal", "logistic")])
def test_two_sites_with_masks_particles_and_vmap(noise, masked):
    """A masked observation counts nothing, and two fits at once are the two fits one by one."""
    x, y = jax.random.normal(jax.random.key(0), (12, 2)), jnp.arange(12) % 5
    is_seen = jnp.arange(12) % 3 > 0

    def model(x, y, z, rows):
        with lc.class_plate("classes", 30, jnp.append(y, z), 4) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with lc.data_plate("data", 12, rows) as rows:
            kwargs = {"classes": classes, "rows": rows}
            lc.sample_choice("y", x @ w.T, obs=y, noise=noise, **kwargs)
            with numpyro.handlers.mask(mask=is_seen):
                lc.sample_choice("z", x[:, ::-1] @ w.T, obs=z, noise=masked, **kwargs)

    def guide(*args):
        with numpyro.plate("classes", 30):
            positive, start = dist.constraints.positive, jnp.zeros((30, 2))
            loc = numpyro.param("w_loc", start, event_dim=1)
            scale = numpyro.param("w_scale", start + 0.1, constraint=positive, event_dim=1)
            numpyro.sample("w", dist.Normal(loc, scale).to_event(1))

    svi = lc.SubsampledSVI(model, guide, optax.adam(0.1), Trace_ELBO(num_particles=2))
    keys = jax.random.split(jax.random.key(1), 2)

    z = (y + 1) % 5  # the same labels in another place where they are masked
    first = svi.init(keys[0], x, y, z, jnp.arange(12))

    @jax.jit
    def one(key, z):
        return svi.update(first._replace(rng_key=key), x, y, z, jnp.arange(12))

    hidden = jnp.where(is_seen, z, z[0])
    state, losses = jax.jit(jax.vmap(one, in_axes=(0, None)))(keys, z)
    assert losses.shape == (2,)
    all_together = jax.jit(jax.vmap(svi.get_params))(state)
    for i, key in enumerate(keys):
        for labels in (z, hidden):
            alone, loss_alone = one(key, labels)
            np.testing.assert_allclose(losses[i], loss_alone, rtol=1e-5)
            for name, value in svi.get_params(alone).items():
                together = np.asarray(all_together[name])[i]
                if labels is z or not name.startswith("z_"):
                    np.testing.assert_allclose(together, value, rtol=1e-4, atol=1e-5)
