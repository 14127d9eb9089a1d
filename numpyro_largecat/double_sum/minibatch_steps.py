# SPDX-License-Identifier: Apache-2.0
"""Implicit steps on fixed minibatches, a pass of them in one compiled loop."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.double_sum.feature_rows import FeatureRows
from numpyro_largecat.double_sum.pair_steps import LinearData, PairVisits
from numpyro_largecat.ops.double_sum.fixed_batches import (
    FixedBatches,
    batch_touch_probability,
    draw_other_classes,
)
from numpyro_largecat.ops.double_sum.implicit_batch import implicit_batch_step


def with_penalties_of(
    batches: FixedBatches, data: LinearData, num_sampled: int, num_categories: int, ridge: float
) -> LinearData:
    """The same data with the penalties of rows that a step on a minibatch touches."""
    if not ridge:
        return data
    probability = batch_touch_probability(
        batches, num_sampled=num_sampled, num_categories=num_categories
    )
    betas = (1 / probability).astype(data.log_others.dtype)
    return data._replace(penalties=ridge / len(data.y) * betas)


def visit_minibatches(
    data: LinearData, batches: FixedBatches, num_sampled: int, num_categories: int
) -> PairVisits:
    """Minibatches, whose local variables lie side by side."""
    x_batches = data.features.take_batches(batches.rows)

    def run(w: Array, u: Array, rng_key: Array, size: Array) -> tuple[Array, Array, Array | float]:
        return run_minibatches(
            w, u, rng_key, data, batches, x_batches, size, num_sampled=num_sampled
        )

    def arrange(u: Array) -> Array:
        return u.at[batches.rows].get(mode="fill", fill_value=math.log(num_categories))

    def by_row(u: Array) -> Array:
        return jnp.zeros(data.y.shape, u.dtype).at[batches.rows].set(u, mode="drop")

    return PairVisits(run, arrange, by_row)


@partial(jax.jit, static_argnames="num_sampled")
def run_minibatches(
    w: Array,
    u: Array,
    rng_key: Array,
    data: LinearData,
    batches: FixedBatches,
    x_batches: FeatureRows,
    step_size: Array,
    *,
    num_sampled: int,
) -> tuple[Array, Array, Array]:
    """Take an implicit step on every minibatch, in a random order; also the largest residual.

    Both u and ``x_batches`` have leading axes (J, B): the rows of a minibatch lie side by side,
    which takes half the time of gathering them from all over memory.
    """
    order_key, class_key = jax.random.split(rng_key)
    others = draw_other_classes(
        class_key, batches, num_sampled=num_sampled, num_categories=w.shape[0]
    )
    order = jax.random.permutation(order_key, len(others))

    def step(tables: tuple[Array, Array], j: Array) -> tuple[tuple[Array, Array], Array]:
        batch, x = jax.tree.map(lambda a: a[j], (batches, x_batches))
        return _batch_step(tables, j, batch, x, others[j], data, step_size)

    (w, u), residuals = lax.scan(step, (w, u), order)
    return w, u, residuals.max()


def _batch_step(
    tables: tuple[Array, Array],
    j: Array,
    batch: FixedBatches,
    rows: FeatureRows,
    others: Array,
    data: LinearData,
    step_size: Array,
) -> tuple[tuple[Array, Array], Array]:
    """Move the rows of minibatch j and its u; also the residual of its step."""
    w, u = tables
    num_categories, num_rows, num_batches = w.shape[0], len(data.y), len(u)
    x = rows.dense(w.shape[1])
    classes = jnp.concatenate([batch.labels, others])
    weight = (num_categories - batch.num_labels) / len(others)
    is_label = (batch.labels < num_categories).astype(w.dtype)
    weights = jnp.concatenate([is_label, jnp.full(len(others), weight, w.dtype)])
    keep = jnp.ones_like(weights)
    if data.penalties is not None:
        keep = 1 / (1 + step_size * data.penalties.at[classes].get(mode="clip"))
    shrunk = keep[:, None] * w.at[classes].get(mode="clip")
    rates = jnp.where(batch.rows < num_rows, step_size * num_batches / num_rows, 0)
    utilities, gram = _matmul(x, shrunk.T), _matmul(x, x.T)
    step = implicit_batch_step(u[j], utilities, gram, batch.label_rows, weights, keep, rates)
    moved = shrunk - keep[:, None] * _matmul(step.forces.T, x)
    w = w.at[classes].set(moved, mode="drop", unique_indices=True)
    return (w, u.at[j].set(step.u)), step.residual


_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)  # as the solver's tolerance needs
