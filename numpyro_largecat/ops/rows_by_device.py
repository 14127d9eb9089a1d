# SPDX-License-Identifier: Apache-2.0
"""Functions of rows that are spread over the devices of a mesh, each of which takes its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from numpyro_largecat._checks import check_kind

T = TypeVar("T")


def mesh_of_one_process(mesh: Any) -> Mesh | None:
    """A mesh that a user gave, checked, with automatic axes; None if it is None."""
    if mesh is None:
        return None
    check_kind("mesh", mesh, Mesh, "a mesh of devices, `jax.make_mesh(sizes, names)`, or None")
    processes = {int(device.process_index) for device in mesh.devices.flat}
    if processes != {jax.process_index()}:
        raise ValueError(
            "`mesh` must have devices of this process, since each would read all the data; got "
            f"those of processes {sorted(processes)}, and this is {jax.process_index()}. Make it "
            "of `jax.local_devices()`."
        )
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        raise ValueError(
            "`mesh` cannot be used inside of `jax.set_mesh` with explicit axes; call this outside "
            "of it, or make that mesh of automatic axes, `axis_types=(AxisType.Auto,) * num_axes`."
        )
    return Mesh(mesh.devices, mesh.axis_names)


def num_devices(mesh: Mesh | None) -> int:
    """Number of parts into which rows are cut; 1 without a mesh."""
    return 1 if mesh is None else int(mesh.size)


def over_all_devices(mesh: Mesh) -> NamedSharding:
    """The sharding of an array whose rows are spread over all devices of a mesh."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def by_device(function: Callable[[Any, Any], T], mesh: Mesh | None) -> Callable[[Any, Any], T]:
    """``function(shared, rows)`` on each device, for its own rows; nothing is sent.

    Args:
        function: Of arrays that all devices have, and of arrays of which each has some rows. What
            it returns has rows too.
        mesh: The devices; None for the function as it is.

    Returns:
        A function for use in ``jit``, whose results are those of all devices, one after the other.
        The number of rows must be a multiple of the number of devices.
    """
    if mesh is None:
        return function
    own = PartitionSpec(mesh.axis_names)
    mapped: Callable[[Any, Any], T] = jax.shard_map(
        function, mesh=mesh, in_specs=(PartitionSpec(), own), out_specs=own, check_vma=False
    )
    return mapped


def sums_by_device(function: Callable[[Any, Any], T], mesh: Mesh | None) -> Callable[[Any, Any], T]:
    """Sums over rows, ``function(shared, rows)``, of each device: (devices, ...)."""

    def with_axis(shared: Any, rows: Any) -> T:
        sums: T = jax.tree.map(lambda x: x[None], function(shared, rows))
        return sums

    return by_device(with_axis, mesh)


def total(sums: Any) -> Any:
    """The sums of all devices, from ``sums_by_device``: what they have, and no more, is sent."""
    return jax.tree.map(_over_devices, sums)


@jax.jit
def _over_devices(sums: Array) -> Array:
    return sums.sum(0)
