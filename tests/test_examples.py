# SPDX-License-Identifier: Apache-2.0
"""The examples run from top to bottom on small data."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def write_bibtex(folder):
    """A small data set in the format of the real one, whose label follows its first feature."""
    rng = np.random.default_rng(0)
    for part, num_points in (("train", 120), ("test", 30)):
        labels = rng.integers(6, size=num_points)
        lines = [f"{num_points} 12 6"]
        lines += [f"{label} {label}:1 {6 + rng.integers(6)}:1" for label in labels]
        (folder / f"bibtex_{part}.txt").write_text("\n".join(lines) + "\n")


@pytest.mark.slow
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
    assert prediction.centre.log_prob.mean() > np.log(1 / 6) + 0.3
    assert {path.name for path in output.iterdir()} == {
        "posterior.nc",
        "elbo.png",
        "weights.png",
        "calibration.png",
        "accuracy.png",
        "confusion.png",
    }
    printed = capsys.readouterr().out
    assert "class frequencies" in printed and "mean over the posterior" in printed
    posterior = az.from_netcdf(str(output / "posterior.nc"))
    assert posterior["posterior"]["weight"].dims == ("chain", "draw", "classes", "feature")
    assert posterior["constant_data"]["elbo"].shape == (300,)


def write_trips(folder, num_people=40):
    """A small file in the format of Swissmetro, in which cheap and fast modes are chosen."""
    rng = np.random.default_rng(0)
    lines = [
        "PURPOSE,CHOICE,SP,ID,TRAIN_AV,SM_AV,CAR_AV,TRAIN_TT,SM_TT,CAR_TT,TRAIN_CO,SM_CO,CAR_CO"
    ]
    lines[0] += ",TRAIN_HE,SM_HE,SM_SEATS,FIRST,LUGGAGE,AGE,MALE,INCOME,GA"
    for i in range(5 * num_people):
        time, cost = rng.integers(50, 250, 3), rng.integers(30, 200, 3)
        choice = 1 + np.argmax(rng.gumbel(size=3) - (time + cost) / 100)
        cells = [1, choice, 1, i // 5, 1, 1, int(choice == 3 or i % 3 > 0), *time, *cost]
        lines.append(",".join(map(str, [*cells, 30, 10, 0, 0, 0, 3, 1, 2, 0])))
    (folder / "swissmetro.csv").write_text("\n".join(lines))


def run_choice_models(tmp_path):
    main = runpy.run_path(str(EXAMPLES / "choice_models.py"))["main"]
    data, output = tmp_path / "data", tmp_path / "out"
    return main(["--quick", "--data", str(data), "--output", str(output)]), output


@pytest.mark.slow
def test_choice_models(tmp_path, capsys):
    """The data set that is there is fitted by logit and probit, reported and drawn."""
    (tmp_path / "data").mkdir()
    write_trips(tmp_path / "data")
    found, output = run_choice_models(tmp_path)
    assert {path.name for path in output.iterdir()} == {"swissmetro.png"}
    printed = capsys.readouterr().out
    for text in (
        "published",
        "posterior median, CHF per hour",
        "held-out log likelihood",
    ):
        assert text in printed
    assert "skipping modecanada: found no modecanada.csv" in printed
    assert set(found) == {"swissmetro"}
    assert set(found["swissmetro"]) == {"logit", "probit", "logit by NUTS"}
    for draws in found["swissmetro"].values():
        np.testing.assert_allclose(draws.mean(axis=0)[2:], -1, atol=0.5)  # time and cost


def test_modecanada_coefficients_belong_to_their_features(tmp_path):
    row = "7,{},{},300,{},{},{},{},45,1\n"  # cost, ivt, ovt, freq
    modes = (("train", 0, 50, 120, 30, 5), ("air", 1, 90, 60, 90, 20))
    modes += (("bus", 0, 20, 240, 15, 10), ("car", 0, 40, 180, 0, 0))
    header = "case,alt,choice,dist,cost,ivt,ovt,freq,income,urban\n"
    path = tmp_path / "modecanada.csv"
    path.write_text(header + "".join(row.format(*mode) for mode in modes))
    problem = runpy.run_path(str(EXAMPLES / "choice_models.py"))["modecanada"](path)
    bus = dict(zip(problem.coefficients, problem.design[0, 2], strict=True))
    assert {name: value for name, value in bus.items() if value} == {
        "bus": 1,
        "cost (10 $)": 2,
        "frequency (10 a day)": 1,
        "out of vehicle (h)": 0.25,
        "income (10), bus": 4.5,
        "in vehicle (h), bus": 4,
    }
    assert problem.published[problem.coefficients.index("in vehicle (h), air")] > 0


def test_topics(tmp_path, capsys):
    """It fits a corpus in LDA-C's format, prints the topics and draws them."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(60):
        words = np.unique(rng.integers(0, 10, size=8) + 10 * rng.integers(2))
        lines.append(f"{len(words)} " + " ".join(f"{w}:{rng.integers(1, 4)}" for w in words))
    (tmp_path / "ap.dat").write_text("\n".join(lines) + "\n")
    (tmp_path / "ap.vocab.txt").write_text("\n".join(f"word{i}" for i in range(20)) + "\n")
    main = runpy.run_path(str(EXAMPLES / "topics.py"))["main"]
    picture = tmp_path / "topics.png"
    options = ["--data", str(tmp_path), "--topics", "2"]
    fit = main([*options, "--output", str(picture)])
    halves = [{int(w.word[4:]) // 10 for w in topic} for topic in fit.top_words(8)]
    assert sorted(map(sorted, halves)) == [[0], [1]]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Held-out log likelihood" in capsys.readouterr().out
