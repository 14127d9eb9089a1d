# SPDX-License-Identifier: Apache-2.0
"""Fits whose arrays are spread over devices and processes, saved by their parts."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from numpyro_largecat.data.fit_folders import (
    FitFolder,
    SavedArrays,
    check_kind_of_fit,
    description,
    plain_value,
    told_of_damage,
)
from numpyro_largecat.data.replace_file import replace_file

_AT = "@"  # between the name of an array, its shape, and the place of a part in it
_PLACE = re.compile(r"(.*)@(\d+(?:,\d+)*)@(\d+(?:,\d+)*)")
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


class StoredArray(NamedTuple):
    """An array in a file, which is read where it becomes one of NumPy."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        with told_of_damage(self.path), self.path.open("rb") as file, np.load(file) as found:
            array = found[_ARRAY + self.name].view(self.dtype)  # of types that are not NumPy's
        return np.asarray(array, dtype)


class JoinedArray:
    """An array of which parts were saved, each for a place in it; they are read where needed.

    Args:
        shape: Its shape.
        parts: Arrays of NumPy or in files, by the index of their first number.
    """

    def __init__(self, shape: tuple[int, ...], parts: Mapping[tuple[int, ...], Any]) -> None:
        self.shape, self.parts = shape, parts
        self.dtype = next(iter(parts.values())).dtype
        self._last: tuple[tuple[int, ...], NDArray[Any]] | None = None  # that was read

    def num_missing(self) -> int:
        """How many numbers no part has.

        Raises:
            ValueError: If two parts have the same numbers.
        """
        places = [
            [(a, a + n) for a, n in zip(first, part.shape, strict=True)]
            for first, part in self.parts.items()
        ]
        for one, other in itertools.combinations(places, 2):
            if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True)):
                raise ValueError(f"two parts have the same numbers, at {one} and {other}")
        return math.prod(self.shape) - sum(math.prod(p.shape) for p in self.parts.values())

    def _part(self, first: tuple[int, ...]) -> NDArray[Any]:
        """A part; the last one is kept, since devices often share one."""
        if self._last is None or self._last[0] != first:
            self._last = None  # before the next is there
            self._last = first, np.asarray(self.parts[first])
        return self._last[1]

    def __getitem__(self, wanted: tuple[slice, ...]) -> NDArray[Any]:
        """The numbers between the bounds that each axis has; a part is read whole."""
        bounds = [s.indices(size)[:2] for s, size in zip(wanted, self.shape, strict=True)]
        found = np.empty([end - start for start, end in bounds], self.dtype)
        for first, part in self.parts.items():
            both = [
                (max(start, a), min(end, a + size))
                for (start, end), a, size in zip(bounds, first, part.shape, strict=True)
            ]
            if all(start < end for start, end in both):
                here = _from([start for start, _ in bounds], both)
                found[here] = self._part(first)[_from(first, both)]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[tuple(slice(None) for _ in self.shape)], dtype)


def _from(first: Sequence[int], bounds: list[tuple[int, int]]) -> tuple[slice, ...]:
    """The same numbers, counted from those that an array begins with."""
    return tuple(slice(a - n, b - n) for n, (a, b) in zip(first, bounds, strict=True))


def joined_fit(saved: SavedArrays) -> SavedArrays:
    """A fit with its parts put together; what was spread is a ``JoinedArray``.

    Raises:
        ValueError: If a part is missing, or there twice.
    """
    arrays: dict[str, Any] = {}
    spread: dict[str, tuple[tuple[int, ...], dict[tuple[int, ...], Any]]] = {}
    for key, part in saved.arrays.items():
        place = _PLACE.fullmatch(key)
        if place is None:
            arrays[key] = np.asarray(part)
            continue
        name, *numbers = place.groups()
        shape, starts = (tuple(int(n) for n in text.split(",")) for text in numbers)
        spread.setdefault(name, (shape, {}))[1][starts] = part
    for name, (shape, parts) in spread.items():
        arrays[name] = array = JoinedArray(shape, parts)
        if missing := array.num_missing():
            raise ValueError(f"{missing} numbers of array '{name}' are missing.")
    return saved._replace(arrays=arrays)


class Write(NamedTuple):
    """One fit as a run wrote it; parts of the same step by another run do not go with it."""

    number: int
    run: str


class PartFolder:
    """The fits that one of several processes has written, each its part in one file.

    (Orbax has one process of several write what is NumPy's.) A file is written under another name
    and renamed, and each array in it has a checksum, as those of every zip archive do.

    Args:
        path: The folder.
        kind: Name of the class whose fits they are.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind

    def writes(self) -> list[Write]:
        """The fits of which a part is in the folder, in order."""
        names = [p.stem.split("_") for p in self.path.glob("*_*.npz")]
        return sorted(Write(int(number), run) for number, run in names)

    def write(self, what: Write, arrays: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write a part.

        Raises:
            OSError: If it cannot be written. What was there before is there still.
        """
        forms = {name: [array.shape, str(array.dtype)] for name, array in arrays.items()}
        told = description(self.kind, forms, about)
        text = json.dumps(told, default=plain_value).encode()
        members = {_ARRAY + name: array for name, array in arrays.items()}
        members[_ABOUT] = np.frombuffer(text, np.uint8)
        replace_file(self._file(what), lambda file: np.savez(file, **members))

    def remove(self, what: Write) -> None:
        """Remove a part."""
        self._file(what).unlink(missing_ok=True)

    def read(self, what: Write) -> SavedArrays:
        """What a part has; each array is read where it becomes one of NumPy.

        Raises:
            ValueError: If it is damaged, or of another kind or format.
        """
        path = self._file(what)
        with told_of_damage(path), path.open("rb") as file, np.load(file) as found:
            told = json.loads(found[_ABOUT].tobytes())
            arrays = {
                name: StoredArray(path, name, tuple(shape), np.dtype(dtype))
                for name, (shape, dtype) in told["arrays"].items()
            }
        check_kind_of_fit(path, told, self.kind)
        return SavedArrays(what.number, arrays, told["about"], told["versions"])

    def _file(self, what: Write) -> Path:
        return self.path / f"{what.number}_{what.run}.npz"


class FolderOfParts:
    """A folder of fits of which each process has written its own part.

    Args:
        path: The folder, which all processes see.
        kind: Name of the class whose fits they are.
        keep: Number of fits that are kept.
        process: Which of the processes of a fit this is.
        num_processes: Their number.
        run: A name that the processes of one run share, and those of others do not.
    """

    def __init__(
        self, path: Any, kind: str, keep: int, process: int, num_processes: int, run: str
    ) -> None:
        self.path, self.kind, self.keep = Path(path).absolute(), kind, keep
        self._own = PartFolder(self.path / f"{_PART}{process}_of_{num_processes}", kind)
        self._run = run

    def make(self) -> None:
        """Make the folder of this process, and remove what no other has the other parts of.

        Raises:
            OSError: If it cannot be made, or not be written into.
        """
        self._own.path.mkdir(parents=True, exist_ok=True)
        for unfinished in self._own.path.glob("*.part"):  # of a process that was killed
            unfinished.unlink(missing_ok=True)
        whole = self._whole()
        for other in self._own.writes():
            if other not in whole:
                self._own.remove(other)
        tempfile.TemporaryFile(dir=self._own.path).close()

    def numbers(self) -> list[int]:
        """Numbers of the fits of which all parts are there, in order.

        Raises:
            ValueError: If there are parts of several fits, and none is whole.
        """
        whole = self._whole()
        if not whole:
            self._check_that_none_is_lost()
        return sorted({what.number for what in whole})

    def write(self, number: int, arrays: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write the part of this process; then remove those of fits before the newest whole ones.

        Raises:
            OSError: If it cannot be written. What was there before is there still.
        """
        self._own.path.mkdir(parents=True, exist_ok=True)
        self._own.write(Write(number, self._run), arrays, about)
        kept = sorted(self._whole())[-self.keep :]
        for other in self._own.writes():
            if kept and other.number < kept[0].number:
                self._own.remove(other)

    def read(self) -> SavedArrays:
        """The newest fit of which all parts are there; arrays are read as those of a part.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is damaged, or of another kind or format.
        """
        whole = self._whole()
        if not whole:
            raise FileNotFoundError(f"{self.path} has no saved fit of which all parts are there.")
        newest = max(whole)
        first, *others = (part.read(newest) for part in whole[newest])
        arrays = dict(first.arrays)
        for other in others:
            arrays |= other.arrays
        return first._replace(arrays=arrays)

    def _whole(self) -> dict[Write, list[PartFolder]]:
        """The fits of which all parts are there, and the folders of these."""
        found = {}
        for parts in self._all_parts():
            for what in set.intersection(*(set(part.writes()) for part in parts)):
                found[what] = parts
        return found

    def _check_that_none_is_lost(self) -> None:
        """Refuse to begin anew where more than the first write of a run was not finished."""
        for parts in self._all_parts():
            held = {part.path.name: [what.number for what in part.writes()] for part in parts}
            if any(len(numbers) > 1 for numbers in held.values()) or not all(
                part.path.is_dir() for part in parts
            ):
                raise ValueError(
                    f"{self.path} has parts of fits, and none of which all are there: {held}. "
                    "Bring back what is missing, or remove the folder to begin anew."
                )

    def _all_parts(self) -> list[list[PartFolder]]:
        """The folders of the processes of each run, which may have had another number of them."""
        return [
            [PartFolder(self.path / f"{_PART}{i}_of_{num}", self.kind) for i in range(num)]
            for num in sorted({int(name.rpartition("_")[2]) for name in part_names(self.path)})
        ]


def part_names(path: Path) -> list[str]:
    """Names of the folders of processes in a folder."""
    return sorted(p.name for p in path.glob(f"{_PART}*_of_*")) if path.is_dir() else []


def fit_folder(
    path: Any, kind: str, keep: int = 1, spans: bool = False
) -> FitFolder | FolderOfParts:
    """A folder of fits, of this process alone or, if it ``spans`` several, of all together.

    Raises:
        ValueError: If several processes are to go on in the folder of one.
    """
    if jax.process_count() == 1 and not part_names(Path(path)):
        return FitFolder(path, kind, keep)
    if not part_names(Path(path)) and FitFolder(path, kind).numbers():
        raise ValueError(
            f"{path} has a fit of one process, which several cannot go on with. Name another "
            "folder."
        )
    run = int.from_bytes(os.urandom(4))
    if not spans:
        return FolderOfParts(path, kind, keep, 0, 1, f"{run:08x}")
    run = int(multihost_utils.broadcast_one_to_all(np.uint32(run)))
    return FolderOfParts(path, kind, keep, jax.process_index(), jax.process_count(), f"{run:08x}")


def _numbers(values: list[int]) -> str:
    return ",".join(map(str, values))
