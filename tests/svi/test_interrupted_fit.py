# SPDX-License-Identifier: Apache-2.0
"""Whatever ends a fit, what it has reached is there."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO

import numpyro_largecat as lc
from numpyro_largecat._result_so_far import attach_result, held_signals
from numpyro_largecat.double_sum.learning import Learning
from numpyro_largecat.svi.plan import Plan

pytestmark = pytest.mark.usefixtures("sigint_raises")

NUM_ROWS = 12
FAR = 10**6  # steps that no test takes


def no_guide(*args):
    del args


def means(x, rows):
    """A mean of its own for each row, drawn to it by every step."""
    with lc.data_plate("data", NUM_ROWS, rows):
        m = numpyro.param("m", jnp.zeros(NUM_ROWS), event_dim=0)
        numpyro.sample("x", dist.Normal(m, 1), obs=x)


@cache
def svi_of(model=means):
    """One SVI object for each model, whose programs are kept; its fits start by ``init``."""
    return lc.SubsampledSVI(model, no_guide, optax.adam(0.1), Trace_ELBO())


def batch(i):
    rows = np.arange(3 * i, 3 * i + 3) % NUM_ROWS
    return np.ones(3, np.float32), rows


def batches_and_then(end, num_good=4):
    """A stream that ends in the middle of a fit by what ``end`` raises or returns."""
    for i in range(num_good):
        yield batch(i)
    yield end()
    raise AssertionError("the fit went on")


@pytest.fixture(scope="module")
def fit_of_four():
    """The fit that every interrupted one below has reached."""
    return svi_of().run(jax.random.key(0), 4, batches=map(batch, range(4)), progress_bar=False)


def raise_(error):
    raise error


def ctrl_c():
    signal.raise_signal(signal.SIGINT)
    return batch(0)


@dataclass(frozen=True)
class Frozen(Exception):
    """An exception whose attributes cannot be set."""

    reason: str = "none"


class Slotted(Exception):
    __slots__ = ()


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (ctrl_c, KeyboardInterrupt),
        (lambda: sys.exit(3), SystemExit),
        (lambda: raise_(OSError("the disk is gone")), OSError),
        (lambda: raise_(Frozen()), Frozen),
        (lambda: raise_(Slotted()), Slotted),
        (lambda: (np.ones(3), "rows"), TypeError),  # no array: the model refuses it
        (lambda: (np.ones(2, np.float32), np.arange(3)), ValueError),  # a shape error
        (lambda: 7, TypeError),  # no tuple
    ],
)
@pytest.mark.some_cases(2)
def test_what_ends_a_stream_has_the_fit_so_far(end, error, fit_of_four):
    with pytest.raises(error) as raised:
        svi_of().run(jax.random.key(0), 9, batches=batches_and_then(end), progress_bar=False)
    result = raised.value.result_so_far
    np.testing.assert_array_equal(result.params["m"], fit_of_four.params["m"])
    np.testing.assert_array_equal(result.losses, fit_of_four.losses)
    assert result.iterates["m"].shape[0] == 4
    assert "4 of 9 steps" in raised.value.__notes__[-1]
    assert "`result_so_far`" in raised.value.__notes__[-1]


def test_what_ends_a_run_before_its_first_state_has_no_fit():
    """While model and guide are run once, and before that."""

    def interrupted(x, rows):
        signal.raise_signal(signal.SIGINT)
        means(x, rows)

    def run(model, num_steps=9, **options):
        svi_of(model).run(jax.random.key(0), num_steps, progress_bar=False, **options)

    for error, begin in [
        (KeyboardInterrupt, lambda: run(interrupted, batches=map(batch, range(9)))),
        (TypeError, lambda: run(means, batches=7)),
        (ValueError, lambda: run(means, 0)),
        (ValueError, lambda: run(means, resume=True)),
    ]:
        with pytest.raises(error) as raised:
            begin()
        assert raised.value.result_so_far is None


def test_a_fit_goes_on_from_where_it_was_interrupted():
    svi, key = svi_of(), jax.random.key(0)
    whole = svi.run(key, 6, batches=map(batch, range(6)), progress_bar=False)
    with pytest.raises(KeyboardInterrupt) as raised:
        svi.run(key, 6, batches=batches_and_then(ctrl_c), progress_bar=False)
    rest = svi.run(
        key,
        2,
        batches=map(batch, (4, 5)),
        init_state=raised.value.result_so_far.state,
        progress_bar=False,
    )
    np.testing.assert_array_equal(rest.params["m"], whole.params["m"])


TRACED_FILES = (
    "svi/loop.py",
    "svi/loss_log.py",
    "svi/run_so_far.py",
    "_result_so_far.py",
)


class Interruption:
    """Sends Ctrl-C at the n-th line that Python runs of the fit's loop and of what guards it.

    So it comes at any moment, without waiting for it. ``lines`` are all that were run.
    """

    def __init__(self, number=None):
        self.number = number
        self.lines = []

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        name = frame.f_code.co_filename
        if not name.endswith(TRACED_FILES):
            return None
        if event == "line":
            self.lines.append((name, frame.f_lineno))
            if len(self.lines) - 1 == self.number:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self.trace


def test_ctrl_c_at_any_line_of_the_loop_keeps_a_state_with_its_losses(monkeypatch):
    """The interrupted state is that of as many steps as it has losses, whatever the moment.

    Each line is tried at its first two visits.
    """
    monkeypatch.setattr("numpyro_largecat.svi.run_so_far.MAX_CHUNK", 1)
    svi, args = svi_of(), batch(0)
    state = svi.init(jax.random.key(0), *args)

    def run(num_steps=2):
        return svi.run(jax.random.key(0), num_steps, *args, init_state=state, progress_bar=False)

    after = [np.zeros(NUM_ROWS), run(1).params["m"], run(2).params["m"]]
    with Interruption() as whole:
        run()
    places = {}
    for i, line in enumerate(whole.lines):
        places.setdefault(line, []).append(i)
    seen = set()
    for number in (i for visits in places.values() for i in visits[:2]):
        with pytest.raises(KeyboardInterrupt) as raised, Interruption(number):
            run()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        result = getattr(raised.value, "result_so_far", None)
        if result is None:  # before there is a state, or as `run` is returning
            seen.add(None)
            continue
        seen.add(len(result.losses))
        np.testing.assert_array_equal(result.params["m"], after[len(result.losses)])
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(result.state))
    assert seen == {None, 0, 1, 2}


def test_a_second_ctrl_c_does_not_lose_what_the_first_has_kept():
    """It comes while the result is put together, and is raised with it."""
    with pytest.raises(KeyboardInterrupt, match="second") as raised:

        def result():
            signal.raise_signal(signal.SIGINT)
            return 5, "far"

        def second(number, frame):
            raise KeyboardInterrupt("second")

        before = signal.signal(signal.SIGINT, second)
        try:
            with attach_result(result):
                raise KeyboardInterrupt("first")
        finally:
            signal.signal(signal.SIGINT, before)
    assert raised.value.result_so_far == 5


def test_signals_wait_and_then_go_to_their_own_handlers():
    """Ctrl-C and a signal of the user's; both handlers are there again afterwards."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(KeyboardInterrupt):
            with held_signals():
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGINT)
                assert seen == []
                seen.append("end of block")
        assert seen == ["end of block", signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.raise_signal(signal.SIGTERM)
        assert seen[-2:] == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_a_callback_raises_inside_of_a_compiled_loop_leaves_the_state_before():
    """Its program has no donated buffers, which would be gone."""

    def look(x):
        if (x < 0).any():
            raise OSError("negative")
        return x

    def model(x, rows):
        means(jax.pure_callback(look, x, x), rows)

    def stream():
        yield batch(0)
        yield batch(1)
        yield -batch(2)[0], batch(2)[1]

    with pytest.raises(Exception, match="negative") as raised:
        svi_of(model).run(jax.random.key(0), 9, batches=stream(), progress_bar=False)
    result = raised.value.result_so_far
    assert result.losses.shape == (2,)
    assert np.flatnonzero(result.params["m"]).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_fit_whose_params_cannot_be_computed_keeps_its_state(monkeypatch):
    svi = svi_of()

    def no_memory(plan, state):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(Plan, "params", no_memory)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as raised:
        svi.run(jax.random.key(0), 2, *batch(0), progress_bar=False)
    assert raised.value.result_so_far.params == {}
    assert raised.value.result_so_far.losses.shape == (2,)
    assert "2 of 2 steps; its `params` cannot be" in raised.value.__notes__[-1]
    monkeypatch.undo()
    assert svi.get_params(raised.value.result_so_far.state)["m"][:3].min() > 0


def test_a_warning_that_is_an_error_has_the_fit():
    with pytest.raises(RuntimeWarning, match="no further batch") as raised:
        svi_of().run(jax.random.key(0), 9, batches=[batch(0)], progress_bar=False)
    assert raised.value.result_so_far.losses.shape == (1,)


NAN = np.full(3, np.nan, np.float32), batch(1)[1]


def test_stable_update_skips_batches_with_bad_data():
    """NaN features, also in the first batch, and an id that JAX would wrap around."""
    wide = np.ones(3, np.float32), np.array([0, 1, 2**32 + 2])
    stream = [NAN, batch(0), NAN, wide, batch(1)]
    with pytest.warns(RuntimeWarning, match=r"skipped 3 of 5.*Of 3 the batch was bad.*`x` must be"):
        result = svi_of().run(
            jax.random.key(0), 5, batches=stream, stable_update=True, progress_bar=False
        )
    assert np.isnan(result.losses).tolist() == [True, False, True, True, False]
    assert np.flatnonzero(result.params["m"]).tolist() == [0, 1, 2, 3, 4, 5]


EMPTY = np.ones(0, np.float32), np.zeros(0, int)


def test_an_empty_batch_is_named_with_its_step():
    with pytest.warns(
        RuntimeWarning, match=r"step 2 of 9: the batch is empty, .*\[\(0,\), \(0,\)\]"
    ):
        result = run_on([batch(0), batch(1), EMPTY, batch(2)], 9)
    assert result.losses.shape == (2,)
    with pytest.raises(ValueError, match="the batch is empty"):
        run_on([EMPTY, batch(0)], 2)
    with pytest.warns(RuntimeWarning, match=r"skipped 2 of 4.*Of 2 the batch was bad.*is empty"):
        result = run_on([EMPTY, batch(0), EMPTY, batch(1)], 4, stable_update=True)
    assert np.isnan(result.losses).tolist() == [True, False, True, False]


def run_on(batches, num_steps, **options):
    return svi_of().run(
        jax.random.key(0), num_steps, batches=batches, progress_bar=False, **options
    )


def test_stable_update_without_any_good_batch_is_refused():
    with pytest.raises(ValueError, match="`x` must be finite"):
        svi_of().run(
            jax.random.key(0), 3, batches=[NAN] * 3, stable_update=True, progress_bar=False
        )


def test_stable_update_skips_the_draws_of_arrays_that_hold_bad_rows():
    """Without it the arrays are refused; with it the warning says what is bad in them."""
    x = np.where(np.arange(NUM_ROWS) == 4, np.nan, 1).astype(np.float32)

    def model(x, rows):
        means(x, rows)

    batches = lc.ArrayBatches(x, batch_size=2)
    with pytest.raises(ValueError, match="nan at position 4"):
        svi_of(model).run(jax.random.key(0), 20, batches=batches, progress_bar=False)
    with pytest.warns(RuntimeWarning) as warned:
        result = svi_of(model).run(
            jax.random.key(0), 200, batches=batches, stable_update=True, progress_bar=False
        )
    texts = [str(warning.message) for warning in warned]
    num_bad = int(np.isnan(result.losses).sum())
    assert any("nan at position 4" in t and "are skipped" in t for t in texts)
    assert any(f"skipped {num_bad} of 200 steps" in t for t in texts)
    # Each draw holds the row with probability 1 / 6: outside of [10, 60] in 1 of 10**5 fits.
    assert 10 <= num_bad <= 60
    assert np.flatnonzero(result.params["m"]).tolist() == [i for i in range(12) if i != 4]


def test_a_stream_keeps_no_array_of_the_device():
    """The losses and iterates of each step are copied, so that its buffers are free again."""
    svi = svi_of()
    svi.run(jax.random.key(0), 3, batches=map(batch, range(3)), progress_bar=False)
    live = []

    def stream():
        for i in range(30):
            live.append(len(jax.live_arrays()))
            yield batch(i)

    svi.run(jax.random.key(0), 30, batches=stream(), progress_bar=False)
    assert live[-1] <= live[5]


@pytest.mark.slow
def test_mixtures_and_double_sums_keep_what_they_have_reached(monkeypatch):
    x = np.random.default_rng(0).normal(size=(40, 2))
    family = lc.mixtures.GaussianFamily(np.zeros(2), np.eye(2))
    reads = iter(range(FAR))

    def source():
        for i in range(4):
            if next(reads) == 4 + 6:  # one look at all, then six batches
                signal.raise_signal(signal.SIGINT)
            yield x[10 * i : 10 * i + 10]

    options = {"num_passes": 5, "method": "stochastic", "progress_bar": False}
    with pytest.raises(KeyboardInterrupt) as raised:
        lc.fit_mixture(jax.random.key(0), source, 3, family, **options)
    fit = raised.value.result_so_far
    assert "6 of 20 batches" in raised.value.__notes__[-1]
    assert fit.bounds.shape == (1,) and np.isfinite(fit.components().mean).all()
    lc.fit_mixture(jax.random.key(1), x, 3, family, start=fit, num_passes=1, progress_bar=False)


@pytest.mark.parametrize("minibatches", [{}, {"batch_size": 3, "num_sampled": 2}])
@pytest.mark.slow
def test_an_epoch_of_a_double_sum_that_fails_leaves_the_one_before(minibatches, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 2)).astype(np.float32), rng.integers(0, 6, 30)
    args = x, y, 6, lc.double_sum.ImplicitSGD(0.5)
    options = {"record_losses": True, "progress_bar": False, **minibatches}
    checks = iter(range(FAR))

    def check(*_):
        if next(checks) == 2:
            raise FloatingPointError("in the third pass")

    monkeypatch.setattr(Learning, "_check_weights", check)
    with pytest.raises(FloatingPointError) as raised:
        lc.fit_double_sum(jax.random.key(0), *args, num_passes=4, **options)
    assert "2 of 4 passes" in raised.value.__notes__[-1]
    fit = raised.value.result_so_far
    assert fit.losses.shape == (2,) and fit.u.shape == (30,)
    by_hand = np.asarray(x) @ np.asarray(fit.w).T
    losses = np.log(np.exp(by_hand).sum(1)) - by_hand[np.arange(30), y]
    np.testing.assert_allclose(fit.losses[-1], losses.mean(), rtol=1e-5)
