# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the papers' tables: its shape, its step sizes, its scores and its marks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import augment_reduce
from tests.benchmarks.test_benchmarks import run_quick
from tests.data_files import WITHOUT_DATA

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_augment_reduce(tmp_path: Path) -> None:
    """Each method has train and test scores; without covariates, errors and bounds."""
    printed, records = run_quick("augment_reduce", tmp_path / "out.json")
    assert all(
        r["setting"].keys() == {"dataset", "B", "S", "steps", "paper", "optimiser"} for r in records
    )
    cells = {(r["setting"]["dataset"], r["method"], r["metric"]): r["value"] for r in records}
    assert len(cells) == len(records)
    for name, setting in augment_reduce.QUICK_SETTINGS.items():
        for method in setting.methods:
            metrics = {m for n, method_of, m in cells if (n, method_of) == (name, method)}
            assert metrics >= {"steps", "fit_seconds"}
            if name == "quick":
                assert metrics >= {
                    f"{part}_{what}"
                    for part in ("train", "test")
                    for what in ("log_likelihood", "accuracy")
                }
                assert cells[name, method, "test_log_likelihood"] < 0
                assert cells[name, method, "test_accuracy"] > 2 / 30  # twice as good as chance
            else:
                assert cells[name, method, "gap_per_observation"] >= 0
                assert cells[name, method, "bound"] <= cells[name, method, "log_likelihood"]
    assert {n for n, _, _ in cells} == set(augment_reduce.QUICK_SETTINGS)
    assert "(the paper's)" in printed


def test_scores_are_means_over_the_rows_alone() -> None:
    """Rows that fill up the last block are not counted."""
    rng = np.random.default_rng(0)
    w, b, x = rng.normal(size=(4, 3)), rng.normal(size=4), rng.normal(size=(7, 3))
    y = rng.integers(0, 4, size=7)
    utilities = x @ w.T + b
    log_probs = utilities[np.arange(7), y] - np.log(np.exp(utilities).sum(axis=1))
    params = {"w": jnp.asarray(w), "b": jnp.asarray(b)}
    scores = augment_reduce.score(params, x, y, "gumbel")
    np.testing.assert_allclose(scores["log_likelihood"], log_probs.mean(), rtol=1e-5)
    assert scores["accuracy"] == (utilities.argmax(axis=1) == y).mean()
    assert scores["clipped_log_likelihood"] == scores["log_likelihood"]


def test_log_probabilities_below_minus_26_are_clipped_beside() -> None:
    params = {"w": jnp.zeros((2, 1)), "b": jnp.array([0.0, 100.0])}
    scores = augment_reduce.score(params, np.zeros((2, 1)), np.array([0, 1]), "gumbel")
    assert scores["log_likelihood"] == -50
    assert scores["clipped_log_likelihood"] == -13


def test_one_vs_each_bounds_of_all_classes() -> None:
    b = np.random.default_rng(0).normal(size=5)
    expected = [sum(-np.log1p(np.exp(b[k] - b[y])) for k in range(5) if k != y) for y in range(5)]
    np.testing.assert_allclose(augment_reduce.one_vs_each_bounds(jnp.asarray(b)), expected, 1e-5)


def test_the_bound_of_the_softmax_is_that_of_the_kept_u() -> None:
    """At the best u it is the log likelihood; each u that is off by log 2 costs log 2 - 1 / 2."""
    problem, p = augment_reduce.frequency_problem(300, 100)
    frequencies = np.bincount(problem.y_train) / 300
    best_u = -np.log(frequencies[problem.y_train])
    b = np.log(frequencies)
    for distance, gap in ((0.0, 0.0), (np.log(2), np.log(2) - 0.5)):
        params = {"b": jnp.asarray(b), "y_u": jnp.asarray(best_u + distance)}
        fit = augment_reduce.Fit(params, 1, 1.0)
        cells = augment_reduce.frequency_cells("softmax", problem, p, fit)
        values = {metric: value for _, metric, value in cells}
        np.testing.assert_allclose(values["gap_per_observation"], gap, atol=1e-5)
        np.testing.assert_allclose(values["error_of_fit"], 0, atol=1e-7)


def test_a_frequency_problem_has_no_class_without_a_row() -> None:
    problem, p = augment_reduce.frequency_problem(300, 100)
    assert np.bincount(problem.y_train, minlength=problem.num_categories).min() >= 1
    assert len(p) == problem.num_categories < 100


def test_worse_means_worse_by_more_than_the_papers_last_digit() -> None:
    assert not augment_reduce.is_worse("test_log_likelihood", -0.2614, -0.261)
    assert augment_reduce.is_worse("test_log_likelihood", -0.2616, -0.261)
    assert augment_reduce.is_worse("error_of_fit", 3.7e-6, 3.0e-6)
    assert not augment_reduce.is_worse("error_of_fit", 2.9e-6, 3.0e-6)
    assert not augment_reduce.is_worse("test_accuracy", 0.5, None)


@pytest.mark.parametrize("arguments", [["--datasets", "minst"], ["--methods", "sofmax"], []])
@pytest.mark.some_cases(1)
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    """A misspelt name, and no folder of data, do not start a long run."""
    command = [sys.executable, "-m", "benchmarks.augment_reduce", *arguments]
    how = {"cwd": ROOT, "env": WITHOUT_DATA, "capture_output": True, "text": True}
    done = subprocess.run(command, **how, timeout=60)
    assert done.returncode == 2
    assert any(word in done.stderr for word in ("minst", "sofmax", "set LARGECAT_DATA to"))
