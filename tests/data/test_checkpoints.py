# SPDX-License-Identifier: Apache-2.0
"""Fits in closed form that are interrupted go on as if they had not been."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_largecat as lc
from numpyro_largecat.data.checkpoints import fingerprint
from numpyro_largecat.data.fit_folders import FitFolder
from tests.slow_cases import slow_case

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(120, 2)) + 4 * (np.arange(120) % 3)[:, None]
FAMILY = lc.mixtures.DiagonalGaussianFamily(np.zeros(2), np.ones(2))
CORPUS = lc.data.Corpus.from_documents(
    [[f"w{(7 * d + i * i) % 11 + 11 * (d % 2)}" for i in range(6 + d % 5)] for d in range(64)]
)
OTHER_WORDS = lc.data.Corpus.from_documents(
    [[f"w{(7 * d + i * i + 1) % 11 + 11 * (d % 2)}" for i in range(6 + d % 5)] for d in range(64)],
    CORPUS.vocabulary,
)
OTHER_NAMES = dataclasses.replace(CORPUS, vocabulary=CORPUS.vocabulary[::-1])
MANY = 150  # passes
QUIET = {"progress_bar": False}


def mixture(num_passes=4, x=X, **options):
    """Of five batches."""
    options = {"num_active": 2, "batch_size": 25} | options
    return lc.fit_mixture(KEY, x, 3, FAMILY, num_passes=num_passes, **options, **QUIET)


def topics(num_passes=4, corpus=CORPUS, **options):
    """Of four batches."""
    return lc.fit_topics(KEY, corpus, 3, num_passes=num_passes, batch_size=16, **options, **QUIET)


def double_sum(num_passes=4, x=X, rng_key=KEY, **options):
    y = jnp.arange(len(x)) % 3
    rule = lc.double_sum.ImplicitSGD(1.0)
    options = {"num_passes": num_passes, "record_losses": True} | options
    return lc.fit_double_sum(rng_key, jnp.asarray(x), y, 3, rule, **options, **QUIET)


STOCHASTIC = {"method": "stochastic"}
WARM = {"options": lc.topics.Options(warm_start=True)}
FITS = [
    pytest.param(mixture, {}, id="mixture"),
    pytest.param(mixture, STOCHASTIC, id="mixture, stochastic"),
    pytest.param(topics, {}, id="topics"),
    slow_case(topics, WARM),
    pytest.param(topics, STOCHASTIC, id="topics, stochastic"),
    pytest.param(double_sum, {}, id="double sum"),
    slow_case(double_sum, {"batch_size": 2}),
]


def assert_same(fit, other):
    """Bit by bit."""
    for field in fields(fit):
        ours, theirs = getattr(fit, field.name), getattr(other, field.name)
        if isinstance(ours, (np.ndarray, jax.Array)):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
        elif isinstance(ours, (int, float, str, tuple)):
            assert ours == theirs


class Stop(Exception):
    """What ends a fit in these tests."""


def stopped(fit, folder, monkeypatch, after, **options):
    """Run a fit whose process ends in the step after so many."""
    from numpyro_largecat.data.checkpoints import CheckpointWriter

    def after_steps(self, num_steps):
        if num_steps == after:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "after_steps", after_steps)
        with pytest.raises(Stop):
            fit(checkpoints=lc.Checkpoints(folder), **options)


@pytest.mark.parametrize(("fit", "options"), FITS)
@pytest.mark.some_cases(3)
def test_a_fit_goes_on_bit_by_bit(fit, options, tmp_path, monkeypatch) -> None:
    """From the middle of the first pass, of a later one, and after the last."""
    whole = fit(**options)
    for after in (1, 3) if fit is double_sum else (2, 7):
        folder = tmp_path / str(after)
        stopped(fit, folder, monkeypatch, after, **options)
        resume = {"checkpoints": lc.Checkpoints(folder), "resume": True}
        assert_same(fit(**resume, **options), whole)
        assert_same(fit(**resume, **options), whole)


@pytest.mark.parametrize("fit", [mixture, topics, double_sum])
def test_a_fit_of_one_of_several_processes_goes_on(fit, tmp_path, monkeypatch) -> None:
    """Its folder has parts, as those of fits over all processes have."""
    whole = fit()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    stopped(fit, tmp_path, monkeypatch, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["part_0_of_1"]
    assert_same(fit(checkpoints=lc.Checkpoints(tmp_path), resume=True), whole)


@pytest.mark.parametrize(
    ("fit", "other", "what"),
    [
        pytest.param(mixture, {"x": X + 1}, "data", id="mixture, data"),
        pytest.param(mixture, {"num_active": 1}, "num_active", id="mixture, num_active"),
        pytest.param(mixture, {"batch_size": 30}, "sizes of batches", id="mixture, batches"),
        pytest.param(topics, {"word_concentration": 0.2}, "word_concentration", id="topics"),
        pytest.param(topics, {"inference": "mean_field"}, "inference", id="topics, inference"),
        pytest.param(topics, {"method": "stochastic"}, "method", id="topics, method"),
        pytest.param(topics, {"corpus": CORPUS[range(60)]}, "corpus", id="topics, corpus"),
        pytest.param(topics, {"corpus": OTHER_WORDS}, "corpus", id="topics, words"),
        pytest.param(topics, {"corpus": OTHER_NAMES}, "corpus", id="topics, vocabulary"),
        pytest.param(double_sum, {"rng_key": jax.random.key(1)}, "rng_key", id="double sum"),
    ],
)
def test_other_data_and_arguments_are_refused(fit, other, what, tmp_path) -> None:
    checkpoints = lc.Checkpoints(tmp_path)
    fit(1, checkpoints=checkpoints)
    with pytest.raises(ValueError, match=f"`resume` needs .*; its {what} was .*, and is now"):
        fit(checkpoints=checkpoints, resume=True, **other)


@pytest.mark.parametrize("fit", [mixture, topics, double_sum])
def test_a_fit_of_more_passes_than_asked_for_is_returned_with_a_warning(fit, tmp_path) -> None:
    checkpoints = lc.Checkpoints(tmp_path)
    whole = fit(2, checkpoints=checkpoints)
    with pytest.warns(RuntimeWarning, match="steps, more than the .* of `num_passes`"):
        found = fit(1, checkpoints=checkpoints, resume=True)
    assert_same(found, whole)


def test_other_versions_are_told_of(tmp_path, monkeypatch) -> None:
    checkpoints = lc.Checkpoints(tmp_path)
    double_sum(1, checkpoints=checkpoints)
    monkeypatch.setattr("numpyro_largecat.data.versions.version", lambda name: "0.0")
    with pytest.warns(RuntimeWarning, match=r"other versions: .*jax .*, here 0\.0"):
        double_sum(checkpoints=checkpoints, resume=True)


def test_a_fingerprint_tells_shapes_types_and_places_apart() -> None:
    zeros = jnp.zeros((2, 3))
    trees = [zeros, zeros.T, zeros[0], np.zeros((2, 3), np.int32), np.zeros(3), {"a": zeros}]
    trees += [{"b": zeros}, (zeros, None), (None, zeros), (zeros, zeros[:0]), {"a": {"b": zeros}}]
    assert len({fingerprint(tree) for tree in trees}) == len(trees)


def test_a_fingerprint_is_one_of_arrays_of_numpy_and_jax() -> None:
    """And of each memory layout, and of Python's numbers and NumPy's."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for same in (jnp.asarray(x), np.asfortranarray(x), x[::-1][::-1]):
        assert fingerprint({"x": same}) == fingerprint({"x": x})
    assert fingerprint((2, 0.5)) == fingerprint([np.int64(2), np.float64(0.5)])


def test_numbers_of_numpy_and_step_sizes_of_functions_go_on(tmp_path) -> None:
    def fit(num_passes):
        rule = lc.double_sum.ImplicitSGD(lambda t: 1 / (1 + t))
        options = {"ridge": np.float32(0.1), "num_passes": num_passes, "resume": True} | QUIET
        checkpoints, y = lc.Checkpoints(tmp_path), jnp.arange(len(X)) % 3
        arguments = KEY, jnp.asarray(X), y, np.int64(3), rule
        return lc.fit_double_sum(*arguments, checkpoints=checkpoints, **options)

    fit(2)
    assert fit(3).num_passes == 3


def test_a_fit_of_more_passes_goes_on(tmp_path, monkeypatch) -> None:
    """It keeps the widths that it was compiled for, which depend on the number of passes."""
    monkeypatch.setattr("numpyro_largecat.topics.whole_documents.SLOTS_FOR_CODE", 200)
    options = {"checkpoints": lc.Checkpoints(tmp_path), "resume": True} | WARM
    topics(1, **options)
    assert len(topics(8, **options).bounds) == 8


@pytest.mark.parametrize("fit", [mixture, topics, double_sum])
def test_checkpoints_need_a_folder_of_their_own(fit, tmp_path) -> None:
    fit(1, checkpoints=lc.Checkpoints(tmp_path, every_steps=1))
    with pytest.raises(ValueError, match=r"already has a checkpoint.*`resume=True`"):
        fit(1, checkpoints=lc.Checkpoints(tmp_path))


def test_checkpoints_of_another_learner_are_refused(tmp_path) -> None:
    double_sum(1, checkpoints=lc.Checkpoints(tmp_path))
    with pytest.raises(ValueError, match=r"must hold a fit of fit_mixture.* a fit of fit_double_"):
        mixture(checkpoints=lc.Checkpoints(tmp_path), resume=True)


KILLED = """
import os, random, signal, sys, threading
import numpyro_largecat as lc
import tests.data.test_checkpoints as t
fit, folder, seed = getattr(t, sys.argv[1]), sys.argv[2], int(sys.argv[3])
fit(1)  # compile
wait = 4 * random.Random(seed).random()
threading.Timer(wait, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
fit(t.MANY, checkpoints=lc.Checkpoints(folder, every_steps=3), resume=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fit", [mixture, topics])
def test_kill_9_at_three_moments(fit, tmp_path) -> None:
    steps = [0]
    for seed in range(3):
        arguments = [fit.__name__, str(tmp_path), str(seed)]
        done = subprocess.run(
            [sys.executable, "-c", KILLED, *arguments],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (-signal.SIGKILL, 0), done.stderr
        steps += FitFolder(tmp_path, "").numbers()[-1:]
    assert steps == sorted(steps) and steps[-1] > 0
    again = fit(MANY, checkpoints=lc.Checkpoints(tmp_path), resume=True)
    assert_same(again, fit(MANY))


def test_a_fingerprint_of_numbers_says_which_they_are() -> None:
    assert fingerprint(np.full(5, 0.1)).startswith("0.1 to 0.1, checksum ")
    assert fingerprint((np.zeros(2), np.ones(2))).startswith("checksum ")
    assert fingerprint(np.zeros(0)).startswith("checksum ")
