# SPDX-License-Identifier: Apache-2.0
"""The biased methods of Unbiased scalable softmax optimization, section 4, as double-sum rules."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_largecat.double_sum.rules import DoubleSumRule, Move, Pair


@dataclass(frozen=True)
class OneVsEach(DoubleSumRule):
    """SGD on the sum of -log sigmoid(x @ (w[y] - w[k])) over k, from one k."""

    def move(self, pair: Pair) -> Move:
        """Take one step; u is not used."""
        force = jnp.exp(pair.log_others) * jax.nn.sigmoid(pair.utility_k - pair.utility_y)
        return _move(pair, pair.rate * force, pair.rate * force)


@dataclass(frozen=True)
class ImportanceSampling(DoubleSumRule):
    """SGD on the log-loss whose normaliser is estimated from the label and one k."""

    def move(self, pair: Pair) -> Move:
        """Take one step; u is not used."""
        force = jax.nn.sigmoid(pair.log_others + pair.utility_k - pair.utility_y)
        return _move(pair, pair.rate * force, pair.rate * force)


@dataclass(frozen=True)
class NoiseContrast(DoubleSumRule):
    """SGD on telling the label from one k, with probabilities exp(x @ w), as Mnih and Teh do."""

    def move(self, pair: Pair) -> Move:
        """Take one step; u is not used."""
        lift = jax.nn.sigmoid(-(pair.utility_y + pair.log_others))
        push = jax.nn.sigmoid(pair.utility_k + pair.log_others)
        return _move(pair, pair.rate * lift, pair.rate * push)


def _move(pair: Pair, lift: Array, push: Array) -> Move:
    return Move(pair.u, 1 - pair.penalty_y, lift, 1 - pair.penalty_k, -push)
