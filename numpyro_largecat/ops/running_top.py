# SPDX-License-Identifier: Apache-2.0
"""The largest values of rows that come in chunks, and which they are."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat.ops.finfo import finfo


class RunningTop(NamedTuple):
    """The n blocks of classes with the largest maxima so far, best first, and of equals the first.

    The n largest values are in these blocks. So a chunk of M values costs one search among its
    M / B maxima, and only at the end are the n B values of the blocks looked through.
    """

    highest: Array  # (..., n), maxima of the blocks; -inf where there is no block
    values: Array  # (..., n, B)
    first: Array  # (..., n), int32, first class of each block

    @staticmethod
    def start(
        batch_shape: tuple[int, ...], num_top: int, chunk_size: int, dtype: Any
    ) -> RunningTop:
        """No blocks yet, of a size that suits chunks of ``chunk_size`` values."""
        shape = (*batch_shape, num_top)
        values = jnp.full((*shape, _block_size(num_top, chunk_size)), -jnp.inf, dtype)
        first = jnp.full(shape, np.iinfo(np.int32).max, jnp.int32)
        return RunningTop(values[..., 0], values, first)

    def include(self, values: Array, first: ArrayLike) -> RunningTop:
        """Take in the values (..., M) of the classes from ``first`` on, which are later ones.

        Cost: O(M + n B) for each row, and a search among M / B + n maxima.
        """
        num_top, size = self.values.shape[-2:]
        blocks = values.reshape((*values.shape[:-1], -1, size))
        # A block of classes of probability zero comes before no block.
        highest = jnp.maximum(blocks.max(axis=-1), float(finfo(values.dtype).min))
        best, place = lax.top_k(jnp.concatenate([self.highest, highest], axis=-1), num_top)
        is_old, new = place < num_top, jnp.maximum(place - num_top, 0)
        old = jnp.minimum(place, num_top - 1)
        new_first = jnp.asarray(first, jnp.int32) + size * new.astype(jnp.int32)
        kept = jnp.take_along_axis(self.values, old[..., None], axis=-2)
        found = jnp.take_along_axis(blocks, new[..., None], axis=-2)
        return RunningTop(
            best,
            jnp.where(is_old[..., None], kept, found),
            jnp.where(is_old, jnp.take_along_axis(self.first, old, axis=-1), new_first),
        )

    def merge(self, other: RunningTop) -> RunningTop:
        """The blocks with the largest maxima of two, of which the other has later classes."""
        num_top = self.highest.shape[-1]
        pairs = zip(self, other, (-1, -2, -1), strict=True)
        highest, values, first = (jnp.concatenate([a, b], axis) for a, b, axis in pairs)
        best, place = lax.top_k(highest, num_top)
        kept = jnp.take_along_axis(values, place[..., None], axis=-2)
        return RunningTop(best, kept, jnp.take_along_axis(first, place, axis=-1))

    def finish(self) -> tuple[Array, Array]:
        """The n largest values, best first and of equals the first, and their classes."""
        num_top, size = self.values.shape[-2:]
        order = jnp.argsort(self.first, axis=-1)  # so that of equal values the first is found
        first = jnp.take_along_axis(self.first, order, axis=-1)
        values = jnp.take_along_axis(self.values, order[..., None], axis=-2)
        best, place = lax.top_k(values.reshape((*first.shape[:-1], -1)), num_top)
        return best, jnp.take_along_axis(first, place // size, axis=-1) + place % size


def _block_size(num_top: int, chunk_size: int) -> int:
    """A power of two near sqrt(M / n), which balances the two searches, that divides M."""
    balanced = math.isqrt(max(chunk_size // num_top, 1))
    return math.gcd(chunk_size, 1 << (balanced.bit_length() - 1))
