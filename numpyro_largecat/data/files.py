# SPDX-License-Identifier: Apache-2.0
"""Opening data files, plain or compressed, and saying what is wrong with them."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

_GZIP_MAGIC = b"\x1f\x8b"
_MOST_TIMES = 100  # its size; text is about 3 times as long unpacked, and gzip's most is 1032
_ALWAYS = 2**20  # bytes, however small the file is
_BUFFER = 2**16  # bytes read at once


@contextmanager
def open_binary(path: str | PathLike[str]) -> Iterator[io.BufferedReader]:
    """Open a file for reading, plain or compressed with gzip.

    Raises:
        ValueError: If a compressed file is cut short or changed, or unpacks to more than
            ``most_unpacked``, so that a small file cannot fill the memory.
    """
    with open(path, "rb") as raw:
        compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        raw.seek(0)
        if not compressed:
            yield raw
            return
        most = most_unpacked(os.fstat(raw.fileno()).st_size)
        too_long = unpacks_to_more(path, most, "Unpack it with `gunzip`")
        try:
            with gzip.open(raw) as packed:
                yield io.BufferedReader(_Bounded(packed, most, too_long), _BUFFER)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{path} must be a complete gzip file; got {error}. The file may be cut short."
            ) from error


def most_unpacked(size: int) -> int:
    """Bytes to which a compressed file of this size may unpack."""
    return _MOST_TIMES * size + _ALWAYS


def unpacks_to_more(path: str | PathLike[str], most: int, fix: str) -> ValueError:
    """The error for a compressed file that unpacks to more than that."""
    return ValueError(
        f"{path} must unpack to at most {most} bytes, {_MOST_TIMES} times its size and 1 MiB; it "
        f"unpacks to more, as files do that are made to fill the memory. {fix} and read the plain "
        "file, if it is meant to be so."
    )


class _Bounded(io.RawIOBase):
    """The first bytes of a file, and an error in place of those after."""

    def __init__(self, file: Any, most: int, error: ValueError) -> None:
        self._file, self._left, self._error = file, most, error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size: int = self._file.readinto(buffer)
        self._left -= size
        if self._left < 0:
            raise self._error
        return size


def malformed(
    path: str | PathLike[str], line_number: int, need: str, line: bytes | str | None = None
) -> ValueError:
    """The error for a line that does not follow the format: file, line, need and what came."""
    got = "" if line is None else f"; got {line[:60]!r}"
    return ValueError(f"{path}, line {line_number}: need {need}{got}.")


def numbered_lines(file: Iterable[bytes], start: int = 1) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, without blank ones at the end of the file."""
    first_blank = None
    for number, line in enumerate(file, start):
        if not line.strip():
            first_blank = first_blank or number
            continue
        for blank in range(first_blank or number, number):
            yield blank, b"\n"
        first_blank = None
        yield number, line


def without_underscores(line: bytes) -> bytes:
    """The line, or ValueError where Python would take ``1_0`` for a number, unlike the format."""
    if b"_" in line:
        raise ValueError("numbers have no underscores")
    return line
