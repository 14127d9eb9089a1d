# SPDX-License-Identifier: Apache-2.0
"""Pairs of an observation and a group, put into blocks that have one group each."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class PairBlocks(NamedTuple):
    """P pairs in M blocks of S places each, where all pairs of a block are of one group."""

    pairs: Array  # (M, S), integers in [0, P): which pair is in a place
    groups: Array  # (M,), integers: the group of the block
    places: Array  # (P,), integers in [0, M * S): the place of each pair


def pair_blocks(groups: Array, num_groups: int, block_size: int) -> PairBlocks:
    """Put pairs of the same group into the same blocks.

    What belongs to a group can then be gathered once for each block, in place of once for each
    pair. Places that are left over, less than one block for each group that occurs, hold another
    pair of their group, so that what is computed there is as finite as elsewhere.

    Cost: O(P log P + G) time, P the number of pairs and G that of groups; there are
    P // S + min(P, G) blocks.

    Args:
        groups: Group of each pair, integers in [0, G), shape (P,), P at least 1.
        num_groups: Number of groups G, a Python int.
        block_size: Number of places in a block S, a Python int of at least 1.

    Returns:
        The blocks.
    """
    num_pairs = groups.shape[0]
    num_blocks = num_pairs // block_size + min(num_pairs, num_groups)
    order, in_order = sort_by_group(groups, num_groups)
    ends = jnp.searchsorted(in_order, jnp.arange(num_groups), side="right")
    sizes = jnp.diff(ends, prepend=0)
    block_ends = jnp.cumsum(-(-sizes // block_size))

    block = jnp.arange(num_blocks)
    group = jnp.searchsorted(block_ends, block, side="right")
    group = jnp.minimum(group, in_order[-1])  # blocks that are not needed
    blocks_before = block_ends[group] - -(-sizes[group] // block_size)
    rank = (block - blocks_before)[:, None] * block_size + jnp.arange(block_size)
    rank = jnp.minimum(rank, sizes[group][:, None] - 1)
    pairs = order[(ends - sizes)[group][:, None] + rank]

    rank = jnp.arange(num_pairs) - (ends - sizes)[in_order]
    first = (block_ends - -(-sizes // block_size))[in_order] * block_size
    place = (first + rank).astype(order.dtype)
    places = jnp.zeros(num_pairs, order.dtype).at[order].set(place, unique_indices=True)
    return PairBlocks(pairs, group, places)


def sort_by_group(groups: Array, num_groups: int) -> tuple[Array, Array]:
    """Places of pairs in the order of their groups, equal ones in their own, and those groups.

    Group and place are sorted as one number while 32 bits hold it: XLA sorts one array about four
    times as fast as two.
    """
    num_pairs = groups.shape[0]
    if num_groups * num_pairs > 2**32:
        order = jnp.argsort(groups)
        return order, groups[order]
    places = jnp.arange(num_pairs, dtype=jnp.uint32)
    both = lax.sort(groups.astype(jnp.uint32) * jnp.uint32(num_pairs) + places, is_stable=False)
    in_order = both // jnp.uint32(num_pairs)
    return (both - in_order * jnp.uint32(num_pairs)).astype(jnp.int32), in_order.astype(
        groups.dtype
    )
