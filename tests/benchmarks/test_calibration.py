# SPDX-License-Identifier: Apache-2.0
"""The benchmark of calibration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.test_benchmarks import run_quick


@pytest.mark.slow
def test_calibration(tmp_path: Path) -> None:
    """Coverage and spread of ranks of weights and contrasts."""
    printed, records = run_quick("calibration", tmp_path / "out.json")
    assert {r["metric"] for r in records} == {"coverage_50", "coverage_90", "rank_spread"}
    assert {r["setting"]["quantity"] for r in records} == {"weight", "contrast"}
    assert "common shift" in printed
