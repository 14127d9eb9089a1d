# SPDX-License-Identifier: Apache-2.0
"""The largest values of rows that come in chunks, and which they are."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike


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
        batch_shape: tuple[int, ...],
        num_top: int,
        chunk_size: int,
        dtype: Any,
        size: int | None = None,
    ) -> RunningTop:
        """No blocks yet, of B = ``size`` or what suits chunks of ``chunk_size`` values."""
        shape = (*batch_shape, num_top)
        size = block_size(num_top, chunk_size) if size is None else size
        values = jnp.full((*shape, size), -jnp.inf, dtype)
        first = jnp.full(shape, np.iinfo(np.int32).max, jnp.int32)
        return RunningTop(values[..., 0], values, first)

    def include(self, values: Array, first: ArrayLike) -> RunningTop:
        """Take in the values (..., M) of the classes from ``first`` on, which are later ones.

        Cost: O(M + n B) for each row, and a search among M / B + n maxima.
        """
        return self.include_by(values, values, first)[0]

    def include_by(self, scores: Array, values: Array, first: ArrayLike) -> tuple[RunningTop, Kept]:
        """The same where the maxima are those of ``scores``, and which blocks are kept.

        These are of the old ones and of the M / B new ones.
        """
        num_top, size = self.values.shape[-2:]
        blocks = values.reshape((*values.shape[:-1], -1, size))
        highest = scores.reshape(blocks.shape).max(axis=-1)
        # A block of classes of probability zero comes before no block.
        highest = _one_nan(jnp.maximum(highest, float(jnp.finfo(values.dtype).min)))
        best, place = lax.top_k(jnp.concatenate([self.highest, highest], axis=-1), num_top)
        kept = Kept(place)
        starts = jnp.asarray(first, jnp.int32) + size * jnp.arange(blocks.shape[-2], dtype="int32")
        starts = jnp.broadcast_to(starts, highest.shape)
        found = kept.values(self.values, blocks), kept.entries(self.first, starts)
        return RunningTop(best, *found), kept

    def merge(self, other: RunningTop) -> RunningTop:
        """The blocks with the largest maxima of two, of which the other has later classes."""
        return self.merge_and_tell(other)[0]

    def merge_and_tell(self, other: RunningTop) -> tuple[RunningTop, Kept]:
        """The same, and which blocks are kept, of these and the other's."""
        highest = jnp.concatenate([self.highest, other.highest], axis=-1)
        best, place = lax.top_k(highest, self.highest.shape[-1])
        kept = Kept(place)
        found = kept.values(self.values, other.values), kept.entries(self.first, other.first)
        return RunningTop(best, *found), kept

    def finish(self) -> tuple[Array, Array]:
        """The n largest values, best first and of equals the first, and their classes."""
        best, place = self.places(self.values, self.values.shape[-2])
        size = self.values.shape[-1]
        return best, jnp.take_along_axis(self.first, place // size, axis=-1) + place % size

    @partial(jax.jit, static_argnames="num_top")
    def places(self, values: Array, num_top: int) -> tuple[Array, Array]:
        """The largest of what the classes of the blocks have (..., n, B), and their places."""
        size = values.shape[-1]
        order = jnp.argsort(self.first, axis=-1)  # so that of equal values the first is found
        values = jnp.take_along_axis(values, order[..., None], axis=-2)
        flat = _one_nan(values.reshape((*order.shape[:-1], -1)))
        best, place = lax.top_k(flat, num_top)
        return best, jnp.take_along_axis(order, place // size, axis=-1) * size + place % size


class Kept(NamedTuple):
    """Which n blocks are kept of n old and some new ones."""

    place: Array  # (..., n), among the old ones and, after them, the new ones

    @property
    def is_old(self) -> Array:
        """Whether a kept block is an old one, (..., n)."""
        return self.place < self.place.shape[-1]

    def entries(self, old: Array, new: Array) -> Array:
        """What the kept blocks have, of what old (..., n) and new ones (..., M / B) have."""
        return self.old_or(old, self.of_new(new))

    def values(self, old: Array, new: Array) -> Array:
        """The same of (..., n, B) and (..., M / B, B)."""
        is_old, place = self.is_old[..., None], self.place[..., None]
        num_top = place.shape[-2]
        from_old = jnp.take_along_axis(old, jnp.minimum(place, num_top - 1), axis=-2)
        from_new = jnp.take_along_axis(new, jnp.maximum(place - num_top, 0), axis=-2)
        return jnp.where(is_old, from_old, from_new)

    def old_or(self, old: Array, from_new: Array) -> Array:
        """What the kept blocks have, of what old ones have and what ``of_new`` gives."""
        place = jnp.minimum(self.place, self.place.shape[-1] - 1)
        return jnp.where(self.is_old, _take(old, place), from_new)

    def of_new(self, new: Array) -> Array:
        """What the kept blocks that are new have, of what all new ones have; else any value."""
        return _take(new, jnp.maximum(self.place - self.place.shape[-1], 0))

    def left(self, num_new: int) -> tuple[Array, Array]:
        """Which of the old blocks, (..., n), and of the new ones are not kept."""
        num_old = self.place.shape[-1]
        all_left = jnp.ones((*self.place.shape[:-1], num_old + num_new), bool)
        is_left = jnp.put_along_axis(all_left, self.place, False, axis=-1, inplace=False)
        return is_left[..., :num_old], is_left[..., num_old:]


def _one_nan(values: Array) -> Array:
    """Values whose NaNs have the sign that a search takes for the largest, as all of theirs do."""
    return jnp.where(jnp.isnan(values), jnp.nan, values)


def _take(values: Array, place: Array) -> Array:
    """Entries of the last axis; ``values`` may have more axes in front."""
    place = place.reshape((1,) * (values.ndim - place.ndim) + place.shape)
    return jnp.take_along_axis(values, place, axis=-1)


def block_size(num_top: int, chunk_size: int) -> int:
    """A power of two near sqrt(M / n), which balances the two searches, that divides M."""
    balanced = math.isqrt(max(chunk_size // num_top, 1))
    return math.gcd(chunk_size, 1 << (balanced.bit_length() - 1))
