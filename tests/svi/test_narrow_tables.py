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
from tests.models import class_points, hierarchical, point_guide

KEY = jax.random.key(0)
FALSE_ALARM = 5e-5  # how often correct random bits fail a comparison


def make_svi(table_dtype, optim=None):
    loss = TraceMeanField_ELBO()
    optim = optax.adam(0.05) if optim is None else optim
    return lc.SubsampledSVI(hierarchical(3), point_guide, optim, loss, table_dtype=table_dtype)


RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 3)).astype(np.float32), RNG.integers(0, 12, 40)
ARGS = X[:8], Y[:8], np.arange(8)


def start():
    """Start values that bfloat16 holds."""
    svi = make_svi(jnp.bfloat16)
    return svi.get_params(svi.init(KEY, *ARGS))


def after_a_step(table_dtype, params):
    """Parameters after one step from these."""
    svi = make_svi(table_dtype, optax.sgd(0.01))
    state = svi.init(KEY, *ARGS, init_params=params)
    return svi.get_params(jax.jit(svi.update)(state, *ARGS)[0])


GROUPS = np.arange(3000) % 30
RATES = np.exp(np.random.default_rng(0).normal(2, 0.5, size=30))
COUNTS = np.random.default_rng(1).poisson(RATES)[GROUPS]


def poisson_rates(groups, counts):
    """Rates of groups, all of which are in each step: it draws nothing."""
    with lc.class_plate("groups", 31, groups, 1) as classes:
        a = numpyro.sample("a", dist.Normal(0, 10))
    with lc.data_plate("data", len(counts), None):
        numpyro.sample("y", dist.Poisson(jnp.exp(a[classes.place(groups)])), obs=counts)


def rate_guide(groups, counts):
    with lc.class_plate("groups", 31, groups, 1):
        loc = numpyro.param("loc", jnp.ones(31, counts.dtype), event_dim=0)
        numpyro.sample("a", dist.Delta(loc))


def make_rates(table_dtype, optim):
    loss = TraceMeanField_ELBO()
    return lc.SubsampledSVI(poisson_rates, rate_guide, optim, loss, table_dtype=table_dtype)


WIDE_COUNTS = COUNTS.astype(np.float32)


def test_tables_and_their_moments_are_stored_in_16_bits():
    svi = make_svi(jnp.bfloat16)
    state = svi.init(KEY, *ARGS)
    state, _ = jax.jit(svi.update)(state, *ARGS)
    wide = {leaf.shape for leaf in jax.tree.leaves(state.optim_state) if leaf.dtype == jnp.float32}
    narrow = [leaf.shape for leaf in jax.tree.leaves(state.optim_state) if leaf.dtype == jnp.uint16]
    assert wide == {()}  # of `scale`, which is in no plate
    assert sorted(narrow) == 3 * [(12,)] + 3 * [(12, 3)]
    assert {p.dtype for p in svi.get_params(state).values()} == {np.dtype(np.float32)}


@pytest.mark.slow
def test_a_step_is_that_of_float32_rounded_to_a_neighbour():
    params = start()
    exact, rounded = (after_a_step(dtype, params) for dtype in (None, jnp.bfloat16))
    assert rounded["scale_auto_loc"] == exact["scale_auto_loc"]
    table, found = (np.asarray(p["w_auto_loc"]) for p in (exact, rounded))
    moved = table != np.asarray(params["w_auto_loc"])
    assert moved.any()
    assert not moved.all()
    np.testing.assert_array_equal(found[~moved], table[~moved])
    assert (np.abs(found - table) <= np.abs(table) * 2.0**-7).all()
    np.testing.assert_array_equal(found.astype(jnp.bfloat16).astype(np.float32), found)


@pytest.mark.slow
def test_rounding_is_unbiased_over_keys_and_independent_between_rows():
    """FALSE_ALARM of the farthest of 30 means and of 435 correlations."""
    exact, found = [], []
    for dtype in (None, jnp.bfloat16):
        svi = make_rates(dtype, optax.sgd(3e-5))
        state = svi.init(KEY, GROUPS, WIDE_COUNTS)

        def one(key, svi=svi, state=state):
            state = state._replace(rng_key=key)
            return svi.get_params(svi.update(state, GROUPS, WIDE_COUNTS)[0])["loc"][:30]

        (found if dtype else exact).append(jax.jit(jax.vmap(one))(jax.random.split(KEY, 2000)))
    exact, found = (np.asarray(x[0], np.float64) for x in (exact, found))
    standard_error = found.std(axis=0) / np.sqrt(2000)
    assert standard_error.min() > 0
    assert (np.abs(found.mean(axis=0) - exact[0]) <= 5 * standard_error).all()
    is_up = found > exact[0]
    correlation = np.corrcoef(is_up.T) - np.eye(30)
    assert np.abs(correlation).max() < 5.5 / np.sqrt(2000)


@pytest.mark.slow
def test_a_fit_ends_where_that_of_float32_does():
    """By small steps, of which rounding to the nearest loses most."""

    def fit(table_dtype):
        svi = make_rates(table_dtype, optax.sgd(2e-5))
        result = svi.run(KEY, 1500, GROUPS, WIDE_COUNTS, progress_bar=False)
        return np.asarray(result.params["loc"])[:30]

    wide, narrow = fit(None), fit(jnp.bfloat16)
    assert np.abs(wide - 1).min() > 0.05
    np.testing.assert_allclose(narrow, wide, atol=0.1)


@pytest.mark.slow
def test_second_moments_of_adam_go_on_growing():
    """Nearest rounding stops them at about a third of their way; FALSE_ALARM of the mean.

    After 1500 steps they are 0.78 of the squared gradient, with a deviation of some 3 % in each of
    30 rows, for the steps of 1e-3 of it are rounded to 2**-8.
    """

    def moments(table_dtype):
        svi = make_rates(table_dtype, optax.adam(1e-7))
        result = svi.run(KEY, 1500, GROUPS, WIDE_COUNTS, progress_bar=False)
        found = optax.tree_utils.tree_get(result.state.optim_state, "nu")["loc"][:30]
        if table_dtype is not None:
            found = jax.lax.bitcast_convert_type(found, jnp.bfloat16)
        return np.asarray(found, np.float64)

    ratio = moments(jnp.bfloat16) / moments(None)
    assert abs(ratio.mean() - 1) < 0.04
    assert ratio.std() < 0.15


@pytest.mark.slow
def test_steps_compute_in_the_type_of_their_own_run(x64):
    """A fit in float64 after one in float32, whose tables are stored alike."""
    svi = make_rates(jnp.bfloat16, optax.sgd(1e-5))
    svi.run(KEY, 2, GROUPS, WIDE_COUNTS, progress_bar=False)
    again = svi.run(KEY, 2, GROUPS, COUNTS.astype(float), progress_bar=False)
    fresh = make_rates(jnp.bfloat16, optax.sgd(1e-5))
    expected = fresh.run(KEY, 2, GROUPS, COUNTS.astype(float), progress_bar=False)
    assert again.losses.dtype == jnp.float64
    np.testing.assert_array_equal(again.losses, expected.losses)


@pytest.mark.slow
def test_a_state_of_another_type_is_read_as_it_is(x64):
    svi = make_rates(None, optax.sgd(1e-5))
    state = svi.init(KEY, GROUPS, WIDE_COUNTS)
    svi.init(KEY, GROUPS, COUNTS.astype(float))
    np.testing.assert_array_equal(svi.get_params(state)["loc"], np.ones(31, np.float32))


def test_averages_need_an_init_as_parameters_do():
    svi = make_rates(None, lc.average_iterates(optax.sgd(1e-5)))
    state = svi.init(KEY, GROUPS, WIDE_COUNTS)
    other = make_rates(None, lc.average_iterates(optax.sgd(1e-5)))
    with pytest.raises(RuntimeError, match="learns the sites of model and guide in `init`"):
        lc.averaged_params(other, state)


@pytest.mark.slow
def test_averages_and_recorded_entries_are_wide():
    found = {}
    for dtype in (None, jnp.bfloat16):
        svi = make_svi(dtype, lc.average_iterates(optax.sgd(0.01)))
        result = svi.run(KEY, 4, *ARGS, progress_bar=False)
        found[dtype] = lc.averaged_params(svi, result.state)["w_auto_loc"]
    assert found[jnp.bfloat16].dtype == jnp.float32
    np.testing.assert_allclose(found[jnp.bfloat16], found[None], atol=0.03)
    iterates = result.iterates["w_auto_loc"]
    assert iterates.shape[0] == 4
    assert np.isin(iterates[-1], np.asarray(result.params["w_auto_loc"])).all()


@pytest.mark.slow
def test_a_run_goes_on_from_its_state_alone():
    svi, again = (make_svi(jnp.bfloat16) for _ in range(2))
    whole = svi.run(KEY, 6, *ARGS, progress_bar=False)
    half = again.run(KEY, 3, *ARGS, progress_bar=False)
    both = again.run(KEY, 3, *ARGS, init_state=half.state, progress_bar=False)
    for name, value in whole.params.items():
        np.testing.assert_array_equal(value, both.params[name])


@pytest.mark.slow
def test_steps_compute_in_double_precision_where_tables_are_made_so(x64):
    svi = make_svi(jnp.bfloat16)
    args = X[:8].astype(float), *ARGS[1:]
    state = svi.init(KEY, *args, init_params={"w_auto_loc": jnp.zeros((12, 3))})
    state, loss = jax.jit(svi.update)(state, *args)
    assert (loss.dtype, svi.get_params(state)["w_auto_loc"].dtype) == (jnp.float64, jnp.float64)


def test_full_plates_are_stored_as_they_are():
    def guide(*args):
        class_points(*args)
        scale = numpyro.param("scale_auto_loc", 1.0, constraint=dist.constraints.positive)
        numpyro.sample("scale", dist.Delta(scale))

    loss = TraceMeanField_ELBO()
    svi = lc.SubsampledSVI(hierarchical(), guide, optax.adam(0.1), loss, table_dtype=jnp.bfloat16)
    state = svi.init(KEY, X, Y)
    assert not [leaf for leaf in jax.tree.leaves(state.optim_state) if leaf.dtype == jnp.uint16]


@pytest.mark.parametrize("dtype", [jnp.float16, "float32", "narrow", 16])
def test_other_types_are_refused(dtype):
    with pytest.raises(ValueError, match=r"`table_dtype` must be jnp\.bfloat16, or None"):
        make_svi(dtype)


def test_a_state_of_other_tables_is_refused():
    state = make_svi(jnp.bfloat16).init(KEY, *ARGS)
    svi = make_svi(None)
    svi.init(KEY, *ARGS)
    with pytest.raises(ValueError, match="Go on under the `jax_enable_x64` and `table_dtype`"):
        svi.update(state, *ARGS)
