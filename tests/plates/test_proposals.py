# SPDX-License-Identifier: Apache-2.0
"""Draws of classes by frequency, with a fixed head or by a user's rule, in fits too."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from numpyro_largecat.plates.frequency_proposal import FrequencyProposal
from numpyro_largecat.plates.head_proposal import HeadProposal
from tests import reference
from tests.memory import temp_bytes
from tests.models import class_points_of
from tests.plates.many_draws import (
    LABELS,
    K,
    assert_means,
    draw_classes,
    draw_often,
    draw_once,
    weight_of_each_class,
)

COUNTS = np.array([100, 40, 10, 1, 3, 20, 2, 7, 1])  # very uneven


class WithRepeats:
    """Draw from all classes with replacement, labels or not, and pad with nonsense of weight 0."""

    def draw(self, rng_key, labels, num_categories, num_sampled):
        del labels
        classes = jax.random.randint(rng_key, (num_sampled,), 0, num_categories)
        weights = jnp.full(num_sampled, num_categories / num_sampled)
        return jnp.append(classes, -7), jnp.append(weights, 0.0)


PROPOSALS = {
    "uniform": None,
    "frequency": FrequencyProposal(COUNTS),
    "head": HeadProposal([0, 3, 1]),
    "a user's own": WithRepeats(),
}
proposals = pytest.mark.parametrize("name", PROPOSALS)


@cache
def draws_of(name):
    """Draw 20_000 subsets for each row of ``LABELS``, with their total weights of each class."""
    drawn = draw_often(list(LABELS.values()), 2, 20_000, proposal=PROPOSALS[name])
    totals = jax.jit(jax.vmap(jax.vmap(weight_of_each_class)))(drawn.indices, drawn.weights)
    return jax.device_get((drawn, totals))


@pytest.mark.smoke
@proposals
@pytest.mark.some_cases(2)
def test_the_mean_weight_of_each_class_is_one(name):
    """So weighted sums of any f, values or gradients, have the sum over all classes as mean."""
    _, totals = draws_of(name)
    assert_means(totals, 1, axis=1)
    for total, labels in zip(totals, LABELS.values(), strict=True):
        np.testing.assert_array_equal(total[:, labels], 1)
    assert totals.std(axis=1).max() < 20  # so the means are known to 0.14


@proposals
def test_rows_of_positive_weight_are_distinct(name):
    drawn, _ = draws_of(name)
    indices, live = drawn.indices[:, :200], drawn.weights[:, :200] > 0
    assert indices.min() >= 0
    assert indices.max() < K
    assert indices.dtype == np.int32
    assert drawn.weights.dtype == jnp.float32
    rows = zip(np.concatenate(indices), np.concatenate(live), strict=True)
    assert all(len(set(row[is_live])) == is_live.sum() for row, is_live in rows)


def test_the_head_is_in_every_draw_with_weight_one():
    """Of the others each draw holds two; with the labels 0 and 6 there are five."""
    totals = draws_of("head")[1][list(LABELS).index("repeated")]
    np.testing.assert_array_equal(totals[:, [0, 1, 3, 6]], 1)
    np.testing.assert_allclose(totals.sum(axis=1), K, rtol=1e-6)
    assert set(np.unique(totals)) == {0, 1, 2, 3}


def test_a_head_that_leaves_fewer_classes_than_draws():
    """Then all classes are there, with weight 1."""
    classes = draw_once(0, np.array([4, 4]), K - 1, proposal=PROPOSALS["head"])
    np.testing.assert_array_equal(np.bincount(classes.indices, classes.weights, K), 1)


@pytest.mark.parametrize(("power", "labels"), [(0.75, None), (1.0, [0, 0, 3]), (0.0, [2])])
@pytest.mark.some_cases(1)
def test_frequency_weights_are_numbers_of_draws_over_their_mean(power, labels):
    """With q from float64 the S draws are found again from their weights."""
    given = np.array(labels or [], np.int32)
    proposal = FrequencyProposal(COUNTS, power)
    drawn = draw_often(given[None], 6, 50, proposal=proposal)
    q = np.where(np.isin(np.arange(K), given), 0, COUNTS**power)
    q = q / q.sum()
    indices, weights = np.asarray(drawn.indices)[0], np.asarray(drawn.weights)[0]
    draws = (weights * 6 * q[indices])[:, len(given) :]
    np.testing.assert_allclose(draws, np.round(draws), atol=1e-4)
    np.testing.assert_array_equal(np.round(draws).sum(axis=1), 6)


def test_a_class_of_almost_no_mass_can_be_drawn():
    """Its probability is rounded up, and its weight is that of the rounded one."""
    counts = np.array([1e12, 1.0, 1e12])
    proposal = FrequencyProposal(counts, power=1)
    mass = np.diff(proposal.ends, prepend=0)
    assert mass.min() == 1
    np.testing.assert_allclose(mass / mass.sum(), counts / counts.sum(), atol=1e-9)


def test_a_million_uneven_classes():
    """Cumulative masses increase up to the last class and stay within int32."""
    counts = 1.0 / np.arange(1, 10**6 + 1)
    ends = np.asarray(FrequencyProposal(counts).ends, np.int64)
    mass = np.diff(ends, prepend=0)
    assert mass.min() >= 1
    assert 2**31 - 10**6 <= ends[-1] < 2**31
    expected = counts**0.75 / (counts**0.75).sum()
    np.testing.assert_allclose(mass / ends[-1], expected, rtol=0.01)


def test_all_classes_are_labels():
    """Then there is nothing to draw, and the labels alone are the sum."""
    options = dict(proposal=FrequencyProposal([5, 1, 1]), num_categories=3)
    classes = draw_once(0, np.array([1, 0, 2]), 2, **options)
    assert classes.weights.tolist() == [1, 1, 1, 0, 0]


def test_a_proposal_may_be_an_argument_of_a_compiled_function():
    """It is a pytree: the table is an input of the function, not a constant in it."""
    proposal, labels = PROPOSALS["frequency"], np.array([4, 4])
    inside = jax.jit(lambda proposal: draw_classes(0, labels, 3, proposal=proposal))(proposal)
    outside = draw_classes(0, labels, 3, proposal=proposal)
    np.testing.assert_array_equal(inside.indices, outside.indices)
    np.testing.assert_allclose(inside.weights, outside.weights)


def test_float64(x64):
    proposal = FrequencyProposal(COUNTS)
    classes = jax.device_get(draw_once(0, np.array([1, 1]), 3, proposal=proposal))
    assert classes.weights.dtype == jnp.float64
    mass = np.diff(np.asarray(proposal.ends), prepend=0)
    draws = classes.weights[2:] * 3 * mass[classes.indices[2:]] / (mass.sum() - mass[1])
    np.testing.assert_allclose(draws, np.round(draws), atol=1e-14)


def test_scratch_memory_does_not_follow_the_classes():
    """Besides its table of 4 MB, a draw by frequency takes some kB."""

    def draw(proposal):
        options = dict(proposal=proposal, num_categories=10**6)
        return draw_classes(0, jnp.arange(50), 100, **options)

    assert temp_bytes(draw, FrequencyProposal(np.ones(10**6))) < 20_000


def returning(*drawn):
    class Fixed:
        def draw(self, rng_key, labels, num_categories, num_sampled):
            return drawn if len(drawn) > 1 else drawn[0]

    return Fixed()


@pytest.mark.parametrize("drawn", [([1, K], [1, 1]), ([1, 2], [3, -1])])
def test_a_class_out_of_range_or_a_negative_weight_makes_all_weights_of_draws_nan(drawn):
    """A softmax would leave a negative weight out, and be biased."""
    proposal = returning(*map(np.array, drawn))
    weights = np.asarray(draw_once(0, np.array([4]), 3, proposal=proposal).weights)
    assert weights[0] == 1
    assert np.isnan(weights[1:]).all()


ERRORS = {
    "not a proposal": (
        lambda: draw_classes(0, np.array([4]), 3, proposal="uniform"),
        TypeError,
        "`proposal` of plate 'classes' must be an object with a method `draw`.*got <class 'str'>",
    ),
    "no weights": (
        lambda: draw_classes(0, None, 3, proposal=returning(jnp.ones(2, int))),
        TypeError,
        "`proposal.draw` must return a pair, the classes and their weights; got an array of int",
    ),
    "float classes": (
        lambda: draw_classes(0, None, 3, proposal=returning(jnp.ones(2), jnp.ones(2))),
        TypeError,
        "`classes of proposal.draw` must be integers",
    ),
    "fewer weights than classes": (
        lambda: draw_classes(0, None, 3, proposal=returning(jnp.array([1, 2]), jnp.ones(3))),
        ValueError,
        r"one shape \(L,\); got shapes \(2,\) and \(3,\)",
    ),
    "counts of other classes": (
        lambda: draw_classes(0, None, 3, proposal=FrequencyProposal([1, 2, 3])),
        ValueError,
        "`counts` of FrequencyProposal must have one entry for each of 9 classes; got 3",
    ),
    "counts of zero": (
        lambda: FrequencyProposal([5, 0, 1, 0]),
        ValueError,
        "must be positive for each class.*got 0 at position 1, and 2 of 4 are 0. Use `counts",
    ),
    "no counts at all": (lambda: FrequencyProposal([0, 0]), ValueError, "2 of 2 are 0"),
    "negative counts": (
        lambda: FrequencyProposal([5, 1, -1]),
        ValueError,
        r"finite and non-negative; got -1\.0 at position 2",
    ),
    "infinite counts": (
        lambda: FrequencyProposal([np.inf, 1]),
        ValueError,
        "got inf at position 0",
    ),
    "counts of two axes": (
        lambda: FrequencyProposal(np.ones((2, 2))),
        ValueError,
        r"must have shape \(K,\).*got shape \(2, 2\)",
    ),
    "a negative power": (
        lambda: FrequencyProposal([1, 2], power=-1),
        ValueError,
        r"`power` must be in \[0, inf\); got -1",
    ),
    "traced counts": (
        lambda: jax.jit(lambda counts: FrequencyProposal(counts).ends)(jnp.ones(3)),
        TypeError,
        "`counts` must be known; got an array that is traced",
    ),
    "a float head": (lambda: HeadProposal([0.5]), TypeError, "`head` must be integers"),
    "a head of two axes": (lambda: HeadProposal([[1]]), ValueError, r"got shape \(1, 1\)"),
    "a negative id": (lambda: HeadProposal([-1]), ValueError, "`head` must be classes.*got -1"),
    "a repeated id": (lambda: HeadProposal([1, 2, 1]), ValueError, "must hold each class once"),
    "an id of no class": (
        lambda: draw_classes(0, None, 3, proposal=HeadProposal([1, K])),
        ValueError,
        r"`head` of HeadProposal must be classes, integers in \[0, 9\); got 9 at position 1",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_bad_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


# In likelihoods, guides and SVI.

N, D, NUM_SAMPLED = 20, 2, 3
X = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, K, N)
W = np.random.default_rng(2).normal(size=(K, D)).astype(np.float32)
BATCH = np.array([3, 11, 5, 17, 0, 8])
LAYOUTS = {
    "frequency": dict(proposal=PROPOSALS["frequency"]),
    "head": dict(proposal=PROPOSALS["head"]),
    "a user's own": dict(proposal=PROPOSALS["a user's own"]),
    "own": dict(negatives="own"),
    "shared": dict(negatives="shared"),
    "shared, by frequency": dict(negatives="shared", proposal=PROPOSALS["frequency"]),
    "shared, with repeats": dict(negatives="shared", proposal=PROPOSALS["a user's own"]),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
SOME_LAYOUTS = ("frequency", "own", "shared, by frequency")
some_layouts = pytest.mark.parametrize(
    "layout", [LAYOUTS[name] for name in SOME_LAYOUTS], ids=SOME_LAYOUTS
)


def open_classes(layout, y, num_sampled=NUM_SAMPLED):
    return lc.class_plate("classes", K, y, num_sampled, **layout)


def utilities_of(x, w, classes):
    return classes.utilities(jnp.dot, (x,), (w,))


def classifier(layout, num_sampled=NUM_SAMPLED):
    """Softmax regression with a u that is fixed, so that the ELBO is linear in the sums."""

    def model(x, y=None, rows=None):
        with open_classes(layout, y, num_sampled) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with lc.data_plate("data", N, rows):
            u = None if classes.kind == "full" else jnp.full(len(x), 2.5)
            choice = lc.UtilityCategorical(utilities_of(x, w, classes), classes, u=u)
            numpyro.sample("y", choice, obs=y)

    return model


def choice_model(layout, num_sampled=NUM_SAMPLED):
    """Softmax regression that keeps u."""

    def model(x, y=None, rows=None):
        with open_classes(layout, y, num_sampled) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", utilities_of(x, w, classes), classes=classes, rows=rows, obs=y)

    return model


def exact_elbo(w):
    """Scaled bound of the batch and log prior, summed over all classes."""
    psi = X[BATCH] @ w.T
    below = psi - jnp.take_along_axis(psi, Y[BATCH][:, None], 1)
    bounds = 1 - 2.5 - jnp.exp(-2.5) * jnp.exp(below).sum(axis=1)
    return N / len(BATCH) * bounds.sum() + dist.Normal(0, 1).log_prob(w).sum()


@layouts
@pytest.mark.some_cases(1)
def test_bounds_have_the_exact_ones_as_means(layout):
    """For each of the observations."""

    @jax.jit
    @jax.vmap
    def bounds(key):
        classes = draw_classes(key, Y[BATCH], NUM_SAMPLED, **layout)
        psi = utilities_of(X[BATCH], jnp.asarray(W)[classes.indices], classes)
        return lc.UtilityCategorical(psi, classes, u=2.5).log_prob(Y[BATCH])

    samples = bounds(jax.random.split(jax.random.key(3), 10_000))
    expected = [reference.softmax_bound(W @ X[n], Y[n], 2.5) for n in BATCH]
    assert_means(samples, np.array(expected))


@pytest.mark.slow
@some_layouts
def test_steps_follow_the_full_gradient(layout):
    """The mean step of the engine is the gradient of the ELBO over all classes.

    Rows that are in the sets of several observations are stored once and moved by them all.
    """
    model, rate = classifier(layout), 1e-2
    svi = lc.SubsampledSVI(model, class_points_of(K, w=(D,)), optax.sgd(rate), Trace_ELBO())
    batch = (X[BATCH], Y[BATCH], BATCH)
    state = svi.init(jax.random.key(0), *batch, init_params={"w_auto_loc": jnp.asarray(W)})

    @jax.jit
    @jax.vmap
    def steps(key):
        new, loss = svi.update(state._replace(rng_key=key), *batch)
        return (svi.get_params(new)["w_auto_loc"] - W) / rate, -loss

    gradients, elbos = steps(jax.random.split(jax.random.key(4), 10_000))
    value, gradient = jax.value_and_grad(exact_elbo)(jnp.asarray(W))
    assert_means(elbos, value)
    assert_means(gradients, np.asarray(gradient))


@pytest.mark.slow
@some_layouts
def test_svi_of_numpyro_with_create_plates(layout):
    """A guide's copy of the plate and the model have the same rows."""
    model = classifier(layout)
    guide = AutoNormal(model, create_plates=lambda x, y, rows: open_classes(layout, y))
    svi = SVI(model, guide, optax.sgd(0.01), Trace_ELBO())
    state = svi.init(jax.random.key(0), X[BATCH], Y[BATCH], BATCH)
    _, value = jax.jit(svi.update)(state, X[BATCH], Y[BATCH], BATCH)
    assert np.isfinite(value)
    in_guide = handlers.trace(handlers.seed(guide, 1)).get_trace(X[BATCH], Y[BATCH], BATCH)
    replayed = handlers.replay(handlers.seed(model, 2), in_guide)
    in_model = handlers.trace(replayed).get_trace(X[BATCH], Y[BATCH], BATCH)
    np.testing.assert_array_equal(in_model["classes"]["value"], in_guide["classes"]["value"])
    np.testing.assert_allclose(in_model["w"]["scale"], in_guide["w"]["scale"])


@pytest.mark.slow
@some_layouts
def test_fit_and_predict_with_kept_u(layout):
    """Two particles, in a compiled loop; prediction visits all classes in chunks."""
    model = choice_model(layout)
    loss = TraceMeanField_ELBO(num_particles=2)
    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adagrad(0.3), loss)
    batches = lc.ArrayBatches(X, Y, batch_size=6)
    result = svi.run(jax.random.key(0), 200, batches=batches, progress_bar=False)
    assert np.isfinite(result.losses).all()
    new = lc.Fitted.from_svi(svi, result, chunk_size=4).on(X).log_likelihood(Y)
    expected = jax.nn.log_softmax(X @ result.params["w_auto_loc"].T)[np.arange(N), Y]
    np.testing.assert_allclose(new, expected, rtol=1e-4, atol=1e-5)
    assert expected.mean() > -np.log(K)  # better than no fit


@layouts
def test_the_same_model_with_all_classes_is_exact(layout):

    @jax.jit
    def found():
        with handlers.trace() as sites, handlers.seed(rng_seed=0):
            classifier(layout, None)(X, Y)
        return sites["w"]["value"], sites["y"]["fn"].log_prob(Y)

    w, log_probs = found()
    expected = reference.softmax_log_probs(X @ np.asarray(w).T, Y)
    np.testing.assert_allclose(log_probs, expected, rtol=1e-4)


@pytest.mark.parametrize("bound", [lc.UtilityCategorical, lc.bounds.OneVsEach, "logistic"])
def test_a_class_out_of_range_makes_log_probabilities_nan(bound):
    class TooHigh:
        def draw(self, rng_key, labels, num_categories, num_sampled):
            return jnp.full(num_sampled, num_categories + 3), jnp.ones(num_sampled)

    @jax.jit
    def log_prob(labels):
        with numpyro.handlers.seed(rng_seed=0):
            classes = lc.class_plate("classes", 9, labels, 2, proposal=TooHigh()).classes
        if bound == "logistic":
            choice = lc.UtilityCategorical(jnp.zeros((2, 4)), classes, "logistic", u=1.0)
        else:
            choice = bound(jnp.zeros((2, 4)), classes)
        return choice.log_prob(labels)

    assert np.isnan(log_prob(np.array([2, 4]))).all()
