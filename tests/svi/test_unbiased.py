# SPDX-License-Identifier: Apache-2.0
"""Over the draws of classes and rows, the ELBO and its gradients have the full ones as means."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.flatten_util import ravel_pytree
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_largecat as lc
from tests.models import NUM_CATEGORIES, NUM_ROWS, class_points, explicit_u, make_data
from tests.slow_cases import slow_case

# A correct program fails one of a test's comparisons, about 100 means each compared at 5.5
# standard errors, with probability below this.
STANDARD_ERRORS = 5.5
FALSE_ALARM = 1e-5

LABELS = {
    "all_equal": jnp.full(8, 5),
    "all_distinct": jnp.array([0, 1, 2, 3, 4, 5, 6, 11]),
    "repeated": jnp.array([3, 9, 3, 0, 9, 3, 7, 7]),
}


def assert_means(samples, expected):
    """Compare the mean of ``samples`` over their first axis with ``expected``."""
    samples = np.asarray(samples, np.float64)
    assert np.isfinite(samples).all()
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    gap = np.abs(samples.mean(axis=0) - np.asarray(expected))
    assert (gap <= STANDARD_ERRORS * error + 1e-4 * (1 + np.abs(expected))).all()


@partial(jax.jit, static_argnums=1)
def values_and_gradients(y, num_sampled):
    """Of 3000 draws, one in each row; one program for all labels."""
    x, rows = make_data()[0][:8], jnp.arange(8)
    params = {
        "w_auto_loc": jax.random.normal(jax.random.key(1), (NUM_CATEGORIES, 3)),
        "b_auto_loc": jnp.linspace(-1, 1, NUM_CATEGORIES),
        "u": jnp.linspace(1, 4, NUM_ROWS),
    }
    model = explicit_u(num_sampled)
    guide = AutoDelta(
        model, create_plates=lambda x, y, rows: lc.class_plate("classes", 12, y, num_sampled)
    )
    numpyro.handlers.seed(guide, 0)(x, y, rows)

    def of_draw(rng_key):
        loss = jax.value_and_grad(
            lambda params: Trace_ELBO().loss(rng_key, params, model, guide, x, y, rows)
        )(params)
        return ravel_pytree(loss)[0]

    return jax.vmap(of_draw)(jax.random.split(jax.random.key(2), 3000))


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("num_sampled", [slow_case(1), 4, "others"])
@pytest.mark.some_cases(1)
def test_elbo_and_gradients_over_class_draws(labels, num_sampled):
    """A point-mass guide leaves the draw of classes as the only randomness."""
    y = LABELS[labels]
    if num_sampled == "others":  # S = K - U: every class is there, so every draw is exact
        num_sampled = NUM_CATEGORIES - len(set(y.tolist()))
    samples = values_and_gradients(y, num_sampled)
    everything = NUM_CATEGORIES - 1  # at least K - U, so that all classes are there with weight 1
    expected = values_and_gradients(y, everything)[0]
    assert_means(samples, expected)


@pytest.mark.slow
def test_steps_over_draws_of_classes_and_rows(x64):
    """One SGD step of the engine moves every parameter, on average, along the full gradient."""
    x, y = make_data()
    lr = 1e-6
    shapes = {"w_auto_loc": (NUM_CATEGORIES, 3), "b_auto_loc": (NUM_CATEGORIES,)}

    def fit(model, *args):
        svi = lc.SubsampledSVI(model, class_points, optax.sgd(lr), Trace_ELBO())
        key = jax.random.key(1)
        start = {name: jax.random.normal(key, shape) for name, shape in shapes.items()}
        return svi, svi.init(jax.random.key(0), *args, init_params=start)

    batches = lc.ArrayBatches(x, y, batch_size=6)
    svi, state = fit(explicit_u(num_sampled=3), *batches.draw(jax.random.key(0)))
    before = svi.get_params(state)
    full_svi, full_state = fit(explicit_u(NUM_CATEGORIES - 1), x, y, jnp.arange(NUM_ROWS))
    full_state = full_state._replace(optim_state=state.optim_state)
    after, _ = jax.jit(full_svi.update)(full_state, x, y, jnp.arange(NUM_ROWS))
    expected = jax.tree.map(lambda a, b: (a - b) / lr, full_svi.get_params(after), before)

    def step(key):
        batch_key, step_key = jax.random.split(key)
        new, _ = svi.update(state._replace(rng_key=step_key), *batches.draw(batch_key))
        return jax.tree.map(lambda a, b: (a - b) / lr, svi.get_params(new), before)

    samples = jax.jit(jax.vmap(step))(jax.random.split(jax.random.key(5), 10_000))
    for name in expected:
        assert_means(samples[name], expected[name])


@pytest.mark.slow
def test_elbo_of_a_normal_guide_under_both_losses():
    """With its noise fixed the mean-field ELBO weighs analytic KL terms by the same weights."""
    y, x, rows = LABELS["repeated"], make_data()[0][:8], jnp.arange(8)

    def guide(x, y, rows):
        start = jax.random.normal(jax.random.key(1), (NUM_CATEGORIES, 4))
        with numpyro.plate("classes", NUM_CATEGORIES):
            w = numpyro.param("w_loc", start[:, :3], event_dim=1)
            numpyro.sample("w", dist.Normal(w, 1e-4).to_event(1))
            b = numpyro.param("b_loc", start[:, 3], event_dim=0)
            numpyro.sample("b", dist.Normal(b, 1e-4))

    def svi_for(num_sampled, loss):
        model = explicit_u(num_sampled)
        svi = lc.SubsampledSVI(model, guide, optax.sgd(0.1), loss)
        return svi, svi.init(jax.random.key(0), x, y, rows)

    for loss in (Trace_ELBO(), TraceMeanField_ELBO()):
        svi, state = svi_for(3, loss)
        full_svi, full_state = svi_for(NUM_CATEGORIES - 1, loss)
        full_state = full_state._replace(optim_state=state.optim_state)

        def losses(svi, state, num):
            keys = jax.random.split(jax.random.key(3), num)
            return jax.jit(
                jax.vmap(lambda key: svi.evaluate(state._replace(rng_key=key), x, y, rows))
            )(keys)

        full = np.asarray(losses(full_svi, full_state, 200), np.float64).mean()
        assert_means(losses(svi, state, 10_000), full)


def test_kl_terms_of_a_prior_only_plate():
    """Without labels the drawn classes stand for all K in prior and entropy terms."""

    def model():
        with lc.class_plate("classes", 9, num_sampled=2):
            numpyro.sample("w", dist.Normal(jnp.float32(0.5), 2.0))

    def guide():
        with numpyro.plate("classes", 9):
            loc = numpyro.param("loc", jnp.linspace(-1, 1, 9), event_dim=0)
            numpyro.sample("w", dist.Normal(loc, 1.0))

    svi = lc.SubsampledSVI(model, guide, optax.sgd(0.1), TraceMeanField_ELBO())
    state = svi.init(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 4000)
    losses = jax.jit(jax.vmap(lambda key: svi.evaluate(state._replace(rng_key=key))))(keys)
    loc = jnp.linspace(-1, 1, 9)
    kl = jnp.log(2.0) + (1 + (loc - 0.5) ** 2) / 8 - 0.5
    assert_means(losses, kl.sum())
