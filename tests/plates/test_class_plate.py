# SPDX-License-Identifier: Apache-2.0
"""Which classes a class plate draws, and what it refuses."""

from __future__ import annotations

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpyro import handlers
from scipy.stats import chisquare, norm

import numpyro_largecat as lc
from numpyro_largecat.plates.uniform_classes import DrawnClasses
from tests import reference
from tests.memory import temp_bytes

FALSE_ALARM = 1e-5  # how often a correct program fails a random check


def draw_classes(rng_key, num_categories, labels=None, num_sampled=None):
    with handlers.seed(rng_seed=rng_key):
        return lc.class_plate("classes", num_categories, labels, num_sampled).classes


def draw_once(*args):
    """As ``draw_classes``, in one program, which does not look at its labels."""
    return jax.jit(lambda: draw_classes(*args))()


@partial(jax.jit, static_argnums=(1, 3))
def draw_for_keys(keys, num_categories, labels, num_sampled):
    return jax.vmap(lambda key: draw_classes(key, num_categories, labels, num_sampled))(keys)


def draw_often(repeats, num_categories, labels, num_sampled):
    """Draw ``repeats`` subsets, under ``jit`` and ``vmap``, with traced labels."""
    keys = jax.random.split(jax.random.key(0), repeats)
    classes = draw_for_keys(keys, num_categories, labels, num_sampled)
    return np.asarray(classes.indices), np.asarray(classes.weights)


# K, labels, S
CORNERS = {
    "all labels equal": (20, [3, 3, 3, 3, 3], 4),
    "all labels distinct": (20, [5, 1, 9, 19, 0], 4),
    "some labels repeated": (20, [7, 2, 7, 2, 0], 4),
    "all others drawn": (8, [1, 6], 6),
    "fewer others than draws": (8, [1, 6], 7),
    "as many rows as classes": (7, [4, 0, 4], 4),
    "more rows than classes": (4, [0, 3, 3, 0, 0], 2),
    "every class is a label": (3, [0, 1, 2], 2),
    "two classes": (2, [1, 0], 1),
    "no labels": (12, None, 5),
    "ten million classes": (10**7, [0, 10**7 - 1, 5], 6),
}
corners = pytest.mark.parametrize(
    ("num_categories", "labels", "num_sampled"), CORNERS.values(), ids=CORNERS
)


@corners
@pytest.mark.some_cases(4)
def test_rows_and_weights(num_categories, labels, num_sampled):
    """Labels first with weight 1, padding with weight 0, then distinct others that stand for all.

    Holds for each of 40 subsets, so the sum of the weights is K in each of them.
    """
    given = None if labels is None else jnp.array(labels)
    indices, weights = draw_often(40, num_categories, given, num_sampled)
    present = sorted(set(labels or []))
    num_labels = min(len(labels or []), num_categories)
    num_others = num_categories - len(present)
    num_drawn = min(num_sampled, num_others)
    assert indices.shape == weights.shape == (40, num_labels + num_sampled)
    assert indices.dtype == np.int32
    assert weights.dtype == np.float32
    assert indices.min() >= 0
    assert indices.max() < num_categories
    live = [1.0] * len(present) + [0.0] * (num_labels - len(present))
    live += map(len, np.array_split(np.arange(num_others), num_sampled))
    np.testing.assert_allclose(weights, np.broadcast_to(live, weights.shape), rtol=1e-6)
    np.testing.assert_allclose(weights.sum(axis=1), num_categories, rtol=1e-6)
    for row in indices:
        assert row[: len(present)].tolist() == present
        drawn = row[num_labels : num_labels + num_drawn].tolist()
        assert len(set(drawn)) == num_drawn
        assert not set(drawn) & set(present)


def test_subset_says_what_it_is():
    classes = draw_once(0, 20, np.array([[7, 2], [7, 9]]), 3)
    assert classes.kind == "sample"
    assert classes.num_categories == 20
    assert classes.labels.tolist() == [2, 7, 9, 20]
    assert classes.indices.tolist()[:4] == [2, 7, 9, 19]  # padding repeats the last class
    assert jax.eval_shape(lambda: draw_classes(0, 20, None, 3)).labels.shape == (0,)


@pytest.mark.parametrize("labels", [None, np.array([3, 3])])
def test_without_num_sampled_all_classes_are_there_in_order(labels):
    classes = lc.class_plate("classes", 5, labels).classes
    assert classes.kind == "full"
    assert classes.indices.tolist() == [0, 1, 2, 3, 4]
    assert classes.weights.tolist() == [1.0] * 5
    assert classes.labels is None


@pytest.mark.parametrize(
    ("dtype", "num_categories"),
    [(np.uint8, 256), (np.int8, 300), (np.uint16, 2**16), (np.int64, 300)],
)
def test_labels_of_any_integer_type(dtype, num_categories):
    """Also of one that cannot hold K, the value that pads the labels."""
    classes = draw_once(1, num_categories, np.array([100, 7, 7], dtype), 4)
    assert classes.labels.tolist() == [7, 100, num_categories]
    assert classes.weights.tolist() == [
        1,
        1,
        0,
        *map(len, np.array_split(np.arange(num_categories - 2), 4)),
    ]
    assert num_categories > classes.indices.max() >= 0


@pytest.mark.slow
def test_float64(x64):
    classes = draw_classes(0, 10, np.array([1, 1]), 7)
    assert classes.weights.dtype == jnp.float64
    assert classes.weights[2:].tolist() == [2, 2, 1, 1, 1, 1, 1]


UNBIASED = {
    "few of many": (60, [5, 1, 5], 3),
    "intervals of two lengths": (9, [5, 1, 5], 4),
    "without labels": (60, None, 3),
}


def values_of_classes(num_categories):
    return np.random.default_rng(0).normal(size=num_categories) * 3 + 1


@pytest.mark.parametrize(
    ("num_categories", "labels", "num_sampled"), UNBIASED.values(), ids=UNBIASED
)
def test_weighted_sums_are_unbiased(num_categories, labels, num_sampled):
    """The mean of 20_000 weighted sums is the sum over all classes, within its standard error.

    Their variance is at most that of draws with replacement, but for the intervals' lengths.
    """
    repeats = 20_000
    given = None if labels is None else np.array(labels)
    indices, weights = draw_often(repeats, num_categories, given, num_sampled)
    f = values_of_classes(num_categories)
    others = f[reference.others_of(labels or [], num_categories)]
    n = len(others)
    variance = (n**2 / num_sampled + num_sampled / 4) * others.var()
    tolerance = norm.isf(FALSE_ALARM / 2) * math.sqrt(variance / repeats)
    estimates = (weights * f[indices]).sum(axis=1)
    assert abs(estimates.mean() - f.sum()) < tolerance
    assert tolerance < abs(f.sum()) / 10
    assert estimates.var() < variance


@pytest.mark.parametrize(
    ("num_categories", "labels", "num_sampled"),
    [(7, [1, 1, 4], 2), (6, [0, 5], 3), (5, [2, 2], 4), (6, [], 2)],
)
def test_weighted_sums_are_unbiased_exactly(num_categories, labels, num_sampled):
    """Every subset of the other classes is forced in turn; the mean of their sums is the sum."""
    f = values_of_classes(num_categories)
    given = np.array(labels, np.int32) if labels else None
    subsets = itertools.combinations(reference.others_of(labels, num_categories), num_sampled)

    weight = (num_categories - len(set(labels))) / num_sampled

    @jax.vmap
    def weigh(others):
        def make():
            return lc.class_plate("classes", num_categories, given, num_sampled).classes

        drawn = DrawnClasses(others, jnp.full(num_sampled, weight))
        return handlers.substitute(make, data={"classes_rows": drawn})()

    classes = jax.device_get(jax.jit(weigh)(np.array(list(subsets), np.int32)))
    estimates = (classes.weights * f[classes.indices]).sum(axis=1)
    np.testing.assert_allclose(estimates.mean(), f.sum(), rtol=1e-5)
    by_reference = reference.mean_over_subsets(
        lambda indices, weights: weights @ f[indices], labels, num_categories, num_sampled
    )
    np.testing.assert_allclose(by_reference, f.sum(), rtol=1e-12)


def test_each_of_the_others_is_equally_likely_and_any_two_may_come_together():
    labels, num_categories, num_sampled = [1, 1, 4], 8, 3
    indices, _ = draw_often(20_000, num_categories, np.array(labels), num_sampled)
    drawn = indices[:, 3:]
    others = reference.others_of(labels, num_categories)
    counts = np.bincount(drawn.ravel(), minlength=num_categories)[others]
    assert chisquare(counts).pvalue > FALSE_ALARM
    together = {pair for row in drawn.tolist() for pair in itertools.combinations(sorted(row), 2)}
    assert together == set(itertools.combinations(others, 2))


def test_traced_labels_and_scan():
    """Labels may be traced, and each step of a scan draws a subset of its own."""

    @jax.jit
    def steps(labels):
        def step(key, labels):
            key, draw_key = jax.random.split(key)
            classes = draw_classes(draw_key, 1000, labels, 5)
            return key, (classes.indices, classes.weights)

        return lax.scan(step, jax.random.key(0), labels)[1]

    indices, weights = map(np.asarray, steps(np.array([[3, 3], [3, 3], [8, 5]])))
    assert indices[:, :2].tolist() == [[3, 999], [3, 999], [5, 8]]
    np.testing.assert_allclose(weights[:, 0], 1)
    np.testing.assert_allclose(weights[:, 1], [0, 0, 1])
    assert weights[:, 2:].tolist() == [[200] * 4 + [199]] * 2 + [[200] * 3 + [199] * 2]
    assert set(indices[0, 2:].tolist()) != set(indices[1, 2:].tolist())


def test_bad_labels_under_jit_are_no_classes():
    """They cannot be refused there, so they are left out, and the weights still sum to K."""
    classes = jax.jit(lambda y: draw_classes(0, 10, y, 3))(jnp.array([-1, 4, 10]))
    assert classes.labels.tolist() == [4, 10, 10]
    np.testing.assert_allclose(classes.weights, [1, 0, 0, 3, 3, 3])


def test_scratch_memory_does_not_grow_with_the_classes():
    labels, key = np.arange(50), jax.random.key(0)

    def memory(num_categories):
        return temp_bytes(lambda key: draw_classes(key, num_categories, labels, 100), key)

    assert memory(10**7) <= memory(10**4) < 20_000  # fewer draws repeat among more classes


ERRORS = {
    "label too large": (
        dict(num_categories=10, labels=np.array([3, 10, 11]), num_sampled=2),
        ValueError,
        r"`labels` of plate 'classes' must be classes, integers in \[0, 10\); got 10 at "
        r"position 1, and 2 of 3 are not",
    ),
    "negative label": (
        dict(num_categories=10, labels=np.array([[3, 2], [-1, 4]]), num_sampled=2),
        ValueError,
        r"`labels` of plate 'classes'.*got -1 at position \(1, 0\), and 1 of 4",
    ),
    "bad label of a full plate": (
        dict(num_categories=10, labels=np.array([3, 10])),
        ValueError,
        "`labels` of plate 'classes'.*got 10 at position 1",
    ),
    "labels are floats": (
        dict(num_categories=10, labels=np.array([3.0]), num_sampled=2),
        TypeError,
        r"`labels` must be integers; got dtype float\d+\..*astype\(int\)",
    ),
    "labels are truth values": (
        dict(num_categories=10, labels=np.array([True]), num_sampled=2),
        TypeError,
        "`labels` must be integers; got dtype bool",
    ),
    "one class": (
        dict(num_categories=1),
        ValueError,
        "`num_categories` must be at least 2; got 1",
    ),
    "classes are a float": (
        dict(num_categories=10.0),
        TypeError,
        r"`num_categories` must be a Python int, .*; got 10\.0, of type float",
    ),
    "classes are an array": (
        dict(num_categories=jnp.array(10)),
        TypeError,
        "`num_categories` must be a Python int, since it fixes array shapes",
    ),
    "classes are True": (
        dict(num_categories=True),
        TypeError,
        "`num_categories` must be a Python int.*got True, of type bool",
    ),
    "no draws": (
        dict(num_categories=10, num_sampled=0),
        ValueError,
        "`num_sampled` must be at least 1; got 0",
    ),
    "draws are a float": (
        dict(num_categories=10, num_sampled=2.5),
        TypeError,
        r"`num_sampled` must be a Python int, .*; got 2\.5, of type float",
    ),
    "more draws than classes without labels": (
        dict(num_categories=10, num_sampled=11),
        ValueError,
        "`num_sampled` must be at most 10, the number of classes; leave it out.*got 11",
    ),
    "as many draws as classes with labels": (
        dict(num_categories=10, labels=np.array([3]), num_sampled=10),
        ValueError,
        "`num_sampled` must be at most 9, the number of classes besides a label; leave it",
    ),
}


@pytest.mark.parametrize(("kwargs", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_bad_arguments_are_refused(kwargs, error, message):
    with handlers.seed(rng_seed=0), pytest.raises(error, match=message):
        lc.class_plate("classes", **kwargs)


def test_traced_counts_are_refused():
    with pytest.raises(TypeError, match="`num_sampled` must be a Python int, since it fixes"):
        jax.jit(lambda s: draw_classes(0, 10, None, s).weights)(3)


def test_drawing_without_a_key_is_refused():
    with pytest.raises(ValueError, match="plate 'classes' draws classes and needs a random key"):
        lc.class_plate("classes", 10, num_sampled=2)


def test_numpy_integers_are_counts():
    classes = draw_once(0, np.int64(10), np.array([1]), np.int32(3))
    assert classes.num_categories == 10
    np.testing.assert_allclose(classes.weights, [1, 3, 3, 3])
