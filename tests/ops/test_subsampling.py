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

from numpyro_largecat.ops.subsampling import draw_without_replacement, skip_labels
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
    """At 10**4 and 10**7 members the compiled scratch memory and the whole program are the same."""
    arguments = jnp.int32(0), jax.random.key(0)
    small, large = drawing_from(10**4), drawing_from(10**7)
    assert temp_bytes(small, *arguments) == temp_bytes(large, *arguments) < 10_000
    programs = [jax.jit(draw).lower(*arguments).as_text() for draw in (small, large)]
    assert programs[0] == programs[1]


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
