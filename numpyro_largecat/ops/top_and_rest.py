# SPDX-License-Identifier: Apache-2.0
r"""The classes with the highest scores, and the moments of what all others add up to.

Of Gaussian utilities that are independent over classes, the exponentials have the sum R with

.. math:: E R = \sum_k \exp(\mu_k + \sigma_k^2 / 2), \qquad
          \mathrm{Var}\, R = \sum_k \exp(2 \mu_k + 2 \sigma_k^2) - \exp(2 \mu_k + \sigma_k^2) .

Without the classes that are most of it, R hardly varies, next to the sum over all.

A class must not be part of the sum that it is compared with, since nothing takes it out again:
where it is nearly all of a sum, nothing is left of the others in floating point. So the moments are
of what is outside of the highest blocks of classes, of which each has moments of its own, that are
added when others come before it. Which blocks these are is known before a chunk is added up: so one
pass over the classes finds all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat._conversions import NO_ID
from numpyro_largecat.ops.log_sums import log_add, log_sum_of_any
from numpyro_largecat.ops.running_top import Kept, RunningTop, block_size

BLOCK = 16  # classes: sums of so many are fast, and those of the blocks that are kept are few
FEW = 64  # blocks of this size; of more, they are smaller
LEAST = 128  # classes that are in blocks
_ROWS = 16  # whose blocks are drawn together at the end
Score = Callable[[Array, Array, Array], Array]  # of classes by their mean, variance and id


class LogMoments(NamedTuple):
    """The logs of mean and variance of a sum of exponentials."""

    mean: Array
    variance: Array

    @staticmethod
    def of_nothing(shape: tuple[int, ...], dtype: Any) -> LogMoments:
        """Those of sums over no class."""
        return LogMoments(jnp.full(shape, -jnp.inf, dtype), jnp.full(shape, -jnp.inf, dtype))

    def plus(self, *others: LogMoments) -> LogMoments:
        """Those of the sum of independent sums."""
        return LogMoments(*(reduce(log_add, parts) for parts in zip(self, *others, strict=True)))

    def of_some(self, are_some: Array) -> LogMoments:
        """Those of the sum over the last axis, where ``are_some``."""
        kept = (jnp.where(are_some, x, -jnp.inf) for x in self)
        return LogMoments(*map(log_sum_of_any, kept))


class TopAndRest(NamedTuple):
    """The n blocks of B classes with the highest scores, and moments of sums of exponentials."""

    top: RunningTop  # by scores, of the means of the utilities
    variance: Array  # (..., n, B), theirs
    end: Array  # (..., n), int32, no class of a block is one from this on
    blocks: LogMoments  # (..., n), of their sums
    rest: LogMoments  # (...), of the sum over all classes that are in none of them

    @staticmethod
    def start(
        batch_shape: tuple[int, ...], num_top: int, num_classes: int, chunk_size: int, dtype: Any
    ) -> TopAndRest:
        """No classes yet, of ``num_classes`` with those that fill chunks.

        There are ``num_top`` blocks or more, so that they have ``LEAST`` classes.
        """
        is_few = num_top <= FEW
        size = math.gcd(chunk_size, BLOCK) if is_few else block_size(num_top, chunk_size)
        num_blocks = min(max(num_top, LEAST // size), num_classes // size)
        top = RunningTop.start(batch_shape, num_blocks, chunk_size, dtype, size)
        variance, end = jnp.zeros_like(top.values), jnp.zeros_like(top.first)
        blocks = LogMoments.of_nothing((*batch_shape, num_blocks), dtype)
        return TopAndRest(top, variance, end, blocks, LogMoments.of_nothing(batch_shape, dtype))

    def include(
        self, score: Score, mean: Array, variance: Array, first: Array, end: ArrayLike
    ) -> TopAndRest:
        """Take in the classes from ``first`` on, and before ``end``, later ones.

        Cost: two exponentials for each of M classes and each row, in a single pass; in two for the
        first chunk, and where one would overflow, with scales of some tens.
        """
        scores = score(mean, variance, _classes(first, end, mean.shape[-1]))
        scores = lax.optimization_barrier(scores)  # a search in what is computed on the way is slow
        top, kept = self.top.include_by(scores, mean, first)
        size = self.top.values.shape[-1]
        old_left, new_left = kept.left(mean.shape[-1] // size)
        rest = self.rest.plus(self.blocks.of_some(old_left))
        own, added = _moments_of_chunk(mean, variance, kept, new_left, rest.mean)
        return TopAndRest(
            top,
            kept.values(self.variance, variance.reshape(*scores.shape[:-1], -1, size)),
            kept.old_or(self.end, jnp.asarray(end, jnp.int32)),
            LogMoments(*map(kept.old_or, self.blocks, own)),
            rest.plus(added),
        )

    def merge(self, other: TopAndRest) -> TopAndRest:
        """The highest blocks of two, of which the other has later classes, and all else."""
        top, kept = self.top.merge_and_tell(other.top)
        left, others_left = kept.left(other.blocks.mean.shape[-1])
        return TopAndRest(
            top,
            kept.values(self.variance, other.variance),
            kept.entries(self.end, other.end),
            LogMoments(*map(kept.entries, self.blocks, other.blocks)),
            self.rest.plus(
                self.blocks.of_some(left), other.rest, other.blocks.of_some(others_left)
            ),
        )

    def finish(
        self, num_top: int, score: Score, draw: Callable[[Array], Array]
    ) -> tuple[Array, Array, Array, Array, Array]:
        """The highest scores, their classes, and means, variances and log sums of all others.

        ``draw`` gives standard normal draws (T, ...) of classes (...). The means and variances are
        of shape (..., num_top), the sums (T, ...): draws of the blocks, and the mean of the rest.
        Where there are fewer classes, the rest are -1.
        """
        mean, variance = self.top.values, self.variance
        ids, shape = _classes(self.top.first, self.end, mean.shape[-1]), mean.shape
        ids, mean, variance = (x.reshape(*shape[:-2], -1) for x in (ids, mean, variance))
        best, place = self.top.places(score(mean, variance, ids).reshape(shape), num_top)
        others = jnp.put_along_axis(mean, place, -jnp.inf, axis=-1, inplace=False)

        def of_row(row: tuple[Array, Array, Array]) -> Array:
            ids, mean, variance = row
            return jax.nn.logsumexp(mean + jnp.sqrt(variance) * draw(ids), axis=-1)

        flat = tuple(x.reshape(-1, ids.shape[-1]) for x in (ids, others, variance))
        by_row = lax.map(of_row, flat, batch_size=_ROWS)
        in_blocks = jnp.moveaxis(by_row, -1, 0).reshape(-1, *best.shape[:-1])
        found = (jnp.take_along_axis(x, place, axis=-1) for x in (ids, mean, variance))
        return best, *found, jnp.logaddexp(self.rest.mean, in_blocks)


def _classes(first: Array, end: ArrayLike, size: int) -> Array:
    """So many classes (..., size) from ``first`` on; -1 from ``end`` on, as what fills a chunk."""
    first, places = jnp.asarray(first, jnp.int32), jnp.arange(size, dtype="int32")
    are_classes = places < (end - first)[..., None]
    return jnp.where(are_classes, first[..., None] + places, NO_ID)


def _moments_of_chunk(
    mean: Array, variance: Array, kept: Kept, is_left: Array, shift: Array
) -> tuple[LogMoments, LogMoments]:
    """Of blocks of classes: the moments of the kept ones, and of the sum of all others.

    Args:
        mean: Means of the utilities (..., M).
        variance: Their variances.
        kept: Which blocks are kept.
        is_left: Which are not, (..., M / B).
        shift: Log of the mean of what others add, (...); what is nothing beside it is left out.
    """

    def in_blocks(values: Array) -> Array:
        return values.reshape(*is_left.shape, -1)

    shift = lax.stop_gradient(shift)  # it comes out again

    def anew() -> tuple[LogMoments, LogMoments]:
        known = jnp.where(mean == -jnp.inf, 0, variance)
        log_means = jax.nn.logsumexp(in_blocks(mean + known / 2), axis=-1)
        m, v = map(lax.stop_gradient, (mean, known))
        log_variances = 2 * (m + v) + jnp.log(-jnp.expm1(-v))
        blocks = LogMoments(log_means, jax.nn.logsumexp(in_blocks(log_variances), axis=-1))
        return LogMoments(*map(kept.of_new, blocks)), blocks.of_some(is_left)

    def from_shift() -> tuple[LogMoments, LogMoments]:
        # What is larger is found to be too large, and has a derivative all the same.
        largest = math.log(float(jnp.finfo(mean.dtype).max)) - 1
        means = jnp.exp(jnp.minimum(mean - shift[..., None] + variance / 2, largest))
        means = lax.optimization_barrier(means)  # not computed again for the variances
        roots = jnp.exp(lax.stop_gradient(mean - shift[..., None] + variance))
        variances = lax.optimization_barrier(roots**2 - lax.stop_gradient(means) ** 2)
        sums = in_blocks(means).sum(axis=-1), jnp.maximum(in_blocks(variances).sum(axis=-1), 0)
        own = tuple(map(kept.of_new, sums))
        rest = tuple(jnp.where(is_left, x, 0).sum(axis=-1) for x in sums)
        are_known = jnp.stack([_is_no_overflow(own), _is_no_overflow(rest)]).all()
        found = _log_moments(own, shift[..., None]), _log_moments(rest, shift)
        return lax.cond(are_known, lambda: found, anew)

    return lax.cond((shift != -jnp.inf).all(), from_shift, anew)


def _log_moments(moments: tuple[Array, ...], shift: Array) -> LogMoments:
    mean, variance = map(_log, moments)
    return LogMoments(mean + shift, variance + 2 * shift)


def _log(values: Array) -> Array:
    """Logarithms, whose derivatives are 0 where there is nothing."""
    is_nothing = values == 0
    return jnp.where(is_nothing, -jnp.inf, jnp.log(jnp.where(is_nothing, 1, values)))


def _is_no_overflow(moments: tuple[Array, ...]) -> Array:
    """Whether no exponential is too large, nor its square; NaN is what others are too."""
    mean, variance = moments
    is_large = mean > 0.5 * float(jnp.finfo(mean.dtype).max) ** 0.5
    return ~(is_large | (variance == jnp.inf)).any()
