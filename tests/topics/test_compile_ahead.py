# SPDX-License-Identifier: Apache-2.0
"""Code of a fit that is compiled while its first topics are found."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest

from numpyro_largecat.ops.threads import meanwhile
from numpyro_largecat.topics import Options, collapsed, passes
from tests.topics.corpora import KEY, fit_topics, topic_corpus

PROGRAMS = collapsed._solve_collapsed, collapsed._through_largest


@pytest.mark.parametrize(
    ("first", "num_topics", "num_sweeps", "dtype"), [(70, 40, 1, "float32"), (12, 4, 2, "float64")]
)
@pytest.mark.some_cases(1)
def test_visits_compile_nothing_more(
    first, num_topics, num_sweeps, dtype, compiled, monkeypatch
) -> None:
    """Documents have room for 32 topics, of which there are more or fewer."""
    for program in PROGRAMS:  # other tests may have compiled the same
        program.clear_cache()
    at_visit = []

    def of_documents():
        own = {program.__name__ for program in PROGRAMS}
        return sorted(name for name in compiled() if name in own)

    visit = passes.visit_batch

    def noted(*args, **kwargs):
        at_visit.append(of_documents())
        return visit(*args, **kwargs)

    monkeypatch.setattr(passes, "visit_batch", noted)
    with jax.enable_x64(dtype == "float64"):
        options = Options(num_candidates=first)
        fit = fit_topics(KEY, topic_corpus(40), num_topics, num_passes=4, options=options)
    assert fit.posterior.dtype == dtype
    expected = ["_solve_collapsed"] * num_sweeps + ["_through_largest"] * 2
    assert at_visit[0] == of_documents() == expected


def test_calls_run_beside_a_block() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def call() -> None:
        has_begun.set()
        assert may_end.wait(60)

    with meanwhile([call]) as wait:
        assert has_begun.wait(60)
        may_end.set()
        wait()


def test_calls_have_the_precision_of_the_block() -> None:
    found = []
    with (
        jax.enable_x64(True),
        meanwhile([lambda: found.append(np.asarray(jax.numpy.ones(())))]) as wait,
    ):
        wait()
    assert found[0].dtype == np.float64


def _no_room() -> None:
    raise MemoryError("no room for the program")


def test_what_a_call_raises_is_raised_where_a_block_waits() -> None:
    done = []
    with pytest.raises(MemoryError, match="no room"), meanwhile([_no_room]) as wait:
        done.append(True)
        wait()
    assert done


def test_calls_that_a_block_does_not_wait_for_are_left_out(monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    may_end = threading.Event()
    called = []

    def call() -> None:
        called.append(True)
        assert may_end.wait(60)
        _no_room()

    with meanwhile([call] * 3):
        threading.Timer(0.2, may_end.set).start()
    assert len(called) <= 1


def test_a_block_that_raises_leaves_out_calls_that_have_not_begun(monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    called, may_end = [], threading.Event()

    def call() -> None:
        called.append(True)
        assert may_end.wait(60)

    with pytest.raises(KeyboardInterrupt), meanwhile([call] * 3):
        threading.Timer(0.2, may_end.set).start()
        raise KeyboardInterrupt
    assert len(called) <= 1
