# SPDX-License-Identifier: Apache-2.0
"""A fit of a mixture between its first batch and its last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jax import Array

from numpyro_largecat._result_so_far import held_signals
from numpyro_largecat.data.checkpoints import Checkpoints, Reached, read_checkpoint
from numpyro_largecat.mixtures.global_step import Statistics
from numpyro_largecat.mixtures.mixture_fit import MixtureFit
from numpyro_largecat.mixtures.options import Options
from numpyro_largecat.mixtures.passes import Model, Step, memoized_steps, stochastic_steps
from numpyro_largecat.mixtures.row_stream import RowStream
from numpyro_largecat.mixtures.saved_step import KIND, arrays_of, step_of


@dataclass
class Learning:
    """What is learned, from what, and what was reached.

    Attributes:
        model: The mixture.
        first: Statistics before the first batch.
        stream: The batches.
        batch_key: Of their order.
        method: How batches are learned from.
        num_passes: Visits of each.
        options: Sizes of stochastic steps.
        num_before: Stochastic steps of an earlier fit.
        settings: What must be the same in a fit that goes on.
        reached: The state after the last batch.
        bounds: After each batch.
    """

    model: Model
    first: Statistics
    stream: RowStream
    batch_key: Array
    method: Literal["memoized", "stochastic"]
    num_passes: int
    options: Options
    num_before: int
    settings: dict[str, Any]
    reached: Step
    bounds: list[float]

    def go_on(self, checkpoints: Checkpoints) -> None:
        """Go on from the newest checkpoint."""
        saved = read_checkpoint(checkpoints, KIND, self.settings, self.total)
        self.reached, self.bounds = step_of(saved.arrays), saved.arrays["bounds"].tolist()

    @property
    def num_done(self) -> int:
        """Batches that were visited."""
        return len(self.bounds)

    @property
    def total(self) -> int:
        """Batches of all passes."""
        return self.num_passes * len(self.model.look.sizes)

    def steps(self) -> Iterator[Step]:
        """Visit the batches that are left; ``take`` each step before the next."""
        if self.method == "memoized":
            reached = self.reached if self.num_done else None
            start = self.first, self.stream, self.num_passes, reached, self.num_done
            return memoized_steps(self.model, *start)
        shared = self.stream, self.num_passes, self.options, self.batch_key
        done = self.num_before, self.num_done
        return stochastic_steps(self.model, self.reached.statistics, *shared, *done)

    def take(self, step: Step) -> None:
        """Keep the state after a batch and its bound, or neither."""
        with held_signals():
            self.reached = step
            self.bounds.append(step.bound)

    def fit(self) -> MixtureFit:
        """What was learned so far."""
        model, num_batches = self.model, len(self.model.look.sizes)
        whole_passes = self.num_done // num_batches * num_batches
        by_pass = np.reshape(self.bounds[:whole_passes], (-1, num_batches))
        return MixtureFit(
            model.family,
            model.mixing,
            model.objective,
            model.num_active,
            self.reached.statistics.counts,
            self.reached.statistics.features,
            by_pass[:, -1] if self.method == "memoized" else by_pass.mean(1),
            model.look.dtype,
            self.num_before + self.num_done * (self.method == "stochastic"),
        )

    def so_far(self) -> tuple[MixtureFit, str]:
        """The same, and how far it is."""
        return self.fit(), f"{self.num_done} of {self.total} batches"

    def to_write(self) -> Reached:
        """What is written to disk."""
        arrays = arrays_of(self.reached) | {"bounds": np.array(self.bounds)}
        return Reached(self.num_done, arrays, {"settings": self.settings})
