# SPDX-License-Identifier: Apache-2.0
"""Arrays of npz files, and what their headers may claim."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks.readers.npz import read_npz


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_read_by_name(tmp_path: Path, save) -> None:
    arrays = {"x": np.arange(6).reshape(2, 3), "y": np.asfortranarray(np.eye(3)), "z": ["a", "bc"]}
    save(tmp_path / "a.npz", **arrays)
    for name, array in zip("zyx", read_npz(tmp_path / "a.npz", ("z", "y", "x")), strict=True):
        np.testing.assert_array_equal(array, arrays[name])


def test_a_missing_array_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(2))
    with pytest.raises(ValueError, match=r"a\.npz must be an npz file with arrays x, w; got .*w"):
        read_npz(tmp_path / "a.npz", ("x", "w"))


def test_objects_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{}], object))
    with pytest.raises(ValueError, match=r"a\.npz must be a complete npz file"):
        read_npz(tmp_path / "a.npz", ("x",))


def test_small_files_that_unpack_to_much_are_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(2**20))
    with pytest.raises(ValueError, match=r"at most \d+ bytes, .*Save its arrays with `np\.savez`"):
        read_npz(tmp_path / "a.npz", ("x",))
    np.savez(tmp_path / "a.npz", x=np.zeros(2**20))
    assert read_npz(tmp_path / "a.npz", ("x",))[0].shape == (2**20,)


@pytest.mark.parametrize("size", [3, 2**40, 2**62, -1])
def test_headers_of_more_than_the_file_holds_are_refused(tmp_path: Path, size: int) -> None:
    """Without the memory that they ask for."""
    array = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(array, header)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", array.getvalue() + bytes(16))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"a\.npz must be a complete npz file"):
        read_npz(tmp_path / "a.npz", ("x",))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
