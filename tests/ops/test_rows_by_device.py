# SPDX-License-Identifier: Apache-2.0
"""Sums over rows that are spread over devices, and meshes that are refused."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from numpyro_largecat.ops.rows_by_device import (
    by_device,
    mesh_of_one_process,
    over_all_devices,
    sums_by_device,
    total,
)

if len(jax.devices()) < 6:  # on a machine whose accelerators are fewer
    pytest.skip("needs six devices", allow_module_level=True)

MESH = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("a", "b"))
ROWS = np.arange(24.0, dtype=np.float32).reshape(12, 2)


def scaled(scale, rows):
    return {"rows": scale * rows["x"]}


@pytest.mark.smoke
def test_rows_stay_in_order() -> None:
    rows = jax.device_put({"x": ROWS}, over_all_devices(MESH))
    found = jax.jit(by_device(scaled, MESH))(3.0, rows)["rows"]
    np.testing.assert_array_equal(found, 3 * ROWS)
    assert found.sharding.shard_shape(found.shape) == (2, 2)


@pytest.mark.parametrize("mesh", [None, MESH])
def test_sums_are_those_of_all_rows(mesh) -> None:
    sums = jax.jit(sums_by_device(lambda scale, rows: (scale * rows).sum(0), mesh))
    np.testing.assert_array_equal(total(sums(2.0, jnp.asarray(ROWS))), 2 * ROWS.sum(0))


def test_what_is_not_a_mesh_is_refused() -> None:
    with pytest.raises(TypeError, match="`mesh` must be a mesh of devices"):
        mesh_of_one_process(jax.devices())


@dataclass(frozen=True)
class Device:
    """What is known of a device of some process."""

    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def test_devices_of_other_processes_are_refused() -> None:
    mesh = Mesh(np.array([Device(0), Device(1)]), ("rows",))
    with pytest.raises(ValueError, match=r"devices of this process.*`jax.local_devices\(\)`"):
        mesh_of_one_process(mesh)


def test_a_context_of_explicit_axes_is_refused() -> None:
    mesh = jax.make_mesh((6,), ("rows",), (AxisType.Explicit,), devices=jax.devices()[:6])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"`jax\.set_mesh` with explicit axes"):
        mesh_of_one_process(mesh)


def test_a_context_of_automatic_axes_is_taken() -> None:
    with jax.set_mesh(MESH):
        mesh = mesh_of_one_process(MESH)
        rows = jax.device_put(ROWS, over_all_devices(mesh))
        sums = jax.jit(sums_by_device(lambda scale, rows: scale * rows.sum(0), mesh))(2.0, rows)
        np.testing.assert_array_equal(total(sums), 2 * ROWS.sum(0))
