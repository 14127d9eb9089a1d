# SPDX-License-Identifier: Apache-2.0
"""Fits of models with an entity plate: what they find, and what a step costs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc

BATCH = 16


def test_random_effects_have_the_posterior_in_closed_form() -> None:
    """Gaussian observations around the mean of their group, and no categorical.

    Groups have 1 to 200 rows, and one has none, whose guide does not move. Sds are within 8 %,
    means within a tenth of an sd.
    """
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat(np.arange(7), [200, 150, 100, 90, 50, 9, 1]))
    x = rng.normal(1.5, 1.5, 7)[groups] + rng.normal(0, 0.8, 600)
    counts = lc.EntityCounts.of(8, groups)

    def random_effects(groups, x=None, rows=None):
        with lc.entity_plate("groups", 8, groups, counts) as read:
            v = numpyro.sample("v", dist.Normal(0.5, 1.5))
        with lc.data_plate("data", 600, rows):
            numpyro.sample("x", dist.Normal(read.rows_of(v, groups), 0.8), obs=x)

    optimiser = optax.adam(optax.cosine_decay_schedule(0.1, 4000))
    guide = AutoNormal(random_effects)
    elbo = TraceMeanField_ELBO(num_particles=16)
    svi = lc.SubsampledSVI(random_effects, guide, optimiser, elbo)
    before = svi.get_params(svi.init(jax.random.key(0), groups[:60], x[:60], np.arange(60)))
    batches = lc.ArrayBatches(groups, x, batch_size=60)
    run = svi.run(jax.random.key(0), 4000, batches=batches, progress_bar=False)
    loc, scale = run.params["v_auto_loc"], run.params["v_auto_scale"]
    number = np.bincount(groups)
    precision = 1 / 1.5**2 + number / 0.8**2
    mean = (0.5 / 1.5**2 + np.bincount(groups, x) / 0.8**2) / precision
    np.testing.assert_allclose(scale[:7], precision**-0.5, rtol=0.08)
    assert (np.abs(loc[:7] - mean) < 0.1 * precision**-0.5).all()
    assert scale[7] == before["v_auto_scale"][7]


def two_sided(users, counts, y, rows, num_categories):
    """Users and classes, each a huge table."""
    with lc.entity_plate("users", counts.counts.shape[0], users, counts) as read:
        v = numpyro.sample("v", dist.Normal(0, 1).expand([4]).to_event(1))
    with lc.class_plate("classes", num_categories, y, num_sampled=8) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    with lc.data_plate("data", 1000, rows):
        psi = read.rows_of(v, users) @ w.T
        numpyro.sample("y", lc.UtilityCategorical(psi, classes), obs=y)


@pytest.fixture(scope="module")
def steps():
    def compiled_step(size):
        def model(users, counts, y, rows):
            two_sided(users, counts, y, rows, size)

        svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.1), TraceMeanField_ELBO())
        users = jnp.arange(BATCH)
        args = users, lc.EntityCounts.of(size, np.arange(size)), users, users
        state = jax.eval_shape(lambda key: svi.init(key, *args), jax.random.key(0))
        return jax.jit(svi.update, donate_argnums=0).lower(state, *args).compile()

    return {size: compiled_step(size) for size in (1_000, 100_000)}


def test_scratch_memory_does_not_grow_with_users_or_classes(steps) -> None:
    small, large = (step.memory_analysis().temp_size_in_bytes for step in steps.values())
    assert small == large


def test_tables_of_both_are_updated_in_place(steps) -> None:
    step = steps[100_000]
    tables = 2 * 100_000 * 4 * 6 * 4  # location, scale and two moments of each, float32
    assert step.memory_analysis().alias_size_in_bytes >= tables
    assert not re.findall(r"copy\(f32\[100000", step.as_text())


def test_operations_do_not_grow_with_users_or_classes(steps) -> None:
    small, large = (step.cost_analysis()["flops"] for step in steps.values())
    assert large == pytest.approx(small, rel=0.02)
