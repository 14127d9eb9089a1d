# SPDX-License-Identifier: Apache-2.0
"""Readings of a fit whose tables are spread over devices are those of one device."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.sharding import AxisType
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc

pytestmark = [
    pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices"),
    pytest.mark.slow,
]

NUM_CLASSES, NUM_USERS, NUM_ROWS, KEY = 21, 10, 30, jax.random.key(0)
USERS = lc.EntityCounts.of(NUM_USERS, np.arange(NUM_ROWS) % NUM_USERS)
X = np.random.default_rng(0).standard_normal((NUM_ROWS, 2)).astype(np.float32)
Y = np.arange(NUM_ROWS) % 7
SHARDINGS = {
    "classes": {"classes": "model"},
    "classes, users apart, data": {"classes": "model", "users": "batch", "data": "batch"},
    "users": {"users": "model"},
}


def model(x, users, y=None, rows=None, noise="gumbel"):
    with lc.class_plate("classes", NUM_CLASSES, y, num_sampled=4) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0, 1))
    with lc.entity_plate("users", NUM_USERS, users, counts=USERS) as of:
        mine = numpyro.sample("mine", dist.Normal(0, 1).expand([2]).to_event(1))
    with lc.data_plate("data", NUM_ROWS, rows) as batch:
        utilities = (x + of.rows_of(mine, users)) @ w.T + b
        lc.sample_choice("y", utilities, classes=classes, rows=batch, obs=y, noise=noise)


def fit(sharding=None, **options):
    if sharding is not None:
        mesh = jax.make_mesh((4, 2), ("model", "batch"), (AxisType.Auto,) * 2)
        options |= {"mesh": mesh, "sharding": sharding}
    loss = TraceMeanField_ELBO()
    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.3), loss, **options)
    batches = lc.ArrayBatches(X, np.arange(NUM_ROWS) % NUM_USERS, Y, batch_size=6)
    return svi, svi.run(KEY, 5, batches=batches, progress_bar=False)


@pytest.fixture(scope="module")
def fit_of_one():
    return fit()


@pytest.fixture(scope="module")
def one(fit_of_one):
    return reading(*fit_of_one)


@pytest.fixture(scope="module", params=SHARDINGS)
def fit_of_parts(request):
    return fit(SHARDINGS[request.param])


@pytest.fixture(scope="module")
def spread(fit_of_parts):
    return reading(*fit_of_parts)


def reading(svi, result, chunk_size=4):
    """On some rows; chunks of 4 do not fill the 6 classes of a device."""
    fitted = lc.Fitted.from_svi(svi, result, chunk_size=chunk_size)
    return fitted.on(X[:5], np.arange(5), rows=np.arange(5))


DRAWS = {"rng_key": KEY, "num_draws": 3}


@pytest.mark.parametrize("draws", [{}, DRAWS], ids=["centre", "draws"])
def test_top_classes(spread, one, draws):
    found, expected = (r.top_classes(7, **draws) for r in (spread, one))
    np.testing.assert_array_equal(found.classes, expected.classes)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, rtol=1e-3)


@pytest.mark.parametrize("draws", [{}, DRAWS], ids=["centre", "draws"])
def test_log_likelihood(spread, one, draws):
    found, expected = (r.log_likelihood(Y[:5] + 14, **draws) for r in (spread, one))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_log_predictive(spread, one):
    found, expected = (r.log_predictive(Y[:5] + 14, **DRAWS) for r in (spread, one))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_draws_of_choices_follow_the_probabilities(spread):
    """Frequencies of 4000 draws; a correct program differs by 4.5 sd once in 10^4 runs or less."""
    probs = np.exp(spread.log_likelihood(np.arange(5) * 4))
    draws = spread.draw_choices(rng_key=KEY, num_draws=4000)
    frequencies = (draws == np.arange(5) * 4).mean(axis=0)
    posterior = np.exp(spread.log_likelihood(np.arange(5) * 4, rng_key=KEY, num_draws=500)).mean(0)
    assert draws.min() >= 0 and draws.max() < NUM_CLASSES
    sd = np.sqrt(posterior * (1 - posterior) / 4000) + posterior.std() / np.sqrt(500)
    assert (np.abs(frequencies - posterior) < 4.5 * sd).all()
    assert not np.allclose(probs, posterior)  # the draws are not of the centre


def test_all_utilities_at_once(one, spread):
    """As other errors than Gumbel's need them."""

    def top(reading):
        reading._fit = replace(reading._fit, kwargs={**reading._fit.kwargs, "noise": "normal"})
        return reading.top_classes(3)

    found, expected = (top(copy(r)) for r in (spread, one))
    np.testing.assert_array_equal(found.classes, expected.classes)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, rtol=1e-3)


def test_arviz_and_diagnosis_have_the_rows_of_the_plates(fit_of_parts, fit_of_one):
    svi, result = fit_of_parts
    fitted = lc.Fitted.from_svi(svi, result, chunk_size=4)
    data = fitted.on(X, np.arange(NUM_ROWS) % NUM_USERS).to_arviz(rng_key=KEY, num_draws=3)
    assert data["posterior"]["w"].shape == (1, 3, NUM_CLASSES, 2)
    few = {"rng_key": KEY, "num_repeats": 5, "num_draws": 100}
    report = fitted.on(X, np.arange(NUM_ROWS) % NUM_USERS, Y).diagnose(**few)
    alone = lc.Fitted.from_svi(*fit_of_one, chunk_size=4)
    expected = alone.on(X, np.arange(NUM_ROWS) % NUM_USERS, Y).diagnose(**few)
    for ours, theirs in zip(report.findings, expected.findings, strict=True):
        assert ours.name == theirs.name
        np.testing.assert_allclose(ours.value, theirs.value, rtol=0.02, atol=1e-3)


def test_a_model_that_reads_classes_by_id():
    """Tied embeddings: its tables are gathered chunk by chunk, and the numbers are the same."""

    def tied(before, y=None, rows=None):
        with lc.class_plate("words", NUM_CLASSES, y, num_sampled=4, reads=before) as words:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        utilities = words.rows_of(w, before).sum(1) @ words.scored(w).T
        with lc.data_plate("data", NUM_ROWS, rows) as batch:
            lc.sample_choice("y", utilities, classes=words, rows=batch, obs=y)

    before = np.arange(2 * NUM_ROWS).reshape(NUM_ROWS, 2) % NUM_CLASSES

    def top(**options):
        loss = TraceMeanField_ELBO()
        svi = lc.SubsampledSVI(tied, AutoNormal(tied), optax.adam(0.3), loss, **options)
        batches = lc.ArrayBatches(before, Y, batch_size=6)
        result = svi.run(KEY, 5, batches=batches, progress_bar=False)
        reading = lc.Fitted.from_svi(svi, result, chunk_size=4).on(before[:5], rows=np.arange(5))
        return reading.top_classes(7), reading.top_classes(7, **DRAWS)

    mesh = jax.make_mesh((4, 2), ("model", "batch"), (AxisType.Auto,) * 2)
    found = top(mesh=mesh, sharding={"words": "model", "data": "batch"})
    for ours, expected in zip(found, top(), strict=True):
        np.testing.assert_array_equal(ours.classes, expected.classes)
        np.testing.assert_allclose(ours.log_probs, expected.log_probs, rtol=1e-3)


def test_no_table_is_sent():
    """The compiled search for the best classes sends what each device found, and touched rows."""
    num_classes, num_features = 80_008, 16  # no other array has such an axis

    def large(x, y=None):
        with lc.class_plate("classes", num_classes, y, num_sampled=8) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([num_features]).to_event(1))
        with lc.data_plate("data", 4) as batch:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=batch, obs=y)

    mesh = jax.make_mesh((8,), ("model",), (AxisType.Auto,))
    options = {"mesh": mesh, "sharding": {"classes": "model"}}
    guide, loss = AutoNormal(large), TraceMeanField_ELBO()
    svi = lc.SubsampledSVI(large, guide, optax.adam(0.1), loss, **options)
    x = jnp.ones((4, num_features))
    result = svi.run(KEY, 1, x, jnp.arange(4), progress_bar=False)
    params = lc.Fitted.from_svi(svi, result).params

    def top(params):
        return lc.Fitted(large, guide, params).on(x).top_classes(5)

    program = jax.jit(top).lower(params).compile()
    kinds = "all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter"
    sent = re.findall(rf"= (.*) (?:{kinds})(?:-start)?\(", program.as_text())
    shapes = [tuple(map(int, s.split(","))) for s in re.findall(r"\[([\d,]+)\]", "".join(sent))]
    largest = max(np.prod(shape) for shape in shapes)
    assert largest <= 384 * num_features  # the classes that the check of chunks looks at
    assert program.memory_analysis().temp_size_in_bytes < 4 * num_classes * num_features / 8


@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_predictions_of_utilities_drawn_alone(scale):
    """With chunks that do not fill a device, and sums whose rest is at its mean, or drawn."""

    def alone(x, y=None, rows=None):
        with lc.class_plate("classes", 200, y, num_sampled=4) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with lc.data_plate("data", NUM_ROWS, rows) as rows:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)

    y, among = np.arange(NUM_ROWS) * 6, np.tile([150, 3, -1], (NUM_ROWS, 1))
    found = []
    for mesh in (None, jax.make_mesh((8,), ("model",), (AxisType.Auto,))):
        options = {} if mesh is None else {"mesh": mesh, "sharding": {"classes": "model"}}
        guide = AutoNormal(alone, init_scale=scale)
        svi = lc.SubsampledSVI(alone, guide, optax.sgd(0.0), TraceMeanField_ELBO(), **options)
        result = svi.run(KEY, 1, X, Y, np.arange(NUM_ROWS), progress_bar=False)
        new = lc.Fitted.from_svi(svi, result, chunk_size=10).on(X)
        tops = new.top_classes(4, **DRAWS), new.top_classes(26, among=among, **DRAWS)
        found.append((new.log_predictive(y, **DRAWS), *(top.log_probs for top in tops)))
    for one, other in zip(*found, strict=True):  # blocks end elsewhere: see NO_MATTER
        np.testing.assert_allclose(one, other, rtol=0, atol=1 / 48)
