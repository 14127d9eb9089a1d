# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from scipy.special import log_softmax, logsumexp

import numpyro_largecat as lc
from tests.memory import temp_bytes
from tests.models import (
    NUM_CATEGORIES,
    NUM_FEATURES,
    NUM_ROWS,
    class_points_of,
    hierarchical,
    make_data,
    normals_of,
)


def guide_of(model, *args, kind=AutoDelta):
    """A guide that has been run once."""
    guide = kind(model)
    numpyro.handlers.seed(guide, 0)(*args)
    return guide


@pytest.fixture(scope="module")
def fitted():
    model = hierarchical(num_sampled=4)
    params = {"scale_auto_loc": np.float32(0.1), "scale_auto_scale": np.float32(0.2)}
    rng = np.random.default_rng(1)
    for name, shape in (("w", (NUM_CATEGORIES, NUM_FEATURES)), ("b", (NUM_CATEGORIES,))):
        params[f"{name}_auto_loc"] = rng.normal(size=shape).astype(np.float32)
        params[f"{name}_auto_scale"] = np.full(shape, 0.1, np.float32)
    x, y = make_data()
    guide = guide_of(model, x[:4], y[:4], np.arange(4), kind=AutoNormal)
    return lc.Fitted(model, guide, params, chunk_size=5)


def dense_log_probs(params, x):
    psi = np.asarray(x, np.float64) @ np.asarray(params["w_auto_loc"], np.float64).T
    psi += np.asarray(params["b_auto_loc"], np.float64)
    return psi - np.log(np.exp(psi).sum(axis=1, keepdims=True))


@pytest.mark.smoke
@pytest.mark.parametrize("chunk_size", [1, 5, NUM_CATEGORIES, 1000])
def test_predictions_equal_dense_arithmetic_whatever_the_chunk(fitted, chunk_size):
    x = np.random.default_rng(5).normal(size=(7, NUM_FEATURES)).astype(np.float32)
    obs = np.array([0, 11, 3, 3, 7, 10, 1])

    @jax.jit
    def predict(params, x):
        new = lc.Fitted(fitted.model, fitted.guide, params, chunk_size=chunk_size).on(x)
        return new.top_classes(3), new.log_likelihood(obs)

    found, log_prob = predict(fitted.params, x)
    expected = dense_log_probs(fitted.params, x)
    order = np.argsort(-expected, axis=1)[:, :3]
    np.testing.assert_array_equal(found.classes, order)
    np.testing.assert_allclose(found.log_probs, np.take_along_axis(expected, order, 1), atol=1e-5)
    np.testing.assert_allclose(log_prob, expected[np.arange(7), obs], atol=1e-5)


@pytest.mark.slow
def test_probabilities_of_all_classes_sum_to_one(fitted):
    found = fitted.on(jnp.ones((2, NUM_FEATURES))).top_classes(NUM_CATEGORIES)
    np.testing.assert_allclose(np.exp(found.log_probs).sum(axis=1), 1, rtol=1e-5)
    assert sorted(found.classes[0].tolist()) == list(range(NUM_CATEGORIES))


@pytest.mark.slow
def test_an_exact_model_predicts_the_same_from_the_same_parameters(fitted):
    x, y = make_data()
    model = hierarchical(num_sampled=None)
    guide = guide_of(model, x[:4], y[:4], jnp.arange(4), kind=AutoNormal)
    found = lc.Fitted(model, guide, fitted.params, chunk_size=7).on(x[:2]).top_classes(1)
    expected = dense_log_probs(fitted.params, x[:2])
    np.testing.assert_array_equal(found.classes[:, 0], expected.argmax(axis=1))


@pytest.mark.parametrize(
    "read",
    [
        lambda new: new.top_classes(),
        lambda new: new.top_classes(rng_key=jax.random.key(0), num_draws=3),
        lambda new: new.log_likelihood(
            jnp.zeros(NUM_ROWS, int), rng_key=jax.random.key(0), num_draws=3
        ),
        lambda new: new.draw_choices(rng_key=jax.random.key(0), num_draws=3),
    ],
    ids=["top_classes", "top_classes over draws", "log_likelihood", "draw_choices"],
)
@pytest.mark.slow
def test_memory_follows_the_chunk_and_not_the_classes(read):
    """Nor the draws, of which one chunk of one draw is held at a time."""

    def scratch(num_categories):
        model = hierarchical(num_sampled=4, num_categories=num_categories)
        guide = AutoDelta(model)
        x, y = make_data()
        svi = lc.SubsampledSVI(model, guide, optax.sgd(0.1), TraceMeanField_ELBO())
        params = jax.eval_shape(lambda: svi.get_params(svi.init(jax.random.key(0), x, y)))

        def run(params, x):
            return read(lc.Fitted(model, guide, params, chunk_size=64).on(x))

        return temp_bytes(run, params, x)

    # One chunk of utilities, noise and so on is 10 kB each; one number for each class 400 kB.
    assert scratch(1_000) == pytest.approx(scratch(100_000), rel=0.01)
    assert scratch(100_000) < 200_000


@pytest.mark.slow
def test_rows_of_the_training_data_can_be_predicted_by_their_ids():
    """A latent value for each row is known for training rows, and refused for new ones."""
    y = jnp.array([1, 4, 4])

    def model(y=None, rows=None):
        with lc.class_plate("classes", 6, y, num_sampled=2) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", 3, rows) as rows:
            z = numpyro.sample("z", dist.Normal(0, 1))
            lc.sample_choice("y", z[:, None] * w, classes=classes, rows=rows, obs=y)

    params = {"z_auto_loc": jnp.array([1.0, -2.0, 3.0]), "w_auto_loc": jnp.arange(6.0)}
    fitted = lc.Fitted(model, guide_of(model, y), params)
    found = fitted.on(rows=jnp.array([2, 1, 2])).top_classes(1)
    assert found.classes[:, 0].tolist() == [5, 0, 5]  # also of one row twice
    with pytest.raises(NotImplementedError, match="site 'z' has a value for each row"):
        fitted.on().top_classes()


def test_bad_arguments_are_described(fitted):
    x = np.ones((2, NUM_FEATURES))
    again = partial(lc.Fitted, fitted.model, fitted.guide)
    with pytest.raises(ValueError, match=r"`site` must name a UtilityCategorical.*'nope'"):
        again(fitted.params, site="nope").on(x).top_classes()
    for plate in ("nope", "data"):  # a plate of observations
        with pytest.raises(ValueError, match=rf"name a class plate.*'classes'.*got '{plate}'"):
            again(fitted.params, plate=plate).on(x).top_classes()
    fewer = fitted.params | {"b_auto_loc": fitted.params["b_auto_loc"][:9]}
    with pytest.raises(ValueError, match=r"'b_auto_loc'.*must have 12 rows.*got shape \(9,\)"):
        again(fewer).on(x).top_classes()
    new = again(fitted.params).on(x)
    with pytest.raises(ValueError, match="`num_top` must be at most 12, the number of classes"):
        new.top_classes(13)
    with pytest.raises(ValueError, match=r"`obs` must be classes.*got 12 at position 1"):
        new.log_likelihood(jnp.array([0, 12]))
    with pytest.raises(ValueError, match=r"`obs` must have.* shape \(2,\); got shape \(2, 1\)"):
        new.log_likelihood(jnp.array([[0], [1]]))
    with pytest.raises(ValueError, match="`rng_key` and `num_draws` belong together"):
        new.top_classes(num_draws=3)


@pytest.mark.slow
def test_numpy_arrays_may_be_indexed_by_classes():
    """A model that takes a table of NumPy's by ``classes.indices`` trains, so it must predict."""
    table = np.arange(12.0).reshape(3, 4)

    def model(table, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with lc.class_plate("classes", 4, y, 2) as classes:
            pass
        with lc.data_plate("data", 3) as rows:
            psi = slope * table[:, classes.indices]
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    guide = guide_of(model, jnp.asarray(table), jnp.array([0, 1, 3]))
    fitted = lc.Fitted(model, guide, {"slope_auto_loc": np.array(1.0, np.float32)})
    assert fitted.on(table).top_classes(1).classes[:, 0].tolist() == [3, 3, 3]
    data = fitted.on(table, y=np.zeros(3, int)).to_arviz(rng_key=jax.random.key(1))
    assert data["posterior"]["slope"].shape == (1, 500)


@pytest.mark.slow
def test_utilities_that_rows_share_are_those_of_each_row():
    """A plate expands them; and one row without ids stands for as many as there are labels."""

    def expanded(y=None):
        with lc.class_plate("classes", 6, y, 2) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("data", 3):
            numpyro.sample("y", lc.UtilityCategorical(b, classes), obs=y)

    def one_row(y=None):
        with lc.class_plate("classes", 6, y, 2) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", 3) as rows:
            lc.sample_choice("y", b[None], classes=classes, rows=rows, obs=y)

    b, obs = jnp.array([0.5, -1.0, 1.0, 0.0, -2.0, 0.2]), jnp.array([2, 0, 2])
    for model, num_rows in ((expanded, 3), (one_row, 1)):
        new = lc.Fitted(model, class_points_of(6, b=()), {"b_auto_loc": b}, chunk_size=4).on()
        assert new.top_classes(2).classes.tolist() == [[2, 0]] * num_rows
        found = new.log_likelihood(obs)
        np.testing.assert_allclose(found, jax.nn.log_softmax(b)[obs], rtol=1e-5)


@pytest.mark.slow
def test_a_guide_may_draw_a_table_whole():
    """As AutoMultivariateNormal does, whose sites are in no plate; chunks take their rows."""

    def model(x, y=None):
        with lc.class_plate("classes", 5) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with lc.data_plate("data", 2):
            numpyro.sample("y", lc.UtilityCategorical(x @ w.T, classes), obs=y)

    x, w = jnp.array([[1.0, 2.0], [-1.0, 0.5]]), jax.random.normal(jax.random.key(0), (5, 2))
    guide = AutoMultivariateNormal(model)
    numpyro.handlers.seed(guide, 0)(x, jnp.array([0, 1]))
    params = {"auto_loc": w.ravel(), "auto_scale_tril": 1e-6 * jnp.eye(10)}
    obs, new = jnp.array([4, 2]), lc.Fitted(model, guide, params, chunk_size=2).on(x)
    found = new.log_likelihood(obs, rng_key=jax.random.key(1), num_draws=2)
    expected = jax.nn.log_softmax(x @ w.T)[jnp.arange(2), obs]
    np.testing.assert_allclose(found, jnp.stack([expected] * 2), atol=1e-4)


def choice_over(classes_to_utilities, num_categories=5, num_sampled=None):
    """A model of weights b in a class plate, its guide, and parameters that differ."""

    def model(y=None):
        with lc.class_plate("classes", num_categories, y, num_sampled) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", 2):
            utilities = jnp.broadcast_to(classes_to_utilities(b, classes), (2, len(b)))
            numpyro.sample("y", lc.UtilityCategorical(utilities, classes), obs=y)

    locs = {"b_auto_loc": np.arange(1.0, num_categories + 1)}
    return model, class_points_of(num_categories, b=()), locs


@pytest.mark.parametrize(
    "across",
    [
        lambda b, classes: b / jnp.linalg.norm(b),
        lambda b, classes: b - b.mean(),
        lambda b, classes: b.at[0].set(0.0),
        lambda b, classes: b.at[-1].set(0.0),
        lambda b, classes: b.at[2].set(0.0),
        lambda b, classes: jnp.cumsum(b),
        lambda b, classes: b * b[jnp.array(3)],
    ],
    ids=["normalised", "centred", "first is 0", "last is 0", "third is 0", "running sum", "by id"],
)
@pytest.mark.some_cases(2)
def test_utilities_that_depend_on_other_classes_are_refused(across):
    fit = choice_over(across)
    with pytest.raises(ValueError, match=r"utility of class [0-4] of plate 'classes' depends on"):
        lc.Fitted(*fit, chunk_size=4).on().top_classes(1)
    found = lc.Fitted(*fit, chunk_size=5).on().log_likelihood(jnp.array([0, 4]))  # all at once
    expected = log_softmax(across(jnp.arange(1.0, 6), None))
    np.testing.assert_allclose(found, expected[[0, 4]], atol=1e-5)


@pytest.mark.parametrize("num_sampled", [None, 2])
def test_what_steps_have_not_had_whole_is_not_read_whole(num_sampled):
    """With few classes a chunk is all of them, but the steps of the fit held some."""
    model, guide, params = choice_over(lambda b, _: b - b.mean(), num_sampled=num_sampled)
    new = lc.Fitted(model, guide, params).on()
    if num_sampled is None:
        expected = log_softmax(np.arange(5.0))[4]
        np.testing.assert_allclose(new.log_likelihood([4, 4]), expected, rtol=1e-5)
    else:
        with pytest.raises(ValueError, match=r"utility of class [0-4] of plate 'classes' depends"):
            new.log_likelihood([4, 4])


@pytest.mark.parametrize("loc", [0.0, -9.0], ids=["where rows are 0", "where all are cut off"])
@pytest.mark.parametrize(
    "across",
    [
        lambda b, classes: 1e4 + b - b.mean(),
        lambda b, classes: jax.nn.relu(b) - jax.nn.relu(b).mean(),
        lambda b, classes: b - b.max(),
    ],
    ids=["far from 0", "partly flat", "by the largest"],
)
@pytest.mark.some_cases(1)
def test_a_dependence_is_seen_wherever_the_rows_are(across, loc):
    model, guide, _ = choice_over(across, 300)
    with pytest.raises(ValueError, match="depends on which"):
        params = {"b_auto_loc": np.full(300, loc)}
        lc.Fitted(model, guide, params, chunk_size=100).on().top_classes(2)


def test_noise_of_the_model_is_no_dependence():
    """A site that the guide lacks is drawn anew for each class, also where it rarely differs."""

    def model(y=None):
        with lc.class_plate("classes", 300) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
            b += numpyro.sample("z", dist.Bernoulli(0.02))
        with lc.data_plate("data", 2):
            utilities = jnp.broadcast_to(b, (2, len(b)))
            numpyro.sample("y", lc.UtilityCategorical(utilities, classes), obs=y)

    params = {"b_auto_loc": np.arange(300.0)}
    new = lc.Fitted(model, class_points_of(300, b=()), params, chunk_size=100).on()
    assert new.top_classes(1).classes[0, 0] == 299


@pytest.mark.slow
def test_utilities_that_depend_on_other_classes_are_nan_under_jit():
    """Also where all rows are alike, as those that nothing has touched, so that none seems off."""
    model, guide, params = choice_over(lambda b, classes: b * b[jnp.array([3])])
    alike = {"b_auto_loc": jnp.zeros(5)}
    with pytest.raises(ValueError, match="depends on which"):
        lc.Fitted(model, guide, alike, chunk_size=2).on().top_classes(2)

    @jax.jit
    def predict(params):
        new = lc.Fitted(model, guide, params, chunk_size=2).on()
        return new.top_classes(2), new.draw_choices(rng_key=jax.random.key(0), num_draws=2)

    top, drawn = predict(params)
    assert np.isnan(top.log_probs).all() and (np.asarray(top.classes) == -1).all()
    assert (np.asarray(drawn) == -1).all()


@pytest.mark.slow
def test_rows_of_any_support_are_those_of_one_class():
    """Positive, and on a simplex, in and out of ``jit``."""

    def model(y=None):
        with lc.class_plate("classes", 5, y, 2) as classes:
            scale = numpyro.sample("scale", dist.HalfNormal(1))
            mix = numpyro.sample("mix", dist.Dirichlet(jnp.ones(3)))
        with lc.data_plate("data", 2) as rows:
            psi = jnp.broadcast_to(scale * mix[:, 0], (2, len(scale)))
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    guide, obs = AutoDelta(model), jnp.array([0, 4])
    numpyro.handlers.seed(guide, 0)(obs)
    scale, mix = jnp.arange(1.0, 6), jax.nn.softmax(jax.random.normal(jax.random.key(0), (5, 3)))
    params = {"scale_auto_loc": scale, "mix_auto_loc": mix}
    expected = jax.nn.log_softmax(scale * mix[:, 0])[obs]

    def log_prob(params):
        return lc.Fitted(model, guide, params, chunk_size=2).on().log_likelihood(obs)

    for found in (log_prob(params), jax.jit(log_prob)(params)):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_features_that_are_not_finite_are_refused_and_nan_under_jit(fitted):
    x = np.ones((3, NUM_FEATURES), np.float32)
    x[1, 2] = np.nan
    with pytest.raises(ValueError, match=r"`x` must be finite; got nan at position \(1, 2\)"):
        fitted.on(x)
    found = jax.jit(lambda x: fitted.on(x).top_classes(2))(x)
    assert np.isnan(found.log_probs).all(axis=1).tolist() == [False, True, False]
    assert (np.asarray(found.classes) == -1).all(axis=1).tolist() == [False, True, False]


def test_utilities_of_each_class_alone_are_not_refused():
    """A reference class by its id, classes that are not available, bad data, and noise."""

    def noisy(b, classes):
        return b + jax.random.normal(numpyro.prng_key(), b.shape)

    for of_class in (
        lambda b, classes: jnp.where(classes.indices == 0, 0.0, b),
        lambda b, classes: jnp.where(classes.indices == 1, -jnp.inf, b),
        lambda b, classes: jnp.where(b == 2.0, jnp.nan, b),  # class 1
        noisy,
    ):
        found = lc.Fitted(*choice_over(of_class), chunk_size=2).on().top_classes(1)
        assert found.classes.shape == (2, 1)


def test_tables_that_are_not_indexed_by_the_classes_are_described():
    fit = choice_over(lambda b, classes: b + jnp.arange(5.0))
    with pytest.raises(ValueError, match=r"fails on two of them.*`x\[:, classes.indices\]`"):
        lc.Fitted(*fit).on().top_classes(1)
    wrong_everywhere = choice_over(lambda b, classes: b)[0]

    def guide(y=None):
        b = numpyro.param("b_auto_loc", jnp.zeros(7))
        numpyro.sample("b", dist.Delta(b, event_dim=1))

    with pytest.raises(ValueError, match=r"draws site 'b' outside.*all 5 rows at axis -1"):
        lc.Fitted(wrong_everywhere, guide, {"b_auto_loc": jnp.zeros(7)}).on().top_classes(1)


@pytest.mark.parametrize("num_sampled", [None, 4])
def test_a_guide_that_has_not_run_is_refused_and_left_as_it_is(fitted, num_sampled):
    guide = AutoNormal(hierarchical(num_sampled))
    with pytest.raises(ValueError, match=r"guide has not been run yet.*seed\(guide, 0\)"):
        lc.Fitted(guide.model, guide, fitted.params)
    assert guide.prototype_trace is None


DRAWS = {"rng_key": jax.random.key(7), "num_draws": 400}


def drawn_log_probs(params, x, num_draws):
    """Log probabilities of all classes for draws from the guide, made by NumPy."""
    rng = np.random.default_rng(0)

    def normals(name):
        loc, scale = (np.asarray(params[f"{name}_auto_{part}"]) for part in ("loc", "scale"))
        return loc + scale * rng.normal(size=(num_draws, *loc.shape))

    w, b = normals("w"), normals("b")
    return np.asarray(jax.nn.log_softmax(np.asarray(x) @ w.transpose(0, 2, 1) + b[:, None]))


@pytest.fixture(scope="module")
def wide(fitted):
    """A guide that is wide, so that draws differ."""
    params = fitted.params | {"w_auto_scale": np.full_like(fitted.params["w_auto_scale"], 1.5)}
    return lc.Fitted(fitted.model, fitted.guide, params, chunk_size=5)


@pytest.mark.slow
def test_draws_average_the_probability(wide):
    """FALSE_ALARM = 1e-5: 24 means within five standard errors of NumPy's."""
    x = jax.random.normal(jax.random.key(5), (2, NUM_FEATURES))
    found = wide.on(x).top_classes(NUM_CATEGORIES, **DRAWS)
    probabilities = np.exp(drawn_log_probs(wide.params, x, 20_000))
    error = probabilities.std(axis=0) * np.sqrt(1 / 400 + 1 / 20_000)
    order = np.asarray(found.classes)
    expected, error = (np.take_along_axis(a, order, 1) for a in (probabilities.mean(0), error))
    assert (np.abs(np.exp(found.log_probs) - expected) < 5 * error).all()
    at_centre = wide.on(x).top_classes(1)
    assert (found.log_probs[:, 0] < at_centre.log_probs[:, 0]).all()  # less sure of itself


@pytest.mark.slow
def test_top_classes_have_the_log_predictive(wide):
    x = jax.random.normal(jax.random.key(5), (2, NUM_FEATURES))
    top = wide.on(x).top_classes(2, **DRAWS)
    for rank in range(2):
        found = wide.on(x).log_predictive(top.classes[:, rank], **DRAWS)
        np.testing.assert_allclose(found, top.log_probs[:, rank], rtol=1e-4)


@pytest.mark.slow
def test_rows_of_the_chunks_are_drawn_apart(wide):
    """FALSE_ALARM = 1e-5: utilities of classes in different chunks are uncorrelated."""
    new = lc.Fitted(wide.model, wide.guide, wide.params, chunk_size=4).on(
        jnp.ones((8, NUM_FEATURES))
    )
    every = np.asarray(new.log_likelihood(jnp.arange(8), **DRAWS)).T
    gaps = np.diff(every.reshape(2, 4, 400), axis=1)  # between classes of one chunk
    correlations = [np.corrcoef(gaps[0, i], gaps[1, i])[0, 1] for i in range(3)]
    assert np.abs(correlations).max() < 5 / 400**0.5


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["gumbel", "normal"])
def test_drawn_choices_have_the_predictive_probabilities(noise):
    """FALSE_ALARM = 1e-5: frequencies of six classes within five standard errors."""
    table = jnp.array([0.5, -1.0, 1.0, 0.0, 2.0, -0.3])

    def model(y=None):
        with lc.class_plate("classes", 6, y, num_sampled=2) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", 1) as rows:
            lc.sample_choice("y", b[None], classes=classes, rows=rows, noise=noise, obs=y)

    new = lc.Fitted(model, class_points_of(6, b=()), {"b_auto_loc": table}, chunk_size=4).on()
    draws = new.draw_choices(rng_key=jax.random.key(0), num_draws=20_000)
    assert draws.shape == (20_000, 1)
    frequencies = np.bincount(draws[:, 0], minlength=6) / 20_000
    expected = np.exp(lc.UtilityCategorical(table, noise=noise).log_prob(jnp.arange(6)))
    error = np.sqrt(expected * (1 - expected) / 20_000)
    assert (np.abs(frequencies - expected) < 5 * error).all()
    draws = {"rng_key": jax.random.key(0), "num_draws": 2}
    for options in ({}, draws):
        top = new.top_classes(3, **options)
        assert top.classes[0].tolist() == [4, 2, 0]
        np.testing.assert_allclose(np.exp(top.log_probs[0]), expected[[4, 2, 0]], rtol=1e-4)


def test_the_progress_bar_counts_the_chunks(fitted, capsys):
    shown = lc.Fitted(
        fitted.model, fitted.guide, fitted.params, chunk_size=5, progress_bar=True
    ).on(jnp.ones((1, 3)))
    for _ in range(2):  # compiled once, shown twice
        shown.log_likelihood(jnp.array([1]), rng_key=jax.random.key(0), num_draws=2)
        jax.effects_barrier()
        assert "6 of 6" in capsys.readouterr().err


def test_labels_out_of_range_have_no_likelihood_under_jit(fitted):
    new = fitted.on(np.ones((3, NUM_FEATURES)))
    log_prob = jax.jit(new.log_likelihood)(np.array([-1, 3, NUM_CATEGORIES]))
    assert np.isnan(log_prob).tolist() == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "guide",
    [
        normals_of(classes=(NUM_CATEGORIES, {"w": (NUM_FEATURES,)})),
        class_points_of(NUM_CATEGORIES, w=(NUM_FEATURES,)),
    ],
    ids=["normals", "points"],
)
def test_masked_choices_have_no_log_probability(guide):
    """As NumPyro has it, so that ArviZ compares models on what they were fitted to."""

    def model(x, keep, y=None):
        with lc.class_plate("classes", NUM_CATEGORIES, y, num_sampled=2) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([NUM_FEATURES]).to_event(1))
        with lc.data_plate("data", len(x)) as rows, numpyro.handlers.mask(mask=keep):
            lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)

    x, y = (np.asarray(part)[:6] for part in make_data())
    keep = np.arange(6) % 3 > 0
    names = ("w_auto_loc", "w_auto_scale")
    params = dict.fromkeys(names, np.full((NUM_CATEGORIES, NUM_FEATURES), 0.3, np.float32))
    draws = {"rng_key": jax.random.key(1), "num_draws": 2}

    def read(params, keep):
        new = lc.Fitted(model, guide, params).on(x, keep)
        return new.log_likelihood(y), new.log_likelihood(y, **draws), new.log_predictive(y, **draws)

    under_jit = jax.jit(read)
    everything = under_jit(params, np.ones(6, bool))
    for found in (read(params, keep), under_jit(params, keep)):
        for some, of_all in zip(found, everything, strict=True):
            np.testing.assert_allclose(some, np.where(keep, of_all, 0), rtol=1e-5)
    data = lc.Fitted(model, guide, params).on(x, keep, y).to_arviz(rng_key=jax.random.key(2), obs=y)
    np.testing.assert_array_equal(data["log_likelihood"]["y"].values[..., ~keep], 0)


@pytest.mark.slow
def test_a_site_that_the_guide_leaves_to_the_model_is_at_the_centre_of_its_prior_or_drawn():
    """FALSE_ALARM = 1e-6: its draws are the same on both sides, those of the weights are narrow."""

    def model(x, y=None):
        size = numpyro.sample("size", dist.LogNormal(0.5, 1.0))
        with lc.class_plate("classes", 4, y, num_sampled=2) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with lc.data_plate("data", len(x)) as rows:
            lc.sample_choice("y", size * (x @ w.T), classes=classes, rows=rows, obs=y)

    def guide(x, y=None):
        with lc.class_plate("classes", 4, y, num_sampled=2):
            loc = numpyro.param("loc", W, event_dim=1)
            numpyro.sample("w", dist.Normal(loc, 0.1).to_event(1))

    W = np.float32([[1, 0], [0, 1], [-1, 0], [0, -1]])
    x, y = np.eye(2, dtype=np.float32), np.array([2, 3])  # the least probable
    new = lc.Fitted(model, guide, {"loc": W}).on(x)
    at_centre = log_softmax(np.exp(0.5) * (x @ W.T), axis=1)[np.arange(2), y]
    np.testing.assert_allclose(new.log_likelihood(y), at_centre, rtol=1e-5)
    draws = {"rng_key": jax.random.key(0), "num_draws": 2000}
    by_draw = logsumexp(new.log_likelihood(y, **draws), axis=0) - np.log(2000)
    assert np.abs(by_draw - at_centre).min() > 0.2
    np.testing.assert_allclose(new.log_predictive(y, **draws), by_draw, atol=0.1)
    np.testing.assert_allclose(new.top_classes(4, **draws).log_probs[:, 3], by_draw, atol=0.1)


@pytest.mark.parametrize("draws", [{}, {"rng_key": jax.random.key(2), "num_draws": 3}])
def test_a_later_prediction_compiles_nothing(fitted, draws, compiled):
    """Of other rows, and by another object; no other test has chunks of so many classes."""
    x, y = map(np.asarray, make_data())
    for rows in (slice(4), slice(4, 8)):
        num_programs = len(compiled())
        again = lc.Fitted(fitted.model, fitted.guide, fitted.params, chunk_size=11)
        found = again.on(x[rows])
        top = found.top_classes(3, **draws)
        found.log_predictive(y[rows], **draws) if draws else found.log_likelihood(y[rows])
    assert len(compiled()) == num_programs > 0
    assert top.classes.shape == (4, 3)
