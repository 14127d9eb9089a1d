# SPDX-License-Identifier: Apache-2.0
"""Damaged files, and what a reader must make of them: ``make fuzz`` tries many more."""

from __future__ import annotations

import gzip
import os
import re
import tracemalloc
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from numpyro_largecat.data import files
from numpyro_largecat.data.files import most_unpacked
from tests.reference_files import Refused

FEW = 200  # files for each reader
NUM_FILES = int(os.environ.get("FUZZ_FILES", FEW))
SPLICED = [
    *(b"0", b"7", b"-", b"+", b"-1", b"+2", b"00", b"1e9", b"1e999", b"2147483648", b"9" * 20),
    *(b"1048600", b"3" * 5000, b"\n", b"\r\n", b"\r", b"\n\n", b" ", b"\t", b"\x0b", b"\0"),
    *(b"\xff\xfe", b"\xc3", "é".encode(), "٣".encode(), "\u2028".encode(), b":", b",", b"_", b'"'),
    *(b"nan", b"inf", b".", b"<eos>", b"[", b"{", b"}", b"\x1f\x8b"),
]

many_files = settings(
    max_examples=NUM_FILES,
    derandomize=NUM_FILES == FEW,  # `make fuzz` tries others each time
    deadline=timedelta(seconds=20),  # a file of a few bytes takes milliseconds
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # one path for all files
)


class Format(NamedTuple):
    """A reader, and what it should give."""

    read: Callable[[Path], Any]  # the content of a file, as plain values
    reference: Callable[[bytes], Any]  # the same, of its bytes
    files: tuple[bytes, ...]  # small valid ones
    is_text: bool = True  # so that errors name a line


@st.composite
def changed(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with one to four changes."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        stop = min(start + draw(st.integers(0, 8)), len(content))
        kinds = ["splice", "splice", "splice", "flip", "delete", "cut", "repeat", "move"]
        kind = draw(st.sampled_from(kinds))
        before, part, after = content[:start], content[start:stop], content[stop:]
        if kind == "flip":
            mask = draw(st.integers(1, 255))
            content = before + bytes(byte ^ mask for byte in part) + after
        elif kind == "splice":
            content = before + draw(st.sampled_from(SPLICED)) + draw(st.sampled_from([part, b""]))
            content += after
        elif kind == "delete":
            content = before + after
        elif kind == "cut":
            content = before
        elif kind == "repeat":
            content = before + part * draw(st.integers(2, 40)) + after
        else:
            place = draw(st.integers(0, len(content)))
            content = content[:place] + content[start:] + content[place:]
    return content


@st.composite
def damaged_files(draw: st.DrawFn, case: Format) -> bytes:
    """A file of this format with changes: plain, compressed, or changed after compression."""
    content = draw(st.sampled_from(case.files))
    how = draw(st.sampled_from(["plain", "gzip", "damaged gzip"]))
    if how == "damaged gzip":
        return draw(changed(gzip.compress(content, mtime=0)))
    content = draw(changed(content))
    return gzip.compress(content, mtime=0) if how == "gzip" else content


def check(case: Format, path: Path, content: bytes) -> None:
    """The reader gives what the reference does, or a ValueError with the file and the line."""
    path.write_bytes(content)
    plain: bytes | None = content
    if content[:2] == b"\x1f\x8b":
        try:
            plain = gzip.decompress(content)
        except (EOFError, OSError, zlib.error):
            plain = None
    try:
        if plain is None or len(plain) > most_unpacked(len(content)):
            raise Refused
        expected = case.reference(plain)
    except Refused:
        with pytest.raises(ValueError) as error:
            read_in_bounded_memory(case, path, plain or content)
        assert type(error.value) is ValueError, f"a {type(error.value).__name__} is raised"
        named = re.match(rf"{re.escape(str(path))}(, line (\d+): need | must )", str(error.value))
        assert named, f"the file is not named: {error.value}"
        is_unpacking = "gzip file" in str(error.value) or "unpack" in str(error.value)
        if case.is_text and not is_unpacking:
            assert named[2], f"no line is named: {error.value}"
            if plain is not None:
                lines = re.split(rb"\r\n|\r|\n", plain)
                assert 1 <= int(named[2]) <= len(lines) + 1, str(error.value)
    else:
        assert read_in_bounded_memory(case, path, plain or b"") == expected


def read_in_bounded_memory(case: Format, path: Path, plain: bytes) -> Any:
    """What the reader gives, if it takes at most some hundred times the memory of the file."""
    tracemalloc.start()
    try:
        return case.read(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**26 + 400 * len(plain), f"{len(plain)} bytes took {peak}"


def check_bomb(case: Format, path: Path, part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that unpacks to a thousand times its size is refused in little memory."""
    monkeypatch.setattr(files, "_ALWAYS", 2**14)  # to trace the memory of 1 MiB takes long
    path.write_bytes(gzip.compress(part * (2**20 // len(part))))
    most = most_unpacked(path.stat().st_size)
    assert most < 2**18
    with pytest.raises(ValueError) as error:
        read_in_bounded_memory(case, path, bytes(most))
    text = str(error.value)
    unpacks = f"{path} must unpack to at most {most} bytes, 100 times its size and 1 MiB; it "
    assert text.startswith((unpacks, f"{path}, line "))
    assert "line" in text or "Unpack it with `gunzip` and read the plain file" in text
