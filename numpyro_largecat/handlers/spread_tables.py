# SPDX-License-Identifier: Apache-2.0
"""Tables of parameters whose rows are spread over devices, read by the rows that a model needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from numpyro_largecat.handlers.touched_rows import TouchedRows


class TableAxis(NamedTuple):
    """An axis of a table that holds the rows of a plate."""

    axis: int
    plate: str
    mesh_axis: str | None  # over whose devices the rows are spread; None if each has them all


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("array",),
    meta_fields=("mesh", "axes", "visited"),
)
@dataclass(frozen=True)
class SpreadTable:
    """A table whose rows are spread over devices, where it may have rows past those of a plate.

    Within ``shard_map`` it is the part of one device, and ``visited`` names the plate whose rows
    each device visits for itself. All devices ask for the same rows of other plates, and get them
    from the one that has them; rows that depend on the classes visited are NaN.
    """

    array: Array
    mesh: Mesh
    axes: tuple[TableAxis, ...]
    visited: str | None = None

    @property
    def spec(self) -> PartitionSpec:
        """Which axes of the array are spread over which axes of the mesh."""
        by_axis = {axis: mesh_axis for axis, _, mesh_axis in self.axes}
        return PartitionSpec(*(by_axis.get(axis) for axis in range(self.array.ndim)))

    def num_rows(self, plate: str) -> int | None:
        """Number of rows that each device has of a plate that is spread; None if it is not."""
        for axis, name, mesh_axis in self.axes:
            if name == plate and mesh_axis is not None:
                return int(self.array.shape[axis] // self.mesh.shape[mesh_axis])
        return None

    def part(self, array: Array, visited: str) -> SpreadTable:
        """The part of one device."""
        return replace(self, array=array, visited=visited)

    def rows(self, touched: TouchedRows) -> Array:
        """The rows that the plates hold, one for each of their entries."""
        value = self.array
        for axis, plate, mesh_axis in self.axes:
            ids = touched.plates[plate].indices
            if self.visited is None or mesh_axis is None:
                value = jnp.take(value, ids, axis=axis, mode="clip")
            else:
                value = _rows_of_part(value, axis, ids, mesh_axis, plate == self.visited)
        return value


def _rows_of_part(value: Array, axis: int, ids: Array, mesh_axis: str, is_visited: bool) -> Array:
    size = value.shape[axis]
    places = ids - lax.axis_index(mesh_axis) * size
    taken = jnp.take(value, places, axis=axis, mode="clip")
    if is_visited:
        return taken
    is_here = ((places >= 0) & (places < size)).reshape(-1, *[1] * (value.ndim - axis - 1))
    rows = lax.psum(jnp.where(is_here, taken, jnp.zeros_like(taken)), mesh_axis)
    are_same = (lax.pmax(ids, mesh_axis) == lax.pmin(ids, mesh_axis)).all()
    return jnp.where(are_same, rows, jnp.full_like(rows, jnp.nan))


def spread_tables(params: dict[str, Any]) -> dict[str, SpreadTable]:
    """The tables among parameters that are spread over devices."""
    return {name: value for name, value in params.items() if isinstance(value, SpreadTable)}


def rows_of_tables(
    tables: dict[str, SpreadTable], touched: TouchedRows, msg: dict[str, Any]
) -> Array | None:
    """The rows that plates hold, for the statement of a parameter among these tables."""
    table = tables.get(msg["name"])
    return None if table is None else table.rows(touched)
