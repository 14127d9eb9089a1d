# SPDX-License-Identifier: Apache-2.0
"""The largest values of rows that come in chunks, and which they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

BLOCK = 16  # entries of which the largest is found first


class Blocks(NamedTuple):
    """Values on consecutive classes, cut into blocks; -inf is kept as the lowest finite value."""

    values: Array  # (..., num_blocks, BLOCK); -inf where the last block holds nothing
    highest: Array  # (..., num_blocks)

    @staticmethod
    def cut(values: Array) -> Blocks:
        """Cut values of shape (..., M): one pass over them."""
        num_blocks = -(-values.shape[-1] // BLOCK)
        padding = [(0, 0)] * (values.ndim - 1) + [(0, num_blocks * BLOCK - values.shape[-1])]
        values = jnp.maximum(values, _lowest(values))
        if padding[-1][1]:
            values = jnp.pad(values, padding, constant_values=-jnp.inf)
        blocks = values.reshape((*values.shape[:-1], num_blocks, BLOCK))
        return Blocks(blocks, blocks.max(axis=-1))

    def log_sum(self) -> Array:
        """Log of the sum of exp(value): one more pass."""
        highest = self.highest.max(axis=-1)
        highest = jnp.where(highest > _lowest(highest), highest, 0)
        below = self.values - highest[..., None, None]
        return highest + jnp.log(jnp.exp(below).sum(axis=(-1, -2)))


class RunningTop(NamedTuple):
    """The largest values so far, best first, and of equal values the first.

    A value of -inf is kept as the lowest finite one, above the -inf of places that hold nothing.
    """

    values: Array  # (..., n)
    classes: Array  # (..., n), int32

    @staticmethod
    def start(batch_shape: tuple[int, ...], num_top: int, dtype: Any) -> RunningTop:
        """Nothing yet: values of -inf."""
        values = jnp.full((*batch_shape, num_top), -jnp.inf, dtype)
        return RunningTop(values, jnp.zeros(values.shape, jnp.int32))

    def finish(self) -> tuple[Array, Array]:
        """The values, and the classes that have them."""
        is_finite = self.values > _lowest(self.values)
        return jnp.where(is_finite, self.values, -jnp.inf), self.classes

    def include(self, blocks: Blocks, first: ArrayLike) -> RunningTop:
        """Take in the values of the classes from ``first`` on.

        The n largest of M values are in the n blocks with the largest maxima, so that only these
        are searched.

        Cost: O(M / BLOCK + n (BLOCK + log n)) for each row.
        """
        num_top, num_blocks = self.values.shape[-1], blocks.highest.shape[-1]
        first = jnp.asarray(first, jnp.int32)
        within = jnp.arange(BLOCK, dtype=jnp.int32)
        if num_blocks <= 2 * num_top:
            ids = jnp.arange(num_blocks, dtype=jnp.int32)[:, None] * BLOCK + within
            return self._merge(blocks.values, jnp.broadcast_to(first + ids, blocks.values.shape))
        _, best = lax.top_k(blocks.highest, num_top)
        best = jnp.sort(best, axis=-1)  # so that of equal values the first is found
        inside = jnp.take_along_axis(blocks.values, best[..., None], axis=-2)
        return self._merge(inside, first + best[..., None] * BLOCK + within)

    def _merge(self, values: Array, ids: Array) -> RunningTop:
        """Take in blocks with an id for each value; those of equal values must ascend."""
        shape = (*values.shape[:-2], -1)
        values = jnp.concatenate([self.values, values.reshape(shape)], axis=-1)
        ids = jnp.concatenate([self.classes, ids.reshape(shape)], axis=-1)
        best, place = lax.top_k(values, self.values.shape[-1])
        return RunningTop(best, jnp.take_along_axis(ids, place, axis=-1))


def _lowest(values: Array) -> Any:
    finfo: Any = jnp.finfo
    return finfo(values.dtype).min
