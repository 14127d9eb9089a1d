# SPDX-License-Identifier: Apache-2.0
"""The examples run from top to bottom on small data."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parents[1] / "examples"


def write_bibtex(folder):
    """A small data set in the format of the real one, whose label follows its first feature."""
    rng = np.random.default_rng(0)
    for part, num_points in (("train", 120), ("test", 30)):
        labels = rng.integers(6, size=num_points)
        lines = [f"{num_points} 12 6"]
        lines += [f"{label} {label}:1 {6 + rng.integers(6)}:1" for label in labels]
        (folder / f"bibtex_{part}.txt").write_text("\n".join(lines) + "\n")


def test_demo(tmp_path, capsys):
    """It fits, beats class frequencies, and writes the fit and the pictures."""
    import arviz as az

    write_bibtex(tmp_path)
    main = runpy.run_path(str(EXAMPLES / "demo.py"))["main"]
    arguments = "--dataset bibtex --steps 300 --batch-size 20 --num-sampled 2 --prior-scale 1"
    output = tmp_path / "out"
    prediction = main(
        [
            *arguments.split(),
            "--learning-rate",
            "0.2",
            "--data",
            str(tmp_path),
            "--output",
            str(output),
        ]
    )
    assert prediction.log_prob.mean() > np.log(1 / 6) + 0.3
    assert {path.name for path in output.iterdir()} == {
        "posterior.nc",
        "elbo.png",
        "weights.png",
        "calibration.png",
    }
    printed = capsys.readouterr().out
    assert "class frequencies" in printed and "posterior location" in printed
    posterior = az.from_netcdf(str(output / "posterior.nc"))
    assert posterior["posterior"]["weight"].dims == ("chain", "draw", "classes", "feature")
    assert posterior["constant_data"]["elbo"].shape == (300,)
