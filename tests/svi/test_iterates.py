# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.infer import Trace_ELBO
from numpyro.infer.svi import SVIRunResult

import numpyro_largecat as lc
from numpyro_largecat.svi.iterates import MOST_ITERATES, IterateLog


def test_a_fit_records_entries_of_what_it_moves():
    """Of a table, in rows that the first batch touched; each step moves all of them by 1."""

    def model(y):
        bias = numpyro.param("bias", jnp.float32(0))
        with lc.class_plate("classes", 1000, y, num_sampled=2) as classes:
            table = numpyro.param("table", jnp.zeros((1000, 3)), event_dim=1)
        weights = classes.weights[:, None]
        numpyro.factor("slope", bias + jnp.where(weights == 1, table, 0).sum())

    y = jnp.array([7, 900, 7])
    svi = lc.SubsampledSVI(model, lambda y: None, optax.sgd(1.0), Trace_ELBO())
    result = svi.run(jax.random.key(0), 130, y, progress_bar=False)  # in two compiled loops
    found = result.iterates["table"]  # of rows 7 and 900
    np.testing.assert_allclose(found, np.broadcast_to(np.arange(1, 131)[:, None], found.shape))
    np.testing.assert_allclose(result.iterates["bias"], np.arange(1, 131)[:, None])
    assert result._replace(losses=None).iterates is result.iterates
    assert result._fields[:3] == SVIRunResult._fields
    first, *shapes = repr(result).splitlines()
    assert first.startswith("SubsampledSVIRunResult, 130 steps; the ELBO rose by")
    assert shapes == ["  bias ()", "  table (1000, 3)"]
    ended = repr(result._replace(losses=jnp.array([1.0, jnp.nan])))
    assert ended.startswith("SubsampledSVIRunResult, 2 steps; the loss of the last is not finite;")
    again = svi.run(jax.random.key(0), 5, jnp.array([1, 2, 2]), progress_bar=False)
    assert (again.iterates["table"][-1] == 5).all()  # rows 1 and 2


def test_iterates_are_thinned_evenly():
    log = IterateLog()
    for start in range(0, 2730, 130):
        log.add({"a": jnp.arange(start, start + 130.0)[:, None]}, min(130, 2700 - start))
    steps = log.iterates()["a"][:, 0]
    assert len(steps) <= MOST_ITERATES
    np.testing.assert_array_equal(steps, np.arange(0, 2700, 4))
