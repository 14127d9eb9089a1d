# SPDX-License-Identifier: Apache-2.0
"""Folders of saved fits: arrays and a few plain values, each fit whole or not there."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.data.versions import versions_here

FORMAT = 2  # 1 had no versions
_PARTS = {"_CHECKPOINT_METADATA", "arrays", "about"}  # of each fit that Orbax has written
_COMMITTED = "commit_success.txt"  # in some of them
MOST_SECONDS = 10  # that may pass between a failure to write one array and the end of the others
_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of one that was not written to its end


class SavedArrays(NamedTuple):
    """A fit as it was read."""

    number: int  # of the fit in its folder
    arrays: dict[str, Any]  # of NumPy, or what becomes one where it is read
    about: dict[str, Any]  # plain values
    versions: dict[str, str]  # of packages that it was made with


class FitFolder:
    """A folder of fits of one kind, numbered in the order of writing; the newest are kept.

    A fit is written under another name and renamed, by Orbax, so that a process that is killed
    meanwhile leaves the earlier ones as they are. Each array has a checksum.

    Args:
        path: The folder; it is made when a fit is written. It must hold fits only.
        kind: Name of the class whose fits they are.
        keep: Number of fits that are kept.
    """

    def __init__(self, path: Any, kind: str, keep: int = 1) -> None:
        self.path, self.kind, self.keep = Path(path).absolute(), kind, keep

    def make(self) -> None:
        """Make the folder, if it is not there.

        Raises:
            OSError: If it cannot be made, or not be written into.
            ValueError: If it holds anything but fits.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._remove_parts()
        tempfile.TemporaryFile(dir=self.path).close()
        import orbax.checkpoint  # noqa: F401  takes a second, for which the first fit would wait

    def numbers(self) -> list[int]:
        """Numbers of the fits in the folder, in order; none if it is not there.

        Raises:
            ValueError: If the folder holds anything else.
        """
        if not self.path.exists():
            return []
        if not self.path.is_dir():
            raise ValueError(f"{self.path} must be a folder of saved fits; it is a file.")
        whole: list[int] = []
        for entry in self.path.iterdir():
            if _UNFINISHED in entry.name or entry.name.startswith("."):  # what file managers write
                continue
            try:
                parts = {p.name for p in entry.iterdir()} if entry.is_dir() else {entry.name}
            except FileNotFoundError:  # another process has just removed it
                continue
            if not entry.name.isdecimal() or parts - _PARTS - {_COMMITTED}:
                raise ValueError(
                    f"{self.path} must hold saved fits and nothing else; it has '{entry.name}'. "
                    "Name a folder of its own."
                )
            if parts >= _PARTS:  # else its removal was cut short
                whole.append(int(entry.name))
        return sorted(whole)

    def write(self, number: int, arrays: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write a fit, larger in number than those there; then remove all but the newest.

        Args:
            number: Its number.
            arrays: NumPy arrays by name. They must not change meanwhile.
            about: Values that JSON can hold.

        Raises:
            OSError: If it cannot be written. What was there before is there still.
        """
        import orbax.checkpoint as ocp  # takes a second

        if max(self.numbers(), default=-1) >= number:
            raise OSError(
                f"{self.path} has fit {self.numbers()[-1]}, and {number} is to be written: another "
                "process writes into the folder. Give each its own."
            )
        self._remove_parts()  # of processes that were killed
        arrays = {name: _in_native_order(np.asarray(array)) for name, array in arrays.items()}
        described = {
            name: {"shape": a.shape, "dtype": str(a.dtype), "crc32": _checksum(a)}
            for name, a in arrays.items()
        }
        told = description(self.kind, described, about)
        text = json.dumps(told, default=plain_value)
        items = ocp.args.Composite(
            # Orbax does not write arrays without entries; their shape and type say all.
            arrays=ocp.args.StandardSave({n: a for n, a in arrays.items() if a.size}),
            about=ocp.args.JsonSave({"text": text, "crc32": zlib.crc32(text.encode())}),
        )
        with _quiet():
            try:
                with self._manager(max_to_keep=self.keep) as manager:
                    manager.save(number, args=items, force=True)
            except Exception as error:  # Orbax gives errors of the file system as many types
                self._remove_parts_while_written()
                raise OSError(f"the fit could not be written into {self.path}: {error}") from error
        self._remove_parts()

    def read(self) -> SavedArrays:
        """Read the newest fit.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is damaged, or of another kind or format.
        """
        import orbax.checkpoint as ocp

        numbers = self.numbers()
        if not numbers:
            raise FileNotFoundError(f"{self.path} has no saved fit.")
        number = numbers[-1]
        with told_of_damage(self.path / str(number)):
            with _quiet(), self._manager(read_only=True) as manager:
                found = manager.restore(
                    number, args=ocp.args.Composite(about=ocp.args.JsonRestore())
                )
            text = found.about["text"]
            if zlib.crc32(text.encode()) != found.about["crc32"]:
                raise ValueError("its description has changed")
            told = json.loads(text)
        check_kind_of_fit(self.path, told, self.kind)
        with told_of_damage(self.path / str(number)):
            arrays = self._arrays(number, told["arrays"])
            return SavedArrays(number, arrays, told["about"], told["versions"])

    def _arrays(self, number: int, described: dict[str, Any]) -> dict[str, NDArray[Any]]:
        import orbax.checkpoint as ocp

        with _quiet(), self._manager(read_only=True) as manager:
            wanted = ocp.args.Composite(arrays=ocp.args.StandardRestore())
            found = manager.restore(number, args=wanted).arrays
        arrays = {}
        for name, want in described.items():
            shape, dtype = tuple(want["shape"]), np.dtype(want["dtype"])
            array = np.asarray(found[name]) if 0 not in shape else np.zeros(shape, dtype)
            if (array.shape, array.dtype, _checksum(array)) != (shape, dtype, want["crc32"]):
                raise ValueError(f"array '{name}' has changed")
            arrays[name] = array
        return arrays

    def _manager(self, **options: Any) -> Any:
        import orbax.checkpoint as ocp

        every = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, **options)
        return ocp.CheckpointManager(self.path, options=every)

    def _remove_parts(self) -> None:
        """Remove what was not written, or not removed, to its end."""
        if self.path.is_dir():
            whole = {str(number) for number in self.numbers()}
            for entry in self.path.iterdir():
                if entry.name not in whole and not entry.name.startswith("."):
                    shutil.rmtree(entry, ignore_errors=True)

    def _remove_parts_while_written(self) -> None:
        """Remove parts until there are none: where one array fails, others are still written."""
        deadline = time.monotonic() + MOST_SECONDS
        while self.path.is_dir() and time.monotonic() < deadline:
            self._remove_parts()
            time.sleep(0.05)
            if not any(_UNFINISHED in entry.name for entry in self.path.iterdir()):
                return


@contextmanager
def told_of_damage(path: Path) -> Iterator[None]:
    """Say of what is raised that this fit is damaged."""
    try:
        yield
    except PermissionError:
        raise
    except Exception as error:  # Orbax raises that class itself, among others
        raise ValueError(
            f"{path} is damaged, or was not written by numpyro_largecat: {error}. Remove it to use "
            "the fit before it, if there is one."
        ) from error


def description(kind: str, arrays: Any, about: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of the fit that it holds."""
    versions = versions_here()
    return dict(kind=kind, format=FORMAT, versions=versions, arrays=arrays, about=about)


def check_kind_of_fit(path: Path, told: Mapping[str, Any], kind: str) -> None:
    """Refuse a fit that says of itself that it is of another kind or format."""
    if told["format"] != FORMAT:
        raise ValueError(
            f"{path} must hold a {kind} in format {FORMAT}; it holds one in format "
            f"{told['format']}, of another version of numpyro_largecat. Read it with that."
        )
    if told["kind"] != kind:
        fix = ""
        if told["about"].get("settings"):
            fix = " It is a checkpoint: go on from it by the same call with `resume=True`."
        elif str(told["kind"]).endswith("SubsampledSVI"):
            fix = " `svi.load` reads it."
        raise ValueError(f"{path} must hold a {kind}; it holds a {told['kind']}.{fix}")


def plain_value(value: Any) -> Any:
    """A number of NumPy or JAX as Python's, for JSON."""
    return np.asarray(value).item()


def _in_native_order(array: NDArray[Any]) -> NDArray[Any]:
    """The same numbers with the bytes in the machine's order, which Orbax reads."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _checksum(array: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax and asyncio log each use, from threads of their own, and each error besides raising it.

    Where one array cannot be written, the writers of the others also find that nobody waits for
    them, and Python prints what they then raise. Uses may overlap, so each has filters of its own.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]

    def is_critical(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.CRITICAL

    for logger in loggers:
        logger.addFilter(is_critical)
    unraisable = _UnraisableOfOthers(sys.unraisablehook)
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        unraisable.is_over = True
        if sys.unraisablehook is unraisable:
            sys.unraisablehook = unraisable.before
        for logger in loggers:
            logger.removeFilter(is_critical)


class _UnraisableOfOthers:
    """Passes on what cannot be raised anywhere, but for writers whose event loop is closed."""

    def __init__(self, before: Callable[[Any], Any]) -> None:
        self.before, self.is_over = before, False

    def __call__(self, found: Any) -> None:
        is_closed_loop = str(found.exc_value) == "Event loop is closed"
        if self.is_over or not is_closed_loop:
            self.before(found)
