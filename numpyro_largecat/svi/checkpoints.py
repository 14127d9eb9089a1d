# SPDX-License-Identifier: Apache-2.0
"""Writing a fit to disk while it runs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_largecat._checks import check_count, check_interval, check_kind
from numpyro_largecat._result_so_far import held_signals
from numpyro_largecat.data.fit_folders import FitFolder
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.saved_run import KIND, SavedRun, as_arrays, is_key

SECONDS_PER_MINUTE = 60
DEFAULT_MINUTES = 10.0


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often ``SubsampledSVI.run`` writes the fit to disk.

    A checkpoint is the whole fit: parameters, optimiser's state, what is kept per row, the random
    key, the position in the data, losses. So ``run(..., resume=True)`` goes on from the newest one
    **bit by bit** as if it had not been interrupted, on the same machine with the same versions,
    and ``SubsampledSVI.load`` reads it in another process.

    It is written

    - every ``every_steps`` steps, or ``every_minutes`` minutes, in a thread while steps go on: the
      pause is the time to copy the state;
    - at the end of the run, and before any exception leaves it: Ctrl-C, SIGTERM (which then ends
      the process as ``SystemExit``), an error of the model or of the stream of batches.

    A process that is killed while it writes leaves the earlier checkpoints as they are. So do a
    full disk and a lost permission: a warning says so, the fit goes on, and the next checkpoint is
    tried again.

    Cost: memory for a copy of the state from the first checkpoint on; on disk ``keep`` + 1 times
    its size.

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

    def fit_folder(self) -> FitFolder:
        """The folder as that of fits of ``SubsampledSVI``."""
        return FitFolder(self.folder, KIND, self.keep)


def has_checkpoint(checkpoints: Checkpoints | None, resume: bool) -> bool:
    """Whether the run goes on from a checkpoint.

    Raises:
        ValueError: If there are checkpoints and ``resume`` is false, or the other way round.
    """
    if checkpoints is None:
        if resume:
            raise ValueError("`resume=True` needs `checkpoints=lc.Checkpoints(folder)`.")
        return False
    check_kind("checkpoints", checkpoints, Checkpoints, "`lc.Checkpoints(folder)`")
    folder = checkpoints.fit_folder()
    numbers = folder.numbers()
    if numbers and not resume:
        raise ValueError(
            f"{folder.path} already has a checkpoint, number {numbers[-1]}. Go on from it with "
            "`resume=True`, or name another folder."
        )
    return bool(numbers)


class CheckpointWriter:
    """Writes what a run has reached, at most one checkpoint at a time.

    Args:
        checkpoints: Where and how often.
        reached: Returns the plan and what the run has reached; None before its first step, or if
            its state is gone.
    """

    def __init__(
        self, checkpoints: Checkpoints, reached: Callable[[], tuple[Plan, SavedRun] | None]
    ) -> None:
        self._every_steps = checkpoints.every_steps
        minutes = checkpoints.every_minutes or DEFAULT_MINUTES
        self._every_seconds = minutes * SECONDS_PER_MINUTE
        self._folder = checkpoints.fit_folder()
        self._reached = reached
        self._last_steps, self._last_time = 0, time.monotonic()  # begun
        self._last_written = 0
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._copies: list[Any] | None = None

    def __enter__(self) -> None:
        """Make the folder, to fail before the first step and not after hours."""
        self._folder.make()

    def __exit__(self, *_: object) -> None:
        """Write what there is at the end, whatever has ended the run."""
        with held_signals():
            self._wait()
            reached = self._reached()
            if reached is not None and reached[1].num_steps > self._last_written:
                self._start(*reached)
                self._wait()
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
        if self._writing is not None:
            if not self._writing.done():
                return
            self._wait()
        if self._is_due(num_steps) and (reached := self._reached()) is not None:
            plan, run = reached
            self._start(plan, run._replace(state=self._copied(run.state)))

    def _is_due(self, num_steps: int) -> bool:
        if self._every_steps is not None:
            return num_steps // self._every_steps > self._last_steps // self._every_steps
        return time.monotonic() - self._last_time >= self._every_seconds

    def _start(self, plan: Plan, run: SavedRun) -> None:
        self._last_steps, self._last_time = run.num_steps, time.monotonic()
        arrays, about = as_arrays(plan, run)
        self._writing = self._thread.submit(self._folder.write, run.num_steps, arrays, about)

    def _copied(self, state: Any) -> Any:
        """A copy in the host's memory, since the next step reuses that of the state.

        It is made in the memory of the last copy: new pages would cost ten times as much.
        """
        leaves, tree = jax.tree.flatten(state)
        if self._copies is None:
            self._copies = [None if is_key(x) else np.empty(x.shape, x.dtype) for x in leaves]
        for copy, leaf in zip(self._copies, leaves, strict=True):
            if copy is not None:
                np.copyto(copy, leaf)
        copies = zip(self._copies, leaves, strict=True)
        return jax.tree.unflatten(tree, [jnp.copy(x) if c is None else c for c, x in copies])

    def _wait(self) -> None:
        if self._writing is not None:
            try:
                self._writing.result()
                self._last_written = self._last_steps
            except OSError as error:
                warnings.warn(
                    f"{error}. The checkpoints written before are still there; the next one is "
                    "tried again.",
                    RuntimeWarning,
                    stacklevel=5,
                )
            self._writing = None
