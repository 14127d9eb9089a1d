# SPDX-License-Identifier: Apache-2.0
"""The benchmark of topic models runs with ``--quick``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.test_benchmarks import run_quick

SCORES = {"heldout_tokens", "heldout_words", "npmi", "diversity"}


@pytest.mark.slow
def test_topics(tmp_path: Path) -> None:
    """Each K has its speed, and each way to solve its scores and times."""
    printed, records = run_quick("topics", tmp_path / "out.json")
    speeds = {(r["setting"]["K"], r["method"]) for r in records if r["metric"] == "speed"}
    assert speeds == {(k, f"{n} restarts") for k in (20, 40) for n in (0, 5)}
    for method in ("collapsed", "eight passes", "mean_field"):
        found = {r["metric"]: r["value"] for r in records if r["method"] == method}
        assert found.keys() == SCORES | {"seconds", "processor_seconds", "compile_seconds"}
        assert max(found["heldout_tokens"], found["heldout_words"]) < 0 < found["diversity"] <= 1
        assert 0 < found["compile_seconds"] < found["seconds"]
    assert all(0 <= r["value"] < 0.2 for r in records if r["metric"] == "distance_to_dense")
    assert "Documents per second" in printed and "tokens, words, coherence" in printed
