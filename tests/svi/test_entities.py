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
from numpyro.infer import Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_largecat as lc

BATCH = 16


@pytest.mark.slow
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


def observed_groups(groups, counts, x=None, rows=None, features=None):
    """Groups of which a feature is observed too."""
    with lc.entity_plate("groups", 8, groups, counts) as read:
        v = numpyro.sample("v", dist.Normal(0, 1))
        if features is not None:
            numpyro.sample("f", dist.Normal(v, 1), obs=jnp.asarray(features)[read.indices])
    with lc.data_plate("data", 40, rows):
        numpyro.sample("x", dist.Normal(read.rows_of(v, groups), 0.5), obs=x)


GROUPS = np.resize(np.arange(8), 40)


@pytest.mark.parametrize(
    "counted",
    [
        np.tile(GROUPS, 3),
        np.append(GROUPS, GROUPS[:7]),
        np.stack([GROUPS, GROUPS], 1),
        np.unique(GROUPS),
    ],
    ids=["three times", "held out too", "two arrays", "each once"],
)
def test_counts_of_other_data_are_refused(counted) -> None:
    """Or of more arrays than the model reads: priors would have other weights."""
    counts = lc.EntityCounts.of(8, counted)
    guide = AutoNormal(observed_groups)
    svi = lc.SubsampledSVI(observed_groups, guide, optax.adam(0.1), TraceMeanField_ELBO())
    rows = np.arange(10)
    with pytest.raises(ValueError, match=r"`counts` of plate 'groups' must be of all observations"):
        svi.init(jax.random.key(0), GROUPS[:10], counts, np.zeros(10), rows)


@pytest.mark.slow
def test_what_is_observed_of_entities_weighs_as_their_prior() -> None:
    """In no data plate, and over a pass as much as the whole."""
    counts = lc.EntityCounts.of(8, GROUPS)
    x, features = np.linspace(-1, 1, 40), np.linspace(0, 2, 8)

    def model(groups, x, rows):
        observed_groups(groups, counts, x, rows, features)

    svi = lc.SubsampledSVI(model, AutoDelta(model), optax.sgd(0.1), Trace_ELBO())
    batches = lc.ArrayBatches(GROUPS, x, batch_size=10)
    svi.run(jax.random.key(0), 2, batches=batches, progress_bar=False)
    order = np.random.default_rng(0).permutation(40).reshape(4, 10)
    state = svi.init(jax.random.key(0), GROUPS[:10], x[:10], np.arange(10))
    evaluate = jax.jit(svi.evaluate)
    losses = [evaluate(state, GROUPS[rows], x[rows], rows) for rows in order]
    v = np.asarray(svi.get_params(state)["v_auto_loc"])
    whole = dist.Normal(0, 1).log_prob(v).sum() + dist.Normal(v, 1).log_prob(features).sum()
    whole += dist.Normal(v[GROUPS], 0.5).log_prob(x).sum()
    np.testing.assert_allclose(np.mean(losses), -whole, rtol=1e-5)


def test_predictive_needs_a_full_plate() -> None:
    """It gives a model values without the rows that they are of."""
    counts = lc.EntityCounts.of(8, GROUPS)
    table = np.arange(8, dtype=np.float32)
    with_ids = Predictive(observed_groups, {"v": table[None, :3]}, batch_ndims=1)
    with pytest.raises(ValueError, match=r"site 'v'.*gets its value from a handler.*full plate"):
        with_ids(jax.random.key(0), GROUPS[:3], counts, rows=np.arange(3))
    prior = Predictive(observed_groups, num_samples=2)
    assert prior(jax.random.key(0), GROUPS[:3], counts, rows=np.arange(3))["x"].shape == (2, 3)

    def with_all(groups):
        with lc.entity_plate("groups", 8) as read:
            v = numpyro.sample("v", dist.Normal(0, 1))
        numpyro.deterministic("mean", read.rows_of(v, groups))

    found = Predictive(with_all, {"v": table[None]}, batch_ndims=1)(jax.random.key(0), GROUPS[3:9])
    np.testing.assert_array_equal(found["mean"][0], GROUPS[3:9])


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

        svi = lc.SubsampledSVI(model, AutoDelta(model), optax.adam(0.1), Trace_ELBO())
        users = np.arange(BATCH)
        args = users, lc.EntityCounts.of(size, np.arange(1000)), users, users
        state = jax.eval_shape(lambda key: svi.init(key, *args), jax.random.key(0))
        return jax.jit(svi.update, donate_argnums=0).lower(state, *args).compile()

    return {size: compiled_step(size) for size in (1_000, 100_000)}


def test_scratch_memory_does_not_grow_with_users_or_classes(steps) -> None:
    small, large = (step.memory_analysis().temp_size_in_bytes for step in steps.values())
    assert small == large


def test_tables_of_both_are_updated_in_place(steps) -> None:
    step = steps[100_000]
    tables = 2 * 100_000 * 4 * 3 * 4  # location and its two moments, float32
    assert step.memory_analysis().alias_size_in_bytes >= tables
    assert not re.findall(r"copy\(f32\[100000", step.as_text())


def test_operations_do_not_grow_with_users_or_classes(steps) -> None:
    small, large = (step.cost_analysis()["flops"] for step in steps.values())
    assert large == pytest.approx(small, rel=0.02)
