# SPDX-License-Identifier: Apache-2.0
"""The classes with the highest scores, and draws of what the exponentials of all others add up to.

A class must not be part of the sum that it is compared with, since nothing takes it out again:
where it is nearly all of a sum, nothing is left of the others in floating point. So the sums are of
what is outside of the highest blocks of classes, of which each has a sum of its own, that is added
when others come before it. Which blocks these are is known before a chunk is added up: so one pass
over the classes finds all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.ops.gaussian_softmax import shift_of
from numpyro_largecat.ops.running_top import Kept, RunningTop, block_size

BLOCK = 16  # classes: sums of so many are fast, and those of the blocks that are kept are few
FEW = 64  # blocks of this size; of more, they are smaller
_DRAWS = 8  # whose sums of a chunk's blocks are in memory together
_ROWS = 16  # whose blocks are drawn together at the end


class TopAndRest(NamedTuple):
    """The n blocks of B classes with the highest scores, and T draws of sums of exponentials."""

    top: RunningTop  # of scores
    mean: Array  # (..., n, B), of the classes of the blocks
    scale: Array  # (..., n, B), their standard deviations
    log_sums: Array  # (T, ..., n), of the blocks
    log_rest: Array  # (T, ...), of all classes that are in none of them

    @staticmethod
    def start(
        batch_shape: tuple[int, ...],
        num_top: int,
        num_draws: int,
        num_classes: int,
        chunk_size: int,
        dtype: Any,
    ) -> TopAndRest:
        """No classes yet, of ``num_classes`` with those that fill chunks."""
        is_few = num_top <= FEW
        size = math.gcd(chunk_size, BLOCK) if is_few else block_size(num_top, chunk_size)
        num_blocks = min(num_top, num_classes // size)
        top = RunningTop.start(batch_shape, num_blocks, chunk_size, dtype, size)
        log_sums = jnp.full((num_draws, *batch_shape, num_blocks), -jnp.inf, dtype)
        mean, scale = jnp.full_like(top.values, -jnp.inf), jnp.zeros_like(top.values)
        return TopAndRest(top, mean, scale, log_sums, log_sums[..., 0])

    def include(
        self, scores: Array, mean: Array, scale: Array, normals: Array, first: Array
    ) -> TopAndRest:
        """Take in the classes from ``first`` on, later ones, with standard normal draws (T, M).

        Cost: T exponentials for each of M classes and each row, in a single pass; in two for the
        first chunk, and where one would overflow or underflow, with scales of some tens.
        """
        top, kept = self.top.include_and_tell(scores, first)
        chunk = _Chunk.of(mean, scale, kept, self.top.values.shape[-1])
        is_left, _ = kept.left(chunk.mean.shape[-2])
        log_rest = self._rest_with(is_left)
        means = kept.values(self.mean, chunk.mean)
        is_empty = kept.is_old | (means == -jnp.inf).all(axis=-1)
        log_sums, added = chunk.log_sums(normals, log_rest, is_empty)
        return TopAndRest(
            top,
            means,
            kept.values(self.scale, chunk.scale),
            kept.old_or(self.log_sums, log_sums),
            jnp.logaddexp(log_rest, added),
        )

    def merge(self, other: TopAndRest) -> TopAndRest:
        """The highest blocks of two, of which the other has later classes, and all else."""
        top, kept = self.top.merge_and_tell(other.top)
        is_left, others_left = kept.left(other.log_sums.shape[-1])
        return TopAndRest(
            top,
            kept.values(self.mean, other.mean),
            kept.values(self.scale, other.scale),
            kept.old_or(self.log_sums, kept.of_new(other.log_sums)),
            jnp.logaddexp(self._rest_with(is_left), other._rest_with(others_left)),
        )

    def finish(
        self, num_top: int, draw: Callable[[Array], Array]
    ) -> tuple[Array, Array, tuple[Array, ...]]:
        """The highest scores, their classes, and the means, scales and log sums of all others.

        ``draw`` gives the draws (T, ...) of classes (...). The means and scales are of shape
        (..., num_top), the sums (T, ...).
        """
        best, place = self.top.places(num_top)
        size = self.top.values.shape[-1]
        ids = (self.top.first[..., None] + jnp.arange(size)).reshape(*best.shape[:-1], -1)
        mean, scale = self.mean.reshape(ids.shape), self.scale.reshape(ids.shape)
        others = jnp.put_along_axis(mean, place, -jnp.inf, axis=-1, inplace=False)

        def of_row(row: tuple[Array, Array, Array]) -> Array:
            ids, mean, scale = row
            return jax.nn.logsumexp(mean + scale * draw(ids), axis=-1)

        flat = tuple(x.reshape(-1, ids.shape[-1]) for x in (ids, others, scale))
        in_blocks = lax.map(of_row, flat, batch_size=_ROWS).T.reshape(self.log_rest.shape)
        classes, mean, scale = (jnp.take_along_axis(x, place, axis=-1) for x in (ids, mean, scale))
        return best, classes, (mean, scale, jnp.logaddexp(self.log_rest, in_blocks))

    def _rest_with(self, is_left: Array) -> Array:
        left = jnp.where(is_left, self.log_sums, -jnp.inf)
        return jnp.logaddexp(self.log_rest, jax.nn.logsumexp(left, axis=-1))


class _Chunk(NamedTuple):
    """The classes of a chunk in blocks, of which some are kept."""

    mean: Array  # (..., M / B, B)
    scale: Array  # (..., M / B, B)
    is_left: Array  # (..., M / B), whether a block is not kept
    kept: Kept

    @classmethod
    def of(cls, mean: Array, scale: Array, kept: Kept, size: int) -> _Chunk:
        mean, scale = (x.reshape(*x.shape[:-1], -1, size) for x in (mean, scale))
        return cls(mean, scale, kept.left(mean.shape[-2])[1], kept)

    def log_sums(self, normals: Array, log_rest: Array, is_empty: Array) -> tuple[Array, Array]:
        """Log sums for each draw of the kept blocks, (T, ..., n), and of all others, (T, ...).

        Args:
            normals: Draws for the classes, (T, M).
            log_rest: What was found of earlier chunks, (T, ...).
            is_empty: Kept blocks whose sums are nothing, or not asked for, (..., n).
        """
        num_draws = len(normals)
        of_draws = partial(self._of_draws, *shift_of(log_rest), is_empty)
        if num_draws <= _DRAWS:
            return of_draws(normals)
        missing = -num_draws % _DRAWS
        groups = jnp.pad(normals, ((0, missing), (0, 0))).reshape(-1, _DRAWS, normals.shape[1])
        sums, rest = (x.reshape(-1, *x.shape[2:])[:num_draws] for x in lax.map(of_draws, groups))
        return sums, rest

    def _of_draws(
        self, shift: Array, is_known: Array, is_empty: Array, normals: Array
    ) -> tuple[Array, Array]:
        z = normals.reshape(-1, *[1] * (self.mean.ndim - 2), *self.mean.shape[-2:])

        def anew() -> tuple[Array, Array]:
            found: tuple[Array, Array] = lax.map(self._with_maxima, z)
            return found

        def from_shift() -> tuple[Array, Array]:
            sums = jnp.exp(self.mean - shift[..., None, None] + self.scale * z).sum(axis=-1)
            own, rest = self.kept.of_new(sums), jnp.where(self.is_left, sums, 0).sum(axis=-1)
            # The sum of a block that is kept must be known: others may leave before it does.
            is_known = is_empty | (own > 0) & (own < jnp.inf) | jnp.isnan(own)
            found = jnp.log(own) + shift[..., None], jnp.log(rest) + shift
            is_finite = (rest < jnp.inf) | jnp.isnan(rest)
            return lax.cond(is_known.all() & is_finite.all(), lambda: found, anew)

        return lax.cond(is_known, from_shift, anew)

    def _with_maxima(self, z: Array) -> tuple[Array, Array]:
        sums = jax.nn.logsumexp(self.mean + self.scale * z, axis=-1)
        left = jnp.where(self.is_left, sums, -jnp.inf)
        return self.kept.of_new(sums), jax.nn.logsumexp(left, axis=-1)
