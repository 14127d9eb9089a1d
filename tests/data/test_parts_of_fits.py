# SPDX-License-Identifier: Apache-2.0
"""Fits of several processes: whole or not there, and put together from their parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from numpyro_largecat.data.fit_folders import FitFolder, SavedArrays
from numpyro_largecat.data.parts_of_fits import (
    FolderOfParts,
    PartFolder,
    fit_folder,
    joined,
    parts_of,
)

KIND = "test"
ARRAYS = {"a": np.arange(6.0), "b": np.asarray(jnp.ones(3, jnp.bfloat16))}


def write(path, process, number, arrays, num_processes=2, keep=2):
    folder = path / f"part_{process}_of_{num_processes}"
    folder.mkdir(parents=True, exist_ok=True)
    PartFolder(folder, KIND, keep).write(number, arrays, {"step": number})
    return folder / f"{number}.npz"


def test_what_is_read_is_what_was_written(tmp_path):
    write(tmp_path, 0, 7, ARRAYS)
    saved = PartFolder(tmp_path / "part_0_of_2", KIND).read(7)
    assert saved.number == 7 and saved.about == {"step": 7}
    for name, array in ARRAYS.items():
        assert saved.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(saved.arrays[name], array)


def test_a_fit_is_there_when_all_its_parts_are(tmp_path):
    folder = FolderOfParts(tmp_path, KIND, 2)
    write(tmp_path, 0, 7, {"a": np.zeros(2)})
    write(tmp_path, 0, 9, {"a": np.zeros(2)})
    assert folder.numbers() == []
    with pytest.raises(FileNotFoundError, match="no saved fit of which all parts are there"):
        folder.read()
    write(tmp_path, 1, 7, {"b": np.ones(2)})
    assert folder.numbers() == [7]
    assert set(folder.read().arrays) == {"a", "b"}


def test_the_newest_of_runs_with_other_numbers_of_processes_is_read(tmp_path):
    for process in range(2):
        write(tmp_path, process, 5, {f"of two, {process}": np.zeros(1)})
    for process in range(3):
        write(tmp_path, process, 8, {f"of three, {process}": np.zeros(1)}, num_processes=3)
    saved = fit_folder(tmp_path, KIND).read()
    assert saved.number == 8 and set(saved.arrays) == {f"of three, {i}" for i in range(3)}


def test_the_newest_are_kept_and_later_ones_of_an_earlier_run_are_removed(tmp_path):
    for number in (3, 5, 20, 7):
        write(tmp_path, 0, number, ARRAYS)
    assert PartFolder(tmp_path / "part_0_of_2", KIND).numbers() == [5, 7]


@pytest.mark.parametrize("damage", [lambda b: b[:-30], lambda b: b[:200] + b"x" + b[201:]])
def test_a_damaged_part_is_refused(tmp_path, damage):
    path = write(tmp_path, 0, 7, ARRAYS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"7\.npz is damaged.*Remove it"):
        PartFolder(path.parent, KIND).read(7)


def test_a_part_of_another_kind_is_refused(tmp_path):
    path = write(tmp_path, 0, 7, ARRAYS)
    with pytest.raises(ValueError, match="must hold a mixture in format 1; it holds a test"):
        PartFolder(path.parent, "mixture").read(7)


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    folder = FolderOfParts(tmp_path, KIND, 2)
    folder.make()
    own = next(tmp_path.iterdir())
    (own / "7.npz.part").write_bytes(b"half")
    folder.make()
    assert list(own.iterdir()) == [] and folder.numbers() == []


def test_several_processes_do_not_go_on_in_the_folder_of_one(tmp_path, monkeypatch):
    FitFolder(tmp_path, KIND).write(1, {"a": np.zeros(2)}, {})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"has a fit of one process.*Name another folder"):
        fit_folder(tmp_path, KIND)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
@pytest.mark.parametrize("spec", [("model", None), (None, "model"), (None, None)])
def test_parts_make_the_array_without_its_padding(spec):
    mesh = jax.make_mesh((4, 2), ("model", "batch"), (AxisType.Auto,) * 2)
    whole = np.arange(32.0).reshape(8, 4)
    array = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*spec)))
    parts = parts_of("w", array, {0: 5})
    if spec == (None, None):  # not spread, and so without padding
        np.testing.assert_array_equal(parts["w"], whole)
        return
    saved = joined(SavedArrays(0, parts, {}))
    np.testing.assert_array_equal(saved.arrays["w"], whole[:5])
    parts.popitem()
    with pytest.raises(ValueError, match=r"numbers of array 'w' are missing"):
        joined(SavedArrays(0, parts, {}))
