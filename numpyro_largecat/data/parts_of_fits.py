# SPDX-License-Identifier: Apache-2.0
"""Fits whose arrays are spread over devices and processes, saved by their parts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.data.fit_folders import FitFolder, SavedArrays

_AT = "@"  # between the name of an array, its shape, and the place of a part in it
_PART = "part_"  # begins the name of the folder of a process


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
        self._own = FitFolder(self.path / own, kind, max(keep, 2))  # another may be one behind

    def make(self) -> None:
        """Make the folder of this process, as ``FitFolder`` does."""
        self._own.make()

    def numbers(self) -> list[int]:
        """Numbers of the fits of which all parts are there, in order."""
        return sorted({number for parts in self._all_parts() for number in _whole(parts)})

    def write(self, number: int, arrays: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write the part of this process, as ``FitFolder`` does."""
        for later in self._own.numbers():
            if later >= number:  # of an earlier run, which another process did not get to
                shutil.rmtree(self._own.path / str(later))
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

    def _all_parts(self) -> list[list[FitFolder]]:
        """The folders of the processes of each run, which may have had another number of them."""
        runs = {int(name.rpartition("_")[2]) for name in part_names(self.path)}
        if not runs:  # of one process
            return [[FitFolder(self.path, self.kind)]]
        return [
            [FitFolder(self.path / f"{_PART}{i}_of_{num}", self.kind) for i in range(num)]
            for num in sorted(runs)
        ]


def _whole(parts: list[FitFolder]) -> set[int]:
    """Numbers of the fits that all folders have."""
    return set.intersection(*(set(part.numbers()) for part in parts))


def part_names(path: Path) -> list[str]:
    """Names of the folders of processes in a folder."""
    return sorted(p.name for p in path.glob(f"{_PART}*_of_*")) if path.is_dir() else []


def fit_folder(path: Any, kind: str, keep: int = 1) -> FitFolder | FolderOfParts:
    """A folder of fits, of this process alone or of several."""
    if jax.process_count() > 1 or part_names(Path(path)):
        return FolderOfParts(path, kind, keep)
    return FitFolder(path, kind, keep)


def _numbers(values: list[int]) -> str:
    return ",".join(map(str, values))
