# SPDX-License-Identifier: Apache-2.0
"""The devices over which the classes of a fit are spread, each of which visits its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from numpyro_largecat.handlers.spread_tables import spread_tables
from numpyro_largecat.ops.softmax_bound import take_row

OfPart = Callable[[dict[str, Any], Array, int], Any]  # of parameters, first class, and how many

LogSums = tuple[Array, Array]  # log of a sum over classes, and utilities of labels among them


def merge_sums(found: LogSums, other: LogSums) -> LogSums:
    """What two devices have found; a label's utility is -inf where it is not among the classes."""
    return jnp.logaddexp(found[0], other[0]), jnp.maximum(found[1], other[1])


def own_utilities(psi: Array, labels: Array, classes: Array) -> Array:
    """Utilities of the labels, -inf of those that are not among these consecutive classes."""
    place = labels - classes[0]
    is_here = (place >= 0) & (place < psi.shape[-1])
    return jnp.where(is_here, take_row(psi, jnp.clip(place, 0, psi.shape[-1] - 1)), -jnp.inf)


class PartsOfClasses(NamedTuple):
    """Which classes each device has, with its part of the tables."""

    params: dict[str, Any]
    plate: str
    mesh: Mesh
    mesh_axis: str
    num_rows: int  # of the class plate on each device, with padding

    @classmethod
    def of(cls, params: dict[str, Any], plate: str) -> PartsOfClasses | None:
        """Those of the tables in a class plate; None if these are not spread."""
        for table in spread_tables(params).values():
            for _, name, mesh_axis in table.axes:
                num_rows = table.num_rows(plate)
                if name == plate and mesh_axis is not None and num_rows is not None:
                    return cls(params, plate, table.mesh, mesh_axis, num_rows)
        return None

    def merged(self, of_part: OfPart, merge: Callable[[Any, Any], Any]) -> Any:
        """What all devices find, joined two by two: they send what they found, and no table."""
        by_part = self._map(
            lambda *part: jax.tree.map(lambda x: x[None], of_part(*part)),
            PartitionSpec(self.mesh_axis),
        )
        parts = [
            jax.tree.map(lambda x, i=i: x[i], by_part)
            for i in range(self.mesh.shape[self.mesh_axis])
        ]
        return reduce(merge, parts)

    def joined(self, of_part: OfPart) -> Array:
        """What all devices have on a last axis of ``num_rows`` classes, one after the other."""
        ndim = len(jax.eval_shape(lambda: self._map(of_part, PartitionSpec())).shape)
        joined: Array = self._map(of_part, PartitionSpec(*[None] * (ndim - 1), self.mesh_axis))
        return joined

    def _map(self, of_part: OfPart, out_specs: Any) -> Any:
        tables = spread_tables(self.params)

        def on_device(arrays: dict[str, Array]) -> Any:
            parts = {name: tables[name].part(array, self.plate) for name, array in arrays.items()}
            first = lax.axis_index(self.mesh_axis) * self.num_rows
            return of_part(self.params | parts, first, self.num_rows)

        mapped = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=({name: table.spec for name, table in tables.items()},),
            out_specs=out_specs,
            check_vma=False,
        )
        return mapped({name: table.array for name, table in tables.items()})
