# SPDX-License-Identifier: Apache-2.0
"""Steps on one observation and one other class, a pass of them in one compiled loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.double_sum.feature_rows import FeatureRows, take_one
from numpyro_largecat.double_sum.rules import DoubleSumRule, Move, Pair, Radii, UMax
from numpyro_largecat.ops.subsampling import draw_integers


class LinearData(NamedTuple):
    """What every step reads from."""

    features: FeatureRows
    y: Array  # (N,)
    squared_norms: Array  # (N,), of the rows of x
    log_others: Array  # log(K - 1)
    penalties: Array | None  # (K,), ridge * beta / N, None without a ridge
    radii: Radii | None  # for U-max


class PairVisits(NamedTuple):
    """How a pass visits all observations, and where it has their local variables."""

    # Takes w, u, a key and a step size; gives the new w and u, and the largest residual.
    all: Callable[[Array, Array, Array, Array], tuple[Array, Array, Array | float]]
    arrange: Callable[[Array], Array]  # u of the observations, as a pass takes it
    by_row: Callable[[Array], Array]  # and back


def collect(
    features: FeatureRows, y: Array, num_categories: int, rule: DoubleSumRule, ridge: float
) -> LinearData:
    """Put together what steps read from."""
    squared_norms = features.squared_norms()
    dtype = squared_norms.dtype
    radii = None
    if isinstance(rule, UMax):
        longest = math.sqrt(float(squared_norms.max()))
        radii = rule.radii(len(y), num_categories, ridge, longest)
    betas = ridge / len(y) * inverse_touch_probability(y, num_categories).astype(dtype)
    log_others = jnp.asarray(math.log(num_categories - 1), dtype)
    return LinearData(features, y, squared_norms, log_others, betas if ridge else None, radii)


def inverse_touch_probability(y: Array, num_categories: int) -> Array:
    """Beta of Eq. 6: one over the probability that a step touches the row of each class, (K,)."""
    counts = jnp.bincount(y, length=num_categories)
    return len(y) / (counts + (len(y) - counts) / (num_categories - 1))


def visit_pairs(data: LinearData, rule: DoubleSumRule) -> PairVisits:
    """One observation and one other class at a time."""
    kernel = replace(rule, step_size=1.0)  # compiled for any size

    def run(w: Array, u: Array, rng_key: Array, size: Array) -> tuple[Array, Array, Array | float]:
        return *run_pairs(w, u, rng_key, data, size, rule=kernel), 0.0

    return PairVisits(run, lambda u: u, lambda u: u)


@partial(jax.jit, static_argnames="rule")
def run_pairs(
    w: Array, u: Array, rng_key: Array, data: LinearData, step_size: Array, *, rule: DoubleSumRule
) -> tuple[Array, Array]:
    """Visit every observation once, in a random order."""
    row_key, class_key = jax.random.split(rng_key)
    rows = jax.random.permutation(row_key, u.shape[0])
    labels = data.y[rows]
    others = draw_integers(class_key, len(rows), jnp.asarray(w.shape[0] - 1))
    others += others >= labels

    def step(tables: tuple[Array, Array], draw: Any) -> tuple[tuple[Array, Array], None]:
        return _step(tables, draw, data, step_size, rule), None

    tables, _ = lax.scan(step, (w, u), (rows, labels, others))
    return tables


def _step(
    tables: tuple[Array, Array],
    draw: tuple[Array, Array, Array],
    data: LinearData,
    step_size: Array,
    rule: DoubleSumRule,
) -> tuple[Array, Array]:
    """Move w[y], w[k] and u[i], for a draw of (i, y, k)."""
    (w, u), (i, y, k) = tables, draw
    x, squared_norm = data.features.take(i), data.squared_norms[i]
    penalties = data.penalties
    none = jnp.zeros_like(step_size)
    pair = Pair(
        u=u[i],
        utility_y=x.product(w, y),
        utility_k=x.product(w, k),
        squared_norm=squared_norm,
        rate=step_size,
        log_others=data.log_others,
        penalty_y=none if penalties is None else step_size * penalties[y],
        penalty_k=none if penalties is None else step_size * penalties[k],
    )
    move = rule.move(pair)
    if data.radii is not None:
        move = move._replace(u=jnp.clip(move.u, data.radii.u_low, data.radii.u_high))
    if data.radii is not None and penalties is not None:
        move = _project(move, pair, w, y, k, data.radii.w)
    # No number is above infinity, but XLA does not know. So the first write waits for all reads of
    # the table, and it can be made in place.
    y += (jnp.asarray(sum(move)) > jnp.inf).astype(y.dtype)
    keep_y, keep_k = (None, None) if penalties is None else (move.keep_y, move.keep_k)
    w = x.add(w, y, keep_y, move.add_y)
    w = x.add(w, k, keep_k, move.add_k)
    return w, u.at[i].set(move.u)


def _project(move: Move, pair: Pair, w: Array, y: Array, k: Array, radius: float) -> Move:
    """Shorten the new rows to ``radius``; their norms follow from those of the old ones."""

    def share(keep: Array, add: Array, utility: Array, row: Array) -> Array:
        squares = keep**2 * (row @ row) + 2 * keep * add * utility + add**2 * pair.squared_norm
        return radius / jnp.sqrt(jnp.maximum(squares, radius**2))

    share_y = share(move.keep_y, move.add_y, pair.utility_y, take_one(w, y))
    share_k = share(move.keep_k, move.add_k, pair.utility_k, take_one(w, k))
    return Move(
        move.u,
        share_y * move.keep_y,
        share_y * move.add_y,
        share_k * move.keep_k,
        share_k * move.add_k,
    )
