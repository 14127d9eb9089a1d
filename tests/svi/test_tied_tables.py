# SPDX-License-Identifier: Apache-2.0
"""Fits of models that read the table of their classes by id: tied embeddings."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.flatten_util import ravel_pytree
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_largecat as lc
from tests.slow_cases import slow_case

BATCH, DRAWS = 8, 4000
HISTORY = np.array([[0, 1], [1, 5], [7, -1], [5, 5], [-1, -1], [11, 0], [2, 3], [9, 1]])
LABELS = np.array([3, 9, 3, 0, 9, 3, 7, 7])


def next_word(history, y, num_categories, num_sampled, u=None, dims=3):
    """The words before say what comes next, by one table."""
    with lc.class_plate("words", num_categories, y, num_sampled, reads=history) as words:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([dims]).to_event(1))
    psi = words.rows_of(w, history).sum(1) @ words.scored(w).T
    with lc.data_plate("data", 1000, jnp.arange(BATCH)):
        numpyro.sample("y", lc.UtilityCategorical(psi, words, u=u), obs=y)


@pytest.mark.parametrize("num_sampled", [slow_case(1), 4])
@pytest.mark.slow
def test_elbo_and_gradients_over_draws_are_those_of_all_classes(num_sampled) -> None:
    """In the prior and in the likelihood, of words that are labels, read, both and neither.

    About 36 means are compared at 5.5 standard errors: a correct program fails once in 10**5 runs.
    """
    table = jnp.asarray(np.random.default_rng(0).normal(size=(12, 3)))

    def losses(num_sampled, num_draws):
        def model():
            next_word(HISTORY, LABELS, 12, num_sampled, u=jnp.linspace(1, 4, BATCH))

        def plates():
            return lc.class_plate("words", 12, LABELS, num_sampled, reads=HISTORY)

        guide = AutoDelta(model, create_plates=plates)
        numpyro.handlers.seed(guide, 0)()

        def of_draw(key):
            def loss(table):
                return Trace_ELBO().loss(key, {"w_auto_loc": table}, model, guide)

            return ravel_pytree(jax.value_and_grad(loss)(table))[0]

        return np.asarray(
            jax.jit(jax.vmap(of_draw))(jax.random.split(jax.random.key(2), num_draws))
        )

    found, expected = losses(num_sampled, DRAWS), losses(11, 1)[0]  # 11: all that are no labels
    error = found.std(axis=0, ddof=1) / np.sqrt(DRAWS)
    gap = np.abs(found.mean(axis=0) - expected)
    assert (gap <= 5.5 * error + 1e-4 * (1 + np.abs(expected))).all()


@pytest.mark.slow
def test_a_fit_finds_what_follows_what() -> None:
    """Word k is followed by word k + 1 of 30, where -w of one is near w of the next."""
    words = np.random.default_rng(0).integers(0, 29, 600)

    def model(history, y=None, rows=None):
        with lc.class_plate("words", 30, y, num_sampled=10, reads=history) as read:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([8]).to_event(1))
        turn = numpyro.param("turn", jnp.eye(8))
        with lc.data_plate("data", 600, rows) as rows:
            psi = read.rows_of(w, history) @ turn @ read.scored(w).T
            lc.sample_choice("y", psi, classes=read, rows=rows, obs=y)

    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.05), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(words, words + 1, batch_size=50)
    run = svi.run(jax.random.key(0), 1500, batches=batches, progress_bar=False)
    top = lc.Fitted.from_svi(svi, run, chunk_size=7).on(np.arange(29)).top_classes(1).classes
    assert (top[:, 0] == np.arange(1, 30)).all()


@pytest.fixture(scope="module")
def steps():
    def compiled_step(size):
        def model(history, y):
            next_word(history, y, size, num_sampled=8, dims=4)

        svi = lc.SubsampledSVI(model, AutoDelta(model), optax.adam(0.1), Trace_ELBO())
        args = jnp.asarray(HISTORY), jnp.asarray(LABELS)
        state = jax.eval_shape(lambda key: svi.init(key, *args), jax.random.key(0))
        return jax.jit(svi.update, donate_argnums=0).lower(state, *args).compile()

    return {size: compiled_step(size) for size in (1_000, 100_000)}


def test_scratch_memory_does_not_grow_with_the_number_of_words(steps) -> None:
    small, large = (step.memory_analysis().temp_size_in_bytes for step in steps.values())
    assert small == large
    assert not re.findall(r"copy\(f32\[100000", steps[100_000].as_text())


def test_operations_do_not_grow_with_the_number_of_words(steps) -> None:
    small, large = (step.cost_analysis()["flops"] for step in steps.values())
    assert large == pytest.approx(small, rel=0.02)
