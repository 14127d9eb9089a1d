# SPDX-License-Identifier: Apache-2.0
"""What each bound or estimate of a softmax does beyond ``test_distributions``."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro import handlers
from scipy.optimize import minimize
from scipy.special import expit, log_softmax

import numpyro_largecat as lc
from numpyro_largecat.choices.baselines.noise_contrastive import NoiseContrastive
from numpyro_largecat.choices.bounds.bouchard import Bouchard
from numpyro_largecat.choices.bounds.one_vs_each import OneVsEach
from tests import reference
from tests.choices.subsets import SUBSET, WEIGHTS

# A correct program fails one of a test's comparisons, at most 200 means each compared at 5.5
# standard errors, with probability below this.
STANDARD_ERRORS = 5.5
FALSE_ALARM = 1e-5
rng = np.random.default_rng(0)

UTILITIES = rng.normal(size=(3, 6)).astype(np.float32) * 2
LOCAL = np.array([0.5, 2.5, -1.5], np.float32)
MARKS = np.array([1, 0, 1, 1, 1, 0], bool)
MARKS_OF_EACH = np.array([MARKS, ~MARKS, np.zeros(6, bool)])


MAKERS = {
    "one-vs-each": OneVsEach,
    "Bouchard": partial(Bouchard, alpha=0.7),
    "noise contrastive": partial(NoiseContrastive, num_noise=3),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@makers
def test_utilities_that_are_not_numbers_are_refused(make):
    with pytest.raises(ValueError, match="utilities"):
        make(jnp.array([0.0, jnp.nan]), validate_args=True)


def test_best_alpha_needs_all_classes():
    with pytest.raises(NotImplementedError, match="best alpha needs all classes"):
        Bouchard(UTILITIES, SUBSET, alpha=0.0).best_alpha()


BAD_ARGUMENTS = {
    "a subset without alpha": (
        lambda: Bouchard(UTILITIES, SUBSET),
        ValueError,
        r"`alpha` must be given with a subset of classes.*numpyro.param\(",
    ),
    "marks that are indices": (
        lambda: OneVsEach(UTILITIES, together=np.array([0, 3])),
        TypeError,
        r"`together` must be booleans.*got dtype int\d+.*jnp.isin",
    ),
    "marks of another length": (
        lambda: OneVsEach(UTILITIES, together=np.ones(5, bool)),
        ValueError,
        r"`together` must broadcast to .*\(3, 6\).*got shape \(5,\)",
    ),
    "marks of more observations": (
        lambda: OneVsEach(UTILITIES, together=np.ones((2, 3, 6), bool)),
        ValueError,
        r"got shape \(2, 3, 6\)",
    ),
    "alpha of another shape": (
        lambda: Bouchard(UTILITIES, alpha=jnp.zeros(2)),
        ValueError,
        r"`alpha` must have a shape that broadcasts.*got shape \(2,\)",
    ),
    "no noise": (
        lambda: NoiseContrastive(UTILITIES, num_noise=0),
        ValueError,
        "`num_noise` must be at least 1; got 0",
    ),
    "noise that is not a count": (
        lambda: NoiseContrastive(UTILITIES, num_noise=2.5),
        TypeError,
        "`num_noise` must be a Python int, .*; got 2.5",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_shapes_are_inferred():
    assert OneVsEach.infer_shapes((3, 6)) == ((3,), ())
    assert OneVsEach.infer_shapes(utilities=(2, 3, 6), together=(6,)) == ((2, 3), ())
    assert Bouchard.infer_shapes(utilities=(2, 1, 6), alpha=(3,)) == ((2, 3), ())
    shapes = dict(utilities=(1, 6), log_normalizer=(2, 3))
    assert NoiseContrastive.infer_shapes(**shapes) == ((2, 3), ())


# Means over the draws of a class plate.

ON_SUBSET = [
    lambda psi, classes: OneVsEach(psi, classes, together=True),
    lambda psi, classes: OneVsEach(psi, classes, together=psi > 0.5),
]
ON_ALL = [  # the same on all classes, where the labels that are together are 1 and 4
    lambda psi: OneVsEach(psi, together=np.isin(np.arange(9), [1, 4])),
    lambda psi: OneVsEach(psi, together=(psi > 0.5) & np.isin(np.arange(9), [1, 4])),
]
LABELS = np.array([4, 1, 4], np.int32)
TABLE = np.random.default_rng(1).normal(size=9) * 2


def values_and_gradients(log_probs):
    """Sum over observations of each distribution's value, and its gradient, in one vector."""
    pairs = [jax.value_and_grad(log_prob)(jnp.array(TABLE)) for log_prob in log_probs]
    return jnp.stack([jnp.append(gradient, value) for value, gradient in pairs])


def on_all_classes():
    def log_prob(make, table):
        return make(jnp.broadcast_to(table, (3, 9))).log_prob(LABELS).sum()

    return values_and_gradients([partial(log_prob, make) for make in ON_ALL])


def on_subset(classes):
    def log_prob(make, table):
        psi = jnp.broadcast_to(table[classes.indices], (3, *classes.indices.shape))
        return make(psi, classes).log_prob(jnp.array(LABELS)).sum()

    return values_and_gradients([partial(log_prob, make) for make in ON_SUBSET])


@pytest.mark.parametrize("num_sampled", [1, 3])
@pytest.mark.some_cases(1)
def test_mean_over_every_subset_with_classes_together_is_that_on_all_classes(num_sampled, x64):
    """Value and gradient. On subsets those are together that surely are there: the labels."""
    distinct = np.array([1, 4], np.int32)

    @jax.jit
    def estimate(indices, weights):
        return on_subset(lc.plates.ClassSubset(indices, weights, distinct, 9, "sample"))

    mean = reference.mean_over_subsets(estimate, LABELS, 9, num_sampled)
    np.testing.assert_allclose(mean, jax.jit(on_all_classes)(), rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_mean_over_draws_of_the_class_plate_is_the_value_on_all_classes_and_its_gradient(x64):
    @jax.jit
    @jax.vmap
    def estimates(rng_key):
        with handlers.seed(rng_seed=rng_key):
            classes = lc.class_plate("classes", 9, LABELS, num_sampled=3).classes
        return on_subset(classes)

    draws = np.asarray(estimates(jax.random.split(jax.random.key(0), 4000)), np.float64)
    error = draws.std(axis=0, ddof=1) / np.sqrt(len(draws))
    gap = np.abs(draws.mean(axis=0) - np.asarray(on_all_classes()))
    assert (gap <= STANDARD_ERRORS * error + 1e-4).all()


@pytest.mark.some_cases(1)
@makers
def test_each_observation_may_have_its_own_classes(make):
    """Its label comes first, and 49 other classes are represented by five, of weight 10 or 9."""

    @jax.jit
    def log_prob(labels):
        with handlers.seed(rng_seed=0):
            plate = lc.class_plate("classes", 50, labels, num_sampled=5, negatives="own")
        return make(UTILITIES, plate.classes).log_prob(labels)

    found = log_prob(np.array([4, 1, 4]))
    weights = np.array([1.0, 10, 10, 10, 10, 9])
    expected = {
        OneVsEach: lambda psi: reference.one_vs_each(psi, 0, weights),
        Bouchard: lambda psi: reference.bouchard_bound(psi, 0, 0.7, weights),
        NoiseContrastive: lambda psi: reference.noise_contrastive(psi, 0, 3 / 50, 0, weights),
    }[getattr(make, "func", make)]
    np.testing.assert_allclose(found, [expected(psi) for psi in UTILITIES], rtol=1e-5)


# Bounds, on random utilities of 2 to 200 classes: those beyond are not available.

MOST = 200
NESTED = [0, 1, 2, 5, 20, 100, MOST]  # how many of the best classes are together


@st.composite
def utilities_of_some(draw):
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = 10.0 ** draw(st.floats(-2, 4))
    psi = np.clip(random.normal(size=MOST) * scale, -1e4, 1e4)
    psi[draw(st.integers(2, MOST)) :] = -np.inf
    return psi


@jax.jit
def all_bounds(psi, alpha):
    """Exact log probabilities of all classes, and every bound on them."""
    values = jnp.arange(MOST)
    rank = jnp.argsort(jnp.argsort(-psi))
    return dict(
        exact=jax.nn.log_softmax(psi),
        one_vs_each=OneVsEach(psi).log_prob(values),
        nested=jnp.stack([OneVsEach(psi, together=rank < n).log_prob(values) for n in NESTED]),
        bouchard=Bouchard(psi, alpha=alpha).log_prob(values),
        best_bouchard=Bouchard(psi).log_prob(values),
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(psi=utilities_of_some(), alpha=st.floats(-1e4, 1e4))
def test_bounds_are_below_the_exact_value_and_in_their_order(psi, alpha):
    with jax.enable_x64(True):
        found = {name: np.asarray(bound) for name, bound in all_bounds(psi, alpha).items()}
    available = np.isfinite(psi)
    assert all((bound[..., ~available] == -np.inf).all() for bound in found.values())
    found = {name: bound[..., available] for name, bound in found.items()}
    exact, nested = found["exact"], found["nested"]
    slack = 1e-10 * (1 + np.abs(exact))
    for bound in found.values():
        assert np.isfinite(bound).all()
        assert (bound <= exact + slack).all()
    assert (nested[:-1] <= nested[1:] + 1e-10 * (1e-4 + np.abs(nested[:-1]))).all()
    np.testing.assert_allclose(nested[0], found["one_vs_each"], rtol=1e-10)
    np.testing.assert_allclose(nested[-1], exact, rtol=1e-9, atol=1e-10)
    assert (found["bouchard"] <= found["best_bouchard"] + slack).all()
    # At alpha = psi_y Bouchard's bound is one-vs-each less log 2, so the best is no worse.
    assert (found["best_bouchard"] >= found["one_vs_each"] - math.log(2) - slack).all()


@settings(max_examples=40)
@given(psi=utilities_of_some())
def test_bounds_in_float32_are_below_the_exact_value_up_to_rounding(psi):
    found = all_bounds(jnp.array(psi, jnp.float32), jnp.float32(1.0))
    available = np.isfinite(psi)
    exact = np.asarray(found["exact"], np.float64)[available]
    for bound in found.values():
        bound = np.asarray(bound)[..., available]
        assert np.isfinite(bound).all()
        assert (bound <= exact + 2e-6 * (1 + np.abs(exact))).all()


def log_prob_of(make, values):
    """In one program."""
    return jax.jit(lambda values: make().log_prob(values))(np.array(values))


def test_one_vs_each_is_exact_with_two_classes():
    psi = np.float32(rng.normal(size=(100, 2)) * 10.0 ** rng.uniform(-2, 4, (100, 1)))
    exact = log_softmax(np.float64(psi), axis=1)
    found = jax.jit(lambda psi: OneVsEach(psi).log_prob(jnp.arange(2)[:, None]).T)(psi)
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)


def test_each_observation_may_have_its_own_classes_together():
    psi = UTILITIES.astype(np.float64)
    found = log_prob_of(lambda: OneVsEach(UTILITIES, together=MARKS_OF_EACH), [0, 5, 2])
    kept = [np.flatnonzero(marks) for marks in MARKS_OF_EACH]
    expected = [
        reference.one_vs_each(p, y, None, k) for p, y, k in zip(psi, [0, 5, 2], kept, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_of_all_that_is_marked_on_a_subset_the_labels_are_kept_together():
    """The other classes are not surely there."""
    found = log_prob_of(lambda: OneVsEach(UTILITIES, SUBSET, together=True), [30, 7, 30])
    rows = zip(UTILITIES, [1, 0, 1], strict=True)
    expected = [reference.one_vs_each(psi, row, WEIGHTS, [0, 1]) for psi, row in rows]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_labels_alone_may_be_kept_together():
    """Where a draw, here that of class 2, has weight 1 by chance."""
    weights = WEIGHTS.copy()
    weights[3] = 1.0
    classes = replace(SUBSET, weights=jnp.array(weights))

    def make():
        return OneVsEach(UTILITIES, classes, together=classes.holds(classes.indices))

    found = log_prob_of(make, [30, 7, 30])
    expected = [
        reference.one_vs_each(psi, row, weights, [0, 1])
        for psi, row in zip(UTILITIES, [1, 0, 1], strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_bouchard_at_the_chosen_utility_is_one_vs_each_less_log_2():
    y = np.array([3, 0, 5])
    alpha = np.take_along_axis(UTILITIES, y[:, None], 1)[:, 0]
    found = log_prob_of(lambda: Bouchard(UTILITIES, alpha=alpha), y)
    expected = [
        reference.one_vs_each(psi, k) - math.log(2) for psi, k in zip(UTILITIES, y, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@jax.jit
def best_alpha(psi):
    return Bouchard(psi).best_alpha()


@pytest.mark.parametrize("num_categories", [3, 10, 300])
def test_best_alpha_solves_its_equation(num_categories, x64):
    """Also where one utility is far above all others."""
    random = np.random.default_rng(num_categories)
    scales = np.array([0.01, 1.0, 3.0, 10.0, 100.0, 1e4])[:, None]
    psi = random.normal(size=(40, 6, num_categories)) * scales
    psi[:20, :, 0] += random.normal(size=(20, 6)) * 50
    psi = np.clip(psi, -1e4, 1e4)
    alpha = np.asarray(best_alpha(psi))
    for n in (0, 39):
        expected = [reference.best_alpha(p) for p in psi[n, :5]]
        np.testing.assert_allclose(alpha[n, :5], expected, rtol=1e-10, atol=1e-10)
    total = expit(psi - alpha[..., None]).sum(axis=-1)
    np.testing.assert_allclose(total, 1, rtol=1e-9)


def test_best_alpha_of_two_classes_is_their_mean():
    """Exactly, at any distance."""
    psi = np.array([[1e4, -1e4], [3.0, 4.0], [0.0, 0.0], [-200.0, 700.0]])
    np.testing.assert_allclose(best_alpha(psi), psi.mean(axis=-1), rtol=1e-6)


def test_best_alpha_of_one_available_class_makes_the_bound_exact():
    psi = np.array([-np.inf, 3.0, -np.inf])
    assert np.isfinite(best_alpha(psi))
    np.testing.assert_allclose(log_prob_of(lambda: Bouchard(psi), 1), 0, atol=1e-7)


# Estimates of class probabilities from counts alone.

COUNTS = np.array([1, 2, 3, 5, 8, 40, 100, 1000])


def best_utilities(total, num_categories):
    """Maximise ``total`` of free utilities, in float64."""
    loss = jax.jit(jax.value_and_grad(lambda psi: -total(psi)))
    found = minimize(
        lambda psi: [np.asarray(part, np.float64) for part in loss(psi)],
        np.zeros(num_categories),
        jac=True,
        method="L-BFGS-B",
        options=dict(maxiter=5000, maxfun=10_000, ftol=1e-15, gtol=1e-9),
    )
    return found.x - found.x[0]


def test_one_vs_each_has_the_maximum_of_the_likelihood(x64):
    """Without covariates its best utilities are log N_k + c, as those of the likelihood."""
    counts = jnp.array(COUNTS / COUNTS.sum())

    def total(psi):
        return counts @ OneVsEach(psi).log_prob(jnp.arange(8))

    expected = np.log(COUNTS / COUNTS[0])
    np.testing.assert_allclose(best_utilities(total, 8), expected, atol=1e-4)


@pytest.mark.parametrize("third", [0.5, -np.inf])
def test_second_derivatives_of_bouchard_know_how_the_best_alpha_moves(x64, third):
    psi = np.array([0.3, -1.0, third, 2.0])

    @jax.jit
    def derivatives(psi):
        def log_prob(psi):
            return Bouchard(psi).log_prob(0)

        return jax.grad(log_prob)(psi), jax.hessian(log_prob)(psi)

    hessian = derivatives(psi)[1]
    for k in (0, 1, 3):
        step = 1e-4 * np.eye(4)[k]
        slope = (derivatives(psi + step)[0] - derivatives(psi - step)[0]) / 2e-4
        np.testing.assert_allclose(hessian[k], slope, atol=1e-7)


def test_bouchard_overestimates_large_probabilities(x64):
    """Of two classes, at the best alpha, by a factor of 2 in the log odds."""
    counts = jnp.array([0.2, 0.8])

    def total(psi):
        return counts @ Bouchard(psi).log_prob(jnp.arange(2))

    np.testing.assert_allclose(best_utilities(total, 2)[1], 2 * math.log(4), atol=1e-5)


def test_alpha_kept_for_each_row_of_the_data():
    """As the docstring of Bouchard says: each observation of a minibatch gets its own entry."""
    y, kept = np.array([4, 1, 4]), np.linspace(-1, 3, 20, dtype=np.float32)

    def model(rows):
        with lc.class_plate("classes", 50, y, num_sampled=3) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", 20, rows):
            alpha = numpyro.param("alpha", jnp.full(20, jnp.log(49)), event_dim=0)
            choice = Bouchard(jnp.ones((3, 1)) * w, classes, alpha=alpha)
            numpyro.sample("y", choice, obs=y)

    @jax.jit
    def run(rows):
        given = handlers.substitute(handlers.seed(model, 0), data={"alpha": kept})
        sites = handlers.trace(given).get_trace(rows)
        d = sites["y"]["fn"]
        return d.alpha, d.log_prob(y), sites["w"]["value"], d.classes.weights

    alpha, log_prob, w, weights = map(np.asarray, run(np.array([17, 2, 5])))
    np.testing.assert_array_equal(alpha, kept[[17, 2, 5]])
    rows = [1, 0, 1]  # of the sorted labels 1 and 4
    expected = [
        reference.bouchard_bound(w, row, float(kept[n]), weights)
        for row, n in zip(rows, [17, 2, 5], strict=True)
    ]
    np.testing.assert_allclose(log_prob, expected, rtol=1e-5)
