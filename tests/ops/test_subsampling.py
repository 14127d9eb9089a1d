# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, norm

from numpyro_largecat.ops import subsampling
from numpyro_largecat.ops.subsampling import (
    class_at_rank,
    draw_by_mass,
    draw_from_intervals,
    draw_integers,
    draw_without_replacement,
    is_among,
    place_among,
    skip_labels,
    sorted_distinct,
)
from tests.memory import temp_bytes
from tests.reference import others_of

FALSE_ALARM = 1e-5  # how often a correct program fails a random check


@partial(jax.jit, static_argnums=(1, 2, 3))
def draw_often(rng_key, population, num_draws, repeats=20_000):
    keys = jax.random.split(rng_key, repeats)
    return jax.vmap(lambda key: draw_without_replacement(key, population, num_draws))(keys)


# By rejection, and by a permutation.
@pytest.mark.parametrize(("population", "num_draws"), [(9, 3), (6, 3)])
def test_every_subset_is_equally_likely(population, num_draws):
    draws = np.asarray(draw_often(jax.random.key(0), population, num_draws))
    subsets = {c: 0 for c in itertools.combinations(range(population), num_draws)}
    for draw in np.sort(draws, axis=1).tolist():
        subsets[tuple(draw)] += 1  # a KeyError is a draw that is repeated or out of range
    assert chisquare(list(subsets.values())).pvalue > FALSE_ALARM


@pytest.mark.parametrize("population", [20, 50, 60, 2**31 - 1])
def test_draws_are_distinct_and_in_range(population):
    draws = np.asarray(draw_often(jax.random.key(6), population, 20, 100))
    assert draws.dtype == np.int32
    assert all(len(set(row)) == 20 for row in draws.tolist())
    assert draws.min() >= 0
    assert draws.max() < population


def test_draws_reach_the_last_member_of_a_huge_population():
    """With 10**7 members the mean rank is known to 6 digits, and so is its largest."""
    draws = np.asarray(draw_without_replacement(jax.random.key(0), 10**7, 5000), float)
    spread = 10**7 / np.sqrt(12 * 5000)
    assert abs(draws.mean() - 10**7 / 2) < 4.5 * spread  # fails 7 times in 10**6
    assert draws.max() > 10**7 * (1 - 12 / 5000)  # fails with probability exp(-12)


@pytest.mark.smoke
def test_cost_of_drawing_does_not_depend_on_the_population():
    """From 10**7 members it takes no more memory, and as many operations as from 10**4."""
    key = jax.random.key(0)
    small, large = (
        partial(draw_without_replacement, population=10**e, num_draws=100) for e in (4, 7)
    )
    assert temp_bytes(large, key) <= temp_bytes(small, key) < 10_000
    flops = [jax.jit(f).lower(key).compile().cost_analysis()["flops"] for f in (small, large)]
    assert flops[1] < 1.1 * flops[0]


def test_too_few_distinct_draws_are_drawn_again(monkeypatch):
    """With no spare draws most sequences of 20 from 60 members hold a repeat: four in five do."""
    monkeypatch.setattr(subsampling, "_length_with_enough_distinct", lambda n, population: n)
    draws = np.asarray(draw_often.__wrapped__(jax.random.key(2), 60, 20, 200))
    assert all(len(set(row)) == 20 for row in draws.tolist())


@partial(jax.jit, static_argnums=(2, 3))
def draw_intervals(rng_key, population, num_draws, repeats):
    """Draws and weights; the population may be traced."""
    keys = jax.random.split(rng_key, repeats)
    return jax.vmap(lambda key: draw_from_intervals(key, population, num_draws))(keys)


@pytest.mark.parametrize("population", [0, 1, 3, 4, 5, 11, 2**31 - 1])
def test_intervals_make_up_the_population(population):
    """A smaller population comes whole, with weight 1, and then draws of weight 0."""
    drawn, weights = map(np.asarray, draw_intervals(jax.random.key(7), population, 4, 100))
    assert drawn.dtype == weights.dtype == np.int32
    assert (weights.sum(axis=1, dtype=np.int64) == population).all()
    assert weights.max() - weights.min() <= 1
    live = weights[0] > 0
    assert live.sum() == min(population, 4)
    assert live[: live.sum()].all()
    assert all(len(set(row)) == live.sum() for row in drawn[:, live].tolist())
    assert ((drawn[:, live] >= 0) & (drawn[:, live] < population)).all()


@pytest.mark.parametrize(("population", "num_draws"), [(7, 3), (12, 4), (5, 1)])
def test_weights_of_intervals_have_mean_one_for_each_member(population, num_draws):
    """Checks 24 means of 20_000 draws by their standard errors."""
    drawn, weights = map(
        np.asarray, draw_intervals(jax.random.key(8), population, num_draws, 20_000)
    )
    totals = np.zeros((20_000, population))
    np.put_along_axis(totals, drawn, weights, axis=1)
    error = totals.std(axis=0) / np.sqrt(20_000)
    assert (abs(totals.mean(axis=0) - 1) < norm.isf(FALSE_ALARM / 2 / 24) * error).all()


def test_any_two_members_may_be_drawn_together():
    """Neighbours too, though seldom: the rarest pair is expected 800 times in 20_000 draws."""
    drawn, _ = draw_intervals(jax.random.key(9), 9, 3, 20_000)
    pairs = {p for row in np.sort(drawn).tolist() for p in itertools.combinations(row, 2)}
    assert pairs == set(itertools.combinations(range(9), 2))


def test_variance_of_intervals_over_orders_is_that_of_draws_without_replacement():
    """And less where neighbours are alike; within 5 %, five standard errors of 20_000 draws."""
    drawn, weights = map(np.asarray, draw_intervals(jax.random.key(10), 12, 4, 20_000))
    f = np.random.default_rng(0).normal(size=12)
    exact = 12**2 / 4 * (1 - 4 / 12) * f.var(ddof=1)
    shuffled = np.random.default_rng(1).permuted(np.tile(f, (20_000, 1)), axis=1)
    sums = (weights * np.take_along_axis(shuffled, drawn, axis=1)).sum(axis=1)
    np.testing.assert_allclose(sums.var(), exact, rtol=0.05)
    assert (weights * np.sort(f)[drawn]).sum(axis=1).var() < 0.75 * exact


@given(
    labels=st.sets(st.integers(0, 29), max_size=8),
    num_categories=st.integers(2, 30),
)
@pytest.mark.slow
def test_skip_labels_lists_the_classes_that_are_not_labels(labels, num_categories):
    labels = sorted(k for k in labels if k < num_categories)
    padded = jnp.array(labels + [num_categories] * (8 - len(labels)), jnp.int32)
    expected = others_of(labels, num_categories)
    classes = skip_labels(jnp.arange(30, dtype=jnp.int32), padded, num_categories)
    assert classes.dtype == jnp.int32
    assert classes[: len(expected)].tolist() == expected


def test_skip_labels_without_labels_changes_nothing():
    ranks = jnp.array([3, 0, 9], jnp.int32)
    assert skip_labels(ranks, jnp.zeros(0, jnp.int32), 10).tolist() == [3, 0, 9]


@given(classes=st.lists(st.integers(-3, 12), min_size=5, max_size=5))
def test_sorted_distinct_classes_are_padded(classes):
    """Those that are no classes are left out."""
    expected = sorted({k for k in classes if 0 <= k < 9})
    assert sorted_distinct(jnp.array(classes), 9).tolist() == expected + [9] * (5 - len(expected))


@given(
    labels=st.sets(st.integers(0, 40), max_size=23),
    values=st.lists(st.integers(-1, 42), min_size=4, max_size=4),
)
def test_place_among_is_that_of_a_search(labels, values):
    labels = np.array([*sorted(labels), *[41] * (23 - len(labels))], np.int32)
    found = place_among(jnp.array(values), jnp.asarray(labels))
    assert found.tolist() == np.searchsorted(labels, values).tolist()


@pytest.mark.parametrize("num_labels", [0, 1, 31, 32, 33, 1023, 1025, 33_000])
def test_place_among_is_that_of_a_search_at_each_depth(num_labels):
    labels = np.arange(num_labels, dtype=np.int32) * 3
    values = np.concatenate([labels - 1, labels, labels[-1:] + 1])
    found = jax.jit(place_among)(values, labels)
    np.testing.assert_array_equal(found, np.searchsorted(labels, values))


def test_place_among_keeps_few_comparisons():
    """At most 32 for each value, where a table of all would have 33,000."""
    labels, values = jnp.arange(33_000), jnp.arange(1_000)
    assert temp_bytes(place_among, values, labels) < 4 * 1_000 * 40


def test_is_among():
    labels = jnp.array([2, 5, 9, 9], jnp.int32)
    assert is_among(jnp.array([0, 2, 4, 5, 8]), labels).tolist() == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert is_among(jnp.array([0, 2]), labels[:0]).tolist() == [False, False]


@given(
    masses=st.lists(st.integers(1, 5), min_size=7, max_size=7),
    labels=st.sets(st.integers(0, 6), max_size=7),
)
@pytest.mark.slow
def test_each_class_owns_as_many_ranks_as_its_mass(masses, labels):
    """Labels own none. So integers that are equally likely draw classes by their mass, exactly."""
    padded = jnp.array(sorted(labels) + [7] * (7 - len(labels)), jnp.int32)
    expected = [0 if k in labels else mass for k, mass in enumerate(masses)]
    ends = jnp.cumsum(jnp.array(masses, jnp.int32))
    classes = class_at_rank(jnp.arange(35, dtype=jnp.int32), ends, padded)[: sum(expected)]
    assert np.bincount(classes, minlength=7).tolist() == expected


@pytest.mark.parametrize("size", [1, 7, 10**7 + 3, 2**31 - 1])
def test_integers_are_a_fraction_of_64_random_bits(size):
    """The product with ``size``, of 95 bits, agrees with Python's."""
    key = jax.random.key(3)
    upper, lower = np.asarray(jax.random.bits(key, (2, 1000), jnp.uint32)).tolist()
    expected = [((u << 32 | v) * size) >> 64 for u, v in zip(upper, lower, strict=True)]
    assert draw_integers(key, 1000, jnp.int32(size)).tolist() == expected


def test_integers_of_a_huge_range_are_equally_likely():
    """Thirds of [0, 3 * 2**29): modulo 2**32 the lowest would be drawn half as often again."""
    draws = draw_integers(jax.random.key(4), 30_000, jnp.int32(3 * 2**29))
    assert chisquare(np.bincount(np.asarray(draws) >> 29, minlength=3)).pvalue > FALSE_ALARM


def test_draws_by_mass():
    """Of classes that are not labels, each as often as its share: one draw more or two, or less."""
    ends = jnp.cumsum(jnp.array([1, 10, 4, 2, 3], jnp.int32)) * 10**8
    classes, weights = draw_by_mass(jax.random.key(5), ends, jnp.array([1, 5], jnp.int32), 20_000)
    counts = np.bincount(np.asarray(classes), minlength=5)
    assert counts[1] == 0
    share = np.array([1, 0, 4, 2, 3]) / 10
    np.testing.assert_allclose(20_000 * weights * share[np.asarray(classes)], 1, rtol=1e-4)
    assert abs(counts - 20_000 * share).max() <= 2


def test_nothing_is_drawn_if_all_classes_are_labels():
    ends = jnp.array([3, 4], jnp.int32)
    _, weights = draw_by_mass(jax.random.key(5), ends, jnp.array([0, 1], jnp.int32), 3)
    assert weights.tolist() == [0, 0, 0]
