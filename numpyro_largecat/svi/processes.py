# SPDX-License-Identifier: Apache-2.0
"""What several processes that take steps together must agree on, or they wait for each other."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from jax.experimental import multihost_utils

from numpyro_largecat.svi.callback_calls import CallbackCalls

T = TypeVar("T")


def check_same_in_all(num_steps: int, calls: CallbackCalls, checkpoints: Any) -> None:
    """Refuse a run in which processes would take other numbers of steps at a time.

    Raises:
        ValueError: In all processes.
    """
    every = [callback.every_steps for callback in calls.callbacks]
    writes = None if checkpoints is None else checkpoints.every_steps
    own = zlib.crc32(repr((num_steps, every, calls.settings, writes)).encode())
    all_of_them = multihost_utils.process_allgather(np.uint32(own))
    if (all_of_them != all_of_them[0]).any():
        raise ValueError(
            "all processes of a fit must have the same `num_steps`, `held_out`, `checkpoints`, and "
            "the same number of `callbacks` with the same `every_steps`, since they take steps "
            "together. Let a callback that is for one process look at `jax.process_index()`."
        )


def check_same_checkpoint(newest: int) -> None:
    """Refuse to go on where processes see other newest checkpoints, such as on slow file systems.

    Raises:
        ValueError: In all processes.
    """
    seen = multihost_utils.process_allgather(np.int32(newest))
    if (seen != newest).any():
        raise ValueError(
            f"all processes must see the same checkpoints; the newest steps are {seen.tolist()}, "
            "-1 for none. Name a folder that all of them share, and start again."
        )


def in_all(read: Callable[[], T]) -> T:
    """What each process reads; where one cannot, none goes on and waits for it.

    Raises:
        Exception: What reading has raised, in that process.
        RuntimeError: In the others.
    """
    found, error = None, None
    try:
        found = read()
    except Exception as raised:
        error = raised
    failed = np.flatnonzero(multihost_utils.process_allgather(np.int32(error is not None)))
    if error is not None:
        raise error
    if failed.size:
        raise RuntimeError(f"process {failed[0]} could not read its part of the fit; it says why.")
    assert found is not None
    return found


def is_over_in_any(is_over: bool) -> bool:
    """Whether a callback or a score has ended the fit in some process: then it ends in all."""
    return bool(multihost_utils.process_allgather(np.int32(is_over)).any())
