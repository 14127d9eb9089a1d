# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints
from scipy.stats import chisquare

import numpyro_largecat as lc
from numpyro_largecat.choices.error_families import FAMILIES
from tests import reference
from tests.choices.subsets import CHUNK, INDICES, SUBSET, WEIGHTS
from tests.memory import temp_bytes

FALSE_ALARM = 1e-5  # how often a correct program fails a random check
rng = np.random.default_rng(0)

UTILITIES = rng.normal(size=(3, 6)).astype(np.float32) * 2
U = np.array([3.0, 4.5, 2.5], np.float32)
SUBSET_VALUES = np.array([30, 7, 30])


class Case(NamedTuple):
    """A distribution with batch shape (3,) as a function of utilities (3, 6) and u (3,)."""

    make: Callable
    values: np.ndarray  # (3,)
    reference: Callable  # (utilities (6,), u, value) -> log probability


def subset_log_prob(utilities, u, value):
    return 1 - u - math.exp(-u) * reference.weighted_eta(utilities, INDICES, WEIGHTS, value)


def stateless_log_prob(utilities, u, value):
    del u
    return -math.log(reference.weighted_eta(utilities, INDICES, WEIGHTS, value))


CASES = {
    "exact": Case(
        lambda utilities, u: lc.UtilityCategorical(utilities),
        np.array([0, 5, 2]),
        lambda utilities, u, value: reference.softmax_log_prob(utilities, value),
    ),
    "subset": Case(
        lambda utilities, u: lc.UtilityCategorical(utilities, SUBSET, u=u),
        SUBSET_VALUES,
        subset_log_prob,
    ),
    "stateless": Case(
        lambda utilities, u: lc.UtilityCategorical(utilities, SUBSET),
        SUBSET_VALUES,
        stateless_log_prob,
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def expected_log_prob(case, values=None):
    values = case.values if values is None else np.broadcast_to(values, (3,))
    return np.array([case.reference(*row) for row in zip(UTILITIES, U, values, strict=True)])


@cases
@pytest.mark.parametrize("transform", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
@pytest.mark.some_cases(3)
def test_masked_observations_count_nothing(case, transform):
    """NumPyro hands the distribution a feasible value in place of what is masked."""
    mask, expected = np.array([True, False, True]), expected_log_prob(case)

    def log_prob(utilities, values):
        return case.make(utilities, U).mask(mask).log_prob(values)

    masked = transform(log_prob)(jnp.array(UTILITIES), jnp.array(case.values))
    np.testing.assert_allclose(masked, [expected[0], 0, expected[2]], rtol=1e-5)
    gradient = transform(jax.grad(lambda x, v: log_prob(x, v).sum()))
    in_utilities = gradient(jnp.array(UTILITIES), jnp.array(case.values))
    np.testing.assert_array_equal(in_utilities[1], 0)
    assert (in_utilities[0] != 0).any()


def test_shapes_are_inferred():
    infer_shapes = lc.UtilityCategorical.infer_shapes
    assert infer_shapes((3, 6)) == ((3,), ())
    assert infer_shapes(utilities=(2, 1, 6), u=(3,)) == ((2, 3), ())


@pytest.mark.parametrize("u_shape", [(), (3,), (2, 3), (2, 1)])
def test_u_broadcasts_with_the_utilities(u_shape):
    shape = np.broadcast_shapes(u_shape, (3,))

    @jax.jit
    def log_prob(u):
        d = lc.UtilityCategorical(UTILITIES, SUBSET, u=u)
        assert d.batch_shape == shape
        return d.log_prob(SUBSET_VALUES)

    rows = [subset_log_prob(x, 3.0, v) for x, v in zip(UTILITIES, SUBSET_VALUES, strict=True)]
    expected = np.broadcast_to(rows, shape)
    np.testing.assert_allclose(log_prob(np.full(u_shape, 3.0)), expected, rtol=1e-5)


def test_exact_log_prob_is_that_of_numpyro():
    utilities = rng.normal(size=(5, 40)).astype(np.float32)
    values = rng.integers(40, size=5)

    @jax.jit
    def log_probs(utilities):
        each = (None, lc.class_plate("classes", 40).classes)
        found = [lc.UtilityCategorical(utilities, of).log_prob(values) for of in each]
        return dist.CategoricalLogits(utilities).log_prob(values), found

    expected, found = log_probs(utilities)
    for log_prob in found:
        np.testing.assert_allclose(log_prob, expected, rtol=1e-6, atol=1e-6)


def test_whole_numbers_are_taken_as_utilities():
    d = lc.UtilityCategorical(np.array([0, 1, 2]))
    assert jnp.issubdtype(d.utilities.dtype, jnp.floating)
    np.testing.assert_allclose(d.log_prob(1), reference.softmax_log_prob([0, 1, 2], 1), rtol=1e-6)


@pytest.mark.parametrize(("dtype", "num_categories"), [(np.uint8, 256), (np.int8, 300)])
def test_values_of_a_type_that_cannot_hold_the_number_of_classes(dtype, num_categories):
    d = lc.UtilityCategorical(jnp.zeros(num_categories))
    value = np.array([100], dtype)
    np.testing.assert_allclose(d.log_prob(value), -math.log(num_categories), rtol=1e-5)


# The bound.


def test_bound_with_all_classes_is_below_the_exact_value_and_meets_it():
    """On all classes with weight 1 it is the bound itself, and equal at u = log eta*."""
    utilities = rng.normal(size=(4, 6)).astype(np.float32) * 3
    values = np.array([0, 5, 2, 2])
    exact = reference.softmax_log_probs(utilities, values)

    @jax.jit
    def bound_and_best(u):
        ids = jnp.arange(6)
        classes = lc.plates.ClassSubset(ids, jnp.ones(6), ids, 6, "sample")
        best = lc.UtilityCategorical(utilities, classes).optimal_u(values)
        bounds = (lc.UtilityCategorical(utilities, classes, u=at) for at in (u, best))
        return *(d.log_prob(values) for d in bounds), best

    bound, at_best, best = map(np.asarray, bound_and_best(np.linspace(-3, 15, 30)[:, None]))
    assert bound.shape == (30, 4)
    assert (bound <= exact + 1e-5).all()
    assert (bound < exact - 0.1).any()
    np.testing.assert_allclose(best, -exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(at_best, exact, rtol=1e-5, atol=1e-5)


def over_all_subsets(fn, labels, num_categories, num_sampled):
    """Mean of ``fn(classes, rows)`` over every subset that the plate may draw."""

    def estimate(indices, weights):
        distinct = jnp.array(sorted(set(labels)), jnp.int32)
        rows, weights = jnp.array(indices, jnp.int32), jnp.array(weights)
        classes = lc.plates.ClassSubset(rows, weights, distinct, num_categories, "sample")
        return np.asarray(fn(classes, rows), np.float64)

    return reference.mean_over_subsets(estimate, labels, num_categories, num_sampled)


def test_stateless_form_is_biased_upwards(x64):
    """Its mean over all subsets lies above the exact value, more so with fewer classes."""
    table = jnp.array(np.random.default_rng(1).normal(size=6) * 2)

    @jax.jit
    def log_prob(classes, rows):
        return lc.UtilityCategorical(table[rows], classes).log_prob(1)

    means = [over_all_subsets(log_prob, [1], 6, s) for s in (1, 2, 3, 5)]
    exact = reference.softmax_log_prob(table, 1)
    assert means[0] > means[1] + 0.01 > means[2] + 0.02 > exact + 0.03
    np.testing.assert_allclose(means[3], exact, rtol=1e-12)  # all classes: no bias


def test_optimal_u_of_all_classes_and_of_a_subset():
    values = CASES["exact"].values
    best = jax.jit(lambda psi: lc.UtilityCategorical(psi).optimal_u(values))(UTILITIES)
    np.testing.assert_allclose(best, -expected_log_prob(CASES["exact"]), rtol=1e-5)
    best = jax.jit(lambda psi: lc.UtilityCategorical(psi, SUBSET, u=U).optimal_u(SUBSET_VALUES))(
        UTILITIES
    )
    np.testing.assert_allclose(best, -expected_log_prob(CASES["stateless"]), rtol=1e-5)


# Extremes.


@pytest.mark.parametrize("name", CASES)
def test_huge_utilities_give_finite_values_and_gradients(name):
    """Utilities in [-1e4, 1e4], at the u that suits them."""
    utilities = jnp.array(
        [[1e4, -1e4, 0.0, 1e4, 1e4, -1e4], [-1e4, 1e4, 1e4, -1e4, 0.0, 0.0], [-1e4] + [1e4] * 5]
    )
    values = CASES[name].values

    @jax.jit
    def value_and_gradient(utilities):
        best = CASES["stateless"].make(utilities, None).optimal_u(SUBSET_VALUES)

        def total(utilities):
            log_prob = CASES[name].make(utilities, best).log_prob(values)
            return log_prob.sum(), log_prob

        return jax.value_and_grad(total, has_aux=True)(utilities)

    (_, log_prob), gradient = value_and_gradient(utilities)
    assert jnp.isfinite(log_prob).all()
    assert jnp.isfinite(gradient).all()
    if name == "exact":
        expected = [-math.log(3), -1e4 - math.log(2), -math.log(5)]
    else:
        expected = [-2e4 - math.log(33), -2e4, -math.log(49)]
    np.testing.assert_allclose(log_prob, expected, rtol=1e-6, atol=1e-3)  # float32 near 1e4


NO_LABELS = replace(SUBSET, labels=np.zeros(0, np.int32))
BAD_ARGUMENTS = {
    "no classes": (dict(utilities=jnp.zeros(())), ValueError, r"K at least 2.*got shape \(\)"),
    "a subset without labels": (
        dict(utilities=jnp.zeros(6), classes=NO_LABELS),
        ValueError,
        "`classes` holds no labels.*labels=y",
    ),
    "u with all classes": (
        dict(utilities=jnp.zeros(6), u=1.0),
        ValueError,
        "`u` belongs to the bound on a subset of classes",
    ),
    "u with a chunk": (
        dict(utilities=jnp.zeros(6), classes=CHUNK, u=1.0),
        ValueError,
        "`u` belongs to the bound on a subset of classes",
    ),
    "unknown noise": (
        dict(utilities=jnp.zeros(6), noise="cauchy"),
        ValueError,
        "`noise` must be one of .*gumbel.*; got 'cauchy'",
    ),
}


@pytest.mark.parametrize(("kwargs", "error", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_are_refused(kwargs, error, message):
    with pytest.raises(error, match=message):
        lc.UtilityCategorical(**kwargs)


def test_validation_refuses_utilities_that_are_not_numbers():
    with pytest.raises(ValueError, match="utilities"):
        lc.UtilityCategorical(jnp.array([0.0, jnp.nan]), validate_args=True)


# All classes: draws, enumeration, entropy.


def test_draws_have_the_exact_frequencies_and_shapes():
    utilities = UTILITIES[:2, :4]

    @jax.jit
    def sample(key):
        d = lc.UtilityCategorical(utilities)
        return (
            d.sample(key, (200, 100)),
            lc.UtilityCategorical(utilities[0]).sample(key),
            d.expand((5, 2)).sample(key, (3,)),
        )

    draws, one, expanded = sample(jax.random.key(0))
    assert draws.shape == (200, 100, 2)
    assert jnp.issubdtype(draws.dtype, jnp.integer)
    for row in range(2):
        counts = np.bincount(np.asarray(draws[..., row]).ravel(), minlength=4)
        probs = np.exp([reference.softmax_log_prob(utilities[row], k) for k in range(4)])
        assert chisquare(counts, 20_000 * probs / probs.sum()).pvalue > FALSE_ALARM
    assert one.shape == ()
    assert expanded.shape == (3, 5, 2)
    assert len(np.unique(expanded)) > 1


def test_scratch_memory_of_draws_is_bounded():
    """10**9 noise variables, 4 GB at once, need less than a tenth of that."""

    def draw(key, utilities):
        return lc.UtilityCategorical(utilities).sample(key, (100,))

    utilities = jax.ShapeDtypeStruct((100, 10**5), jnp.float32)
    assert temp_bytes(draw, jax.random.key(0), utilities) < 400e6


def test_enumerate_support_lists_all_classes():
    d = lc.UtilityCategorical(UTILITIES)
    assert d.has_enumerate_support
    assert jax.eval_shape(lambda: d.enumerate_support(expand=False)).shape == (6, 1)

    @jax.jit
    def support():
        found = d.enumerate_support()
        return found, d.log_prob(found)

    values, log_probs = map(np.asarray, support())
    assert values.shape == (6, 3)
    np.testing.assert_array_equal(values[:, 1], np.arange(6))
    np.testing.assert_allclose(np.exp(log_probs).sum(axis=0), 1, rtol=1e-5)


def test_entropy_is_that_of_the_probabilities():
    log_probs = np.array([[reference.softmax_log_prob(x, k) for k in range(6)] for x in UTILITIES])
    expected = -(np.exp(log_probs) * log_probs).sum(axis=1)

    @jax.jit
    def entropy_and_slopes(utilities):
        entropy, pull_back = jax.vjp(lambda psi: lc.UtilityCategorical(psi).entropy(), utilities)
        return entropy, pull_back(jnp.ones(3))[0]

    np.testing.assert_allclose(entropy_and_slopes(UTILITIES)[0], expected, rtol=1e-5)
    extreme = np.array([[0, -np.inf, 0, *[-np.inf] * 3], [1e4, -1e4, 1e4, *[-1e4] * 3], [0] * 6])
    entropy, slopes = entropy_and_slopes(np.float32(extreme))
    np.testing.assert_allclose(entropy, np.log([2, 2, 6]), rtol=1e-5)
    assert np.isfinite(slopes).all()


@pytest.mark.parametrize("name", CASES)
def test_support_is_the_classes(name):
    support = CASES[name].make(UTILITIES, U).support
    assert (support.lower_bound, support.upper_bound) == (0, 5 if name == "exact" else 49)
    assert lc.UtilityCategorical.support.is_discrete
    assert isinstance(support, type(constraints.integer_interval(0, 5)))


@pytest.mark.parametrize("classes", [SUBSET, CHUNK], ids=["subset", "chunk"])
def test_what_needs_all_classes_is_refused_without_them(classes):
    d = lc.UtilityCategorical(UTILITIES, classes)
    with pytest.raises(NotImplementedError, match="sample needs all classes"):
        d.sample(jax.random.key(0))
    with pytest.raises(NotImplementedError, match="enumerate_support needs all classes"):
        d.enumerate_support()
    with pytest.raises(NotImplementedError, match="entropy needs all classes"):
        d.entropy()


@pytest.mark.parametrize("noise", sorted(FAMILIES))
@pytest.mark.some_cases(1)
def test_copies_keep_their_errors(noise):
    d = lc.UtilityCategorical(jnp.array([0.0, 1.0, -2.0]), noise=noise)
    for copied in (copy.deepcopy(d), pickle.loads(pickle.dumps(d))):
        assert copied.noise is d.noise
        np.testing.assert_array_equal(copied.log_prob(jnp.arange(3)), d.log_prob(jnp.arange(3)))


@pytest.mark.parametrize("first", [True, False])
def test_numpy_labels_in_a_compiled_program_work_in_and_out_of_64_bits(first):
    """JAX keeps what it traced of a compiled function inside another one, by NumPy's own type."""
    labels = np.array([2, 0, 1])  # int64

    def log_prob_and_u():
        choice = lc.UtilityCategorical(jnp.zeros((3, 4)))
        return choice.log_prob(labels), choice.optimal_u(labels)

    for enabled in (first, not first):
        with jax.enable_x64(enabled):
            log_prob, u = jax.jit(log_prob_and_u)()
        np.testing.assert_allclose(log_prob, -np.log(4), rtol=1e-5)
        np.testing.assert_allclose(u, np.log(4), rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_utilities_that_are_no_numbers_are_named_where_they_are(bad):
    utilities = np.zeros((2, 3), np.float32)
    utilities[1, 2] = bad
    with pytest.raises(ValueError, match=rf"utilities must be numbers.*got {bad} at .*\(1, 2\)"):
        lc.UtilityCategorical(utilities, validate_args=True)
