# SPDX-License-Identifier: Apache-2.0
"""What the local variable u of ``sample_choice`` follows in a draw, and what it must not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.primitives import mutable

import numpyro_largecat as lc
from numpyro_largecat.choices import kept_per_row
from numpyro_largecat.choices.update_rules import best_u_at

N, K, D = 12, 50, 3
X = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
Y = (np.arange(N) * 7) % K


@pytest.fixture
def distances(monkeypatch):
    """The largest distances at which u is taken."""
    found = []

    def spy(u, distance):
        jax.debug.callback(lambda far: found.append(float(far)), jnp.abs(distance).max())
        return best_u_at(u, distance)

    monkeypatch.setattr(kept_per_row, "best_u_at", spy)
    return found


def choices(utilities_of, before_rows=lambda: None):
    """A model of choices by the weights of their classes."""

    def model():
        before_rows()
        with lc.class_plate("classes", K, Y, num_sampled=8) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with lc.data_plate("data", N) as rows:
            lc.sample_choice("y", utilities_of(w), classes=classes, rows=rows, obs=Y)

    return model


def evaluated(model, guide, loss=None):
    svi = lc.SubsampledSVI(model, guide, optax.sgd(0.1), loss or Trace_ELBO())
    loss = jax.jit(lambda key: svi.evaluate(svi.init(key)))(jax.random.key(1))
    jax.effects_barrier()
    return loss


def with_dropout():
    def utilities(w):
        return (X * jax.random.bernoulli(numpyro.prng_key(), 0.5, X.shape)) @ w.T

    return choices(utilities)


def with_a_site_of_the_model_alone():
    def utilities(w):
        return X @ w.T * jnp.exp(numpyro.sample("own", dist.Normal(0, 1)))[:, None]

    return choices(utilities)


def with_two_choices_around_dropout():
    def model():
        with lc.class_plate("classes", K, Y, num_sampled=8) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        for name in ("y", "z"):
            with lc.data_plate("data", N) as rows:
                mask = jax.random.bernoulli(numpyro.prng_key(), 0.5, X.shape)
                lc.sample_choice(name, (X * mask) @ w.T, classes=classes, rows=rows, obs=Y)

    return model


def with_state_that_the_guide_moves():
    def utilities(w):
        return X @ w.T * mutable("state", {"scale": jnp.ones(())})["scale"]

    return choices(utilities)


def point_guide():
    with lc.class_plate("classes", K, Y, num_sampled=8):
        w = numpyro.param("m", jnp.ones((K, D)), event_dim=1)
        numpyro.sample("w", dist.Delta(w).to_event(1))


def normal_guide():
    with lc.class_plate("classes", K, Y, num_sampled=8):
        loc = numpyro.param("m", jnp.ones((K, D)), event_dim=1)
        numpyro.sample("w", dist.Normal(loc, 0.1).to_event(1))


def point_guide_that_moves_state():
    point_guide()
    state = mutable("state", {"scale": jnp.ones(())})
    state["scale"] = state["scale"] + 1


@pytest.mark.some_cases(1)
@pytest.mark.filterwarnings("ignore:Found vars in model but not guide")
@pytest.mark.parametrize(
    ("model", "guide"),
    [
        (with_dropout(), point_guide),
        (with_two_choices_around_dropout(), point_guide),
        (with_a_site_of_the_model_alone(), point_guide),
        (with_state_that_the_guide_moves(), point_guide_that_moves_state),
    ],
    ids=["dropout", "two choices", "site of the model alone", "mutable state"],
)
def test_points_are_at_their_centre_whatever_else_is_drawn(model, guide, distances):
    evaluated(model, guide)
    assert distances and max(distances) == 0


def test_rows_are_followed_in_a_scope(distances):
    model = choices(lambda w: X @ w.T)
    plain = evaluated(model, normal_guide)
    scoped, guide = (numpyro.handlers.scope(f, prefix="inner") for f in (model, normal_guide))
    assert max(distances) > 0.05
    distances.clear()
    assert float(evaluated(scoped, guide)) == pytest.approx(float(plain), rel=1e-6)
    assert max(distances) > 0.05


def test_rows_that_come_after_a_choice_are_followed_by_the_next(distances):
    def model():
        with lc.class_plate("classes", K, Y, num_sampled=8) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with lc.data_plate("data", N) as rows:
            lc.sample_choice("y", X @ w.T, classes=classes, rows=rows, obs=Y)
        with lc.class_plate("classes", K, Y, num_sampled=8) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", N) as rows:
            lc.sample_choice("z", X[:, :1] * b, classes=classes, rows=rows, obs=Y)

    def guide():
        with lc.class_plate("classes", K, Y, num_sampled=8) as classes:
            w = numpyro.param("m", jnp.ones((K, D)), event_dim=1)
            numpyro.sample("w", dist.Delta(w).to_event(1))
        numpyro.sample("b", dist.Normal(0, 1).expand(classes.indices.shape))

    evaluated(model, guide)
    assert max(distances) > 0.5


def test_a_site_without_a_mean_leaves_others_followed(distances):
    """Nothing depends on it."""

    class OfUnknownMean(dist.Normal):
        @property
        def mean(self):
            raise NotImplementedError

    def model():
        numpyro.sample("extra", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([D]).to_event(1))
        with lc.class_plate("classes", K, Y, num_sampled=8) as classes:
            z = jax.random.normal(jax.random.key(2), (K, D))[classes.indices]
        with lc.data_plate("data", N) as rows:
            own = jnp.broadcast_to(b, (N, D))
            how = {"classes": classes, "rows": rows, "obs": Y}
            lc.sample_choice("y", lambda own: own @ z.T, follow=own, **how)

    def guide():
        numpyro.sample("extra", OfUnknownMean(0, 1))
        loc = numpyro.param("loc", jnp.zeros(D))
        numpyro.sample("b", dist.Normal(loc, 1).to_event(1))

    evaluated(model, guide)
    assert max(distances) > 0.5


@pytest.mark.parametrize("family", [dist.Cauchy, lambda *known: dist.StudentT(1.0, *known)])
def test_a_guide_of_no_finite_mean_keeps_u(family, distances):
    def guide():
        with lc.class_plate("classes", K, Y, num_sampled=8):
            centre = numpyro.param("m", jnp.zeros((K, D)), event_dim=1)
            numpyro.sample("w", family(centre, 0.1).to_event(1))

    loss = evaluated(choices(lambda w: X @ w.T), guide)
    assert np.isfinite(loss) and max(distances) == 0


@pytest.mark.slow
def test_a_masked_row_whose_class_is_not_available_leaves_gradients_finite():
    """The mask hides the first row."""

    def model():
        with lc.class_plate("classes", K, Y, num_sampled=8) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with lc.data_plate("data", N) as rows:
            is_first = (jnp.arange(N) == 0)[:, None] & (classes.indices == Y[0])
            utilities = jnp.where(is_first, -jnp.inf, X @ w.T)
            with numpyro.handlers.mask(mask=jnp.arange(N) > 0):
                lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=Y)

    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.sgd(0.1), Trace_ELBO())
    result = svi.run(jax.random.key(0), 3, progress_bar=False)
    assert np.isfinite(np.asarray(result.losses)).all()


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("mean", "sd"), [(10.0, 3.0), (6.0, 1.5), (2.0, 2.0)])
@pytest.mark.parametrize("excess", [0.0, 0.002])
def test_the_expected_bound_is_that_of_the_mean_of_the_others(mean, sd, excess):
    """E log(1 + E[R] exp(-psi_y)), R the sum of exp(psi_k) over the other classes.

    With all other classes in each step and a fixed guide. Where u may take all that a step knows it
    is E log(1 + R exp(-psi_y)). FALSE_ALARM = 1e-4: 200 steps of 12 rows.
    """
    rule = lc.update_rules.NaturalGradient(excess=excess)
    size, features, labels = 20, np.eye(20, dtype=np.float32)[:12], np.arange(12)

    def plate():
        return lc.class_plate("classes", size, labels, num_sampled=size - 1)

    def model():
        with plate() as classes:
            w = numpyro.sample("w", dist.Normal(0, 5).expand([size]).to_event(1))
        with lc.data_plate("data", 12) as rows:
            how = {"classes": classes, "rows": rows, "update_rule": rule}
            lc.sample_choice("y", features @ w.T, obs=labels, **how)

    def guide():
        with plate():
            centre = numpyro.param("m", mean * jnp.eye(size), event_dim=1)
            numpyro.sample("w", dist.Normal(centre, sd).to_event(1))

    svi = lc.SubsampledSVI(model, guide, optax.sgd(0.0), TraceMeanField_ELBO())
    losses = np.asarray(svi.run(jax.random.key(0), 300, progress_bar=False).losses)[100:]
    squares = (mean * np.eye(size)) ** 2 + sd**2
    divergence = (np.log(5 / sd) + squares / 50 - 0.5).sum()
    draws = sd * np.random.default_rng(0).normal(size=(100_000, size))
    own = mean + draws[:, 0]
    log_others = (
        np.log(np.exp(draws[:, 1:]).sum(axis=1)) if excess else np.log(size - 1) + sd**2 / 2
    )
    best = 12 * np.logaddexp(0, log_others - own)
    noise = losses.std() / np.sqrt(len(losses))
    assert abs(losses.mean() - divergence - best.mean()) < 4 * noise + 0.1 * best.mean()


def test_u_at_a_distance_is_the_best_u_of_a_softmax(x64):
    distance = np.array([-30.0, -1.0, 0.0, 2.0, 30.0])
    log_others = np.logaddexp(0.3, -2.0)
    start, best = (np.logaddexp(0, log_others - psi) for psi in (1.0, 1.0 + distance))
    at_distance = jax.jit(best_u_at)
    found = at_distance(np.full(5, start), distance)
    np.testing.assert_allclose(found, best, rtol=1e-9)
    np.testing.assert_allclose(at_distance(found, -distance), start, rtol=1e-9)


def test_u_at_a_distance_is_finite_and_not_below_zero():
    u, distance = np.meshgrid([-5.0, 0.0, 1e-30, 90.0], [-1e3, 0.0, 1e3])
    found = np.asarray(jax.jit(best_u_at)(u, distance))
    assert np.isfinite(found).all() and (found >= 0).all()
