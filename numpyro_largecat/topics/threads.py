# SPDX-License-Identifier: Apache-2.0
"""Work on all cores of a CPU, by threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

S = TypeVar("S")
T = TypeVar("T")


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
    enabled = jnp.result_type(float) == jnp.float64  # set for each thread by itself

    def in_thread(make: Callable[[], S]) -> T:
        with jax.enable_x64(enabled):
            return solve(make())

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(in_thread, problems))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What some functions return, each called in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))
