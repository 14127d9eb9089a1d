# SPDX-License-Identifier: Apache-2.0
"""A chunk of steps as one compiled program, for the cells that ``turns`` measures."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro.infer import SVI

import numpyro_largecat as lc
from benchmarks.cell import Cell


class CompiledLoop:
    """A compiled chunk of steps of one cell, and the state that it moves.

    Args:
        cell: The cell.
        svi: What takes the steps.
        batches: The minibatches, of which each step draws one.
        fixed: Arguments of the model that are the same in each step, before those of the minibatch.
    """

    def __init__(self, cell: Cell, svi: SVI, batches: lc.ArrayBatches, *fixed: Any) -> None:
        self.cell = cell
        self._data = batches, fixed

        def steps(state: Any, rng_key: Any, batches: Any, fixed: Any) -> Any:
            def step(state: Any, key: Any) -> Any:
                return svi.update(state, *fixed, *batches.draw(key))

            return lax.scan(step, state, random.split(rng_key, cell.steps_per_chunk))

        init_key, self._rng_key = random.split(random.key(0))
        self._state = svi.init(init_key, *fixed, *batches.draw(init_key))
        if not isinstance(svi, lc.SubsampledSVI):  # the state shares arrays with the guide
            self._state = jax.tree.map(jnp.copy, self._state)
        arguments = self._state, self._rng_key, *self._data
        self._compiled = jax.jit(steps, donate_argnums=0).lower(*arguments).compile()

    @property
    def hlo_text(self) -> str:
        """The compiled program, with the source of each instruction."""
        return self._compiled.as_text()

    def __call__(self) -> None:
        """Run one chunk of steps."""
        self._rng_key, key = random.split(self._rng_key)
        self._state, losses = self._compiled(self._state, key, *self._data)
        if not bool(jnp.isfinite(losses).all()):
            raise RuntimeError(f"{self.cell} gave a loss that is not finite.")
