# SPDX-License-Identifier: Apache-2.0
"""The benchmark of image patches: its shape, its patches and its marks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import patches
from tests.benchmarks.test_benchmarks import run_quick


@pytest.mark.slow
def test_patches(tmp_path: Path) -> None:
    """Each L has a curve and a time under both algorithms, and a distance from the dense fit."""
    figure = tmp_path / "curves.png"
    printed, records = run_quick("patches", tmp_path / "out.json", "--plot", str(figure))
    by_metric: dict[str, list[dict]] = {}
    for r in records:
        by_metric.setdefault(r["metric"], []).append(r)
    for algorithm in patches.ALGORITHMS:
        for num_active in (1, 2, 6):
            curve = [
                (r["setting"]["seconds"], r["value"])
                for r in by_metric["heldout_log_likelihood"]
                if (r["setting"]["algorithm"], r["setting"]["L"]) == (algorithm, num_active)
            ]
            assert len(curve) == 4  # two passes of two batches
            assert curve == sorted(curve, key=lambda point: point[0])
            assert curve[-1][1] > curve[0][1]
    assert [r["setting"]["L"] for r in by_metric["local_step_seconds"]] == [1, 2, 6]
    one, two = (r["value"] for r in by_metric["distance_mean"])
    assert 0 < two < one < 1
    dense = [r for r in by_metric["speedup_to_reach"] if r["method"] == "dense"]
    assert all(r["value"] >= 1 for r in dense)
    assert "s to dense score" in printed
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_patches_are_windows_without_their_means() -> None:
    """The second patch of a row starts four columns to the right."""
    images = np.random.RandomState(0).randint(0, 256, (2, 16, 24)).astype(np.uint8)
    x = patches.patches(images)
    assert x.shape == (2 * 3 * 5, 64)
    for row, window in ((1, images[0, :8, 4:12]), (15 + 5, images[1, 4:12, :8])):
        pixels = window.reshape(-1) / 255.0
        np.testing.assert_allclose(x[row], pixels - pixels.mean(), atol=1e-6)


@pytest.mark.parametrize(
    ("score", "seconds"), [(-5.0, 1.0), (-2.0, 1.4), (1.0, 2.0), (2.0, 4.0), (9.0, None)]
)
def test_time_to_a_score_is_interpolated(score: float, seconds: float | None) -> None:
    """Between the points around the first crossing."""
    points = [(1, 1.0, 2.0, -4.0), (2, 2.0, 4.0, 1.0), (3, 3.0, 6.0, 0.0), (4, 5.0, 10.0, 4.0)]
    run = patches.Run(None, iter(()), curve=[patches.Point(*p) for p in points])
    assert run.seconds_to_reach(score) == pytest.approx(seconds)
    doubled = None if seconds is None else 2 * seconds
    assert run.seconds_to_reach(score, "processor") == pytest.approx(doubled)
