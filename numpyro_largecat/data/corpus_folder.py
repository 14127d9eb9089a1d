# SPDX-License-Identifier: Apache-2.0
"""Folders of saved corpora: one whole corpus, also while another is written in its place."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

_ABOUT = "corpus.json"
_OURS = re.compile("arrays-[0-9a-f]{32}")  # names of folders of arrays, a new one for each save


def write_corpus(
    folder: Path, arrays: Mapping[str, NDArray[Any]], values: Mapping[str, Any]
) -> None:
    """Write a corpus in place of the one in a folder.

    The arrays go to a new folder inside. ``corpus.json``, which names it, is replaced last, so the
    folder holds the one corpus before that, and the other after. What it does not name is removed,
    at the end and, where another process was killed before it could, at the beginning.

    Args:
        folder: The folder; it is made if it is not there.
        arrays: Arrays with one axis, by name.
        values: What JSON can hold, by name.

    Raises:
        OSError: If it cannot be written. What was there before is there still.
        ValueError: If the folder holds anything else.
    """
    _refuse_others(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _remove_unnamed(folder)
            _write(folder, arrays, values)
        finally:
            _remove_unnamed(folder)
    except OSError as error:
        raise OSError(
            f"the corpus could not be written into {folder}: {error}. If there was one before, it "
            "is there still."
        ) from error


def read_corpus(folder: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Open the arrays that ``write_corpus`` wrote, which stay on disk, and read the values.

    Raises:
        FileNotFoundError: If there is no corpus.
        ValueError: If there are saved fits instead, or a file is cut short, changed, or of another
            corpus.
    """
    path = folder / _ABOUT
    if not path.exists() and _fits_in(folder):
        raise ValueError(f"{folder} holds a saved fit, not a corpus; see the `load` of its class.")
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no corpus, which `Corpus.save` writes.")
    while True:
        about = _described(path)
        inside = folder / about["folder"]
        try:
            arrays = {
                name: _open_array(inside / f"{name}.npy", crc32)
                for name, crc32 in about["arrays"].items()
            }
        except FileNotFoundError as error:
            if _described(path) == about:  # else another corpus has just taken its place
                raise _damaged(inside, f"{error.filename} is not there") from error
        else:
            return arrays, about["values"]


def _refuse_others(folder: Path) -> None:
    """Raise if the folder holds anything but a corpus, or parts of one, and hidden files."""
    if not folder.is_dir():
        return
    if _fits_in(folder):
        raise ValueError(f"{folder} holds saved fits. Name another folder for the corpus.")
    for entry in folder.iterdir():
        is_ours = entry.name == _ABOUT or _OURS.fullmatch(entry.name)
        if not is_ours and not entry.name.startswith("."):  # what file managers write
            raise ValueError(
                f"{folder} must hold a saved corpus and nothing else; it has '{entry.name}'. "
                "Name a folder of its own."
            )


def _fits_in(folder: Path) -> bool:
    return folder.is_dir() and any(e.name.isdecimal() and e.is_dir() for e in folder.iterdir())


def _write(folder: Path, arrays: Mapping[str, NDArray[Any]], values: Mapping[str, Any]) -> None:
    inside = folder / f"arrays-{uuid4().hex}"
    inside.mkdir()
    checksums = {}
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        header = io.BytesIO()
        about_array = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(header, about_array)
        with (inside / f"{name}.npy").open("wb") as file:
            file.write(header.getvalue())
            file.write(array.data)  # says why it fails, unlike ``np.save``
            _flush(file)
        checksums[name] = zlib.crc32(array.data, zlib.crc32(header.getvalue()))
    about = {"folder": inside.name, "arrays": checksums, "values": dict(values)}
    with (inside / _ABOUT).open("w", encoding="utf-8") as file:
        json.dump(about | {"crc32": _crc32(about)}, file)
        _flush(file)
    (inside / _ABOUT).replace(folder / _ABOUT)


def _flush(file: Any) -> None:
    """Have the disk hold the file before ``corpus.json`` names it, also if the power fails."""
    file.flush()
    os.fsync(file.fileno())


def _remove_unnamed(folder: Path) -> None:
    """Remove the arrays that ``corpus.json`` does not name: old ones, and parts of new ones."""
    try:
        named = _described(folder / _ABOUT)["folder"]
    except (FileNotFoundError, ValueError):  # without it no arrays can be used
        named = None
    for entry in folder.iterdir():
        if _OURS.fullmatch(entry.name) and entry.name != named:
            shutil.rmtree(entry, ignore_errors=True)  # what is left, the next save removes


def _described(path: Path) -> dict[str, Any]:
    text = path.read_bytes()
    try:
        about = json.loads(text)
        if about.pop("crc32") != _crc32(about):
            raise ValueError("its checksum is another")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise _damaged(path, "it may be cut short") from error
    return about


def _crc32(about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _open_array(path: Path, crc32: int) -> NDArray[Any]:
    whole = np.memmap(path, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
    if zlib.crc32(whole.data) != crc32:  # first, since NumPy raises anything of other headers
        raise _damaged(path, f"it is cut short, or of another corpus than {_ABOUT} there")
    return np.lib.format.open_memmap(path, mode="r")


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} must be what `Corpus.save` writes; {why}. Save the corpus again.")
