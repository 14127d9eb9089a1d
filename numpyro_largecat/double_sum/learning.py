# SPDX-License-Identifier: Apache-2.0
"""A fit by the double sum between its first pass and its last."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_largecat.data.checkpoints import Reached
from numpyro_largecat.data.fit_folders import SavedArrays
from numpyro_largecat.double_sum.double_sum_fit import DoubleSumFit, log_loss
from numpyro_largecat.double_sum.feature_rows import FeatureRows
from numpyro_largecat.double_sum.minibatch_steps import visit_minibatches, with_penalties_of
from numpyro_largecat.double_sum.pair_steps import PairVisits, collect, visit_pairs
from numpyro_largecat.double_sum.rules import DoubleSumRule
from numpyro_largecat.ops.double_sum.fixed_batches import fixed_batches

LARGEST_RESIDUAL = 1e-2  # of a minibatch, relative to its step, without a warning


class Linear(NamedTuple):
    """A linear softmax, its data, and how a step moves it."""

    features: FeatureRows
    y: Array  # (N,)
    shape: tuple[int, int]  # (K, D), of the weights
    rule: DoubleSumRule
    ridge: float

    def visits(self, batch_key: Array, batch_size: int, num_sampled: int) -> PairVisits:
        """How a pass visits all observations: in pairs with a class, or in minibatches."""
        num_categories = self.shape[0]
        data = collect(self.features, self.y, num_categories, self.rule, self.ridge)
        if batch_size == num_sampled == 1:
            return visit_pairs(data, self.rule)
        batches = fixed_batches(
            batch_key, self.y, batch_size=batch_size, num_categories=num_categories
        )
        data = with_penalties_of(batches, data, num_sampled, num_categories, self.ridge)
        return visit_minibatches(data, batches, num_sampled, num_categories)

    def loss(self, w: Array) -> Array:
        """Penalised log-loss per observation."""
        penalty = self.ridge / (2 * len(self.y)) * jnp.vdot(w, w)
        return log_loss(self.features, self.y, w) + penalty


class AfterPass(NamedTuple):
    """What a fit has reached; one name, so that no signal can part what belongs together."""

    w: Array  # (K, D)
    u: Array  # (N,), or as passes take it
    losses: list[Array]  # of the passes, if they are recorded
    num_done: int  # passes of this fit

    @classmethod
    def begin(cls, start: DoubleSumFit | None, problem: Linear, dtype: Any) -> AfterPass:
        """Before the first pass."""
        if start is not None:
            return cls(jnp.asarray(start.w, dtype), jnp.asarray(start.u, dtype), [], 0)
        u = jnp.full(len(problem.y), math.log(problem.shape[0]), dtype)
        return cls(jnp.zeros(problem.shape, dtype), u, [], 0)

    @classmethod
    def of_checkpoint(cls, saved: SavedArrays) -> AfterPass:
        """After the last pass that is on disk."""
        w, u, losses = (jnp.asarray(saved.arrays[name]) for name in ("w", "u", "losses"))
        return cls(w, u, list(losses), saved.number)


@dataclass
class Learning:
    """What is learned, from what, and what was reached.

    Attributes:
        problem: The softmax and its data.
        visits: How a pass visits all observations.
        rng_key: Of what passes draw.
        first: Number of the first pass, after those of earlier fits.
        sizes: Of the steps of each pass.
        records: Whether losses are recorded.
        settings: What must be the same in a fit that goes on.
        now: What was reached.
    """

    problem: Linear
    visits: PairVisits
    rng_key: Array
    first: int
    sizes: np.ndarray
    records: bool
    settings: dict[str, Any]
    now: AfterPass

    def run_pass(self) -> None:
        """Visit all observations once more.

        Nothing is donated: a pass that is interrupted or overflows leaves the last one.
        """
        now, number = self.now, self.first + self.now.num_done
        size = jnp.asarray(self.sizes[now.num_done], now.w.dtype)
        pass_key = jax.random.fold_in(self.rng_key, number)
        w, u, residual = self.visits.all(now.w, now.u, pass_key, size)
        _warn_of_residual(float(residual), number)
        self._check_weights(w, u, number)
        losses = [*now.losses, self.problem.loss(w)] if self.records else now.losses
        self.now = AfterPass(w, u, losses, now.num_done + 1)

    def fit(self) -> DoubleSumFit:
        """What was learned so far."""
        now = self.now
        recorded = jnp.array(now.losses) if self.records else None
        return DoubleSumFit(now.w, self.visits.by_row(now.u), recorded, self.first + now.num_done)

    def so_far(self) -> tuple[DoubleSumFit, str]:
        """The same, and how far it is."""
        return self.fit(), f"{self.now.num_done} of {len(self.sizes)} passes"

    def to_write(self) -> Reached:
        """What is written to disk."""
        now, losses = self.now, jnp.array(self.now.losses, self.now.w.dtype)
        arrays = {"w": now.w, "u": self.visits.by_row(now.u), "losses": losses}
        about = {"settings": self.settings}
        return Reached(now.num_done, jax.tree.map(np.asarray, arrays), about)

    def _check_weights(self, w: Array, u: Array, number: int) -> None:
        if not bool(jnp.isfinite(jnp.vdot(w, w)) & jnp.isfinite(u).all()):
            raise FloatingPointError(
                f"the weights or local variables overflowed in pass {number} of "
                f"{self.problem.rule}. Take a smaller `step_size`, or `ImplicitSGD`, which cannot "
                "overflow."
            )


def _warn_of_residual(residual: float, number: int) -> None:
    if not residual <= LARGEST_RESIDUAL:
        warnings.warn(
            f"a minibatch of pass {number} was not solved: its step is off by {residual:.2g} of "
            "its length. Take a smaller `step_size`, rows of norm 1, float64, or `batch_size=1`.",
            RuntimeWarning,
            stacklevel=4,
        )
