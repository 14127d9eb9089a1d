# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import TraceMeanField_ELBO

import numpyro_largecat as lc


@pytest.mark.parametrize("burn_in", [0, 7, 100])
def test_the_average_is_that_of_the_iterates_after_the_burn_in(burn_in, x64):
    grads = jnp.array(np.random.default_rng(0).normal(size=(20, 3)))
    optimiser = lc.average_iterates(optax.adam(0.1), burn_in)
    plain = optax.adam(0.1)
    params = others = jnp.ones(3)
    state, plain_state, seen = optimiser.init(params), plain.init(others), []
    for grad in grads:
        step, state = optimiser.update(grad, state, params)
        params = optax.apply_updates(params, step)
        step, plain_state = plain.update(grad, plain_state, others)
        others = optax.apply_updates(others, step)
        seen.append(others)
    np.testing.assert_allclose(params, others)  # the fit is the same
    expected = np.mean(seen[burn_in:] or seen[-1:], axis=0)
    np.testing.assert_allclose(state.average, expected, rtol=1e-12)


def test_rows_are_averaged_over_their_own_visits():
    """A table of which steps touch some rows; the guide's scales are averaged unconstrained."""
    y = np.arange(20) % 10

    def model(y, rows):
        with lc.class_plate("classes", 50, y, 5) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", 20, rows) as rows:
            psi = jnp.broadcast_to(b, (len(y), *b.shape))
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    def guide(y, rows):
        with numpyro.plate("classes", 50):
            loc = numpyro.param("b_loc", jnp.zeros(50), event_dim=0)
            positive = dist.constraints.softplus_positive
            start = jnp.full(50, 0.1)
            scale = numpyro.param("b_scale", start, constraint=positive, event_dim=0)
            numpyro.sample("b", dist.Normal(loc, scale))

    optimiser = lc.average_iterates(optax.chain(optax.clip_by_global_norm(10.0), optax.sgd(0.01)))
    svi = lc.SubsampledSVI(model, guide, optimiser, TraceMeanField_ELBO())
    state = svi.init(jax.random.key(0), y[:5], np.arange(5))
    start = svi.get_params(state)
    step, seen = jax.jit(svi.update), []
    for i in range(8):
        rows = (5 * i + np.arange(5)) % 20
        state, _ = step(state, y[rows], rows)
        seen.append(svi.get_params(state))
    averaged = lc.averaged_params(svi, state)
    for name, log in (("b_loc", lambda x: x), ("b_scale", lambda s: np.log(np.expm1(s)))):
        values = np.stack([np.asarray(start[name]), *(np.asarray(p[name]) for p in seen)])
        is_visit = values[1:] != values[:-1]  # every visit moves a row
        for k in range(50):
            visited = values[1:, k][is_visit[:, k]]
            expected = log(visited).mean() if len(visited) else log(values[0, k])
            np.testing.assert_allclose(log(averaged[name][k]), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(averaged["y_u"], svi.get_params(state)["y_u"])


def test_what_is_missing_is_said():
    optimiser = lc.average_iterates(optax.sgd(0.1))
    with pytest.raises(ValueError, match="needs the parameters"):
        optimiser.update(jnp.zeros(1), optimiser.init(jnp.zeros(1)))
    with pytest.raises(ValueError, match="burn_in"):
        lc.average_iterates(optax.sgd(0.1), burn_in=-1)

    def model():
        numpyro.factor("loss", -(numpyro.param("a", 0.0) ** 2))

    svi = lc.SubsampledSVI(model, lambda: None, optax.adam(0.1), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match=r"keeps no averages.*lc.average_iterates"):
        lc.averaged_params(svi, svi.init(jax.random.key(0)))
