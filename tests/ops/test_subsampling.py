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
from scipy.stats import chisquare

from numpyro_largecat.ops import subsampling
from numpyro_largecat.ops.subsampling import (
    class_at_rank,
    draw_by_mass,
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

# population, num_draws, min_population, max_population
REJECTION = [(9, 3, 9, 9), (8, 2, 6, 10)]
PERMUTATION = [(6, 3, 6, 6), (5, 2, 3, 7), (5, 4, 2, 5)]


@partial(jax.jit, static_argnums=(2, 3, 4, 5))
def draw_often(rng_key, population, num_draws, least, most, repeats=20_000):
    return jax.vmap(
        lambda key: draw_without_replacement(
            key, population, num_draws, min_population=least, max_population=most
        )
    )(jax.random.split(rng_key, repeats))


@pytest.mark.parametrize(("population", "num_draws", "least", "most"), REJECTION + PERMUTATION)
def test_every_subset_is_equally_likely(population, num_draws, least, most):
    """Chi-square over all subsets; the population is traced."""
    draws = np.asarray(draw_often(jax.random.key(0), population, num_draws, least, most))
    subsets = {c: 0 for c in itertools.combinations(range(population), num_draws)}
    for draw in np.sort(draws, axis=1).tolist():
        subsets[tuple(draw)] += 1  # a KeyError is a draw that is repeated or out of range
    assert chisquare(list(subsets.values())).pvalue > FALSE_ALARM


@pytest.mark.parametrize(("population", "most"), [(0, 6), (1, 6), (3, 6), (3, 40)])
def test_a_population_smaller_than_the_draws_comes_whole_and_first(population, most):
    draws = draw_often(jax.random.key(1), population, 5, 0, most, 50)
    expected = np.broadcast_to(np.arange(population), (50, population))
    np.testing.assert_array_equal(np.sort(draws[:, :population], axis=1), expected)


@partial(jax.jit, static_argnums=(2, 3, 4))
def draw(seed, population, num_draws, least, most):
    return draw_without_replacement(
        jax.random.key(seed), population, num_draws, min_population=least, max_population=most
    )


@given(seed=st.integers(0, 2**31 - 1), population=st.integers(60, 2**31 - 1))
def test_rejected_draws_are_distinct_and_in_range(seed, population):
    draws = np.asarray(draw(seed, population, 20, 60, 2**31 - 1))
    assert draws.dtype == np.int32
    assert len(set(draws.tolist())) == 20
    assert draws.min() >= 0
    assert draws.max() < population


@given(seed=st.integers(0, 2**31 - 1), population=st.integers(10, 50))
def test_permuted_draws_are_distinct_and_in_range(seed, population):
    draws = np.asarray(draw(seed, population, 20, 10, 50))[:population]
    assert draws.dtype == np.int32
    assert len(set(draws.tolist())) == min(20, population)
    assert draws.min() >= 0
    assert draws.max() < population


def test_draws_reach_the_last_member_of_a_huge_population():
    """With 10**7 members the mean rank is known to 6 digits, and so is its largest."""
    draws = np.asarray(draw(0, 10**7, 5000, 10**7, 10**7), float)
    spread = 10**7 / np.sqrt(12 * 5000)
    assert abs(draws.mean() - 10**7 / 2) < 4.5 * spread  # fails 7 times in 10**6
    assert draws.max() > 10**7 * (1 - 12 / 5000)  # fails with probability exp(-12)


def drawing_from(size):
    def draw(population, rng_key):
        return draw_without_replacement(
            rng_key, population, 100, min_population=size, max_population=size
        )

    return draw


@pytest.mark.smoke
def test_cost_of_drawing_does_not_depend_on_the_population():
    """From 10**7 members it takes less memory and fewer operations than from 10**4."""
    arguments = jnp.int32(0), jax.random.key(0)
    small, large = drawing_from(10**4), drawing_from(10**7)
    assert temp_bytes(large, *arguments) <= temp_bytes(small, *arguments) < 10_000
    flops = [
        jax.jit(f).lower(*arguments).compile().cost_analysis()["flops"] for f in (small, large)
    ]
    assert flops[1] <= flops[0]


def test_too_few_distinct_draws_are_drawn_again(monkeypatch):
    """With no spare draws most sequences of 20 from 60 members hold a repeat: four in five do."""
    monkeypatch.setattr(subsampling, "_length_with_enough_distinct", lambda n, population: n)
    draws = np.asarray(draw_often.__wrapped__(jax.random.key(2), 60, 20, 60, 60, 200))
    assert all(len(set(row)) == 20 for row in draws.tolist())


@given(
    labels=st.sets(st.integers(0, 29), max_size=8),
    num_categories=st.integers(2, 30),
)
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
    labels=st.sets(st.integers(0, 40), max_size=20),
    padding=st.integers(0, 3),
    values=st.lists(st.integers(-1, 42), min_size=4, max_size=4),
)
def test_place_among_is_that_of_a_search(labels, padding, values):
    labels = np.array([*sorted(labels), *[41] * padding], np.int32)
    found = place_among(jnp.array(values), jnp.asarray(labels))
    assert found.tolist() == np.searchsorted(labels, values).tolist()


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
    """Of classes that are not labels; the weights are exact inverse probabilities."""
    ends = jnp.cumsum(jnp.array([1, 10, 4, 2, 3], jnp.int32)) * 10**8
    classes, inverse = draw_by_mass(jax.random.key(5), ends, jnp.array([1, 5], jnp.int32), 20_000)
    counts = np.bincount(np.asarray(classes), minlength=5)
    assert counts[1] == 0
    share = np.array([1, 0, 4, 2, 3]) / 10
    np.testing.assert_allclose(inverse, 1 / share[np.asarray(classes)], rtol=1e-6)
    assert chisquare(counts[share > 0], 20_000 * share[share > 0]).pvalue > FALSE_ALARM


def test_nothing_is_drawn_if_all_classes_are_labels():
    ends = jnp.array([3, 4], jnp.int32)
    _, inverse = draw_by_mass(jax.random.key(5), ends, jnp.array([0, 1], jnp.int32), 3)
    assert inverse.tolist() == [0, 0, 0]
