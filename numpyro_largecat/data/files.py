# SPDX-License-Identifier: Apache-2.0
"""Opening data files, plain or compressed, and saying what is wrong with them."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike

_GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def open_binary(path: str | PathLike[str]) -> Iterator[io.BufferedIOBase]:
    """Open a file for reading, plain or compressed with gzip."""
    with open(path, "rb") as raw:
        compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        raw.seek(0)
        if not compressed:
            yield raw
            return
        try:
            with gzip.open(raw) as file:
                yield file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{path} must be a complete gzip file; got {error}. The file may be cut short."
            ) from error


def malformed(
    path: str | PathLike[str], line_number: int, need: str, line: bytes | str | None = None
) -> ValueError:
    """The error for a line that does not follow the format: file, line, need and what came."""
    got = "" if line is None else f"; got {line[:60]!r}"
    return ValueError(f"{path}, line {line_number}: need {need}{got}.")


def numbered_lines(file: Iterable[bytes], start: int = 1) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, without blank ones at the end of the file."""
    blank: list[tuple[int, bytes]] = []
    for number, line in enumerate(file, start):
        if not line.strip():
            blank.append((number, line))
            continue
        yield from blank
        blank = []
        yield number, line
