# SPDX-License-Identifier: Apache-2.0
"""Folders of fits: one is whole or not there, whatever happens to the disk or the process."""

from __future__ import annotations

import gc
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from numpyro_largecat.data import fit_folders
from numpyro_largecat.data.fit_folders import FitFolder

ARRAYS = {"w": np.arange(6.0).reshape(2, 3), "empty": np.zeros((0, 4), np.int32), "n": np.array(3)}
ABOUT = {"name": "first", "sizes": [1, 2]}


@pytest.fixture
def folder(tmp_path: Path) -> FitFolder:
    """Two fits, of which the second has other numbers."""
    found = FitFolder(tmp_path / "fits", "Fit", keep=2)
    found.write(1, ARRAYS, ABOUT)
    found.write(4, {"w": ARRAYS["w"] + 1}, {"name": "second"})
    return found


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_the_newest_is_read(folder: FitFolder) -> None:
    found = folder.read()
    assert (found.number, found.about) == (4, {"name": "second"})
    np.testing.assert_array_equal(found.arrays["w"], ARRAYS["w"] + 1)


def test_shapes_and_types_are_kept(tmp_path: Path) -> None:
    folder = FitFolder(tmp_path, "Fit")
    folder.write(0, ARRAYS, ABOUT)
    found = folder.read()
    assert found.about == ABOUT
    assert found.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (found.arrays[name].shape, found.arrays[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(found.arrays[name], array)


def test_the_newest_are_kept(folder: FitFolder) -> None:
    folder.write(7, ARRAYS, ABOUT)
    assert names_in(folder.path) == ["4", "7"]


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    folder = FitFolder(tmp_path, "Fit")
    for act in (folder.make, folder.numbers, folder.read, lambda: folder.write(0, ARRAYS, ABOUT)):
        with pytest.raises(ValueError, match=r"nothing else; it has 'thesis\.txt'"):
            act()
    assert names_in(tmp_path) == ["thesis.txt"]


def test_a_numbered_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "photo.jpg").write_text("")
    with pytest.raises(ValueError, match="nothing else; it has '2024'"):
        FitFolder(tmp_path, "Fit").make()
    assert (tmp_path / "2024" / "photo.jpg").exists()


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fit").write_text("")
    with pytest.raises(ValueError, match="must be a folder of saved fits; it is a file"):
        FitFolder(tmp_path / "fit", "Fit").numbers()


def test_nothing_is_no_fit(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no saved fit"):
        FitFolder(tmp_path / "none", "Fit").read()


def test_fits_of_another_kind_are_refused(folder: FitFolder) -> None:
    with pytest.raises(ValueError, match=r"must hold a Tree; it holds a Fit"):
        FitFolder(folder.path, "Tree").read()


def test_fits_of_a_later_format_are_refused(
    folder: FitFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_folders, "FORMAT", 3)
    folder.write(7, ARRAYS, ABOUT)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="in format 2; it holds one in format 3"):
        folder.read()


def changes(content: bytes) -> list[bytes]:
    """The content of a file after some accidents."""
    middle = len(content) // 2
    flipped = bytearray(content)
    flipped[middle] ^= 1
    return [b"", content[:middle], content[:-1], bytes(flipped), content + b"x"]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_fit_is_refused_or_right(folder: FitFolder) -> None:
    """Each file cut, changed or gone: what is read has its checksum, and the error says what to do.

    Orbax leaves coroutines behind where it fails.
    """
    want = {"w": ARRAYS["w"] + 1}
    refused = 0
    files = [path for path in (folder.path / "4").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        for changed in [*changes(content), None]:
            path.unlink()
            if changed is not None:
                path.write_bytes(changed)
            try:
                found = folder.read()
            except ValueError as error:
                refused += 1
                assert "Remove it to use the fit before it" in str(error)
            else:
                assert found.about in ({"name": "second"}, ABOUT)
                wanted = want if found.number == 4 else ARRAYS
                np.testing.assert_array_equal(found.arrays["w"], wanted["w"])
            path.write_bytes(content)
    gc.collect()  # for the warnings to come here
    assert refused > len(files)
    np.testing.assert_array_equal(folder.read().arrays["w"], want["w"])


def test_the_fit_before_a_damaged_one_is_there(folder: FitFolder) -> None:
    (folder.path / "4" / "about" / "metadata").write_bytes(b"")
    with pytest.raises(ValueError, match=r"/4 is damaged.* Remove it to use the fit before it"):
        folder.read()
    shutil.rmtree(folder.path / "4")
    assert folder.read().about == ABOUT


def test_parts_of_a_process_that_was_killed_are_removed(folder: FitFolder) -> None:
    """While it wrote one, and while it removed another."""
    (folder.path / "7.orbax-checkpoint-tmp").mkdir()
    shutil.rmtree(folder.path / "1" / "about")
    assert folder.numbers() == [4]
    folder.write(8, ARRAYS, ABOUT)
    assert names_in(folder.path) == ["4", "8"]


def test_uses_that_overlap_leave_loggers_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    """As those of two threads do, of which the first to begin is the first to end."""
    absl = logging.getLogger("absl")
    before = absl.level, list(absl.filters)
    first, second = fit_folders._quiet(), fit_folders._quiet()
    with caplog.at_level(logging.ERROR, "absl"):
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        absl.error("dropped")
        second.__exit__(None, None, None)
        absl.error("kept")
    assert [record.message for record in caplog.records] == ["kept"]
    assert (absl.level, absl.filters) == before


def test_a_full_disk_leaves_what_was_there(folder: FitFolder) -> None:
    code = """
import resource, sys
import numpy as np
from numpyro_largecat.data.fit_folders import FitFolder
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
arrays = {name: np.random.default_rng(0).random(100_000) for name in "abcdefgh"}
try:
    FitFolder(sys.argv[1], "Fit", keep=2).write(7, arrays, {})
except OSError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder.path)], capture_output=True, text=True, check=True
    )
    assert "could not be written into" in done.stdout
    assert done.stderr == ""  # nor of the arrays that are still written then
    assert names_in(folder.path) == ["1", "4"]
    assert folder.read().number == 4
