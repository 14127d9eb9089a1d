# SPDX-License-Identifier: Apache-2.0
"""``run``: minibatches, streams, bad data, bad steps, resuming."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.sparse
from jax.experimental.sparse import BCOO
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from tests.models import (
    NUM_CATEGORIES,
    NUM_ROWS,
    Frame,
    hierarchical,
    make_data,
    point_guide,
)

KEY = jax.random.key(1)


@cache
def data():
    return tuple(map(np.asarray, make_data()))


def with_value(array, place, value):
    array = array.copy()
    array[place] = value
    return array


def make_svi(model=None, guide=point_guide):
    model = hierarchical(num_sampled=4) if model is None else model
    return lc.SubsampledSVI(model, guide, optax.adagrad(0.1), TraceMeanField_ELBO())


@pytest.fixture(scope="module")
def shared():
    """One SVI object for most tests, each of which starts by ``init``: its programs are kept."""
    return make_svi()


@pytest.fixture(scope="module")
def update(shared):
    """One step, compiled: the program serves several tests."""
    return jax.jit(shared.update)


@pytest.mark.smoke
def test_run_draws_minibatches_and_improves(shared):
    x, y = data()
    svi, batches = shared, lc.ArrayBatches(x, y, batch_size=8)
    result = svi.run(jax.random.key(0), 250, batches=batches, progress_bar=False)
    assert result.losses.shape == (250,)
    assert result.losses[-50:].mean() < result.losses[:50].mean() - 20
    visits = result.state.local_state["y_u"].rule_state.visits
    assert visits.sum() == 250 * 8
    assert result.params["y_u"].shape == (NUM_ROWS,)


def test_local_rows_are_those_of_the_batch(shared, update):
    """Only the rows whose ids the batch gives are moved, whatever their order."""
    x, y = data()
    svi, rows = shared, np.array([31, 5, 17, 2, 38, 9, 8, 21])
    state = svi.init(jax.random.key(0), x[rows], y[rows], rows)
    before = state.local_state["y_u"].value
    state, _ = update(state, x[rows], y[rows], rows)
    moved = np.flatnonzero(state.local_state["y_u"].value != before)
    assert sorted(rows.tolist()) == moved.tolist()
    np.testing.assert_array_equal(
        np.flatnonzero(state.local_state["y_u"].rule_state.visits), np.sort(rows)
    )


@pytest.mark.slow
def test_repeated_rows_take_the_mean_of_their_updates():
    """A row that is twice in the batch is moved once, by the mean, and visited once."""
    x, y = data()
    svi = make_svi(hierarchical(num_sampled=NUM_CATEGORIES - 1))
    rows = jnp.array([6, 3, 6])
    update = jax.jit(svi.update)
    state = svi.init(jax.random.key(0), x[rows], y[rows], rows)
    once, _ = update(state, x[rows], y[rows], jnp.array([6, 3, 5]))
    state, _ = update(state, x[rows], y[rows], rows)
    local, other = state.local_state["y_u"], once.local_state["y_u"]
    assert local.rule_state.visits.sum() == 2
    np.testing.assert_allclose(local.value[6], other.value[6], rtol=1e-5)
    np.testing.assert_allclose(local.value[3], other.value[3], rtol=1e-5)


def test_run_equals_a_loop_of_updates(shared, update):
    x, y = data()
    args = (x[:8], y[:8], np.arange(8))
    svi = shared
    result = svi.run(jax.random.key(0), 7, *args, progress_bar=False)
    state, evaluate = svi.init(jax.random.key(0), *args), jax.jit(svi.evaluate)
    for i in range(7):
        np.testing.assert_allclose(evaluate(state, *args), result.losses[i], rtol=1e-5)
        state, loss = update(state, *args)
        np.testing.assert_allclose(loss, result.losses[i], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        svi.get_params(state),
        result.params,
    )


def test_resuming_goes_on_where_it_stopped_and_keeps_the_earlier_result(shared):
    x, y = data()
    batches = lc.ArrayBatches(x, y, batch_size=8)
    svi = shared
    whole = svi.run(jax.random.key(0), 20, batches=batches, progress_bar=False)
    half = svi.run(jax.random.key(0), 10, batches=batches, progress_bar=False)
    rest = svi.run(
        jax.random.key(9), 10, batches=batches, init_state=half.state, progress_bar=False
    )
    np.testing.assert_allclose(rest.losses, whole.losses[10:], rtol=1e-5)
    assert np.isfinite(half.params["w_auto_loc"]).all()  # not donated away


def test_the_next_batch_of_a_stream_is_read_while_a_step_runs(shared):
    """It is asked for before the call that follows the step, and none that no step takes."""
    x, y = data()
    called, calls_at_reading = [], []

    def stream():
        while True:
            calls_at_reading.append(len(called))
            yield x[:8], y[:8], np.arange(8)

    shared.run(
        jax.random.key(0),
        4,
        batches=stream(),
        callbacks=[lc.Callback(called.append, every_steps=1)],
        progress_bar=False,
    )
    assert calls_at_reading == [0, 0, 1, 2]


def test_streams_give_the_same_fit_as_arrays_and_may_end(shared, update):
    x, y = data()

    def stream(num_batches):
        for i in range(num_batches):
            rows = np.arange(8) + 8 * (i % 5)
            yield x[rows], y[rows], rows

    svi = shared
    result = svi.run(jax.random.key(0), 12, batches=stream(99), progress_bar=False)
    state = svi.init(jax.random.key(0), *next(stream(1)))
    for i, batch in enumerate(stream(12)):
        state, loss = update(state, *batch)
        np.testing.assert_allclose(loss, result.losses[i], rtol=1e-4)
    with pytest.warns(RuntimeWarning, match="ended at step 4 of 12.*no further batch"):
        short = svi.run(jax.random.key(0), 12, batches=stream(4), progress_bar=False)
    assert short.losses.shape == (4,)
    with pytest.raises(ValueError, match="no batch"):
        svi.run(jax.random.key(0), 12, batches=[], progress_bar=False)


def test_a_bad_batch_in_a_stream_ends_the_fit_and_keeps_it(shared):
    x, y = data()
    rows = np.arange(8)
    bad = x[rows].copy()
    bad[5, 1] = np.nan
    batches = [(x[rows], y[rows], rows), (bad, y[rows], rows)]
    with pytest.warns(
        RuntimeWarning, match=r"ended at step 1.*`x` must be.*nan at position \(5, 1\)"
    ):
        result = shared.run(jax.random.key(0), 5, batches=batches, progress_bar=False)
    assert result.losses.shape == (1,)
    assert np.isfinite(result.params["w_auto_loc"]).all()


def test_divergence_keeps_the_last_good_state_and_names_the_step():
    """The loss of this guide overflows at its fourth step, by construction."""

    def model(x):
        numpyro.sample("obs", dist.Normal(numpyro.param("m", 0.0), 1.0), obs=x)

    svi = lc.SubsampledSVI(model, lambda x: None, optax.sgd(-1e12), Trace_ELBO())
    with pytest.warns(RuntimeWarning, match="ended at step (1|2|3) of 50"):
        result = svi.run(jax.random.key(0), 50, jnp.float32(1.0), progress_bar=False)
    assert np.isnan(result.losses[-1]) and np.isfinite(result.losses[:-1]).all()
    assert np.isfinite(result.params["m"]) and result.params["m"] != 0
    assert len(result.losses) < 6


@pytest.mark.filterwarnings("ignore:.*skipped:RuntimeWarning")
@pytest.mark.slow
def test_a_run_goes_on_after_batches_that_were_skipped(shared):
    """One bad row comes once in each pass of five batches, and is not drawn again at once."""
    x, y = data()
    batches = lc.ArrayBatches(x, with_value(y, 7, 99), batch_size=8)
    options = {"batches": batches, "stable_update": True, "progress_bar": False}
    whole = shared.run(jax.random.key(0), 10, **options)
    first = shared.run(jax.random.key(0), 1, **options)
    state, losses = first.state, [first.losses[0]]
    for _ in range(9):
        part = shared.run(jax.random.key(1), 1, init_state=state, **options)
        state = part.state
        losses.append(part.losses[0])
    np.testing.assert_allclose(losses, whole.losses, rtol=1e-5)
    assert np.isnan(whole.losses).sum() == 2
    assert state.num_steps == 10


def test_stable_update_skips_bad_steps_and_counts_them():
    """Data that is infinite in some steps only: those steps change nothing."""
    x, y = data()
    rows = np.arange(8)

    def model(x, y, rows, scale):
        with lc.class_plate("classes", NUM_CATEGORIES, y, 4) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with lc.data_plate("data", NUM_ROWS, rows) as rows:
            lc.sample_choice(
                "y", x @ w.T * jnp.power(scale, 100), classes=classes, rows=rows, obs=y
            )

    def guide(x, y, rows, scale):
        with numpyro.plate("classes", NUM_CATEGORIES):
            w = numpyro.param("w_auto_loc", jnp.ones((NUM_CATEGORIES, 3)), event_dim=1)
            numpyro.sample("w", dist.Delta(w, event_dim=1))

    svi = make_svi(model, guide)
    good = (x[rows], y[rows], rows, np.ones((), np.float32))
    bad = (*good[:3], np.full((), 9, np.float32))
    with pytest.warns(RuntimeWarning, match="skipped 2 of 5 steps"):
        result = svi.run(
            jax.random.key(0),
            5,
            batches=[good, bad, good, bad, good],
            stable_update=True,
            progress_bar=False,
        )
    assert np.isnan(result.losses).tolist() == [False, True, False, True, False]
    assert (result.state.local_state["y_u"].rule_state.visits[rows] == 3).all()
    state = svi.init(jax.random.key(0), *good)
    stable_update = jax.jit(svi.stable_update)
    new, loss = stable_update(state, *bad)
    assert np.isnan(loss)
    jax.tree.map(np.testing.assert_array_equal, svi.get_params(new), svi.get_params(state))
    new, loss = stable_update(state, *good)
    assert np.isfinite(loss) and not np.allclose(
        svi.get_params(new)["w_auto_loc"], svi.get_params(state)["w_auto_loc"]
    )


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (33, NUM_CATEGORIES, r"`labels` of plate 'classes'.*\[0, 12\); got 12 at position 33"),
        (0, -1, r"got -1 at position 0, and 1 of 40"),
    ],
)
def test_a_bad_label_anywhere_is_refused_before_the_first_step(position, value, message, shared):
    x, y = data()
    batches = lc.ArrayBatches(x, with_value(y, position, value), batch_size=3)
    with pytest.raises(ValueError, match=message):
        shared.run(jax.random.key(0), 5, batches=batches, progress_bar=False)


def test_bad_labels_of_an_exact_model_are_refused_too():
    x, y = data()
    batches = lc.ArrayBatches(x, with_value(y, 21, 99), batch_size=3)
    svi = make_svi(hierarchical(num_sampled=None))
    with pytest.raises(ValueError, match="got 99 at position 21"):
        svi.run(jax.random.key(0), 5, batches=batches, progress_bar=False)


def test_labels_the_class_plate_does_not_know_are_refused():
    x, y = data()

    def model(x, y, other):
        with lc.class_plate("classes", NUM_CATEGORIES, other, 2) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with lc.data_plate("data", NUM_ROWS):
            numpyro.sample("y", lc.UtilityCategorical(x @ w.T, classes), obs=y)

    other = np.where(y == y[7], (y + 1) % NUM_CATEGORIES, y)
    first = int(np.flatnonzero(y == y[7])[0])
    with pytest.raises(ValueError, match=rf"got class {int(y[7])}|at position {first}"):
        make_svi(model, lambda *_: None).init(jax.random.key(0), x, y, other)


def test_data_that_is_not_finite_is_reported_with_its_position(shared):
    x, y = data()
    x = with_value(x, (39, 2), np.inf)
    with pytest.raises(ValueError, match=r"array 0 of `batches`.*inf at position \(39, 2\)"):
        batches = lc.ArrayBatches(x, y, batch_size=3)
        shared.run(jax.random.key(0), 5, batches=batches, progress_bar=False)
    with pytest.raises(ValueError, match=r"`x` must be finite; got inf at position \(39, 2\)"):
        shared.init(jax.random.key(0), x, y)


def test_arguments_of_run_are_checked(shared):
    with pytest.raises(ValueError, match="`num_steps` must be at least 1; got 0"):
        shared.run(jax.random.key(0), 0)
    for takes_key in (lambda: shared.run(0, 5), lambda: shared.init(0)):
        with pytest.raises(TypeError, match=r"`rng_key` must be .*got 0.*`jax.random.key\(0\)`"):
            takes_key()
    with pytest.raises(NotImplementedError, match="multi_sample_guide"):
        lc.SubsampledSVI(print, print, optax.sgd(0.1), Trace_ELBO(multi_sample_guide=True))
    with pytest.raises(ValueError, match=r"same number of rows.*\(3,\), \(4,\)"):
        lc.ArrayBatches(np.zeros(3), np.zeros(4), batch_size=1)
    with pytest.raises(
        ValueError, match="`batch_size` must be at most 3, the number of rows; got 4"
    ):
        lc.ArrayBatches(np.zeros(3), batch_size=4)


def test_batches_are_made_of_what_numpy_makes_into_numbers():
    x, y = data()
    batches = lc.ArrayBatches(Frame(x), Frame(y), y.tolist(), batch_size=8)
    for found, expected in zip(batches.arrays, (x, y, y), strict=True):
        np.testing.assert_array_equal(found, expected, strict=True)
    for values, dtype in ((["a", "b"], "<U1"), (Frame([1, "b"]), "<U21"), ([None], "object")):
        with pytest.raises(TypeError, match=f"array 1 must hold real numbers; got dtype {dtype}"):
            lc.ArrayBatches(x, values, batch_size=1)


@pytest.mark.parametrize("kind", ["scipy", "BCOO"])
def test_sparse_arrays_get_the_name_of_what_reads_their_rows(kind):
    dense = np.eye(3)
    x = scipy.sparse.csr_array(dense) if kind == "scipy" else BCOO.fromdense(dense)
    with pytest.raises(TypeError, match=r"array 1 is sparse.*`lc.data.CsrRows\(x\)`"):
        lc.ArrayBatches(np.zeros(3), x, batch_size=1)


def test_rows_of_several_lengths_get_the_name_of_what_pads_them():
    with pytest.raises(ValueError, match=r"array 0 must have rows of one.*`lc.data.padded_lists`"):
        lc.ArrayBatches([[1, 2], [3]], batch_size=1)


def test_batches_of_a_stream_are_made_of_what_numpy_makes_into_arrays(shared):
    """As a loader of tensors gives them."""
    x, y = data()

    def stream(made):
        for start in range(0, NUM_ROWS, 8):
            rows = np.arange(start, start + 8)
            yield made(x[rows]), made(y[rows]), made(rows)

    found, expected = (
        shared.run(jax.random.key(0), 3, batches=stream(made), progress_bar=False)
        for made in (Frame, np.asarray)
    )
    np.testing.assert_array_equal(found.losses, expected.losses)


def test_the_progress_bar_shows_a_smoothed_elbo(capsys, shared):
    x, y = data()
    result = shared.run(jax.random.key(0), 3, batches=lc.ArrayBatches(x, y, batch_size=8))
    shown = capsys.readouterr().err
    assert "3 of 3" in shown and "smoothed ELBO" in shown
    expected = -float(result.losses[0])
    for loss in result.losses[1:]:
        expected = 0.98 * expected - 0.02 * float(loss)
    assert f"{expected:.6g}"[:6] in shown


@pytest.mark.slow
def test_programs_are_kept_when_the_data_changes(compiled):
    """Of a run that goes on, on other data of the same shape."""
    svi, state = make_svi(hierarchical(num_sampled=4)), None
    x, y = data()
    num_programs = []
    for shift in range(3):
        batches = lc.ArrayBatches(x + shift, y, batch_size=8)
        options = {"batches": batches, "init_state": state, "progress_bar": False}
        state = svi.run(jax.random.key(shift), 2, **options).state
        num_programs.append(len(compiled()))
    assert num_programs[1] == num_programs[2]


@pytest.mark.slow
def test_run_under_vmap_and_jit(shared):
    """Under a transformation start and steps are the same, and nothing is looked at."""
    rows = np.arange(8)
    batch = (*(array[:8] for array in data()), rows)

    def fit(key):
        first = shared.run(key, 2, *batch, progress_bar=False)
        second = shared.run(key, 2, *batch, init_state=first.state, progress_bar=False)
        return jnp.concatenate([first.losses, second.losses])

    keys = jax.random.split(jax.random.key(1), 2)
    losses = jax.jit(jax.vmap(fit))(keys)
    for key, expected in zip(keys, losses, strict=True):
        np.testing.assert_allclose(fit(key), expected, rtol=1e-4)


def test_a_run_in_jit_draws_from_data_that_are_known(shared):
    """And looks at them, as it does outside."""
    x, y = data()
    batches = lc.ArrayBatches(x, y, batch_size=8)

    def fit(key, batches):
        return shared.run(key, 2, batches=batches, progress_bar=False).losses

    losses = jax.jit(lambda key: fit(key, batches))(KEY)
    np.testing.assert_allclose(losses, fit(KEY, batches), rtol=1e-5)
    bad = lc.ArrayBatches(x, y + NUM_CATEGORIES, batch_size=8)
    with pytest.raises(ValueError, match="`labels` of plate 'classes'"):
        jax.jit(lambda key: fit(key, bad))(KEY)


@pytest.mark.slow
@pytest.mark.parametrize("around", [jax.vmap, lambda fit: jax.jit(jax.vmap(fit))])
def test_models_that_close_over_values_of_a_transformation_are_fitted(around):
    """Such as a prior for each of some scales."""
    x, y = data()
    batches = lc.ArrayBatches(x, y, batch_size=8)

    def fit(scale):
        def model(x, y, rows):
            with lc.class_plate("classes", NUM_CATEGORIES, y, num_sampled=4) as classes:
                w = numpyro.sample("w", dist.Normal(0, scale).expand([3]).to_event(1))
            with lc.data_plate("data", NUM_ROWS, rows) as rows:
                lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)

        svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.01), TraceMeanField_ELBO())
        return svi.run(KEY, 3, batches=batches, progress_bar=False).losses

    scales = jnp.array([0.5, 2.0])
    for scale, losses in zip(scales, around(fit)(scales), strict=True):
        np.testing.assert_allclose(losses, fit(scale), rtol=1e-4)


@pytest.mark.slow
def test_a_stream_that_compiles_again_says_so_once(shared):
    x, y = data()
    sizes = [8, 8, 5, 8, 3, 5]
    batches = [(x[:n], y[:n], jnp.arange(n)) for n in sizes]
    with pytest.warns(RuntimeWarning, match=r"step 2 .*first float32\[5,3\] after") as caught:
        shared.run(jax.random.key(0), 6, batches=iter(batches), progress_bar=False)
    assert len(caught) == 1
