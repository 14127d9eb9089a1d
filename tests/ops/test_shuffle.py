# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2, chisquare

from numpyro_largecat.ops.shuffle import shuffled
from tests.memory import temp_bytes

FALSE_ALARM = 1e-5  # how often a correct program fails a random check


@partial(jax.jit, static_argnums=(1, 2))
def orders_of(rng_key, size, repeats):
    keys = jax.random.split(rng_key, repeats)
    return jax.vmap(lambda key: shuffled(key, jnp.arange(size), size))(keys)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9, 97, 1000, 4097])
@pytest.mark.some_cases(3)
def test_each_item_comes_once(size):
    orders = np.asarray(orders_of(jax.random.key(0), size, 20))
    assert orders.dtype == np.int32
    np.testing.assert_array_equal(np.sort(orders), np.broadcast_to(np.arange(size), (20, size)))


# Of an odd and of an even number of items, and of a product of two odd ones and less.
@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 5, 7])
def test_every_order_of_a_few_items_is_equally_likely(size):
    orders = np.asarray(orders_of(jax.random.key(1), size, 60_000))
    counts = {order: 0 for order in itertools.permutations(range(size))}
    for order in orders.tolist():
        counts[tuple(order)] += 1
    assert chisquare(list(counts.values())).pvalue > FALSE_ALARM


@pytest.mark.slow
def test_every_item_is_equally_likely_at_every_place():
    """Also every pair of items at two places, next to each other or far apart."""
    size, repeats = 30, 20_000
    orders = np.asarray(orders_of(jax.random.key(2), size, repeats))
    at_place = np.stack([np.bincount(orders[:, j], minlength=size) for j in range(size)])
    distance = ((at_place - repeats / size) ** 2 / (repeats / size)).sum()
    assert chi2.sf(distance, (size - 1) ** 2) > FALSE_ALARM
    for first, second in ((0, 1), (3, 20)):
        pairs = np.bincount(orders[:, first] * size + orders[:, second], minlength=size**2)
        assert chisquare(pairs[~np.eye(size, dtype=bool).ravel()]).pvalue > FALSE_ALARM


@pytest.mark.parametrize("size", [10**9, 2**31 - 1])
def test_places_of_a_huge_order(size):
    """The last 5000: their mean is known to 0.4 %, five of its standard errors are 2 %."""
    items = np.asarray(shuffled(jax.random.key(3), jnp.arange(size - 5000, size), size), float)
    assert len(set(items)) == 5000
    assert items.min() >= 0
    assert items.max() < size
    assert abs(items.mean() / size - 0.5) < 0.02


def test_no_order_is_made_whole():
    places = jnp.arange(100)
    scratch = [
        temp_bytes(partial(shuffled, size=size), jax.random.key(0), places)
        for size in (10**4, 10**9)
    ]
    assert scratch[1] <= scratch[0] < 20_000
