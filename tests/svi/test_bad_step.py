# SPDX-License-Identifier: Apache-2.0
"""A step that is not finite ends the fit with what it was: parameter, site or gradient, and row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from tests.models import class_points_of

NUM_CLASSES, NUM_ROWS = 6, 12
KEY = jax.random.key(0)


def softmax(x, y, rows):
    with lc.class_plate("classes", NUM_CLASSES, y, num_sampled=2) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with lc.data_plate("data", NUM_ROWS, rows) as batch:
        lc.sample_choice("y", x @ w.T, classes=classes, rows=batch, obs=y)


def softmax_svi(guide, optimiser=None):
    loss = TraceMeanField_ELBO()
    return lc.SubsampledSVI(softmax, guide, optimiser or optax.adam(0.1), loss)


@pytest.fixture(scope="module")
def of_points():
    """One SVI object for the fits that differ in their batches alone: its programs are kept."""
    return softmax_svi(class_points_of(NUM_CLASSES, w=(2,)))


def batch(i, x=1.0):
    rows = np.arange(3 * i, 3 * i + 3) % NUM_ROWS
    return np.full((3, 2), x, np.float32), rows % NUM_CLASSES, rows


def end_of(svi, match, num_steps=9, **options):
    """The result of a fit that a bad step ends, with a warning that says what it was."""
    with pytest.warns(RuntimeWarning, match=match):
        return svi.run(KEY, num_steps, progress_bar=False, **options)


@pytest.mark.slow
def test_a_parameter_that_is_not_finite_is_named_with_its_row():
    svi = softmax_svi(AutoNormal(softmax))
    state = svi.run(KEY, 2, batches=map(batch, range(9)), progress_bar=False).state

    def broken(table):
        return table.at[4].set(jnp.nan) if table.shape == (NUM_CLASSES, 2) else table

    state = state._replace(optim_state=jax.tree.map(broken, state.optim_state))
    what = r"step 1 of 9: .* the parameter 'w_auto_loc' is nan in row 4 of plate 'classes'"
    result = end_of(svi, what, batches=map(batch, range(9)), init_state=state)
    assert len(result.losses) == 2  # rows 0 to 2 have other classes


@pytest.mark.parametrize("kind", ["arrays", "streamed"])
@pytest.mark.some_cases(1)
def test_a_site_is_named_with_the_row_of_its_plate(kind):
    def model(x, rows):
        a = numpyro.param("a", jnp.array(1.0))
        with lc.data_plate("data", NUM_ROWS, rows):
            numpyro.sample("x", dist.Gamma(jnp.exp(a), 1.0), obs=1 / x)

    batches = {"arrays": lc.ArrayBatches, "streamed": lc.StreamedBatches}[kind]
    x = np.ones(NUM_ROWS, np.float32)
    x[7] = 0
    svi = lc.SubsampledSVI(model, lambda *_: None, optax.adam(0.1), Trace_ELBO())
    what = "the model's log density at site 'x' is nan in row 7 of plate 'data'"
    result = end_of(svi, what, batches=batches(x, batch_size=3))
    assert np.isfinite(result.params["a"])
    assert np.isnan(result.losses[-1]) and np.isfinite(result.losses[:-1]).all()


def test_a_gradient_is_named_with_the_row_of_its_parameter():
    def model(x, rows):
        with lc.data_plate("data", NUM_ROWS, rows):
            a = numpyro.param("a", jnp.zeros(NUM_ROWS), event_dim=0)
            root = jnp.sqrt(jnp.where(x > 5, a, a + 1))  # of infinite slope at 0
            numpyro.sample("x", dist.Normal(root, 1), obs=x)

    svi = lc.SubsampledSVI(model, lambda *_: None, optax.sgd(0.1), Trace_ELBO())
    x = np.ones(NUM_ROWS, np.float32)
    x[5] = 6.0
    stream = ((x[rows], rows) for rows in np.arange(NUM_ROWS).reshape(4, 3))
    what = "step 1 of 9: .*the gradient of parameter 'a' is -inf in row 5 of plate 'data'"
    result = end_of(svi, what, batches=stream)
    np.testing.assert_array_equal(np.isfinite(result.losses), [True, False])


@pytest.mark.slow
def test_a_step_too_long_for_the_type_is_named():
    svi = softmax_svi(AutoNormal(softmax), optax.sgd(1e38))
    what = "step 0 of 9: .*after the step, the parameter 'w_auto_loc' is -?inf in row"
    result = end_of(svi, what, batches=(batch(i, x=100.0) for i in range(9)))
    assert np.isfinite(result.params["w_auto_loc"]).all()


def test_what_a_batch_has_wrong_is_said_first(of_points):
    stream = (batch(i, np.nan if i == 3 else 1.0) for i in range(9))
    result = end_of(of_points, "step 3 of 9: `x` must be finite", batches=stream)
    assert len(result.losses) == 3


def test_bad_steps_that_are_skipped_are_counted(of_points):
    stream = (batch(i, np.nan if i == 3 else 1.0) for i in range(9))
    result = end_of(
        of_points,
        "skipped 1 of 9 steps.*`x` must be finite",
        batches=stream,
        stable_update=True,
    )
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(result.losses)), [3])


def test_a_fit_ends_in_good_order_where_the_reason_cannot_be_found(monkeypatch):
    def fails(*_, **__):
        raise NotImplementedError("a log density that only the loss knows")

    monkeypatch.setattr("numpyro_largecat.svi.run_so_far.first_not_finite", fails)
    what = r"step 0 of 9: .*could not be looked for \(NotImplementedError: a log density that only"

    def model():
        numpyro.factor("f", -1e3 * numpyro.param("a", 1.0))

    result = end_of(lc.SubsampledSVI(model, lambda: None, optax.sgd(1e38), Trace_ELBO()), what)
    assert result.params["a"] == 1


@pytest.mark.slow
def test_particles_and_local_parameters_are_looked_at():
    """The first particle is; the parameters of update rules are moved on the way."""

    def model(x, y, rows):
        with lc.class_plate("classes", NUM_CLASSES, y, num_sampled=2) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with lc.data_plate("data", NUM_ROWS, rows) as batch:
            utilities = jnp.where((rows == 7)[:, None], jnp.nan, x @ w.T)
            lc.sample_choice("y", utilities, classes=classes, rows=batch, obs=y)

    svi = lc.SubsampledSVI(
        model, AutoNormal(model), optax.adam(0.1), TraceMeanField_ELBO(num_particles=2)
    )
    stream = map(batch, range(9))
    end_of(
        svi, "step 2 of 9: .*density at site 'y' is -inf in row 7 of plate 'data'", batches=stream
    )
