# SPDX-License-Identifier: Apache-2.0
"""The posterior predictive of a softmax by draws of its utilities, where these are Gaussian."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat._checks import is_concrete
from numpyro_largecat._conversions import NO_ID
from numpyro_largecat.handlers.closed_over_arrays import run_compiled
from numpyro_largecat.handlers.row_noise import apart_from_sites
from numpyro_largecat.ops.gaussian_softmax import (
    add_log_sums,
    full_number,
    log_mean_sigmoid,
    log_sums_of_others,
    stratified_normals,
)
from numpyro_largecat.ops.running_top import RunningTop
from numpyro_largecat.ops.top_and_rest import Score, TopAndRest
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.eligible_classes import EligibleClasses
from numpyro_largecat.reading.gaussian_utilities import GaussianUtilities, Moments

NUM_TRIED = 4  # times as many classes as asked for
SHORT = 8  # a list with as many classes as an eighth of a chunk
NO_MATTER = 1 / 16  # relative variance of a sum over classes, with one draw
SumsAndMoments = tuple[Array, Moments]  # log sums over classes, and what some of these have


class _Search(NamedTuple):
    """Which classes are looked for."""

    score_for_blocks: Score  # blocks with the highest are kept
    score: Score  # of the classes of these blocks
    num_tried: int
    num_blocks: int  # that are kept, or more


def log_mean_probs(gaussian: GaussianUtilities, labels: Array, keys: Array) -> Array:
    """Log posterior predictive of a class for each choice, over draws with these keys.

    For each draw the utility of a class itself is integrated out, and those of all others are
    drawn, or at the mean of their sum, see ``_of_highest``. One pass over the classes, a second one
    where that mean is not enough, or one for each draw if sites outside of the class plate are
    drawn too.
    """
    if gaussian.is_drawn_outside:
        return _log_mean_over_passes(gaussian, labels[..., None], keys)[..., 0]

    def score(mean: Array, variance: Array, ids: Array) -> Array:
        return jnp.where(ids == labels[..., None], jnp.inf, mean + variance / 2)

    _, _, by_draw = _of_highest(gaussian, _Search(score, score, 1, 1), labels.shape, keys)
    return _log_mean(by_draw)[..., 0]


def top_over_utilities(
    gaussian: GaussianUtilities, num_top: int, keys: Array, eligible: EligibleClasses
) -> tuple[Array, Array]:
    """The classes of the highest posterior predictive, and its log.

    They are looked for among ``NUM_TRIED`` times as many with the highest scores, the mean utility
    and the larger of a standard deviation and of what the variance adds to the mean exponential,
    half of it, and two standard deviations at most: a probability grows no more. As many passes
    over the classes as of ``log_mean_probs``, and one more if sites outside of the class plate are
    drawn too.

    Classes that may not be named are often those that matter to the sums. So as many blocks more
    are kept as classes are listed, those of the classes that alone may be named first. With long
    lists the highest classes that may be named are found first, and all are drawn in a second pass.
    """
    utilities = gaussian.utilities
    num_classes = utilities.num_categories
    num_tried = min(NUM_TRIED * num_top, num_classes)

    def score(mean: Array, variance: Array, ids: Array) -> Array:
        scale = jnp.sqrt(variance)
        return mean + scale * jnp.clip(scale / 2, 1, 2)

    def score_for_blocks(mean: Array, variance: Array, ids: Array) -> Array:
        scores = score(mean, variance, ids)
        if eligible.among is None:
            return scores
        is_named = eligible.only(scores, ids[0], num_classes) > -jnp.inf
        return jnp.where(is_named & (ids != NO_ID), jnp.inf, scores)

    def score_at_end(mean: Array, variance: Array, ids: Array) -> Array:
        return eligible.of_ids(score(mean, variance, ids), ids, num_classes)

    if gaussian.is_drawn_outside:
        high, tried = _highest(gaussian.with_progress(1), num_tried, score, eligible)
        log_probs = _log_mean_over_passes(gaussian, tried, keys)
    elif eligible.num_listed > utilities.chunk_size // SHORT:
        high, tried = _highest(gaussian.with_progress(2), num_tried, score, eligible)
        noise_key, num_draws = apart_from_sites(keys[0]), full_number(len(keys))
        log_probs = _log_mean(_log_probs_by_draw(gaussian, tried, None, noise_key, num_draws))
    else:
        num_blocks = num_tried + eligible.num_listed
        search = _Search(score_for_blocks, score_at_end, num_tried, num_blocks)
        high, tried, by_draw = _of_highest(gaussian, search, utilities.batch_shape, keys)
        log_probs = _log_mean(by_draw)
    best, place = lax.top_k(jnp.where(jnp.isfinite(high), log_probs, high), num_top)
    return jnp.take_along_axis(tried, place, axis=-1), best


def _log_mean(by_draw: Array) -> Array:
    return jax.nn.logsumexp(by_draw, axis=0) - jnp.log(len(by_draw))


def _log_mean_over_passes(gaussian: GaussianUtilities, classes: Array, keys: Array) -> Array:
    """Log mean probabilities of ``classes``, shape (..., n), over a pass for each of the keys."""
    gaussian = gaussian.with_progress(len(keys))
    noise_keys = jax.random.split(apart_from_sites(keys[0]), len(keys))

    def of_draw(draw: tuple[Array, Array]) -> Array:
        return _log_probs_by_draw(gaussian, classes, *draw, 1)[0]

    return _log_mean(run_compiled(partial(lax.map, of_draw), (keys, noise_keys)))


def _highest(
    gaussian: GaussianUtilities, num_top: int, score: Score, eligible: EligibleClasses
) -> tuple[Array, Array]:
    """The highest scores of eligible classes, and these."""
    utilities, slopes = gaussian.utilities, gaussian.slopes(None)

    def add(part: ChunkedUtilities, best: RunningTop, chunk: Array) -> RunningTop:
        moments, ids = gaussian.of_chunk(part, chunk, None, slopes)
        scores = eligible.only(score(*moments, ids), ids[0], utilities.num_categories)
        return best.include(scores, ids[0])

    shape, size = utilities.batch_shape, utilities.chunk_size
    start = RunningTop.start(shape, num_top, size, utilities.dtype)
    high, classes = utilities.visit(add, start, RunningTop.merge).finish()
    return high, jnp.where(high == -jnp.inf, NO_ID, classes)  # what fills a chunk has others' ids


def _of_highest(
    gaussian: GaussianUtilities, search: _Search, shape: tuple[int, ...], keys: Array
) -> tuple[Array, Array, Array]:
    """The highest scores (..., n), their classes, and log probabilities of these for each draw.

    Of all others, those in the highest blocks are drawn, and the rest adds its mean to their sums.
    Its variance may move a probability by as much as it is next to the square of the sum over all
    classes. Where that is more than 1 / 16 T in any row, with T draws, whose own error is larger,
    all classes are drawn, in a second pass.
    """
    gaussian = gaussian.with_progress(1)
    utilities, slopes = gaussian.utilities, gaussian.slopes(None)
    num_draws, noise_key = full_number(len(keys)), apart_from_sites(keys[0])

    def draw(ids: Array) -> Array:
        return stratified_normals(noise_key, ids, num_draws, utilities.dtype)

    def add(part: ChunkedUtilities, found: TopAndRest, chunk: Array) -> TopAndRest:
        moments, ids = gaussian.of_chunk(part, chunk, None, slopes)
        moments = Moments(*(jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in moments))
        return found.include(search.score_for_blocks, *moments, ids[0], part.end)

    sizes = utilities.num_visited, utilities.chunk_size
    start = TopAndRest.start(shape, search.num_blocks, *sizes, utilities.dtype)
    found: TopAndRest = utilities.visit(add, start, TopAndRest.merge)
    finish = partial(TopAndRest.finish, num_top=search.num_tried, score=search.score, draw=draw)
    high, classes, mean, variance, log_sums = run_compiled(finish, found)

    def given_sums() -> Array:
        return _given_sums(log_sums, mean, jnp.sqrt(variance), draw(classes))

    def all_drawn() -> Array:
        return _log_probs_by_draw(gaussian, classes, None, noise_key, num_draws)

    own = jax.nn.logsumexp(mean + jnp.sqrt(variance) * draw(classes), axis=-1)
    total = jnp.logaddexp(log_sums, own).min(axis=0)
    # Also where it is not known, NaN.
    matters = ~(found.rest.variance <= 2 * total + jnp.log(NO_MATTER / num_draws)).all()
    if is_concrete(matters):
        return high, classes, all_drawn() if matters else given_sums()
    return high, classes, lax.cond(matters, all_drawn, given_sums)


def _log_probs_by_draw(
    gaussian: GaussianUtilities,
    classes: Array,
    key: Array | None,
    noise_key: Array,
    num_draws: int,
) -> Array:
    """Log probabilities of ``classes`` for each draw of utilities, shape (num_draws, ..., n).

    All of these draws have the same values outside of the class plate, those of ``key``, or at the
    centre.
    """
    log_sums, own = _sums_and_moments(gaussian, classes, key, noise_key, num_draws)
    scale = jnp.sqrt(own.variance)
    normals = stratified_normals(noise_key, classes, num_draws, scale.dtype)
    return _given_sums(log_sums, own.mean, scale, normals)


@jax.jit
def _given_sums(log_sums: Array, mean: Array, scale: Array, normals: Array) -> Array:
    """The same for some classes, given the log sums (num_draws, ...) of all others."""

    def of_draw(drawn: tuple[Array, Array]) -> Array:
        log_sum, z = drawn
        log_others = jnp.logaddexp(log_sum[..., None], log_sums_of_others(mean + scale * z))
        return log_mean_sigmoid(mean - log_others, scale**2)

    return lax.map(of_draw, (log_sums, normals))


def _sums_and_moments(
    gaussian: GaussianUtilities,
    classes: Array,
    key: Array | None,
    noise_key: Array,
    num_draws: int,
) -> SumsAndMoments:
    """Log sums over all classes but ``classes``, for each draw, and the moments of these."""
    slopes, row_shape = gaussian.slopes(key), classes.shape[:-1]

    def add(part: ChunkedUtilities, found: SumsAndMoments, chunk: Array) -> SumsAndMoments:
        log_sums, own = found
        moments, ids = gaussian.of_chunk(part, chunk, key, slopes)
        moments = Moments(*(jnp.broadcast_to(x, (*row_shape, x.shape[-1])) for x in moments))
        normals = stratified_normals(noise_key, ids, num_draws, moments.mean.dtype)
        place = classes - ids[0]
        is_here = (place >= 0) & (place < ids.shape[0]) & part.is_visited(classes)
        place = jnp.where(is_here, place, ids.shape[0])  # elsewhere: neither read nor written
        others = jnp.put_along_axis(
            moments.mean, place, -jnp.inf, axis=-1, inplace=False, mode="drop"
        )
        log_sums = add_log_sums(log_sums, others, jnp.sqrt(moments.variance), normals)

        def taken(of_chunk: Array, known: Array) -> Array:
            return jnp.where(is_here, jnp.take_along_axis(of_chunk, place, axis=-1), known)

        return log_sums, Moments(*map(taken, moments, own))

    def merge(found: SumsAndMoments, other: SumsAndMoments) -> SumsAndMoments:
        own = map(jnp.maximum, found[1], other[1])
        return jnp.logaddexp(found[0], other[0]), Moments(*own)

    dtype = gaussian.utilities.dtype
    nothing = jnp.full((num_draws, *row_shape), -jnp.inf, dtype)
    unknown = jnp.full(classes.shape, -jnp.inf, dtype)
    found: SumsAndMoments = gaussian.utilities.visit(
        add, (nothing, Moments(unknown, jnp.zeros_like(unknown))), merge
    )
    return found
