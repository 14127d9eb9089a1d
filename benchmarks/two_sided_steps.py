# SPDX-License-Identifier: Apache-2.0
"""The two-sided model, and the compiled loop of its steps that ``two_sided`` times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from benchmarks.two_sided_cells import (
    BATCH_SIZE,
    LEARNING_RATE,
    NUM_FEATURES,
    NUM_ROWS,
    NUM_SAMPLED,
    Cell,
    make_data,
)


class StepLoop:
    """A compiled chunk of steps of one cell, and the state that it moves."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        users, items = make_data(cell)
        self._batches = lc.ArrayBatches(users, items, batch_size=BATCH_SIZE)
        self._counts = lc.EntityCounts.of(cell.size, users)
        model = two_sided_model(cell.size)
        optimizer = optax.adam(LEARNING_RATE)
        svi = lc.SubsampledSVI(model, AutoNormal(model), optimizer, TraceMeanField_ELBO())

        def steps(state: Any, rng_key: Any, batches: Any, counts: Any) -> Any:
            def step(state: Any, key: Any) -> Any:
                return svi.update(state, counts, *batches.draw(key))

            return lax.scan(step, state, random.split(rng_key, cell.steps_per_chunk))

        init_key, self._rng_key = random.split(random.key(0))
        self._state = svi.init(init_key, self._counts, *self._batches.draw(init_key))
        arguments = self._state, self._rng_key, self._batches, self._counts
        self._compiled = jax.jit(steps, donate_argnums=0).lower(*arguments).compile()

    def __call__(self) -> None:
        """Run one chunk of steps."""
        self._rng_key, key = random.split(self._rng_key)
        arguments = self._state, key, self._batches, self._counts
        self._state, losses = self._compiled(*arguments)
        if not bool(jax.numpy.isfinite(losses).all()):
            raise RuntimeError(f"{self.cell} gave a loss that is not finite.")


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
