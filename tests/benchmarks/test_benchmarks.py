# SPDX-License-Identifier: Apache-2.0
"""Each benchmark runs with ``--quick`` and writes records of the agreed shape."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks import two_sided, two_sided_cells
from benchmarks.records import torch_is_missing
from benchmarks.step_cells import Cell
from benchmarks.step_cost import records_of, wanted_figures
from benchmarks.turns import Measured
from tests.data_files import WITHOUT_DATA

ROOT = Path(__file__).parents[2]
FIELDS = {"benchmark", "setting", "method", "metric", "value", "unit", "better"}
# Most of a quick run is compilation, and its speed does not matter.
ENVIRONMENT = {**WITHOUT_DATA, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
NOT_ALWAYS_REACHED = {
    "seconds_to_reach",
    "seconds_to_peer_best",
    "speedup_to_reach",
    "processor_speedup_to_reach",
    "loss_at_rate",
}


def run_quick(name: str, out: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """Run a benchmark as a user does; return what it prints and its records of cells."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(out)]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    records = json.loads(out.read_text(encoding="utf-8"))
    machines = [record for record in records if "machine" in record]
    assert len(machines) == 1
    check_machine_record(name, machines[0])
    cells = [record for record in records if "machine" not in record]
    for record in cells:
        check_record(name, record)
    return done.stdout, cells


def check_machine_record(name: str, record: dict[str, Any]) -> None:
    assert record.keys() == {"benchmark", "machine", "versions", "date"}
    assert record["benchmark"] == name
    assert {"processor", "cores", "memory_gb", "device"} <= record["machine"].keys()
    assert {"python", "numpyro-largecat", "numpyro", "jax"} <= record["versions"].keys()
    assert datetime.fromisoformat(record["date"]).tzinfo is not None


def check_record(name: str, record: dict[str, Any]) -> None:
    assert record.keys() == FIELDS
    assert record["benchmark"] == name
    assert isinstance(record["setting"], dict)
    assert all(isinstance(record[field], str) for field in ("method", "metric", "unit"))
    assert record["better"] in ("lower", "higher")
    if record["metric"] not in NOT_ALWAYS_REACHED or record["value"] is not None:
        assert isinstance(record["value"], int | float)
        assert math.isfinite(record["value"])


@pytest.mark.slow
def test_soak(tmp_path: Path) -> None:
    """Each kind of batches has its growth, and compiles nothing after the first steps."""
    _, cells = run_quick("soak", tmp_path / "out.json")
    assert {record["method"] for record in cells} == {"arrays", "streamed", "iterator"}
    assert all(record["value"] == 0 for record in cells if record["metric"] == "programs")


@pytest.mark.slow
def test_streams(tmp_path: Path) -> None:
    """Each figure is there, and the file and the checkpoints are removed."""
    _, cells = run_quick("streams", tmp_path / "out.json", "--folder", str(tmp_path))
    metrics = {record["metric"] for record in cells}
    wanted = {"disk_to_memory_ratio", "ms_per_step", "checkpoint_pause_s", "resume_s"}
    assert metrics - {"torch_loader_ratio"} == wanted
    assert ("torch_loader_ratio" in metrics) is not torch_is_missing()
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.slow
def test_sharding(tmp_path: Path) -> None:
    """What is sent is what is predicted, and each device has its share."""
    _, cells = run_quick("sharding", tmp_path / "out.json")
    values = {(r["setting"]["devices"], r["metric"]): r["value"] for r in cells}
    assert values["1", "bytes_per_step"] == 0
    for devices in ("2", "4", "8", "4 x 2"):
        ratio = values[devices, "predicted_to_measured_bytes"]
        assert ratio == pytest.approx(1, abs=0.05)
        assert values[devices, "table_memory_share"] == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    """The entry points that are asked for have the seconds and the number of their programs."""
    options = ["--entries", "double_sum, Vanilla", "init, frequency"]
    _, records = run_quick("compile", tmp_path / "out.json", *options)
    names = ["init, frequency gumbel", "fit_double_sum, Vanilla"]
    metrics = ["compile_seconds", "programs", "first_call_seconds"]
    assert [(r["method"], r["metric"]) for r in records] == [(n, m) for n in names for m in metrics]
    assert all(record["value"] > 0 for record in records)


@pytest.mark.slow
def test_scales(tmp_path: Path) -> None:
    """Each form has a scale, its ratio to the reference and a held-out score.

    So has the best scale that is not learned.
    """
    _, records = run_quick("scales", tmp_path / "out.json")
    found = {(r["setting"]["reference"], r["method"], r["metric"]) for r in records}
    forms = ["centred", "not centred", "at prior", "best fixed", "truth"]
    metrics = ["scale_ratio", "scale", "heldout_log_likelihood"]
    assert found == {("NUTS", form, metric) for form in ["NUTS", *forms] for metric in metrics}


@pytest.mark.slow
def test_step_cost(tmp_path: Path) -> None:
    """Each method and K has a time, its range, and a peak memory."""
    printed, records = run_quick("step_cost", tmp_path / "out.json")
    cells = {(r["method"], r["setting"]["K"], r["metric"]): r["value"] for r in records}
    metrics = (
        "ms_per_step",
        "ms_per_step_min",
        "ms_per_step_max",
        "peak_mb",
        "peak_mb_above_tables",
    )
    assert cells.keys() == {
        (method, num_categories, metric)
        for method, sizes in {
            "subsampled": (10**3, 10**4),
            "bfloat16": (10**3,),
            "logistic": (10**3,),
            "shared_delta": (10**3,),
            "torch": () if torch_is_missing() else (10**3,),
            "torch_batch": () if torch_is_missing() else (10**3,),
            "torch_exact": () if torch_is_missing() else (10**3,),
            "numpyro": (10**3,),
        }.items()
        for num_categories in sizes
        for metric in metrics
    }
    assert len(records) == len(cells)
    for method, num_categories, _ in cells:
        middle, least, greatest, peak, above = (cells[method, num_categories, m] for m in metrics)
        assert 0 < least <= middle <= greatest
        assert peak > above > 10
    assert "ms per step" in printed
    assert ("PyTorch is not installed" in printed) == torch_is_missing()


def test_step_cost_compares_with_torch_where_it_was_measured() -> None:
    """The posterior takes 4 ms, our point estimate 1 ms and PyTorch's 2 or 5 ms."""
    times = {"subsampled": 4.0, "delta": 1.0, "shared": 3.0, "shared_delta": 0.8, "torch": 2.0}
    times["torch_batch"] = 5.0
    measured = {
        Cell(method, 10**5, 128, 100): Measured([ms, ms, ms], 1000.0, 9.0)
        for method, ms in times.items()
    }
    records = records_of(measured)
    figures = {(r["metric"], r["setting"]["K"]): r["value"] for r in wanted_figures(records)}
    assert figures == {
        ("ratio_to_torch", 10**5): 2.0,
        ("delta_ratio_to_torch", 10**5): 0.5,
        ("ratio_to_torch_batch", 10**5): 0.8,
        ("delta_ratio_to_torch_batch", 10**5): 0.2,
        ("shared_ratio_to_torch", 10**5): 1.5,
        ("shared_delta_ratio_to_torch", 10**5): 0.4,
    }
    without = [record for record in records if not record["method"].startswith("torch")]
    assert wanted_figures(without) == []


@pytest.mark.slow
def test_two_sided(tmp_path: Path) -> None:
    """Each method and size has times, a peak memory and a set-up, and ours are compared."""
    printed, records = run_quick("two_sided", tmp_path / "out.json")
    quality = [record for record in records if "seconds" in record["setting"]]
    records = [record for record in records if record not in quality]
    found = {(r["method"], r["setting"]["K"], r["metric"]): r["value"] for r in records}
    sizes = {("subsampled", 10**3), ("subsampled", 10**4)}
    if not torch_is_missing():
        sizes.add(("torch", 10**3))
    for method, size in sizes:
        middle, least, greatest, peak, setup = (
            found[method, size, metric]
            for metric in (
                "ms_per_step",
                "ms_per_step_min",
                "ms_per_step_max",
                "peak_mb",
                "setup_seconds",
            )
        )
        assert 0 < least <= middle <= greatest
        assert peak > 100 and setup > 0.5
    ratios = {key[1:] for key in found if key[2] in ("flat_ratio", "ratio_to_torch")}
    with_torch = set() if torch_is_missing() else {(10**3, "ratio_to_torch")}
    assert ratios == {(10**4, "flat_ratio")} | with_torch
    assert len(found) == len(records) == 5 * len(sizes) + len(ratios)
    learners = {"subsampled", "popularity"} | (set() if torch_is_missing() else {"torch"})
    scores = Counter((record["method"], record["metric"]) for record in quality)
    assert scores == Counter((n, m) for n in learners for m in two_sided.QUALITY_METRICS)
    assert ("PyTorch is not installed" in printed) == torch_is_missing()


def test_two_sided_compares_sizes_and_peers() -> None:
    times = {("subsampled", 100): 2.0, ("subsampled", 1000): 3.0, ("torch", 1000): 1.5}
    measured = {
        two_sided_cells.Cell(*cell, 5): Measured([0.0, ms, 9.0], 1.0, 1.0)
        for cell, ms in times.items()
    }
    found = {(r["metric"], r["setting"]["K"]): r["value"] for r in two_sided.ratios(measured)}
    assert found == {("flat_ratio", 1000): 1.5, ("ratio_to_torch", 1000): 2.0}


@pytest.mark.slow
def test_time_to_quality(tmp_path: Path) -> None:
    """Each method has a score and a number of steps at the same check points."""
    peers = [] if torch_is_missing() else ["torch_exact", "torch_sampled"]
    figure = tmp_path / "curves.png"
    printed, records = run_quick("time_to_quality", tmp_path / "out.json", "--plot", str(figure))
    curves = {
        (method, metric): {
            r["setting"]["seconds"]: r["value"]
            for r in records
            if (r["method"], r["metric"]) == (method, metric)
        }
        for method in ("subsampled", "numpyro", *peers)
        for metric in ("heldout_log_likelihood", "steps")
    }
    check_points = list(curves["numpyro", "steps"])
    assert check_points == sorted(check_points)
    assert check_points[0] == 0 and check_points[-1] == 2
    for (_, metric), curve in curves.items():
        assert list(curve) == check_points
        start, *_, end = curve.values()
        assert end > start
        if metric == "heldout_log_likelihood":
            assert max(curve.values()) < 0
    number = len(curves) // 2 * len(check_points)
    others = Counter((r["metric"], r["setting"].get("peer")) for r in records) - Counter(
        {("heldout_log_likelihood", None): number, ("steps", None): number}
    )
    assert others == Counter(
        [("seconds_to_reach", None), ("speedup_to_reach", None)]
        + [(f"seconds_to_{best}_best", peer) for best in ("peer", "own") for peer in peers]
    )
    assert "Subsampled classes" in printed
    assert ("PyTorch is not installed" in printed) == torch_is_missing()
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_an_unknown_argument_is_refused() -> None:
    """A misspelt option does not start a long run."""
    command = [sys.executable, "-m", "benchmarks.step_cost", "--quik"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--quik" in done.stderr


@pytest.mark.parametrize("name", ["step_cost", "patches"])
@pytest.mark.slow
def test_help_says_what_is_measured(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout and "--quick" in done.stdout


@pytest.mark.slow
def test_random_effects(tmp_path: Path) -> None:
    """Groups beside their closed form, and four fits of a mixed logit beside NUTS."""
    _, records = run_quick("random_effects", tmp_path / "out.json")
    found = Counter((r["setting"]["study"], r["method"]) for r in records)
    assert found == {
        ("gaussian", "subsampled"): 4,
        ("made", "nuts"): 1,
        ("made", "mean_field"): 27,
        ("made", "row_covariance"): 27,
        ("made", "following"): 27,
        ("made", "importance_weighted"): 27,
    }


@pytest.mark.slow
def test_posterior(tmp_path: Path) -> None:
    """Every kind of SVI is compared with NUTS, and with SVI on all data."""
    printed, records = run_quick("posterior", tmp_path / "out.json")
    pairs = {(r["method"], r["setting"]["reference"]) for r in records}
    assert pairs == {
        ("numpyro", "nuts"),
        ("subsampled", "nuts"),
        ("stateless", "nuts"),
        ("subsampled", "numpyro"),
        ("stateless", "numpyro"),
    }
    assert "subsampled against nuts" in printed


@pytest.mark.slow
def test_proposals(tmp_path: Path) -> None:
    """Each way to draw has its times, and its variances at both weights."""
    printed, records = run_quick("proposals", tmp_path / "out.json")
    cells = {(r["method"], r["setting"].get("weights"), r["metric"]): r["value"] for r in records}
    ways = ("uniform", "frequency ** 0.75")
    times = ("ms_per_draw", "ms_per_step")
    variances = (
        "gradient_variance",
        "gradient_variance_error",
        "posterior_gradient_variance",
        "bound_variance",
    )
    assert cells.keys() == {(way, None, metric) for way in ways for metric in times} | {
        (way, place, metric)
        for way in ways
        for place in ("start", "fitted")
        for metric in variances
    }
    assert len(records) == len(cells)
    for (way, place, metric), value in cells.items():
        if way == "uniform" and place == "start" and metric == "bound_variance":
            assert value < 1e-9  # the utilities of all classes are equal
        else:
            assert value > 0
    assert "Variance over draws of classes" in printed


@pytest.mark.slow
def test_predict(tmp_path: Path) -> None:
    """Each function has a time, relative to the product and to the centre, and scratch memory."""
    printed, records = run_quick("predict", tmp_path / "out.json")
    over_draws = {"top_classes over draws", "log_predictive"}
    methods = {"matrix product", "top_classes", "log_likelihood"} | over_draws
    for metric in ("ms", "share_of_product_speed", "scratch", "ratio_to_centre"):
        values = {r["method"]: r["value"] for r in records if r["metric"] == metric}
        assert values.keys() == methods
        assert min(values.values()) > 0
    assert "share of the product's speed" in printed


@pytest.mark.slow
def test_mixture_cost(tmp_path: Path) -> None:
    """Each method has a time and its memory, with each kind of covariance."""
    printed, records = run_quick("mixture_cost", tmp_path / "out.json")
    mixtures = {"numpyro", "L = 2", "L = 8"}
    methods = {"full": mixtures, "diagonal": mixtures | {"elbo, L = 2"}}
    cells = [(r["setting"]["covariance"], r["method"], r["metric"]) for r in records]
    assert sorted(cells) == sorted(
        (covariance, method, metric)
        for covariance, names in methods.items()
        for method in names
        for metric in ("seconds", "memory")
    )
    assert all(r["value"] > 0 for r in records)
    assert "memory, MB" in printed
