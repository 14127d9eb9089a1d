# SPDX-License-Identifier: Apache-2.0
"""Held-out scores, early stops and callbacks between the steps of a fit."""

from __future__ import annotations

import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO

import numpyro_largecat as lc
from numpyro_largecat.svi.run_so_far import RunSoFar

KEY = jax.random.key(0)
NUM_ROWS = 8
X = np.ones(NUM_ROWS, np.float32)


def means(x, rows=None):
    """A mean of each row, drawn towards 1 by every step."""
    with lc.data_plate("data", NUM_ROWS, rows):
        m = numpyro.param("m", jnp.zeros(NUM_ROWS), event_dim=0)
        numpyro.sample("x", dist.Normal(m, 1), obs=x)


@pytest.fixture(scope="module")
def svi():
    return lc.SubsampledSVI(means, lambda *a: None, optax.adam(0.1), Trace_ELBO())


@pytest.fixture(scope="module")
def run(svi):
    """``svi.run`` from a first state that is made once."""
    return partial(svi.run, KEY, init_state=svi.init(KEY, X), progress_bar=False)


@pytest.fixture(params=["array", "arrays", "stream"])
def data(request):
    """The same fit from whole arrays, from batches of them, and from a stream."""
    if request.param == "array":
        return lambda: ((X,), {})
    if request.param == "arrays":
        return lambda: ((), {"batches": lc.ArrayBatches(X, batch_size=4)})
    return lambda: ((), {"batches": iter([(X[:4], np.arange(4))] * 1_000)})


def nearness(target):
    """A score that is best where the first row's mean is at the target."""
    return lambda result: -abs(float(result.params["m"][0]) - target)


@pytest.mark.some_cases(1)
def test_callbacks_see_the_fit_at_their_steps(run, data):
    args, kwargs = data()
    seen = []
    called = [
        lc.Callback(lambda p: seen.append(("a", p.step, len(p.result().losses))), every_steps=3),
        lc.Callback(lambda p: seen.append(("b", p.step, len(p.result().losses))), every_steps=4),
    ]
    run(10, *args, callbacks=called, **kwargs)
    steps = [("a", 3), ("b", 4), ("a", 6), ("b", 8), ("a", 9)]
    assert seen == [(name, step, step) for name, step in steps]


def test_a_fit_with_callbacks_is_the_same(run, data):
    args, kwargs = data()
    plain = run(10, *args, **kwargs)
    args, kwargs = data()
    held_out = lc.HeldOut(nearness(1), every_steps=3)
    scored = run(10, *args, held_out=held_out, **kwargs)
    np.testing.assert_array_equal(scored.params["m"], plain.params["m"])
    np.testing.assert_array_equal(scored.losses, plain.losses)
    assert plain.scores == {}


def test_metrics_are_those_of_the_fit(run):
    seen = []
    result = run(
        4,
        X,
        held_out=lc.HeldOut(nearness(1), every_steps=2),
        callbacks=[lc.Callback(lambda p: seen.append(p.metrics), every_steps=1)],
    )
    elbo = -float(result.losses[0])
    for metrics, loss in zip(seen[1:], result.losses[1:], strict=True):
        elbo = 0.98 * elbo - 0.02 * float(loss)
        assert metrics["elbo"] == pytest.approx(elbo, rel=1e-5)
    assert all(metrics["steps_per_second"] > 0 and metrics["seconds"] > 0 for metrics in seen)
    assert "held_out" not in seen[0]
    assert [m["held_out"] for m in seen[1:]] == [*result.scores["score"][[0, 0, 1]]]


def test_a_callback_adds_metrics_for_those_after_it(run, tmp_path):
    def add(progress):
        progress.metrics |= {"mine": progress.step / 2, "bad": float("nan")}

    path = tmp_path / "metrics.jsonl"
    called = [lc.Callback(add, 2), lc.Callback(lc.JsonLines(path), 2)]
    run(5, X, callbacks=called)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert [line["mine"] for line in lines] == [1, 2]
    assert all(line["bad"] is None and line["elbo"] < 0 for line in lines)


def test_scores_are_in_the_result(run, data):
    args, kwargs = data()
    held_out = lc.HeldOut(lambda result: len(result.losses), every_steps=4)
    result = run(10, *args, held_out=held_out, **kwargs)
    assert result.scores["step"].tolist() == [4, 8]
    assert result.scores["score"].tolist() == [4.0, 8.0]
    assert result._replace(losses=None).scores == result.scores


def test_a_fit_stops_early_with_the_best_state(run, data):
    """The best is at step 10 of 2, 4, ..., 16: of the fit of ten steps, bit by bit."""
    args, kwargs = data()
    ten = run(10, *args, **kwargs)
    args, kwargs = data()
    held_out = lc.HeldOut(nearness(float(ten.params["m"][0])), every_steps=2, patience=3)
    result = run(100, *args, held_out=held_out, **kwargs)
    best = result.scores["step"][np.argmax(result.scores["score"])]
    assert len(result.losses) == best + 6 < 100
    fit = run(int(best), *data()[0], **data()[1])
    np.testing.assert_array_equal(result.params["m"], fit.params["m"])
    assert int(result.state.num_steps) == best


def test_scores_that_are_nan_are_not_the_best(run):
    scores = iter([float("nan"), 1.0, float("nan"), 0.5])
    held_out = lc.HeldOut(lambda result: next(scores), every_steps=1, patience=2)
    result = run(100, X, held_out=held_out)
    assert len(result.losses) == 4
    assert int(result.state.num_steps) == 2


def test_the_first_of_scores_that_are_all_minus_infinity_is_the_best(run):
    held_out = lc.HeldOut(lambda result: -math.inf, every_steps=1, patience=2)
    result = run(100, X, held_out=held_out)
    assert len(result.losses) == 3
    assert int(result.state.num_steps) == 1


def test_scores_that_are_all_nan_end_the_fit_with_a_warning(run):
    held_out = lc.HeldOut(lambda result: float("nan"), every_steps=2, patience=3)
    with pytest.warns(RuntimeWarning, match="step 6 of 100: `held_out` gave NaN alone"):
        result = run(100, X, held_out=held_out)
    assert int(result.state.num_steps) == 6


def test_a_callback_ends_the_fit(run, data):
    def stop(progress):
        if progress.step >= 5:
            raise StopIteration

    args, kwargs = data()
    result = run(100, *args, callbacks=[lc.Callback(stop, 1)], **kwargs)
    assert len(result.losses) == 5


def test_what_a_callback_raises_has_the_fit_so_far(run, data):
    def fail(progress):
        raise OSError("no space left")

    args, kwargs = data()
    with pytest.raises(OSError, match="no space") as error:
        run(100, *args, callbacks=[lc.Callback(fail, 7)], **kwargs)
    assert len(error.value.result_so_far.losses) == 7


@pytest.mark.parametrize("score", [lambda result: "good", lambda result: np.ones(2)])
def test_scores_that_are_no_numbers_are_refused(run, score):
    with pytest.raises(TypeError, match="`score` of HeldOut must return a number; got"):
        run(3, X, held_out=lc.HeldOut(score, 1))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: lc.HeldOut(len, every_steps=0), ValueError, "every_steps"),
        (lambda: lc.HeldOut(len, patience=0), ValueError, "patience"),
        (lambda: lc.HeldOut(0.5), TypeError, "`score` must be callable"),
        (lambda: lc.Callback(len, every_steps=0), ValueError, "every_steps"),
        (lambda: lc.Callback("len"), TypeError, "`function` must be callable"),
    ],
)
def test_what_cannot_be_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    "wrong", [{"callbacks": [print]}, {"callbacks": lc.Callback(print)}, {"held_out": print}]
)
def test_bare_functions_are_refused(run, wrong):
    with pytest.raises(TypeError, match=r"lc\.(Callback|HeldOut)\("):
        run(3, X, **wrong)


@pytest.mark.parametrize(
    "needs_python",
    [
        lambda: {"held_out": lc.HeldOut(nearness(1))},
        lambda: {"batches": iter([(X,)] * 3)},
        lambda: {"batches": lc.StreamedBatches(X, batch_size=4)},
    ],
)
def test_what_needs_python_between_steps_is_refused_inside_of_jit(svi, needs_python):
    args = () if "batches" in needs_python() else (X,)
    with pytest.raises(ValueError, match="outside of `jit`"):
        jax.jit(lambda key: svi.run(key, 3, *args, **needs_python()).losses)(KEY)


class TestWithCheckpoints:
    """Scores and the best state are part of a checkpoint."""

    HELD_OUT = lc.HeldOut(nearness(0.6), every_steps=2, patience=3)

    def run(self, run, folder, num_steps, **options):
        checkpoints = lc.Checkpoints(folder, every_steps=1)
        shared = {"held_out": self.HELD_OUT, "checkpoints": checkpoints, "resume": True}
        return run(num_steps, X, **(shared | options))

    def test_an_early_stop_is_the_same_after_an_interruption(self, run, tmp_path):
        whole = run(100, X, held_out=self.HELD_OUT)

        def stop(progress):
            if progress.step == len(whole.losses) - 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.run(run, tmp_path, 100, callbacks=[lc.Callback(stop, 1)])
        for _ in range(2):  # the second time nothing is left to be done
            result = self.run(run, tmp_path, 100)
            np.testing.assert_array_equal(result.params["m"], whole.params["m"])
            np.testing.assert_array_equal(result.losses, whole.losses)
            np.testing.assert_array_equal(result.scores["score"], whole.scores["score"])
            assert int(result.state.num_steps) == int(whole.state.num_steps)

    @pytest.mark.parametrize("where", ["score", "callback", "copy"])
    @pytest.mark.some_cases(1)
    def test_an_interrupted_call_is_made_again(self, run, tmp_path, where, monkeypatch):
        """At the sixth step: a score, a callback after it, or the copy of the best state."""
        whole = run(100, X, held_out=self.HELD_OUT)
        calls, interrupted = [], []

        def once():
            if not interrupted:
                interrupted.append(where)
                raise KeyboardInterrupt

        def score(result):
            if where == "score" and len(result.losses) == 6:
                once()
            return nearness(0.6)(result)

        def call(progress):
            if where == "callback" and progress.step == 6:
                once()
            calls.append(progress.step)

        if where == "copy":
            copy = RunSoFar._copy_of_state

            def copy_of_state(run):
                if run.log.num_taken == 6:
                    once()
                return copy(run)

            monkeypatch.setattr(RunSoFar, "_copy_of_state", copy_of_state)
        options = {"held_out": lc.HeldOut(score, every_steps=2, patience=3)}
        options["callbacks"] = [lc.Callback(call, every_steps=3)]
        with pytest.raises(KeyboardInterrupt):
            self.run(run, tmp_path, 100, **options)
        result = self.run(run, tmp_path, 100, **options)
        assert calls == list(range(3, len(result.losses) + 1, 3))
        np.testing.assert_array_equal(result.scores["score"], whole.scores["score"])
        np.testing.assert_array_equal(result.params["m"], whole.params["m"])

    def test_a_fit_that_a_callback_ended_stays_ended(self, run, tmp_path):
        def stop(progress):
            if progress.step >= 5:
                raise StopIteration

        for _ in range(2):
            result = self.run(run, tmp_path, 100, callbacks=[lc.Callback(stop, 1)])
            assert len(result.losses) == 5

    @pytest.mark.parametrize(
        "other", [None, lc.HeldOut(nearness(0.6), 2), lc.HeldOut(nearness(0.6), 3, patience=3)]
    )
    def test_another_held_out_is_refused(self, run, tmp_path, other):
        self.run(run, tmp_path, 4)
        with pytest.raises(ValueError, match=r"patience\] of `held_out` was \[2, 3\], and is now"):
            self.run(run, tmp_path, 8, held_out=other)

    def test_a_fit_that_stopped_early_is_loaded_as_it_was(self, svi, run, tmp_path):
        whole = self.run(run, tmp_path / "run", 100)
        svi.save(tmp_path / "saved", whole)
        for folder in ("run", "saved"):
            loaded = svi.load(tmp_path / folder, X)
            np.testing.assert_array_equal(loaded.params["m"], whole.params["m"])
            np.testing.assert_array_equal(loaded.scores["score"], whole.scores["score"])
            assert int(loaded.state.num_steps) == int(whole.state.num_steps)
