# SPDX-License-Identifier: Apache-2.0
"""The cost of a compiled step does not follow the number of classes or of observations."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from tests.models import class_points_of, explicit_u, hierarchical

BATCH, SAMPLED, FEATURES = 16, 8, 4


def compiled_step(num_categories, num_rows, table_dtype=None):
    """Compile one donated update on tables of this size."""
    model = hierarchical(SAMPLED, num_categories, num_rows)
    guide, optimiser = AutoNormal(model), optax.adam(0.1)
    svi = lc.SubsampledSVI(model, guide, optimiser, TraceMeanField_ELBO(), table_dtype=table_dtype)
    x = np.ones((BATCH, FEATURES), np.float32)
    y, rows = np.arange(BATCH), np.arange(BATCH)
    state = jax.eval_shape(lambda key: svi.init(key, x, y, rows), jax.random.key(0))
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.size >= num_categories]
    tables = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return jax.jit(svi.update, donate_argnums=0).lower(state, x, y, rows).compile(), tables


@pytest.fixture(scope="module")
def steps():
    return {size: compiled_step(size, 10 * size) for size in (1_000, 100_000)}


def test_scratch_memory_does_not_grow_with_classes_or_rows(steps):
    """The temporaries of a step are the same at K = 10**3 and 10**5, N = 10 K."""
    small, large = (steps[k][0].memory_analysis().temp_size_in_bytes for k in steps)
    assert small == large


def test_every_table_is_updated_in_place(steps):
    """All table memory that comes in goes out again, none of it copied."""
    step, tables = steps[100_000]
    assert step.memory_analysis().alias_size_in_bytes >= tables
    assert not re.findall(r"copy\(f32\[100000", step.as_text())


@pytest.mark.slow
def test_tables_of_bfloat16_take_half_and_none_is_widened(steps):
    """No table is copied or widened on the way: a type that is not stored would need one."""
    step, tables = compiled_step(100_000, 1_000_000, jnp.bfloat16)
    memory = step.memory_analysis()
    of_classes = 100_000 * (FEATURES + 1) * 6  # numbers in tables of w and b
    assert steps[100_000][1] - tables == 2 * of_classes
    assert memory.alias_size_in_bytes >= tables
    assert memory.temp_size_in_bytes < 1.1 * steps[100_000][0].memory_analysis().temp_size_in_bytes
    assert not re.findall(r"copy\(u16\[100000|(bf16|f32)\[100000,4\]", step.as_text())


def test_operations_do_not_grow_with_classes_or_rows(steps):
    """XLA counts the same floating-point operations, but for the depth of binary searches."""
    small, large = (steps[k][0].cost_analysis()["flops"] for k in steps)
    assert large == pytest.approx(small, rel=0.02)


def test_utilities_are_computed_for_the_draw_the_centre_and_the_gradient(steps):
    """Finding the rows and moving u add no further product of features and weights."""
    assert steps[1_000][0].as_text().count(" dot(") == 3


def test_noise_takes_half_a_block_of_threefry_for_each_number():
    """JAX by itself takes a block for each number, in the shape of the numbers."""
    model = hierarchical(SAMPLED, 1_000, 1_000)
    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.1), TraceMeanField_ELBO())
    batch = (np.ones((BATCH, FEATURES), np.float32), np.arange(BATCH), np.arange(BATCH))
    state = jax.eval_shape(lambda key: svi.init(key, *batch), jax.random.key(0))
    text = jax.jit(svi.update).lower(state, *batch).as_text()
    rows = BATCH + SAMPLED
    mixed = re.findall(r"stablehlo.xor .* : tensor<(\w+)xui32>", text)  # by a round of Threefry
    assert f"{rows * FEATURES // 2}" in mixed
    assert f"{rows}x{FEATURES}" not in mixed


def test_compiled_loop_of_run_copies_no_table():
    """The loop behind ``run`` carries the tables in place too."""
    num_categories = 50_000
    guide = class_points_of(num_categories, w=(FEATURES,), b=())
    model = explicit_u(SAMPLED, num_categories, 100)
    svi = lc.SubsampledSVI(model, guide, optax.adam(0.1), TraceMeanField_ELBO())
    x, y = np.ones((100, FEATURES), np.float32), np.arange(100)
    batches = lc.ArrayBatches(x, y, batch_size=BATCH)
    batch = batches.draw(jax.random.key(0))
    state = jax.eval_shape(lambda key: svi.init(key, *batch), jax.random.key(0))

    def steps(state):
        def step(state, _):
            return svi.update(state, *batches.draw(state.rng_key))

        return jax.lax.scan(step, state, None, length=3)

    compiled = jax.jit(steps, donate_argnums=0).lower(state).compile()
    assert not re.findall(r"copy\(f32\[50000", compiled.as_text())
    one_table = num_categories * FEATURES * 4
    assert compiled.memory_analysis().temp_size_in_bytes < one_table


@pytest.mark.slow
def test_guides_hold_no_second_table():
    """AutoNormal's initial values do not stay in memory beside the parameters."""
    model = hierarchical(SAMPLED, 20_000, 100)
    guide = AutoNormal(model)
    svi = lc.SubsampledSVI(model, guide, optax.sgd(0.1), TraceMeanField_ELBO())
    args = (jnp.ones((BATCH, FEATURES)), jnp.arange(BATCH), jnp.arange(BATCH))
    first = svi.get_params(svi.init(jax.random.key(0), *args))
    assert all(isinstance(v, np.ndarray) for k, v in guide._init_locs.items() if k != "scale")
    assert guide._init_locs["w"].strides[0] == 0
    again = svi.get_params(svi.init(jax.random.key(0), *args))
    jax.tree.map(np.testing.assert_array_equal, again, first)
