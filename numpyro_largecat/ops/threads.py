# SPDX-License-Identifier: Apache-2.0
"""Work on all cores of a CPU, by threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

S = TypeVar("S")
T = TypeVar("T")
LONGEST_WAIT = 1.0  # seconds, of a thread for the others, if an interrupt keeps it from being told


def on_all_cores(
    solve: Callable[[S], T],
    problems: Iterator[Callable[[], S]],
    mesh: Mesh | None = None,
) -> list[T]:
    """Call ``solve`` for each of some problems; on a CPU in as many threads as there are cores.

    A problem is made when it is its turn, so few are in memory. A mesh has all its devices work on
    one of them.
    """
    if jax.default_backend() != "cpu" or mesh is not None:
        return [solve(make()) for make in problems]
    return _in_threads(lambda make: solve(make()), problems)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What some functions return, called in as many threads as there are cores."""
    return _in_threads(lambda call: call(), calls)


@contextmanager
def meanwhile(calls: Iterable[Callable[[], object]]) -> Generator[Callable[[], None]]:
    """Call functions in threads, as many as there are cores, while a block runs.

    The block has a function that waits for them, and raises what they do. Those that have not begun
    when it ends are left out, and what others raise then is nobody's concern.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            called = pool.map(_as_here(lambda call: call()), calls)

            def wait() -> None:
                list(called)

            yield wait
        finally:
            pool.shutdown(cancel_futures=True)


def _in_threads(function: Callable[[S], T], values: Iterable[S]) -> list[T]:
    """Threads begin once all are there: one at work would keep the interpreter from the next."""
    are_there = Event()
    begin = partial(are_there.wait, LONGEST_WAIT)
    with ThreadPoolExecutor(os.cpu_count(), initializer=begin) as pool:
        try:
            found = pool.map(_as_here(function), values)
        finally:
            are_there.set()
        return list(found)


def _as_here(function: Callable[[S], T]) -> Callable[[S], T]:
    """With float64 as in the thread that asks, since each has a setting of its own."""
    enabled = jnp.result_type(float) == jnp.float64

    def in_thread(value: S) -> T:
        with jax.enable_x64(enabled):
            return function(value)

    return in_thread
