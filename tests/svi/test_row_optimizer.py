# SPDX-License-Identifier: Apache-2.0
"""Optimisers run on rows: right for all that act row by row, refused for the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro.optim import optax_to_numpyro

import numpyro_largecat as lc
from numpyro_largecat.svi.row_optimizer import (
    check_row_wise,
    find_owners,
    gather_state,
    scatter_state,
)

PARAMS = {
    "table": np.linspace(-1, 1, 30, dtype=np.float32).reshape(10, 3),
    "dense": np.ones(4, np.float32),
    "column": np.zeros((2, 10), np.float32),
}
AXES = {"table": (0,), "column": (1,)}
ROW_WISE = {
    "sgd": optax_to_numpyro(optax.sgd(0.1)),
    "momentum": optax_to_numpyro(optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "adam": optax_to_numpyro(optax.adam(0.1)),
    "adamw": optax_to_numpyro(optax.adamw(0.1)),
    "adagrad": optax_to_numpyro(optax.adagrad(0.1)),
    "rmsprop": optax_to_numpyro(optax.rmsprop(0.1, centered=True, momentum=0.9)),
    "adaptive_steps": optax_to_numpyro(lc.adaptive_steps(0.1)),
    "schedule": optax_to_numpyro(optax.adam(optax.exponential_decay(0.1, 10, 0.9))),
    "clip": optax_to_numpyro(optax.chain(optax.clip(0.5), optax.adam(0.1))),
    "global_norm": optax_to_numpyro(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))),
    "by_site": optax_to_numpyro(
        optax.multi_transform(
            {"a": optax.adam(0.1), "b": optax.sgd(0.1)},
            {"table": "a", "dense": "b", "column": "b"},
        )
    ),
    "numpyro_adam": numpyro.optim.Adam(0.1),
    "numpyro_adagrad": numpyro.optim.Adagrad(0.1),
    "numpyro_clipped": numpyro.optim.ClippedAdam(0.1, clip_norm=0.5),
    "numpyro_rmsprop": numpyro.optim.RMSProp(0.1),
}
MIXING = {
    "lamb": optax_to_numpyro(optax.lamb(0.1)),
    "lars": optax_to_numpyro(optax.lars(0.1)),
    "adafactor": optax_to_numpyro(optax.adafactor(0.1, min_dim_size_to_factor=2)),
    "norm_after_momentum": optax_to_numpyro(
        optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1e6))
    ),
    "block_rms": optax_to_numpyro(optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1))),
    "noise": optax_to_numpyro(optax.chain(optax.add_noise(0.1, 0.55, 0), optax.sgd(0.1))),
    "accumulate": optax_to_numpyro(
        optax.MultiSteps(optax.adam(0.1), every_k_schedule=3).gradient_transformation()
    ),
    "schedule_free": optax_to_numpyro(optax.contrib.schedule_free_adamw(0.1)),
    "numpyro_sm3": numpyro.optim.SM3(0.1),
    "minimize": numpyro.optim.Minimize(),
}


@pytest.mark.parametrize("name", ROW_WISE)
@pytest.mark.some_cases(3)
def test_updates_of_touched_rows_equal_dense_updates(name):
    """Rows without gradient aside, gathering commutes with the optimiser, step after step."""
    optim = ROW_WISE[name]
    check_row_wise(optim, PARAMS, AXES)
    owners = find_owners(optim, PARAMS, AXES)
    rows = {"table": {0: np.array([7, 2])}, "column": {1: np.array([1, 8, 3])}}
    by_name = [name if name in rows else None for name in sorted(PARAMS)]

    @jax.jit
    def step(full, dense, lazy):
        grads = gather_state(full, by_name, rows)
        zeros = jax.tree.map(jnp.zeros_like, PARAMS)
        dense = optim.update(scatter_state(zeros, grads, by_name, rows), dense, value=1.0)
        new = optim.update(grads, gather_state(lazy, owners, rows), value=1.0)
        return dense, scatter_state(lazy, new, owners, rows)

    rng = np.random.default_rng(0)
    dense = lazy = jax.jit(optim.init)(PARAMS)
    for _ in range(3):
        full = {k: rng.normal(size=v.shape).astype(np.float32) for k, v in PARAMS.items()}
        dense, lazy = step(full, dense, lazy)
    found = jax.jit(lambda state: gather_state(optim.get_params(state), by_name, rows))
    touched = found(dense)
    assert not np.allclose(touched["table"], PARAMS["table"][[7, 2]])
    for key, value in found(lazy).items():
        np.testing.assert_allclose(value, touched[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.some_cases(2)
def test_optimisers_that_mix_rows_are_refused(name):
    with pytest.raises(ValueError, match="cannot run this optimiser"):
        check_row_wise(MIXING[name], PARAMS, AXES)
        find_owners(MIXING[name], PARAMS, AXES)


def test_owners_are_the_leaves_that_follow_the_rows():
    optim = optax_to_numpyro(optax.adam(0.1))
    owners = find_owners(optim, PARAMS, AXES)
    leaves = jax.tree.leaves(optim.init(PARAMS))
    by_shape = {(10, 3): "table", (2, 10): "column", (4,): None, (): None}
    assert owners == [by_shape[leaf.shape] for leaf in leaves]
    assert owners.count("table") == 3  # the parameter and two moments


def test_finding_owners_allocates_no_table():
    """Nothing is computed, whatever the size of the table: 10**12 rows would not fit."""
    shapes = {"table": jax.ShapeDtypeStruct((10**12, 128), jnp.float32)}
    owners = find_owners(optax_to_numpyro(optax.adam(0.1)), shapes, {"table": (0,)})
    assert owners.count("table") == 3
    check_row_wise(optax_to_numpyro(optax.adam(0.1)), shapes, {"table": (0,)})


def test_state_that_is_no_table_is_described():
    with pytest.raises(ValueError, match=r"shape \(3,\).*'table'|shape \(10,\).*'table'"):
        find_owners(numpyro.optim.SM3(0.1), PARAMS, {"table": (0,)})


def test_the_check_runs_while_a_step_is_being_traced():
    """Its answer is known there, also of an optimiser that holds arrays."""
    rate = jnp.float32(0.1)

    def step(x):
        check_row_wise(optax_to_numpyro(optax.adam(lambda count: rate / (count + 1))), PARAMS, AXES)
        with pytest.raises(ValueError, match="rows"):
            check_row_wise(MIXING["lamb"], PARAMS, AXES)
        return x

    assert jax.jit(jax.vmap(step))(jnp.ones(2)).tolist() == [1, 1]
