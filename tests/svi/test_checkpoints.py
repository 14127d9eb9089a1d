# SPDX-License-Identifier: Apache-2.0
"""A fit on disk is the fit itself, and one that is interrupted goes on as if it had not been."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO

import numpyro_largecat as lc
from numpyro_largecat.data.fit_folders import FitFolder
from numpyro_largecat.svi.run_so_far import RunSoFar
from numpyro_largecat.svi.saved_run import KIND
from tests.models import class_points, hierarchical, point_guide

pytestmark = pytest.mark.usefixtures("sigint_raises")

KEY = jax.random.key(3)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 3)).astype(np.float32), RNG.integers(0, 12, 40)
BATCH = X[:8], Y[:8], np.arange(8)
QUIET = {"progress_bar": False}


@cache
def batches_of(seed=0):
    return lc.ArrayBatches(X, Y, batch_size=8, seed=seed)


def svi_of(optim=None, guide=point_guide, num_categories=12, **options):
    optim = optax.adam(0.05) if optim is None else optim
    model = hierarchical(num_sampled=4, num_categories=num_categories)
    return lc.SubsampledSVI(model, guide, optim, TraceMeanField_ELBO(), **options)


@cache
def shared():
    """One object for the runs that need no new process: it keeps its compiled steps."""
    return svi_of()


def stream(stop_after=None, error=None):
    """The batches of ``ArrayBatches``, as any iterator gives them."""
    for step in range(10**6):
        if step == stop_after:
            raise error
        yield tuple(np.asarray(a) for a in batches_of().batch(step))


def assert_same(result, other):
    """Equal in everything, bit by bit."""
    ours, theirs = jax.tree.flatten(result.state), jax.tree.flatten(other.state)
    assert ours[1] == theirs[1]
    for a, b in zip(ours[0], theirs[0], strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(result.losses, other.losses)
    assert result.iterates.keys() == other.iterates.keys()
    for name, values in result.iterates.items():
        np.testing.assert_array_equal(values, other.iterates[name])
    for name, values in result.params.items():
        np.testing.assert_array_equal(values, other.params[name])


@pytest.fixture(scope="module")
def whole():
    """The fit of 30 steps that nothing interrupts."""
    return shared().run(KEY, 30, batches=batches_of(), **QUIET)


class TestSaveAndLoad:
    """``svi.save`` and ``svi.load``."""

    @pytest.mark.smoke
    def test_a_fit_that_was_saved_goes_on_bit_by_bit(self, tmp_path, whole):
        first = shared().run(KEY, 20, batches=batches_of(), **QUIET)
        shared().save(tmp_path / "fit", first)
        another = svi_of()
        loaded = another.load(tmp_path / "fit", *BATCH)
        assert_same(loaded, first)
        rest = another.run(KEY, 10, batches=batches_of(), init_state=loaded.state, **QUIET)
        for name, values in rest.params.items():
            np.testing.assert_array_equal(values, whole.params[name])

    @pytest.mark.slow
    def test_a_new_fit_takes_the_place_of_the_old(self, tmp_path):
        svi = svi_of()
        first = svi.run(KEY, 3, batches=batches_of(), **QUIET)
        second = svi.run(KEY, 2, batches=batches_of(seed=1), **QUIET)
        svi.save(tmp_path, first)
        svi.save(tmp_path, second)
        assert_same(svi.load(tmp_path, X, Y), second)
        assert len(list(tmp_path.iterdir())) == 1

    @pytest.mark.parametrize("key", [jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")])
    @pytest.mark.slow
    def test_a_key_of_any_kind_goes_on(self, tmp_path, key):
        svi = svi_of()
        result = svi.run(key, 3, batches=batches_of(), **QUIET)
        svi.save(tmp_path, result)
        loaded = svi_of().load(tmp_path, *BATCH)
        assert_same(loaded, result)
        both = [
            svi.run(key, 3, batches=batches_of(), init_state=r.state, **QUIET)
            for r in (result, loaded)
        ]
        assert_same(*both)

    @pytest.mark.slow
    def test_tables_in_bfloat16_are_kept(self, tmp_path):
        svi = svi_of(table_dtype=jnp.bfloat16)
        result = svi.run(KEY, 3, batches=batches_of(), **QUIET)
        svi.save(tmp_path, result)
        loaded = svi_of(table_dtype=jnp.bfloat16).load(tmp_path, *BATCH)
        assert_same(loaded, result)

    @pytest.mark.slow
    def test_a_result_so_far_is_kept(self, tmp_path):
        svi = svi_of()
        with pytest.raises(OSError, match="unplugged") as error:
            svi.run(KEY, 9, batches=stream(5, OSError("unplugged")), **QUIET)
        svi.save(tmp_path, error.value.result_so_far)
        assert len(svi.load(tmp_path, *BATCH).losses) == 5

    @pytest.mark.slow
    def test_a_loaded_fit_predicts_as_before(self, tmp_path, whole):
        svi = svi_of()
        svi.init(KEY, X, Y)
        svi.save(tmp_path, whole)
        another = svi_of()
        loaded = another.load(tmp_path, X, Y)
        want, got = (
            lc.Fitted.from_svi(s, r).on(X).log_likelihood(Y, num_draws=2, rng_key=KEY)
            for s, r in ((svi, whole), (another, loaded))
        )
        np.testing.assert_array_equal(got, want)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, whole):
    """A folder with that fit."""
    path = tmp_path_factory.mktemp("fits") / "fit"
    shared().save(path, whole)
    return path


class TestRefusals:
    """A fit of anything else is refused, with what differs."""

    @pytest.mark.parametrize(
        ("other", "what"),
        [
            pytest.param({"optim": optax.sgd(0.1)}, "types of the optimiser's state", id="optim"),
            pytest.param({"table_dtype": jnp.bfloat16}, r"b_auto_loc.*float32", id="dtype"),
            pytest.param({"guide": class_points}, "parameter 'scale_auto_loc'.*none", id="name"),
        ],
    )
    @pytest.mark.some_cases(1)
    def test_another_model_guide_or_optimiser(self, folder, other, what):
        with pytest.raises(ValueError, match=f"must hold a fit of this model.*{what}"):
            svi_of(**other).load(folder, *BATCH)

    def test_another_number_of_rows(self, tmp_path):
        def svi_of_rows(num_rows):
            def model():
                with lc.data_plate("people", num_rows):
                    numpyro.param("m", jnp.zeros(num_rows), event_dim=0)

            return lc.SubsampledSVI(model, lambda: None, optax.sgd(0.1), Trace_ELBO())

        svi = svi_of_rows(3)
        svi.save(tmp_path, svi.run(KEY, 1, **QUIET))
        with pytest.raises(ValueError, match=r"plate .people. differs: it is 3 .* and here 4"):
            svi_of_rows(4).load(tmp_path)

    def test_another_precision(self, tmp_path):
        def model():
            with lc.data_plate("people", 3):
                numpyro.param("m", lambda key: jnp.zeros(3), event_dim=0)

        svi = lc.SubsampledSVI(model, lambda: None, optax.sgd(0.1), Trace_ELBO())
        with jax.enable_x64(True):
            svi.save(tmp_path, svi.run(KEY, 1, **QUIET))
        with pytest.raises(ValueError, match=r"64\[\] in the saved.*Set `jax_enable_x64` to True"):
            svi.load(tmp_path)

    def test_other_versions_are_named_where_something_differs(self, folder, monkeypatch):
        monkeypatch.setattr("numpyro_largecat.data.versions.version", lambda name: "0.0")
        with pytest.raises(ValueError, match=r"It was saved with other versions: .*jax.*here 0\.0"):
            svi_of(optim=optax.sgd(0.1)).load(folder, *BATCH)

    def test_a_folder_without_a_fit(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no saved fit"):
            svi_of().load(tmp_path / "nothing", *BATCH)

    def test_a_result_of_another_model(self, tmp_path, whole):
        svi = svi_of(optim=optax.sgd(0.1))
        svi.init(KEY, *BATCH)
        with pytest.raises(ValueError, match="this optimiser"):
            svi.save(tmp_path / "fit", whole)
        assert not (tmp_path / "fit").exists()


def run(folder, num_steps=30, svi=None, key=KEY, batches=None, every_steps=7, **options):
    """A run with checkpoints that goes on from the newest one."""
    checkpoints = lc.Checkpoints(folder, every_steps=every_steps)
    batches = batches_of() if batches is None else batches
    return (shared() if svi is None else svi).run(
        key, num_steps, batches=batches, checkpoints=checkpoints, resume=True, **QUIET, **options
    )


def test_a_checkpoint_beyond_the_last_step_is_told(tmp_path):
    assert_same(run(tmp_path, 9), run(tmp_path, 9))
    with pytest.warns(RuntimeWarning, match="ended at step 9 of 5: the checkpoint has more steps"):
        result = run(tmp_path, 5)
    assert len(result.losses) == 9


def test_another_loss_is_refused(tmp_path):
    run(tmp_path, 9)
    other = lc.SubsampledSVI(shared().model, shared().guide, shared().optim, Trace_ELBO())
    with pytest.raises(ValueError, match="its loss was TraceMeanField_ELBO, and is now Trace_ELBO"):
        run(tmp_path, svi=other)


def test_loading_without_labels_says_what_is_missing(tmp_path):
    run(tmp_path, 2)
    with pytest.raises((TypeError, ValueError)) as raised:
        svi_of().load(tmp_path, X[:2])
    assert "with labels" in raised.value.__notes__[-1]


class TestResume:
    """A run that goes on is the run that was not interrupted, bit by bit."""

    @pytest.mark.smoke
    def test_arrays(self, tmp_path, whole):
        run(tmp_path, 12)
        assert_same(run(tmp_path), whole)

    @pytest.mark.slow
    def test_a_stream_that_failed(self, tmp_path):
        with pytest.raises(OSError, match="unplugged"):
            run(tmp_path, batches=stream(12, OSError("unplugged")))
        assert steps_of(tmp_path)[-1] == 12
        whole = shared().run(KEY, 30, batches=stream(), **QUIET)
        assert_same(run(tmp_path, batches=stream()), whole)

    @pytest.mark.slow
    def test_a_stream_with_bad_batches_that_are_skipped(self, tmp_path):
        def batches():
            for step, (x, y, rows) in enumerate(stream()):
                yield x, np.where(step in (0, 3, 14), -5, y), rows

        with pytest.warns(RuntimeWarning, match="3 of 30 steps"):
            whole = shared().run(KEY, 30, batches=batches(), stable_update=True, **QUIET)
        with pytest.warns(RuntimeWarning, match="2 of 10 steps"):
            run(tmp_path, 10, batches=batches(), stable_update=True)
        with pytest.warns(RuntimeWarning):
            assert_same(run(tmp_path, batches=batches(), stable_update=True), whole)

    def test_ctrl_c(self, tmp_path, whole):
        def batches():
            for step, batch in enumerate(stream()):
                if step == 11:
                    signal.raise_signal(signal.SIGINT)
                yield batch

        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, batches=batches())
        assert steps_of(tmp_path)[-1] == 11
        assert_same(
            run(tmp_path, batches=stream()), shared().run(KEY, 30, batches=stream(), **QUIET)
        )

    @pytest.mark.slow
    def test_a_fit_that_met_a_bad_batch_goes_on_with_a_good_one(self, tmp_path):
        def batches(bad):
            for step, (x, y, rows) in enumerate(stream()):
                yield (np.full_like(x, np.nan) if step == bad else x), y, rows

        with pytest.warns(RuntimeWarning, match="step 12"):
            run(tmp_path, batches=batches(bad=12))
        assert steps_of(tmp_path)[-1] == 12
        whole = shared().run(KEY, 30, batches=stream(), **QUIET)
        assert_same(run(tmp_path, batches=batches(bad=None)), whole)

    @pytest.mark.slow
    def test_a_fit_that_ended_at_a_step_that_was_not_finite_stays_ended(self, tmp_path):
        jump = optax.chain(optax.adam(0.05), optax.scale_by_schedule(_nan_at_12))
        with pytest.warns(RuntimeWarning, match="step 12 of 30"):
            whole = run(tmp_path, svi=svi_of(optim=jump))
        assert steps_of(tmp_path)[-1] == 13
        with pytest.warns(RuntimeWarning, match=r"step 12 of 30: there .* `init_state=svi.load"):
            assert_same(run(tmp_path, svi=svi_of(optim=jump)), whole)

    def test_a_run_that_has_ended_is_returned(self, tmp_path, whole):
        run(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        assert_same(run(tmp_path), whole)
        assert sorted(tmp_path.rglob("*")) == before

    @pytest.mark.slow
    def test_a_run_that_goes_on_holds_no_second_state(self, tmp_path):
        """That of `init` is dropped when the checkpoint has taken its place."""

        def model():
            numpyro.param("m", jnp.zeros(1_237))

        svi = lc.SubsampledSVI(model, lambda: None, optax.sgd(0.1), Trace_ELBO())
        live = []

        def count(progress):
            gc.collect()
            live.append(sum(array.shape == (1_237,) for array in jax.live_arrays()))

        for num_steps in (2, 4):
            options = {"checkpoints": lc.Checkpoints(tmp_path, every_steps=100), "resume": True}
            svi.run(KEY, num_steps, callbacks=[lc.Callback(count, 2)], **options, **QUIET)
        assert live[1] == live[0] > 0

    def test_by_the_minute(self, tmp_path, whole):
        every = lc.Checkpoints(tmp_path, every_minutes=1e-9)
        shared().run(KEY, 12, batches=batches_of(), checkpoints=every, **QUIET)
        assert_same(run(tmp_path), whole)

    @pytest.mark.parametrize("num_steps", [6, 12])
    def test_what_has_just_been_read_is_not_written_again(self, tmp_path, num_steps):
        """Warnings are errors: another process would seem to write into the folder."""
        every = lc.Checkpoints(tmp_path, every_minutes=1e-9)
        for last in (6, num_steps):
            options = {"checkpoints": every, "resume": True}
            shared().run(KEY, last, batches=batches_of(), **options, **QUIET)
        assert steps_of(tmp_path)[-1] == num_steps


def _nan_at_12(count):
    return jnp.where(count == 12, jnp.nan, 1.0)


def steps_of(folder):
    """The steps at which the checkpoints in a folder were made; it holds nothing else."""
    return sorted(int(path.name) for path in Path(folder).iterdir())


class TestCheckpoints:
    """When they are written, and to where."""

    def test_the_last_k_are_kept(self, tmp_path, monkeypatch):
        checkpoints = lc.Checkpoints(tmp_path / "deep" / "fit", every_steps=2, keep=3)
        written = []
        write = FitFolder.write
        monkeypatch.setattr(
            FitFolder, "write", lambda self, n, *a: (written.append(n), write(self, n, *a))[1]
        )
        shared().run(KEY, 30, batches=batches_of(), checkpoints=checkpoints, **QUIET)
        assert steps_of(tmp_path / "deep" / "fit") == written[-3:]
        assert written[-1] == 30

    @pytest.mark.slow
    def test_they_load_as_a_saved_fit_does(self, tmp_path, whole):
        run(tmp_path)
        assert_same(svi_of().load(tmp_path, *BATCH), whole)

    def test_a_used_folder_needs_resume(self, tmp_path):
        run(tmp_path, 3)
        with pytest.raises(ValueError, match=r"already has a checkpoint, number 3.*resume=True"):
            shared().run(KEY, 3, batches=batches_of(), checkpoints=lc.Checkpoints(tmp_path))

    def test_resume_needs_checkpoints(self):
        with pytest.raises(ValueError, match="needs `checkpoints="):
            shared().run(KEY, 3, batches=batches_of(), resume=True)

    @pytest.mark.parametrize("wrong", ["a/folder", 3])
    def test_a_bare_folder_is_refused(self, wrong):
        with pytest.raises(TypeError, match="Checkpoints"):
            shared().run(KEY, 3, batches=batches_of(), checkpoints=wrong)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"every_steps": 0}, "every_steps"),
            ({"every_minutes": 0.0}, "every_minutes"),
            ({"every_minutes": float("nan")}, "every_minutes"),
            ({"every_steps": 1, "every_minutes": 1.0}, "got both"),
            ({"keep": 0}, "keep"),
        ],
    )
    def test_numbers_out_of_range(self, options, match):
        with pytest.raises(ValueError, match=match):
            lc.Checkpoints("folder", **options)

    @pytest.mark.parametrize(
        "others",
        [
            pytest.param({"batches": batches_of(seed=1)}, id="seed"),
            pytest.param({"batches": lc.ArrayBatches(X, Y, batch_size=4)}, id="batch_size"),
            pytest.param({"batches": lc.ArrayBatches(X + 1, Y, batch_size=8)}, id="first batch"),
            pytest.param({"batches": stream()}, id="kind of batches"),
            pytest.param({"key": jax.random.key(7)}, id="rng_key"),
        ],
    )
    @pytest.mark.some_cases(2)
    def test_other_batches_and_keys_are_refused(self, tmp_path, others, request):
        run(tmp_path, 3)
        name = request.node.callspec.id
        with pytest.raises(ValueError, match=f"the arguments of the fit in .*; its {name} was "):
            run(tmp_path, **others)

    def test_a_saved_fit_is_no_checkpoint(self, tmp_path, whole):
        shared().save(tmp_path, whole)
        with pytest.raises(ValueError, match=r"svi.save"):
            run(tmp_path, 40)

    @pytest.mark.slow
    def test_another_model_is_refused_before_a_step(self, tmp_path):
        run(tmp_path, 3)
        before = steps_of(tmp_path)
        with pytest.raises(ValueError, match="optimiser's state"):
            run(tmp_path, svi=svi_of(optim=optax.sgd(0.1)))
        assert steps_of(tmp_path) == before

    def test_inside_jit(self, tmp_path):
        svi = svi_of()
        with pytest.raises(ValueError, match="outside of `jit`"):
            jax.jit(lambda key: run(tmp_path, svi=svi, key=key).losses)(KEY)

    def test_a_folder_that_cannot_be_written_fails_before_the_first_step(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file"):
            run(tmp_path / "file" / "fit")


FIT = """
import os, random, resource, signal, sys, threading, warnings
import jax
import numpyro_largecat as lc
import tests.svi.test_checkpoints as t

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def limit_files():
    while os.listdir(sys.argv[1]) != ["7"]:  # a thread is writing it
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

def batches(at, act):
    for step, batch in enumerate(t.stream()):
        if step == at:
            act()
        yield batch
"""


def in_process(code, *arguments):
    """Run code after ``FIT`` in a process of its own, with the tests' cache."""
    return subprocess.run(
        [sys.executable, "-c", FIT + code, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


class TestEndsOfAProcess:
    """What ends the process, or takes the disk from it, leaves a checkpoint to go on from."""

    def test_sigterm(self, tmp_path):
        code = """
act = lambda: signal.raise_signal(signal.SIGTERM)
t.run(sys.argv[1], batches=batches(12, act))
"""
        done = in_process(code, tmp_path)
        assert done.returncode == 128 + signal.SIGTERM, done.stderr
        assert steps_of(tmp_path)[-1] == 12

    def test_sigterm_once_the_old_state_is_gone_waits_for_the_new_one(
        self, tmp_path, monkeypatch, whole
    ):
        chunk_of = RunSoFar._chunk

        def signalled_chunk_of(run, *what):
            chunk = chunk_of(run, *what)

            def take(*arguments):
                taken = chunk(*arguments)
                signal.raise_signal(signal.SIGTERM)
                return taken

            return take

        with monkeypatch.context() as patched:
            patched.setattr(RunSoFar, "_chunk", signalled_chunk_of)
            with pytest.raises(SystemExit):
                run(tmp_path)
        assert steps_of(tmp_path)
        assert_same(run(tmp_path), whole)

    def test_a_stray_file_in_the_folder_does_not_end_the_fit(self, tmp_path):
        """Nor does what a file manager writes, which starts with a dot."""

        def batches():
            for step, batch in enumerate(stream()):
                if step == 9:
                    (tmp_path / ".DS_Store").write_text("")
                if step == 20:
                    (tmp_path / "notes.txt").write_text("")
                yield batch

        with pytest.warns(RuntimeWarning, match=r"nothing else; it has 'notes.txt'"):
            result = run(tmp_path, batches=batches())
        assert len(result.losses) == 30
        (tmp_path / "notes.txt").unlink()
        assert FitFolder(tmp_path, KIND).numbers()[-1] >= 7

    def test_a_write_that_fails_is_said_with_what_is_there(self, tmp_path, monkeypatch):
        """Once for each, at the line of the user; nothing is tried after the last."""
        write = FitFolder.write

        def fail_twice(folder, number, *what):
            if number in (7, 30):
                raise OSError(f"no room for {number}")
            write(folder, number, *what)

        monkeypatch.setattr(FitFolder, "write", fail_twice)
        with pytest.warns(RuntimeWarning) as warned:
            run(tmp_path, batches=stream())
        first, last = map(str, (w.message for w in warned))
        assert "no room for 7. There is no checkpoint to go on from. The next one is" in first
        assert "no room for 30. The checkpoint of step" in last and "tried" not in last
        assert {w.filename for w in warned} == {__file__}

    @pytest.mark.slow
    def test_a_full_disk(self, tmp_path, whole):
        code = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    result = t.run(sys.argv[1], batches=batches(12, limit_files), every_steps=7)
print(len(result.losses), str(caught[0].message))
"""
        done = in_process(code, tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("30 ")
        assert "could not be written" in done.stdout
        assert steps_of(tmp_path)[-1] == 7  # and no part of a file beside it
        assert_same(
            run(tmp_path, batches=stream()), shared().run(KEY, 30, batches=stream(), **QUIET)
        )

    @pytest.mark.slow
    def test_kill_9_at_eight_moments(self, tmp_path):
        code = """
folder, seed = sys.argv[1], int(sys.argv[2])
wait = random.Random(seed).random() * 0.6
t.run(folder, 3000, batches=batches(0, lambda: threading.Timer(wait, kill).start()), every_steps=3)
"""
        num_steps = [0]
        for seed in range(8):
            done = in_process(code, tmp_path, seed)
            assert done.returncode in (-signal.SIGKILL, 0), done.stderr
            numbers = FitFolder(tmp_path, KIND).numbers()
            num_steps.append(numbers[-1] if numbers else 0)
        assert num_steps == sorted(num_steps)
        whole = svi_of().run(KEY, 3000, batches=stream(), **QUIET)
        assert_same(run(tmp_path, 3000, batches=stream()), whole)
