# SPDX-License-Identifier: Apache-2.0
"""Fits whose arrays are spread over devices and processes, saved by their parts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.data.fit_folders import (
    FORMAT,
    FitFolder,
    SavedArrays,
    plain_value,
    told_of_damage,
)
from numpyro_largecat.data.replace_file import replace_file

_AT = "@"  # between the name of an array, its shape, and the place of a part in it
_PART = "part_"  # begins the name of the folder of a process
_ARRAY, _ABOUT = "array ", "about"  # in the names of what a file holds


def parts_of(name: str, array: Any, sizes: Mapping[int, int]) -> dict[str, NDArray[Any]]:
    """The parts of an array that the devices of this process hold, by name and place.

    Nothing is copied where it is in the host's memory. An array that is not spread is one part, by
    its name alone.

    Args:
        name: Name of the array.
        array: One of JAX.
        sizes: Rows of those axes that have padding, without it.
    """
    if not isinstance(array, jax.Array) or array.is_fully_replicated:
        return {name: np.asarray(array)}
    shape = [sizes.get(axis, size) for axis, size in enumerate(array.shape)]
    parts = {}
    for shard in array.addressable_shards:
        starts = [index.start or 0 for index in shard.index]
        room = tuple(slice(max(0, n - a)) for n, a in zip(shape, starts, strict=True))
        part = np.asarray(shard.data)[room]
        if part.size:
            parts[f"{name}{_AT}{_numbers(shape)}{_AT}{_numbers(starts)}"] = part
    return parts


def joined(saved: SavedArrays) -> SavedArrays:
    """A fit with its parts put together.

    Raises:
        ValueError: If a part is missing.
    """
    arrays: dict[str, NDArray[Any]] = {}
    held: dict[str, int] = {}
    for key, part in saved.arrays.items():
        name, *place = key.split(_AT)
        if not place:
            arrays[name] = part
            continue
        shape, starts = ([int(n) for n in numbers.split(",")] for numbers in place)
        whole = arrays.setdefault(name, np.empty(shape, part.dtype))
        whole[tuple(slice(a, a + n) for a, n in zip(starts, part.shape, strict=True))] = part
        held[name] = held.get(name, 0) + part.size
    for name, size in held.items():
        if size != arrays[name].size:
            raise ValueError(f"{arrays[name].size - size} numbers of array '{name}' are missing.")
    return saved._replace(arrays=arrays)


class PartFolder:
    """The fits that one of several processes has written, each its part in one file.

    (Orbax has one process of several write what is NumPy's.) A file is written under another name
    and renamed, and each array in it has a checksum, as those of every zip archive do.

    Args:
        path: The folder.
        kind: Name of the class whose fits they are.
        keep: Number of fits that are kept.
    """

    def __init__(self, path: Path, kind: str, keep: int = 1) -> None:
        self.path, self.kind, self.keep = path, kind, keep

    def numbers(self) -> list[int]:
        """Numbers of the fits in the folder, in order."""
        return sorted(int(p.stem) for p in self.path.glob("*.npz") if p.stem.isdecimal())

    def write(self, number: int, arrays: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write a part; then remove all but the newest, and those of larger number.

        The larger ones are of an earlier run, in which another process did not get as far.

        Raises:
            OSError: If it cannot be written. What was there before is there still.
        """
        dtypes = {name: str(array.dtype) for name, array in arrays.items()}
        told = {"kind": self.kind, "format": FORMAT, "dtypes": dtypes, "about": about}
        text = json.dumps(told, default=plain_value).encode()
        members = {_ARRAY + name: array for name, array in arrays.items()}
        members[_ABOUT] = np.frombuffer(text, np.uint8)
        replace_file(self._file(number), lambda file: np.savez(file, **members))
        known = self.numbers()
        kept = [other for other in known if other <= number][-self.keep :]
        for other in set(known) - set(kept):
            self._file(other).unlink()

    def read(self, number: int) -> SavedArrays:
        """Read a part.

        Raises:
            ValueError: If it is damaged, or of another kind or format.
        """
        path = self._file(number)
        with told_of_damage(path), path.open("rb") as file, np.load(file) as found:
            told = json.loads(found[_ABOUT].tobytes())
            arrays = {
                name: found[_ARRAY + name].view(np.dtype(dtype))  # of types that are not NumPy's
                for name, dtype in told["dtypes"].items()
            }
        if told["kind"] != self.kind or told["format"] != FORMAT:
            raise ValueError(
                f"{path} must hold a {self.kind} in format {FORMAT}; it holds a {told['kind']} in "
                f"format {told['format']}."
            )
        return SavedArrays(number, arrays, told["about"])

    def _file(self, number: int) -> Path:
        return self.path / f"{number}.npz"


class FolderOfParts:
    """A folder of fits of which each process has written its own part.

    Args:
        path: The folder, which all processes see.
        kind: Name of the class whose fits they are.
        keep: Number of fits that are kept.
    """

    def __init__(self, path: Any, kind: str, keep: int) -> None:
        self.path, self.kind, self.keep = Path(path).absolute(), kind, keep
        own = f"{_PART}{jax.process_index()}_of_{jax.process_count()}"
        self._own = PartFolder(self.path / own, kind, max(keep, 2))  # another may be one behind

    def make(self) -> None:
        """Make the folder of this process, if it is not there.

        Raises:
            OSError: If it cannot be made, or not be written into.
        """
        self._own.path.mkdir(parents=True, exist_ok=True)
        for unfinished in self._own.path.glob("*.part"):  # of a process that was killed
            unfinished.unlink(missing_ok=True)
        tempfile.TemporaryFile(dir=self._own.path).close()

    def numbers(self) -> list[int]:
        """Numbers of the fits of which all parts are there, in order."""
        return sorted({number for parts in self._all_parts() for number in _whole(parts)})

    def write(self, number: int, arrays: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write the part of this process."""
        self.make()
        self._own.write(number, arrays, about)

    def read(self) -> SavedArrays:
        """Read the newest fit of which all parts are there.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is damaged, or of another kind or format.
        """
        numbers = self.numbers()
        if not numbers:
            raise FileNotFoundError(f"{self.path} has no saved fit of which all parts are there.")
        newest = next(parts for parts in self._all_parts() if numbers[-1] in _whole(parts))
        first, *others = (part.read(numbers[-1]) for part in newest)
        arrays = dict(first.arrays)
        for other in others:
            arrays |= other.arrays
        return first._replace(arrays=arrays)

    def _all_parts(self) -> list[list[PartFolder]]:
        """The folders of the processes of each run, which may have had another number of them."""
        return [
            [PartFolder(self.path / f"{_PART}{i}_of_{num}", self.kind) for i in range(num)]
            for num in sorted({int(name.rpartition("_")[2]) for name in part_names(self.path)})
        ]


def _whole(parts: list[PartFolder]) -> set[int]:
    """Numbers of the fits that all folders have."""
    return set.intersection(*(set(part.numbers()) for part in parts))


def part_names(path: Path) -> list[str]:
    """Names of the folders of processes in a folder."""
    return sorted(p.name for p in path.glob(f"{_PART}*_of_*")) if path.is_dir() else []


def fit_folder(path: Any, kind: str, keep: int = 1) -> FitFolder | FolderOfParts:
    """A folder of fits, of this process alone or of several.

    Raises:
        ValueError: If several processes are to go on in the folder of one.
    """
    if part_names(Path(path)):
        return FolderOfParts(path, kind, keep)
    if jax.process_count() == 1:
        return FitFolder(path, kind, keep)
    if FitFolder(path, kind).numbers():
        raise ValueError(
            f"{path} has a fit of one process, which several cannot go on with. Name another "
            "folder."
        )
    return FolderOfParts(path, kind, keep)


def _numbers(values: list[int]) -> str:
    return ",".join(map(str, values))
