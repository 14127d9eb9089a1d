# SPDX-License-Identifier: Apache-2.0
"""Weighted sums over rows for each group, where every row belongs to a few of many groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.ops.pair_blocks import sort_by_group

BLOCK_ROWS = 128  # rows of one group that are summed by one product
BLOCKS_TOGETHER = 64  # blocks whose sums are held at once


class _Blocks(NamedTuple):
    """Entries of the pairs in blocks; each block is of one group."""

    groups: Array  # (J,), group of each block
    pairs: Array  # (J, M), positions in the flattened (N, L) table
    is_pair: Array  # (J, M), False where a block is not full


def grouped_sums(
    x: Array,
    groups: Array,
    weights: Array,
    num_groups: int,
    weighted_sum: Callable[[Array, Array], Any],
) -> Any:
    r"""For every group k, :math:`\sum_{n,l} w_{nl} [g_{nl} = k] f(x_n)`.

    The N L pairs are sorted by group and cut into blocks of one group each, so that f may sum a
    block by a matrix product.

    Cost: O(N L log(N L)) for the sort and N L / 128 + K blocks. Scratch memory: O(N L + K), 64
    blocks of rows and of sums; never N L rows.

    Args:
        x: Rows, shape (N, ...).
        groups: Groups of each row, integers in [0, K), shape (N, L).
        weights: Weights of each row in its groups, shape (N, L).
        num_groups: Number of groups K.
        weighted_sum: From rows (M, ...) and weights (M,) to the weighted sum of f, an array or a
            tree of arrays.

    Returns:
        What ``weighted_sum`` returns, with a leading axis K.
    """
    num_active = groups.shape[1]
    blocks = _cut_into_blocks(groups.reshape(-1), num_groups)
    block_weights = jnp.where(blocks.is_pair, weights.reshape(-1)[blocks.pairs], 0)
    parts = (blocks.groups, blocks.pairs // num_active, block_weights)
    together = min(BLOCKS_TOGETHER, len(blocks.groups))
    missing = -len(blocks.groups) % together
    # Blocks added at the end have weight 0; the last group keeps the groups sorted.
    parts = jax.tree.map(lambda a: jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)), parts)
    last = jnp.arange(len(blocks.groups) + missing) >= len(blocks.groups)
    parts = (jnp.where(last, num_groups - 1, parts[0]), *parts[1:])
    parts = jax.tree.map(lambda a: a.reshape(-1, together, *a.shape[1:]), parts)

    def add(totals: Any, part: tuple[Array, Array, Array]) -> tuple[Any, None]:
        block_groups, rows, of_rows = part
        sums = jax.vmap(weighted_sum)(x[rows], of_rows)
        return jax.tree.map(
            lambda total, s: total.at[block_groups].add(s, indices_are_sorted=True), totals, sums
        ), None

    shapes = jax.eval_shape(weighted_sum, x[:1], weights[:1, 0])
    start = jax.tree.map(lambda s: jnp.zeros((num_groups, *s.shape), s.dtype), shapes)
    return lax.scan(add, start, parts)[0]


def _cut_into_blocks(groups: Array, num_groups: int) -> _Blocks:
    """Sort Q pairs by group and cut each group into blocks; at most Q / M + K blocks."""
    order, in_order = sort_by_group(groups, num_groups)
    starts = jnp.searchsorted(in_order, jnp.arange(num_groups + 1))
    num_blocks = -(-jnp.diff(starts) // BLOCK_ROWS)
    ends = jnp.cumsum(num_blocks)
    block = jnp.arange(len(groups) // BLOCK_ROWS + num_groups)
    group = jnp.searchsorted(ends, block, side="right")
    is_block = group < num_groups
    group = jnp.minimum(group, num_groups - 1)
    first = starts[group] + (block - ends[group] + num_blocks[group]) * BLOCK_ROWS
    place = first[:, None] + jnp.arange(BLOCK_ROWS)
    is_pair = is_block[:, None] & (place < starts[group + 1][:, None])
    return _Blocks(group, order[jnp.minimum(place, len(groups) - 1)], is_pair)
