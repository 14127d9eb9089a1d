# SPDX-License-Identifier: Apache-2.0
"""Writing a fit to disk while it runs, and going on from there."""

from __future__ import annotations

import contextlib
import inspect
import json
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from numpyro_largecat._checks import check_count, check_interval, check_kind
from numpyro_largecat._result_so_far import held_signals
from numpyro_largecat.data.fit_folders import FitFolder, SavedArrays, plain_value
from numpyro_largecat.data.parts_of_fits import FolderOfParts, fit_folder, joined_fit
from numpyro_largecat.data.versions import other_versions

SECONDS_PER_MINUTE = 60
DEFAULT_MINUTES = 10.0


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often a fit is written to disk while it runs.

    For ``SubsampledSVI.run``, ``fit_mixture``, ``fit_topics`` and ``fit_double_sum``. A checkpoint
    is all that the fit has reached: parameters, what is kept of each row or batch, the state of
    random numbers, the position in the data. So the same call with ``resume=True`` goes on from the
    newest one **bit by bit** as if it had not been interrupted, on the same machine with the same
    versions. ``SubsampledSVI.load`` reads it in another process.

    It is written

    - every ``every_steps`` steps, or ``every_minutes`` minutes, in a thread while steps go on: the
      pause is the time to copy the state. A step is a batch of a mixture or of topics, and a pass
      of the double sum;
    - at the end of the fit, and before any exception leaves it: Ctrl-C, SIGTERM (which then ends
      the process as ``SystemExit``), an error of the model or of the batches.

    A process that is killed while it writes leaves the earlier checkpoints as they are. So do a
    full disk and a lost permission: a warning says so, the fit goes on, and the next checkpoint is
    tried again.

    **Several processes** of one fit write a part each into the folder, which all must see, every
    ``every_steps`` steps and at the end, but not where something is raised: they would stop at
    different steps. Where one is lost, start all again, as many as before or others: they go on
    from the newest step of which every part is there.

    Cost: memory for a copy of the state from the first checkpoint on, and about as much again while
    one is written; on disk ``keep`` + 1 times its size.

    Args:
        folder: A folder for the checkpoints of this one fit, which is made if it is not there.
        every_steps: Number of steps between checkpoints, at least 1. One that is due while another
            is being written waits for the end of that.
        every_minutes: Minutes between checkpoints, above 0; 10 if neither is given.
        keep: Number of checkpoints that are kept, the newest.

    Raises:
        ValueError: If a number is out of range, or both intervals are given.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, numpyro, optax
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer import Trace_ELBO
        >>> def model():
        ...     a = numpyro.param("a", 0.0)
        ...     numpyro.factor("loss", -((a - 1) ** 2))
        >>> svi = lc.SubsampledSVI(model, lambda: None, optax.adam(0.1), Trace_ELBO())
        >>> folder = tempfile.mkdtemp()
        >>> def run(num_steps):
        ...     checkpoints = lc.Checkpoints(folder, every_steps=50)
        ...     return svi.run(jax.random.key(0), num_steps, checkpoints=checkpoints, resume=True,
        ...                    progress_bar=False)
        >>> len(run(100).losses), len(run(150).losses)  # the second call takes 50 steps
        (100, 150)
    """

    folder: str | PathLike[str]
    every_steps: int | None = None
    every_minutes: float | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        check_count("keep", self.keep, 1)
        if self.every_steps is not None:
            check_count("every_steps", self.every_steps, 1)
        if self.every_minutes is not None:
            check_interval("every_minutes", self.every_minutes, "(0, inf)")
            if self.every_steps is not None:
                raise ValueError("Checkpoints needs `every_steps` or `every_minutes`; got both.")

    def fit_folder(self, kind: str, spans: bool = False) -> FitFolder | FolderOfParts:
        """The folder as that of fits of a kind; ``spans`` if several processes make one."""
        return fit_folder(self.folder, kind, self.keep, spans)


def has_checkpoint(
    checkpoints: Checkpoints | None, resume: bool, kind: str, spans: bool = False
) -> bool:
    """Whether a fit goes on from a checkpoint; ``spans`` if several processes make it.

    Raises:
        ValueError: If there are checkpoints and ``resume`` is false, or the other way round.
    """
    if checkpoints is None:
        if resume:
            raise ValueError("`resume=True` needs `checkpoints=lc.Checkpoints(folder)`.")
        return False
    check_kind("checkpoints", checkpoints, Checkpoints, "`lc.Checkpoints(folder)`")
    if spans and checkpoints.every_steps is None:
        raise ValueError(
            "`checkpoints` of several processes need `every_steps`, so that all write the same "
            "steps; their clocks differ."
        )
    folder = checkpoints.fit_folder(kind, spans)
    numbers = folder.numbers()
    if numbers and not resume:
        raise ValueError(
            f"{folder.path} already has a checkpoint, number {numbers[-1]}. Go on from it with "
            "`resume=True`, or name another folder."
        )
    return bool(numbers)


def read_checkpoint(
    checkpoints: Checkpoints, kind: str, settings: Mapping[str, Any], most: int
) -> SavedArrays:
    """Read the newest checkpoint of a fit with these settings, which ``about`` must hold.

    Raises:
        ValueError: If it is damaged, or one of the settings is another, with the first.
        RuntimeWarning: If it has more steps than ``most``, or was made with other versions.
    """
    folder = checkpoints.fit_folder(kind)
    saved = joined_fit(folder.read())
    check_settings(folder, saved, settings)
    if saved.number > most:
        message = (
            f"the fit in {folder.path} has {saved.number} steps, more than the {most} of "
            "`num_passes`. It is returned as it is."
        )
        warnings.warn(message, RuntimeWarning, stacklevel=_level_of_user())
    return saved


def check_settings(
    folder: FitFolder | FolderOfParts, saved: SavedArrays, settings: Mapping[str, Any]
) -> None:
    """Refuse a fit with other settings, with the first that differs; warn of other versions."""
    for name, now in json.loads(json.dumps(settings, default=plain_value)).items():
        then = saved.about["settings"].get(name)
        if then != now:
            raise ValueError(
                f"`resume` needs the data and the arguments of the fit in {folder.path}; its "
                f"{name} was {then}, and is now {now}. Use those, or name another folder."
            )
    if others := other_versions(saved.versions):
        message = (
            f"the fit in {folder.path} was made with other versions: {others}. It goes on, but not "
            "bit by bit as it would have with those."
        )
        warnings.warn(message, RuntimeWarning, stacklevel=_level_of_user())


def fingerprint(tree: Any) -> str:
    """A checksum of the arrays and numbers in a pytree, which others hardly ever share.

    It follows from their places in the tree, shapes and types too: arrays of zeros are not all one.
    Of one array of floating point numbers it says between which these are, for people.
    """
    value, leaves = 0, jax.tree.leaves_with_path(tree)
    for path, leaf in leaves:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        if array.dtype.hasobject:  # such as a function among the arguments
            array = np.frombuffer(repr(leaf).encode(), np.uint8)
        form = f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}"
        value = zlib.crc32(form.encode(), value)
        value = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, value)
    is_one = len(leaves) == 1 and array.size and np.issubdtype(array.dtype, np.floating)
    ends = f"{array.min():.6g} to {array.max():.6g}, " if is_one else ""
    return f"{ends}checksum {value:08x}"


class Reached(NamedTuple):
    """What a fit has reached, to be written."""

    number: int  # of steps
    arrays: Mapping[str, NDArray[Any]]
    about: Mapping[str, Any]  # values that JSON can hold


class CheckpointWriter:
    """Writes what a fit has reached, at most one checkpoint at a time, in a ``with`` block.

    Args:
        checkpoints: Where and how often; None to write nothing.
        kind: Of the fit.
        reached: Returns what the fit has reached; None if there is nothing to write.
        num_steps: Steps of the checkpoint that it goes on from.
        spans: Whether several processes make the fit, of which each writes its part. All then write
            the same steps, and none where something is raised.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        kind: str,
        reached: Callable[[], Reached | None],
        num_steps: int = 0,
        *,
        spans: bool = False,
    ) -> None:
        self._folder = None if checkpoints is None else checkpoints.fit_folder(kind, spans)
        self._spans = spans
        self._every_steps = None if checkpoints is None else checkpoints.every_steps
        minutes = (checkpoints and checkpoints.every_minutes) or DEFAULT_MINUTES
        self._every_seconds = minutes * SECONDS_PER_MINUTE
        self._reached = reached
        self._last_steps = self._last_written = num_steps
        self._last_time = time.monotonic()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._copies: dict[str, NDArray[Any]] = {}

    def __enter__(self) -> CheckpointWriter:
        """Make the folder, to fail before the first step and not after hours."""
        if self._folder is not None:
            self._folder.make()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Write what there is at the end, whatever has ended the fit."""
        if self._folder is None:
            return
        with held_signals():
            try:
                self._wait()
                reached = None if self._spans and kind is not None else self._reached()
                if reached is not None and reached.number > self._last_written:
                    self._start(reached)
                    self._wait(is_last=True)
            finally:
                self._thread.shutdown()

    def go_on(self, num_steps: int) -> None:
        """Count from a checkpoint of so many steps."""
        self._last_steps = self._last_written = num_steps

    def steps_to_go(self, num_steps: int, most: int) -> int:
        """Steps until the next checkpoint by their number, at most ``most``."""
        if self._every_steps is None:
            return most
        return min(most, self._every_steps - num_steps % self._every_steps)

    def after_steps(self, num_steps: int) -> None:
        """Begin to write a checkpoint if one is due and none is being written."""
        if self._folder is None:
            return
        if self._writing is not None:
            if not self._writing.done() and not (self._spans and self._is_due(num_steps)):
                return
            self._wait()
        if self._is_due(num_steps):
            with held_signals():
                reached = self._reached()
                if reached is not None:
                    copies = {name: self._copy(name, of) for name, of in reached.arrays.items()}
                    self._start(reached._replace(arrays=copies))

    def _is_due(self, num_steps: int) -> bool:
        if num_steps <= self._last_steps:  # as of a fit that has just gone on from there
            return False
        if self._every_steps is not None:
            return num_steps // self._every_steps > self._last_steps // self._every_steps
        return time.monotonic() - self._last_time >= self._every_seconds

    def _start(self, reached: Reached) -> None:
        assert self._folder is not None
        self._last_steps, self._last_time = reached.number, time.monotonic()
        self._writing = self._thread.submit(self._folder.write, *reached)

    def _copy(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """A copy, since the next step may reuse the memory of an array.

        It is made in the memory of the last copy: new pages would cost ten times as much.
        """
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (array.shape, array.dtype):
            copy = self._copies[name] = np.empty(array.shape, array.dtype)
        np.copyto(copy, array)
        return copy

    def _wait(self, is_last: bool = False) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
                self._last_written = self._last_steps
            except (OSError, ValueError) as error:  # also a folder that got a file of others
                then = "" if is_last else " The next one is tried again."
                message = f"{str(error).rstrip('.')}.{self._what_is_there()}{then}"
                warnings.warn(message, RuntimeWarning, stacklevel=_level_of_user())

    def _what_is_there(self) -> str:
        assert self._folder is not None
        try:
            numbers = self._folder.numbers()
        except (OSError, ValueError):  # as the error itself says
            return ""
        if not numbers:
            return " There is no checkpoint to go on from."
        return f" The checkpoint of step {numbers[-1]} is still there."


def _level_of_user() -> int:
    """The ``stacklevel`` of the line outside of this package that called it, however deep it is."""
    inside = str(Path(__file__).parents[1]), contextlib.__file__
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level
