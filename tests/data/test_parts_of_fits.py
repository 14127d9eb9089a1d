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
    Write,
    fit_folder,
    joined_fit,
    parts_of,
)

KIND = "test"
ARRAYS = {"a": np.arange(6.0), "b": np.asarray(jnp.ones(3, jnp.bfloat16))}


def folder_of(path, process=0, num_processes=2, run="a", keep=2):
    return FolderOfParts(path, KIND, keep, process, num_processes, run)


def write(path, process, number, arrays=ARRAYS, **options):
    folder_of(path, process, **options).write(number, arrays, {"step": number})


def of_process(path, process=0):
    return PartFolder(path / f"part_{process}_of_2", KIND)


def test_what_is_read_is_what_was_written(tmp_path):
    write(tmp_path, 0, 7)
    saved = of_process(tmp_path).read(Write(7, "a"))
    assert saved.number == 7 and saved.about == {"step": 7}
    for name, array in ARRAYS.items():
        assert saved.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(saved.arrays[name], array)


def test_a_fit_is_there_when_all_its_parts_are(tmp_path):
    write(tmp_path, 0, 7, {"a": np.zeros(2)})
    (tmp_path / "part_1_of_2").mkdir()
    assert folder_of(tmp_path).numbers() == []
    with pytest.raises(FileNotFoundError, match="no saved fit of which all parts are there"):
        folder_of(tmp_path).read()
    write(tmp_path, 1, 7, {"b": np.ones(2)})
    assert folder_of(tmp_path).numbers() == [7]
    assert set(folder_of(tmp_path).read().arrays) == {"a", "b"}


def test_parts_of_two_runs_do_not_go_together(tmp_path):
    for process in range(2):
        write(tmp_path, process, 5)
    write(tmp_path, 0, 7, run="a")
    write(tmp_path, 1, 7, run="b")
    assert folder_of(tmp_path).numbers() == [5]


def test_the_newest_of_runs_with_other_numbers_of_processes_is_read(tmp_path):
    for process in range(2):
        write(tmp_path, process, 5, {f"of two, {process}": np.zeros(1)})
    for process in range(3):
        write(tmp_path, process, 8, {f"of three, {process}": np.zeros(1)}, num_processes=3)
    saved = fit_folder(tmp_path, KIND).read()
    assert saved.number == 8 and set(saved.arrays) == {f"of three, {i}" for i in range(3)}


def test_no_part_of_the_newest_whole_fits_is_removed(tmp_path):
    """Also where another process is many writes behind."""
    for process in range(2):
        write(tmp_path, process, 1)
        write(tmp_path, process, 2)
    for number in range(3, 9):
        write(tmp_path, 0, number)
    assert folder_of(tmp_path).numbers() == [1, 2]
    write(tmp_path, 1, 8)
    assert folder_of(tmp_path).numbers() == [2, 8]
    assert [what.number for what in of_process(tmp_path, 1).writes()] == [2, 8]


def test_a_new_run_removes_what_no_other_process_has(tmp_path):
    for process in range(2):
        write(tmp_path, process, 5)
    write(tmp_path, 0, 7)
    folder_of(tmp_path, run="b").make()
    assert of_process(tmp_path).writes() == [Write(5, "a")]


@pytest.mark.parametrize("lost", ["folder", "files"])
def test_fits_whose_parts_are_lost_are_not_taken_for_none(tmp_path, lost):
    write(tmp_path, 0, 5)
    if lost == "files":
        write(tmp_path, 0, 7)
        (tmp_path / "part_1_of_2").mkdir()
    with pytest.raises(
        ValueError, match=r"none of which all are there.*Bring back what is missing"
    ):
        folder_of(tmp_path).numbers()


@pytest.mark.parametrize("damage", [lambda b: b[:-30], lambda b: b[:200] + b"x" + b[201:]])
def test_a_damaged_part_is_refused(tmp_path, damage):
    write(tmp_path, 0, 7)
    path = tmp_path / "part_0_of_2" / "7_a.npz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"7_a\.npz is damaged.*Remove it"):
        np.asarray(of_process(tmp_path).read(Write(7, "a")).arrays["a"])


def test_a_part_of_another_kind_is_refused(tmp_path):
    write(tmp_path, 0, 7)
    with pytest.raises(ValueError, match="must hold a mixture; it holds a test"):
        PartFolder(tmp_path / "part_0_of_2", "mixture").read(Write(7, "a"))


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    folder = folder_of(tmp_path)
    folder.make()
    own = next(tmp_path.iterdir())
    (own / "7_a.npz.part").write_bytes(b"half")
    folder.make()
    assert list(own.iterdir()) == []


def test_several_processes_do_not_go_on_in_the_folder_of_one(tmp_path, monkeypatch):
    FitFolder(tmp_path, KIND).write(1, {"a": np.zeros(2)}, {})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"has a fit of one process.*Name another folder"):
        fit_folder(tmp_path, KIND)


def test_a_fit_of_one_of_several_processes_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    fit_folder(tmp_path, KIND).write(3, ARRAYS, {})
    assert fit_folder(tmp_path, KIND).numbers() == [3]
    assert set(fit_folder(tmp_path, KIND).read().arrays) == set(ARRAYS)


def test_names_that_look_like_places_stay_as_they_are():
    arrays = {"w@x": np.zeros(2), "iterates of a@1": np.ones(1)}
    assert joined_fit(SavedArrays(0, arrays, {}, {})).arrays.keys() == arrays.keys()


def test_rows_are_read_from_the_parts_that_have_them(tmp_path):
    """No other file is opened, and no part is read for rows that it does not have."""
    whole = np.arange(24.0).reshape(6, 4)
    for process in range(2):
        rows = whole[3 * process : 3 * process + 3]
        write(tmp_path, process, 7, {f"w@6,4@{3 * process},0": rows})
    array = joined_fit(folder_of(tmp_path).read()).arrays["w"]
    assert array.shape == whole.shape and array.dtype == whole.dtype
    np.testing.assert_array_equal(array[1:5, 2:], whole[1:5, 2:])
    np.testing.assert_array_equal(np.asarray(array), whole)
    (tmp_path / "part_1_of_2" / "7_a.npz").unlink()
    np.testing.assert_array_equal(array[:3, :], whole[:3])
    with pytest.raises(ValueError, match="is damaged"):
        array[2:4, :]


def test_parts_that_lie_over_each_other_are_refused():
    """Their sizes alone do not tell: together they have as many numbers as the array."""
    parts = {"w@8,4@0,0": np.zeros((4, 4)), "w@8,4@2,0": np.zeros((4, 4))}
    with pytest.raises(ValueError, match="two parts have the same numbers"):
        joined_fit(SavedArrays(0, parts, {}, {}))


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
    saved = joined_fit(SavedArrays(0, parts, {}, {}))
    np.testing.assert_array_equal(saved.arrays["w"], whole[:5])
    parts.popitem()
    with pytest.raises(ValueError, match=r"numbers of array 'w' are missing"):
        joined_fit(SavedArrays(0, parts, {}, {}))
