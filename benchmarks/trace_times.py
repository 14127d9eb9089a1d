# SPDX-License-Identifier: Apache-2.0
"""How the time of a compiled program divides over its instructions, from JAX's profiler.

Threads run instructions side by side, and one instruction can have pieces on several threads. Each
moment is divided equally among the threads that work on an instruction then; moments in which none
does are between instructions. So the parts sum to the time that passed.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

# XLA's records of a piece of work that one thread gives away and another one takes up and ends.
GIVEN, TAKEN, ENDED = (f"ThreadpoolListener::{e}" for e in ("Record", "StartRegion", "StopRegion"))

Event = tuple[Any, dict[str, Any]]  # of a thread, with its properties


class TraceTimes(NamedTuple):
    """Nanoseconds of a traced call."""

    by_instruction: dict[str, float]
    between: float  # in which no thread worked on an instruction

    @property
    def total(self) -> float:
        """From the start of the first instruction to the end of the last."""
        return sum(self.by_instruction.values()) + self.between


def trace_times(call: Callable[[], object], program: str) -> TraceTimes:
    """Run ``call`` under the profiler, and read the times of the instructions of ``program``."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            call()
        (path,) = Path(folder).rglob("*.xplane.pb")
        threads = _threads(jax.profiler.ProfileData.from_file(str(path)), program)
        return divide_time(threads)


def _threads(data: Any, program: str) -> list[list[Event]]:
    """The events of each thread, or stream of an accelerator, that runs the program."""
    found: dict[bool, list[list[Event]]] = {True: [], False: []}
    for plane in data.planes:
        for line in plane.lines:
            events = [(event, dict(event.stats)) for event in line.events]
            events = [e for e in events if e[1].get("hlo_module", program) == program]
            if any("hlo_op" in properties for _, properties in events):
                found[plane.name.startswith("/device:")].append(events)
    threads = found[True] or found[False]  # an accelerator's own times, if there are any
    if not threads:
        raise RuntimeError(f"The profiler's trace has no instruction of {program}.")
    return threads


class _Change(NamedTuple):
    """A moment at which a thread begins or ends something, or gives work away."""

    time: float
    kind: Literal["end", "begin", "give", "take"]
    thread: int
    key: Any  # of what begins or ends, or of the work that is given or taken
    instruction: str | None = None  # that begins
    length: float = 0.0

    @property
    def order(self) -> tuple[float, int, float]:
        """Sorts changes: at one moment, ends come first, and outer things begin before inner."""
        return self.time, ("end", "begin", "give", "take").index(self.kind), -self.length


def divide_time(threads: Sequence[Sequence[Event]]) -> TraceTimes:
    """Divide the time from the first to the last instruction over the instructions."""
    changes = [c for n, events in enumerate(threads) for c in _changes(n, events)]
    changes.sort(key=lambda change: change.order)
    spans = [e for events in threads for e, properties in events if "hlo_op" in properties]
    start = min(e.start_ns for e in spans)
    end = max(e.start_ns + e.duration_ns for e in spans)

    shares: dict[str, float] = defaultdict(float)
    between = 0.0
    doing: list[dict[Any, str | None]] = [{} for _ in threads]  # the innermost last
    given: dict[Any, str | None] = {}  # which instruction a piece of work belongs to
    for change, following in pairwise(changes):
        inner = doing[change.thread]
        if change.kind == "end":
            inner.pop(change.key, None)
        elif change.kind == "begin":
            inner[change.key] = change.instruction
        elif change.kind == "give":
            given[change.key] = next(reversed(inner.values()), None)
        else:
            inner[change.key] = given.get(change.key)
        passed = min(following.time, end) - max(change.time, start)
        if passed <= 0:
            continue
        innermost = [next(reversed(inner.values()), None) for inner in doing]
        working = [name for name in innermost if name is not None]
        for name in working:
            shares[name] += passed / len(working)
        between += 0.0 if working else passed
    return TraceTimes(dict(shares), between)


def _changes(thread: int, events: Sequence[Event]) -> Iterator[_Change]:
    """What the events of a thread begin, end and give away."""
    taken: list[Any] = []  # the innermost last
    for number, (event, properties) in enumerate(sorted(events, key=lambda e: e[0].start_ns)):
        if event.name == GIVEN:
            yield _Change(event.start_ns, "give", thread, ("work", properties["_p"]))
        elif event.name == TAKEN:
            taken.append(("work", properties["_c"]))
            yield _Change(event.start_ns, "take", thread, taken[-1])
        elif event.name == ENDED:
            if taken:  # else it was taken up before the trace began
                yield _Change(event.start_ns, "end", thread, taken.pop())
        elif event.duration_ns > 0:  # without an instruction, it is work of the runtime
            start, length = event.start_ns, event.duration_ns
            name = properties.get("hlo_op")
            yield _Change(start, "begin", thread, number, name, length)
            yield _Change(start + length, "end", thread, number)
