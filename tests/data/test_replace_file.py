# SPDX-License-Identifier: Apache-2.0
"""A file that is replaced is the whole old one or the whole new one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from numpyro_largecat.data.replace_file import replace_file
from tests.full_disk import full_disk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "fit.nc").write_bytes(b"old")
    return tmp_path / "fit.nc"


def test_a_file_is_written_where_there_is_none(tmp_path: Path) -> None:
    replace_file(str(tmp_path / "fit.nc"), b"new")
    assert (tmp_path / "fit.nc").read_bytes() == b"new"


def test_an_open_file_stays_as_it_is(path: Path) -> None:
    with path.open("rb") as opened:
        replace_file(path, b"new")
        assert (opened.read(), path.read_bytes()) == (b"old", b"new")
    assert os.listdir(path.parent) == ["fit.nc"]


def test_permissions_stay(path: Path) -> None:
    path.chmod(0o640)
    replace_file(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    replace_file(tmp_path / "fit.nc", b"new")
    assert (tmp_path / "fit.nc").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_link_is_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "link"
    link.symlink_to(path)
    replace_file(link, b"new")
    assert link.is_symlink() and path.read_bytes() == b"new"


def test_what_a_killed_process_left_is_written_over(path: Path) -> None:
    (path.parent / "fit.nc.part").write_bytes(b"longer than what is new")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(path.parent) == ["fit.nc"]


@pytest.mark.parametrize("size", [0, 3, 99_999])
def test_a_full_disk_leaves_the_old_file(path: Path, size: int) -> None:
    with full_disk(size), pytest.raises(OSError, match=r"fit\.nc could not .*too large"):
        replace_file(path, bytes(100_000))
    assert path.read_bytes() == b"old" and os.listdir(path.parent) == ["fit.nc"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["fsync", "replace", "chmod"])
def test_a_failure_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(os, name, fails)
    with pytest.raises(error):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(path.parent) == ["fit.nc"]


def test_a_file_that_is_protected_is_not_replaced(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *args: False)  # root may write any file
    with pytest.raises(OSError, match="not a file that may be written"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match="not a file that may be written"):
            replace_file(path, b"new")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"no/fit\.nc could not be written: .*No such file"):
        replace_file(tmp_path / "no" / "fit.nc", b"new")
