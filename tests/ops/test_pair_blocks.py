# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_largecat.ops.pair_blocks import pair_blocks, sort_by_group

rng = np.random.default_rng(0)
GROUPS = {
    "some groups are empty": rng.choice([0, 2, 3, 7, 8], size=40),
    "one group": np.full(13, 4),
    "each its own": np.arange(10),
    "last one alone": np.array([0, 0, 0, 9]),
    "one pair": np.array([3]),
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.some_cases(5)
def test_every_pair_has_a_place_in_a_block_of_its_group(groups, size):
    find = jax.jit(pair_blocks, static_argnums=(1, 2))
    blocks = jax.tree.map(np.asarray, find(jnp.array(groups), 10, size))
    num_blocks = len(groups) // size + min(len(groups), 10)
    assert blocks.pairs.shape == (num_blocks, size)
    np.testing.assert_array_equal(blocks.pairs.reshape(-1)[blocks.places], np.arange(len(groups)))
    assert len(np.unique(blocks.places)) == len(groups)
    np.testing.assert_array_equal(
        groups[blocks.pairs], np.broadcast_to(blocks.groups[:, None], blocks.pairs.shape)
    )


def test_places_are_of_one_type_in_double_precision(x64):
    """Else JAX warns, and will refuse."""
    assert jax.jit(pair_blocks, static_argnums=(1, 2))(jnp.arange(5), 5, 2).places.shape == (5,)


@pytest.mark.slow
def test_many_random_groups():
    for seed in range(20):
        groups = np.random.default_rng(seed).integers(50, size=200) ** 2 // 50
        blocks = pair_blocks(jnp.array(groups), 50, 4)
        np.testing.assert_array_equal(blocks.pairs.reshape(-1)[blocks.places], np.arange(200))
        assert (groups[blocks.pairs] == np.asarray(blocks.groups)[:, None]).all()


@pytest.mark.parametrize("num_groups", [10, 2**30, 2**31])
def test_pairs_are_sorted_by_group_and_in_their_own_order(num_groups):
    """As one number of 32 bits where that holds both (four pairs of 2**30 groups), and as two."""
    groups = np.array([9, 0, 9, num_groups - 1], np.int32)
    order, in_order = sort_by_group(jnp.array(groups), num_groups)
    np.testing.assert_array_equal(order, np.argsort(groups, kind="stable"))
    np.testing.assert_array_equal(in_order, np.sort(groups))
    assert order.dtype == jnp.int32
