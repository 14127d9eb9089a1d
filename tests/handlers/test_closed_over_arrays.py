# SPDX-License-Identifier: Apache-2.0
"""Arrays that grow with K or N and that models close over are arguments of compiled programs."""

from __future__ import annotations

import gc
import math
import re
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from numpyro_largecat.handlers.closed_over_arrays import compiled
from tests.models import hierarchical

NUM_CATEGORIES = 50_000
CONSTANT = re.compile(r'constant dense<(?:"|\[)[^>]*> : tensor<([0-9x]*)x[a-z]')


def largest_constant(program):
    """Entries of the largest array that is written out in a lowered program."""
    shapes = CONSTANT.findall(program)
    return max((math.prod(map(int, shape.split("x"))) for shape in shapes), default=0)


def test_a_constant_is_seen():
    table = jnp.asarray(np.arange(NUM_CATEGORIES) ** 2)

    def look(i):
        return table[i]

    assert largest_constant(jax.jit(look).lower(3).as_text()) == NUM_CATEGORIES
    program = compiled(look)
    assert largest_constant(program.lower(3).as_text()) == 0
    assert program(3) == 9 and program(7) == 49


@contextmanager
def lowered_programs(folder):
    """Texts of all programs that are compiled in the block, which are there at its end."""
    texts = []
    jax.config.update("jax_dump_ir_to", str(folder))
    try:
        yield texts
    finally:
        jax.config.update("jax_dump_ir_to", "")
    texts += [path.read_text() for path in folder.iterdir()]


def closing_over(num_rows=NUM_CATEGORIES):
    """A model that closes over features of classes and rows, and the counts of its proposal."""
    features = np.random.default_rng(0).normal(size=(NUM_CATEGORIES, 2)).astype(np.float32)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(num_rows, 2)), jnp.float32)
    proposal = lc.FrequencyProposal(np.arange(NUM_CATEGORIES) % 7 + 1)

    def model(y=None, rows=None):
        with lc.class_plate("classes", NUM_CATEGORIES, y, 3, proposal=proposal) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
            v = numpyro.deterministic("v", jnp.asarray(features)[classes.indices])
        with lc.data_plate("data", num_rows, rows) as rows:
            psi = x[rows.indices] @ v.T + b
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    return model


@pytest.mark.slow
def test_a_fit_compiles_no_table_into_its_programs(tmp_path):
    """``init``, the checks, the loop over arrays, and the steps of a stream."""
    model = closing_over()
    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
    y = np.arange(NUM_CATEGORIES)
    rows = np.arange(4)
    with lowered_programs(tmp_path) as programs:
        state = svi.init(jax.random.key(0), y[rows], rows)
        svi.run(
            jax.random.key(0), 1, batches=[(y[rows], rows)], init_state=state, progress_bar=False
        )
        batches = lc.ArrayBatches(y, batch_size=4)
        svi.run(jax.random.key(0), 2, batches=batches, progress_bar=False)
    assert len(programs) > 3
    assert max(map(largest_constant, programs)) < NUM_CATEGORIES


@pytest.mark.slow
def test_readings_of_a_fit_compile_no_table_into_their_programs(tmp_path):
    """Predictions and ArviZ, at few rows of the data."""
    model = closing_over(num_rows=4)
    guide = AutoNormal(model)
    svi = lc.SubsampledSVI(model, guide, optax.adam(0.1), Trace_ELBO())
    y = jnp.arange(4)
    state = svi.init(jax.random.key(0), y)
    params = svi.get_params(state)
    fitted = lc.Fitted(model, guide, params, chunk_size=20_000)
    with lowered_programs(tmp_path) as programs:
        fitted.on(rows=jnp.arange(4)).top_classes()
        key, rows = jax.random.key(3), {"classes": [0, 7]}
        fitted.on(y).to_arviz(rng_key=key, num_draws=2, rows=rows)
    assert len(programs) > 3
    assert max(map(largest_constant, programs)) < NUM_CATEGORIES


def test_a_full_plate_of_many_classes_is_no_constant():
    """Its ids and weights are made in the program."""
    model = hierarchical(None, NUM_CATEGORIES, NUM_CATEGORIES)
    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.sgd(0.1), Trace_ELBO())
    args = jnp.ones((2, 1)), jnp.arange(2), jnp.arange(2)
    state = jax.eval_shape(svi.init, jax.random.key(0), *args)  # nothing is compiled
    assert largest_constant(jax.jit(svi.update).lower(state, *args).as_text()) < NUM_CATEGORIES


def test_programs_take_donate_and_give_back_trees():
    """A second call with like arguments traces nothing; the first argument may be donated."""
    table = jnp.asarray(np.arange(3.0))
    for donates in (False, True):
        traces = []

        def step(state, shift, scale, traces=traces):
            traces.append(scale)
            return {"w": state["w"] * scale + table + shift}, None

        program = compiled(step, static_argnums=(2,), donate_first=donates)
        for _ in range(2):
            state = {"w": jnp.ones(3)}
            new, nothing = program(state, 1.0, 2)
            assert new["w"].tolist() == [3, 4, 5] and nothing is None
            assert state["w"].is_deleted() == donates
        assert program({"w": jnp.ones(3)}, 1.0, 3)[0]["w"].tolist() == [4, 5, 6]
        assert traces == [2, 3]


def num_live():
    """Of arrays that are in use: what earlier tests have left is thrown away, which takes long."""
    gc.collect()
    return len(jax.live_arrays())


def test_each_program_keeps_one_copy_of_an_array_that_its_trace_has_made():
    """Calls make no more of them, and they go with the programs."""

    def look(i):
        return jnp.asarray(np.arange(9.0))[i]

    before, program = num_live(), compiled(look)
    for num_programs in (1, 2):
        for _ in range(3):
            program(np.zeros(num_programs, int))
        assert len(jax.live_arrays()) == before + num_programs
    del program
    assert num_live() == before


def test_programs_share_the_copy_of_an_array_that_is_always_the_same():
    table, before = np.arange(9.0), num_live()
    program = compiled(lambda i: jnp.asarray(table)[i])
    for size in (1, 2, 3):
        program(np.zeros(size, int))
    assert len(jax.live_arrays()) == before + 1


@pytest.mark.parametrize("nested", [False, True])
def test_programs_that_call_back_are_not_donated(nested):
    """Where the call is within loops and branches too."""

    def call(x):
        return jax.pure_callback(lambda x: x, x, x)

    def step(state):
        if not nested:
            return call(state)
        return jax.lax.fori_loop(
            0, 2, lambda i, x: jax.lax.cond(i > 0, jax.jit(call), lambda x: x, x), state
        )

    state = jnp.ones(3)
    assert compiled(step, donate_first=True)(state).tolist() == [1, 1, 1]
    assert not state.is_deleted()


def test_a_program_for_one_run_gives_the_same_and_may_be_a_part_of_another():
    table = jnp.linspace(0, 3, 40).reshape(8, 5)

    def look(x):
        return jnp.tanh(table @ x).sum(), jax.random.normal(jax.random.key(1), (3,))

    x = jnp.arange(5.0)
    once, often = compiled(look, runs_once=True), compiled(look)
    for found, expected in zip(once(x), often(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    inside = jax.jit(lambda x: compiled(look, runs_once=True)(x))(x)
    np.testing.assert_allclose(inside[0], often(x)[0], rtol=1e-6)
