# SPDX-License-Identifier: Apache-2.0
"""Which devices hold which rows of the tables of a fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from numpyro_largecat._checks import check_kind, describe


@dataclass(frozen=True)
class Sharding:
    """A mesh of devices, and the mesh axis over which the rows of each plate are spread."""

    mesh: Mesh
    axes: Mapping[str, str]  # plate to mesh axis

    @classmethod
    def of(cls, mesh: Any, axes: Any) -> Sharding | None:
        """What a user gave, checked; None if that is nothing.

        The axes of the mesh become automatic ones: XLA finds out where the values of a model are.
        """
        if mesh is None and axes is None:
            return None
        check_kind("mesh", mesh, Mesh, "a `jax.make_mesh(sizes, names)`, given with `sharding`")
        form = 'a dict from plates to axes of the mesh, such as {"classes": "model"}'
        check_kind("sharding", axes, Mapping, form)
        for plate, axis in axes.items():
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"`sharding['{plate}']` must be an axis of `mesh`, one of {mesh.axis_names}; "
                    f"got {describe(axis)}."
                )
        return cls(Mesh(mesh.devices, mesh.axis_names), dict(axes))

    def check_plates(self, known: Mapping[str, str]) -> None:
        """Refuse plates that the model has not; ``known`` are those it has, with their kinds."""
        for plate in self.axes.keys() - known.keys():
            raise ValueError(f"`sharding` names plate '{plate}'; the model has {sorted(known)}.")

    def num_devices(self, plate: str) -> int:
        """Number of parts into which the rows of a plate are cut; 1 for plates that are not."""
        return int(self.mesh.shape[self.axes[plate]]) if plate in self.axes else 1

    def padding(self, plate: str, size: int) -> int:
        """Number of rows by which a table is longer than its plate, so that all parts are equal."""
        return -size % self.num_devices(plate)

    def spec(self, plates: Mapping[int, str]) -> NamedSharding:
        """The sharding of an array whose axes hold rows of plates; of others it holds all."""
        by_axis = {axis: self.axes.get(plate) for axis, plate in plates.items()}
        used = [axis for axis in by_axis.values() if axis is not None]
        if len(set(used)) < len(used):
            raise ValueError(
                f"`sharding` must spread the plates {sorted(plates.values())}, whose rows one "
                f"parameter has, over different axes of the mesh; got {used}."
            )
        parts = [by_axis.get(axis) for axis in range(max(by_axis, default=-1) + 1)]
        return NamedSharding(self.mesh, PartitionSpec(*parts))

    @property
    def spans_processes(self) -> bool:
        """Whether some of the devices are those of other processes."""
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of what each device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())


@dataclass(frozen=True)
class LeafLayout:
    """Where the parts of one array of a state are, and how many of its rows are no padding."""

    sharding: NamedSharding
    sizes: Mapping[int, int]  # rows of the axes that have padding, without it

    def place(self, array: Any) -> Array:
        """A copy of an array of NumPy, or of keys, that is padded and spread over the devices.

        Each process puts the parts of its own devices there, and reads no others of an array that
        is read by slices.
        """
        if isinstance(array, jax.Array):  # keys
            data = self.place(np.asarray(jax.random.key_data(array)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        parts = {a: self.sharding.mesh.shape[self.sharding.spec[a]] for a in self.sizes}
        shape = [n + -n % parts.get(axis, 1) for axis, n in enumerate(array.shape)]

        @cache  # for devices that hold the same
        def part(*bounds: tuple[int, int]) -> NDArray[Any]:
            # Of a device that has padding alone the last row, to be repeated.
            there = [
                (min(a, n - 1) if b > a else a, min(b, n))
                for (a, b), n in zip(bounds, array.shape, strict=True)
            ]
            rows = np.asarray(array[tuple(slice(a, b) for a, b in there)])
            padding = [(0, b - a - n) for (a, b), n in zip(bounds, rows.shape, strict=True)]
            return np.pad(rows, padding, mode="edge") if any(map(any, padding)) else rows

        def of_device(index: tuple[slice, ...] | None) -> NDArray[Any]:
            assert index is not None  # JAX's own word for an array without a sharding
            return part(*(s.indices(n)[:2] for s, n in zip(index, shape, strict=True)))

        made = jax.make_array_from_callback(tuple(shape), self.sharding, of_device)
        return jnp.copy(made)  # in memory that may be donated

    def without_padding(self, array: Any) -> Any:
        """The rows that are no padding."""
        if not self.sizes:
            return array
        return array[tuple(slice(self.sizes.get(axis)) for axis in range(array.ndim))]


def pin(tree: Any, layout: Any) -> Any:
    """Have a compiled program keep each array of a tree where its layout says."""
    return jax.tree.map(lambda x, of: lax.with_sharding_constraint(x, of.sharding), tree, layout)


def with_padding(values: Any, padding: Mapping[int, int]) -> Any:
    """Repeat the last row of each axis, as often as it says."""
    if not padding:
        return values
    return jax.tree.map(
        lambda x: jnp.pad(x, [(0, padding.get(a, 0)) for a in range(x.ndim)], mode="edge"), values
    )
