# SPDX-License-Identifier: Apache-2.0
"""The two-sided model, and the compiled loop of its steps that ``two_sided`` times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from benchmarks.compiled_loop import CompiledLoop
from benchmarks.two_sided_cells import (
    BATCH_SIZE,
    LEARNING_RATE,
    NUM_FEATURES,
    NUM_ROWS,
    NUM_SAMPLED,
    Cell,
    make_data,
)


def make_step_loop(cell: Cell) -> CompiledLoop:
    """Make the loop of a cell."""
    users, items = make_data(cell)
    model = two_sided_model(cell.size)
    optimizer = optax.adam(LEARNING_RATE)
    svi = lc.SubsampledSVI(model, AutoNormal(model), optimizer, TraceMeanField_ELBO())
    batches = lc.ArrayBatches(users, items, batch_size=BATCH_SIZE)
    return CompiledLoop(cell, svi, batches, lc.EntityCounts.of(cell.size, users))


def two_sided_model(size: int) -> Callable[..., None]:
    """A posterior over embeddings of as many users as items."""

    def model(counts: Any, users: Any, items: Any, rows: Any) -> None:
        with lc.entity_plate("users", size, users, counts) as read:
            v = numpyro.sample("v", dist.Normal(0, 1).expand([NUM_FEATURES]).to_event(1))
        with lc.class_plate("items", size, items, num_sampled=NUM_SAMPLED) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([NUM_FEATURES]).to_event(1))
        with lc.data_plate("data", NUM_ROWS, rows) as batch:
            utilities = read.rows_of(v, users) @ w.T
            lc.sample_choice("y", utilities, classes=classes, rows=batch, obs=items)

    return model
