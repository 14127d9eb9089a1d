# SPDX-License-Identifier: Apache-2.0
"""Read and write some rows of a table along one or several of its axes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_largecat.ops.subsampling import place_among, sorted_distinct


def gather_rows(table: Array, rows: dict[int, Array]) -> Array:
    """Read rows ``rows[axis]`` along each ``axis``; the others are read whole.

    Shapes: like ``table``, with ``rows[axis].shape[0]`` at each of the axes.

    Cost: O(size of the result). Rows past the end read the last one.
    """
    return table.at[_mesh(table.shape, rows)].get(mode="clip")


def scatter_rows(table: Array, rows: dict[int, Array], values: Array) -> Array:
    """Write ``values`` to rows ``rows[axis]`` along each ``axis``.

    Rows must be distinct, except that rows past the end are not written.

    Cost: O(size of ``values``) if XLA may reuse the memory of ``table`` (donated, or carried
    through a loop), else a copy of it.
    """
    return table.at[_mesh(table.shape, rows)].set(
        values.astype(table.dtype), mode="drop", unique_indices=True
    )


def add_rows(table: Array, rows: dict[int, Array], values: Array) -> Array:
    """Add ``values`` to rows ``rows[axis]`` along each ``axis``; those past the end are dropped.

    Cost: as ``scatter_rows``.
    """
    return table.at[_mesh(table.shape, rows)].add(values.astype(table.dtype), mode="drop")


def _mesh(shape: tuple[int, ...], rows: dict[int, Array]) -> tuple[Any, ...]:
    """Index arrays for all axes up to the last indexed one, shaped to span their product."""
    axes = range(max(rows) + 1)
    first = min(rows)
    index: list[Any] = []
    for axis in axes:
        if axis < first:
            index.append(slice(None))
            continue
        ids = rows.get(axis, jnp.arange(shape[axis]))
        index.append(ids.reshape((-1,) + (1,) * (max(rows) - axis)))
    return tuple(index)


def merge_repeats(indices: Array, size: int) -> tuple[Array, Array]:
    """Find the distinct rows among ``indices``.

    Cost: O(B log B). Sorting the indices alone and then finding them takes a third to a half of the
    time that sorting them with their places does.

    Args:
        indices: Row ids in [0, size), possibly repeated, shape (B,).
        size: Number of rows of the table.

    Returns:
        The distinct rows, padded with ``size``, shape (B,); and the position of each index among
        them, shape (B,).
    """
    distinct = sorted_distinct(indices, size)
    return distinct, place_among(indices, distinct)


def merge_values(values: Array, position: Array, axis: int) -> Array:
    """Merge entries of ``values`` along ``axis`` that share a ``position``.

    Shapes: like ``values``; entry j holds the mean of the entries at position j, for integers and
    truth values the largest, and 0 where there is none.

    Cost: O(size of ``values``).
    """
    moved = jnp.moveaxis(values, axis, 0)
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        counted = moved.astype(jnp.promote_types(moved.dtype, jnp.int32))
        lowest = jnp.full_like(counted, np.iinfo(counted.dtype).min)
        merged = lowest.at[position].max(counted)
        merged = jnp.where(merged == lowest, 0, merged).astype(moved.dtype)
    else:
        count = jnp.zeros(moved.shape[0], moved.dtype).at[position].add(1)
        count = jnp.maximum(count, 1).reshape((-1,) + (1,) * (moved.ndim - 1))
        merged = jnp.zeros_like(moved).at[position].add(moved) / count
    return jnp.moveaxis(merged, 0, axis)
