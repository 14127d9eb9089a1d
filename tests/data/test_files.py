# SPDX-License-Identifier: Apache-2.0
"""Compressed files are read as a stream, up to a bound."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import pytest

from numpyro_largecat.data import files
from numpyro_largecat.data.files import most_unpacked, numbered_lines, open_binary


def packed(path: Path, content: bytes) -> int:
    """Write a compressed file, and return to how much it may unpack."""
    path.write_bytes(gzip.compress(content))
    return most_unpacked(path.stat().st_size)


@pytest.mark.parametrize("part", [b"\0", b"\n", b"0 0:1\n"])
def test_a_small_file_that_unpacks_to_much_is_refused_in_little_memory(
    tmp_path: Path, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is one line or many."""
    monkeypatch.setattr(files, "_ALWAYS", 2**16)  # to trace the memory of 1 MiB takes long
    most = packed(tmp_path / "a.gz", part * (2**22 // len(part)))
    need = rf"a\.gz must unpack to at most {most} bytes, .* 1 MiB; it unpacks to more.* `gunzip`"
    tracemalloc.start()
    with pytest.raises(ValueError, match=need), open_binary(tmp_path / "a.gz") as file:
        for _ in file:
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21


@pytest.mark.parametrize("more", [0, 1])
def test_the_bound_is_exact(tmp_path: Path, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that unpacks to the bound is read; one byte more is refused."""
    content = b"a" * 3_000_000
    size = packed(tmp_path / "a.gz", content)
    monkeypatch.setattr("numpyro_largecat.data.files.most_unpacked", lambda _: len(content) - more)
    assert size < len(content)
    if more:
        with (
            pytest.raises(ValueError, match=r"at most 2999999 bytes"),
            open_binary(tmp_path / "a.gz") as file,
        ):
            file.read()
    else:
        with open_binary(tmp_path / "a.gz") as file:
            assert file.read() == content


def test_a_plain_file_has_no_bound(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(2**22))
    with open_binary(tmp_path / "a") as file:
        assert file.read() == bytes(2**22)


def test_members_of_one_file_count_together(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(2**20)) * 4)
    with (
        pytest.raises(ValueError, match=r"a\.gz must unpack to at most"),
        open_binary(tmp_path / "a.gz") as file,
    ):
        file.read()


def test_blank_lines_are_those_before_another_line() -> None:
    lines = [b"\n", b"a\n", b" \n", b"\r\n", b"b\n", b"\n", b"\n"]
    numbers = list(numbered_lines(lines, start=5))
    assert numbers == [(5, b"\n"), (6, b"a\n"), (7, b"\n"), (8, b"\n"), (9, b"b\n")]
