# SPDX-License-Identifier: Apache-2.0
"""The profile of a step divides its time over instructions, and these over classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from benchmarks.hlo_text import read_program
from benchmarks.step_profile import BETWEEN, CLASSES, class_of
from benchmarks.trace_times import ENDED, GIVEN, TAKEN, divide_time
from tests.benchmarks.test_benchmarks import run_quick


class Event(NamedTuple):
    """An event as the profiler gives it."""

    name: str
    start_ns: float
    duration_ns: float


def on_thread(*events: tuple[str, float, float]) -> list[tuple[Event, dict[str, Any]]]:
    """Events of one thread; small letters are instructions, the rest is the runtime's."""
    return [(Event(*event), {"hlo_op": event[0]} if event[0].islower() else {}) for event in events]


def test_side_by_side_instructions_share_their_time() -> None:
    """From 2 to 4 both threads work; from 6 to 7 none does."""
    threads = [on_thread(("a", 0, 4), ("a", 7, 1)), on_thread(("b", 2, 4))]
    times = divide_time(threads)
    assert times.by_instruction == {"a": 2 + 1 + 1, "b": 1 + 2}
    assert times.between == 1
    assert times.total == 8


def test_an_inner_event_takes_the_time_from_the_outer() -> None:
    """A loop has the time that its body leaves; the runtime's own work is of no instruction."""
    times = divide_time([on_thread(("a", 0, 10), ("b", 2, 3), ("Runtime", 6, 3), ("c", 7, 1))])
    assert times.by_instruction == {"a": 10 - 3 - 3, "b": 3, "c": 1}
    assert times.between == 2


def test_work_that_a_thread_gives_away_is_the_instructions() -> None:
    """The second thread does a piece of a; the first one goes on to b meanwhile."""
    first = on_thread(("a", 0, 2), ("b", 2, 2))
    first.append((Event(GIVEN, 1, 0), {"_p": 5}))
    second = on_thread(("c", 8, 2))
    second += [(Event(TAKEN, 3, 0), {"_c": 5}), (Event(ENDED, 6, 0), {})]
    times = divide_time([first, second])
    assert times.by_instruction == {"a": 2 + 0.5 + 2, "b": 1 + 0.5, "c": 2}
    assert times.between == 2
    assert times.total == 10


def test_instructions_are_classed_by_operation_and_source() -> None:
    """The classes come from the compiled program, with no name of a kernel."""

    def step(x: jax.Array, w: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        utilities = jnp.exp(x @ w)
        return utilities, jnp.sort(utilities, axis=0), jax.random.normal(key, x.shape)

    arguments = jnp.ones((50, 30)), jnp.ones((30, 20)), jax.random.key(0)
    program = read_program(jax.jit(step).lower(*arguments).compile().as_text())
    assert program.name == "jit_step"
    classes = {class_of(i, program) for i in program.instructions.values()}
    assert {"matrix products", "sorts", "normals", "exponentials"} <= classes <= {*CLASSES}
    files = {file for i in program.instructions.values() for file in i.files}
    assert str(Path(__file__)) in files


def test_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="HLO module"):
        read_program("module @jit_step")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["subsampled", "numpyro"])
def test_step_profile(method: str, tmp_path: Path) -> None:
    """The classes sum to the whole, and the matrix products are there."""
    printed, records = run_quick("step_profile", tmp_path / "out.json", "--method", method)
    parts = {r["metric"]: r["value"] for r in records}
    total, alone = parts.pop("sum"), parts.pop("without the profiler")
    assert tuple(parts) == CLASSES
    assert sum(parts.values()) == pytest.approx(total, rel=1e-6)
    assert 0 < parts["matrix products"] < total
    assert parts[BETWEEN] < total
    assert alone > 0
    assert "matrix products" in printed
