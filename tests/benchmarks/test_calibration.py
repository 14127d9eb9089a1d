# SPDX-License-Identifier: Apache-2.0
"""The benchmark of calibration: its shape, and its measures where the answer is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import calibration
from tests.benchmarks.test_benchmarks import run_quick

FALSE_ALARM = 1e-5  # shares of 10,000 within 5 standard errors


@pytest.mark.slow
def test_calibration(tmp_path: Path) -> None:
    """Coverage and spread of ranks of weights and contrasts."""
    printed, records = run_quick("calibration", tmp_path / "out.json")
    metrics = {r["metric"] for r in records}
    assert {m.split(",")[0] for m in metrics} == {"weights", "contrasts"}
    assert len(metrics) == 6
    assert "mean field" in printed


@pytest.mark.parametrize("width", [1.0, 0.5])
def test_draws_that_are_too_narrow_cover_too_little(width: float) -> None:
    """Of a normal truth and draws of the same centre and ``width`` times its deviation."""
    rng = np.random.default_rng(0)
    true = rng.normal(size=(500, 4, 5))
    draws = width * rng.normal(size=(500, calibration.NUM_DRAWS, 4, 5))
    found = calibration.measures(true, draws)
    for level, narrow in ((0.5, 0.264), (0.9, 0.589)):  # P(|z| < width * quantile)
        expected = level if width == 1 else narrow
        coverage, error = found[f"weights, coverage of {level:.0%}"]
        assert error == pytest.approx(np.sqrt(expected * (1 - expected) / 10_000), rel=0.2)
        assert abs(coverage - expected) < 5 * np.sqrt(0.25 / 10_000)
    spread, _ = found["weights, spread of ranks"]
    assert (spread > 1.2) if width < 1 else abs(spread - 1) < 0.03
