# SPDX-License-Identifier: Apache-2.0
"""The benchmark of topic models runs with ``--quick``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.test_benchmarks import run_quick

TIMES = ("seconds", "seconds_again", "compile_seconds")


@pytest.mark.slow
def test_topics(tmp_path: Path) -> None:
    """Each K has its speed, and each L a score and its time."""
    printed, records = run_quick("topics", tmp_path / "out.json")
    speeds = {(r["setting"]["K"], r["method"]) for r in records if r["metric"] == "speed"}
    assert speeds == {(k, f"{n} restarts") for k in (20, 40) for n in (0, 5)}
    scores = {r["method"]: r["value"] for r in records if r["metric"] == "score"}
    assert scores.keys() == {"L = 1", "L = K"} and max(scores.values()) < 0
    times = {m: [r["value"] for r in records if r["metric"] == m] for m in TIMES}
    expected = np.subtract(times["seconds"], times["seconds_again"])
    np.testing.assert_allclose(times["compile_seconds"], expected)
    assert all(0 <= r["value"] < 0.2 for r in records if r["metric"] == "distance_to_dense")
    assert "Documents per second" in printed and "held-out log likelihood" in printed
