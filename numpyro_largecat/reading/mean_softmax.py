# SPDX-License-Identifier: Apache-2.0
"""The posterior predictive of a softmax by draws of its utilities, where these are Gaussian."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.handlers.closed_over_arrays import run_compiled
from numpyro_largecat.handlers.row_noise import apart_from_sites
from numpyro_largecat.ops.gaussian_softmax import (
    add_log_sums,
    log_mean_sigmoid,
    log_sums_of_others,
    stratified_normals,
)
from numpyro_largecat.ops.running_top import RunningTop
from numpyro_largecat.ops.top_and_rest import TopAndRest
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.eligible_classes import EligibleClasses
from numpyro_largecat.reading.gaussian_utilities import GaussianUtilities, Moments

NUM_TRIED = 4  # times as many classes as asked for
SumsAndMoments = tuple[Array, Moments]  # log sums over classes, and what some of these have


def log_mean_probs(gaussian: GaussianUtilities, classes: Array, keys: Array) -> Array:
    """Log posterior predictive of ``classes``, shape (..., n), over draws with these keys.

    For each draw the utility of a class itself is integrated out, and those of all others are
    drawn. One pass over the classes, or one for each draw if sites outside of the class plate are
    drawn too.
    """
    num_draws, noise_key = len(keys), apart_from_sites(keys[0])
    if not gaussian.is_drawn_outside:
        gaussian = gaussian.with_progress(1)
        by_draw = _log_probs_by_draw(gaussian, classes, None, noise_key, num_draws)
    else:
        gaussian = gaussian.with_progress(num_draws)
        noise_keys = jax.random.split(noise_key, num_draws)

        def of_draw(draw: tuple[Array, Array]) -> Array:
            return _log_probs_by_draw(gaussian, classes, *draw, 1)[0]

        by_draw = run_compiled(partial(lax.map, of_draw), (keys, noise_keys))
    return jax.nn.logsumexp(by_draw, axis=0) - jnp.log(num_draws)


def top_over_utilities(
    gaussian: GaussianUtilities, num_top: int, keys: Array, eligible: EligibleClasses
) -> tuple[Array, Array]:
    """The classes of the highest posterior predictive, and its log.

    They are looked for among ``NUM_TRIED`` times as many with the highest scores, the mean utility
    and the larger of a standard deviation and of what the variance adds to the mean exponential,
    half of it, and two standard deviations at most: a probability grows no more. One pass over the
    classes, and one more for each draw if sites outside of the class plate are drawn too.
    """
    utilities = gaussian.utilities
    num_tried = min(NUM_TRIED * num_top, utilities.num_categories)
    one_pass = gaussian.with_progress(1)
    if gaussian.is_drawn_outside:
        high, tried = _highest(one_pass, num_tried, eligible)
        log_probs = log_mean_probs(gaussian, tried, keys)
    else:
        high, tried, by_draw = _top_and_probs(one_pass, num_tried, keys, eligible)
        log_probs = jax.nn.logsumexp(by_draw, axis=0) - jnp.log(len(keys))
    best, place = lax.top_k(jnp.where(jnp.isfinite(high), log_probs, high), num_top)
    return jnp.take_along_axis(tried, place, axis=-1), best


def _highest(
    gaussian: GaussianUtilities, num_tried: int, eligible: EligibleClasses
) -> tuple[Array, Array]:
    """The highest scores and their classes."""
    utilities, slopes = gaussian.utilities, gaussian.slopes(None)

    def add(part: ChunkedUtilities, best: RunningTop, chunk: Array) -> RunningTop:
        moments, ids = gaussian.of_chunk(part, chunk, None, slopes)
        scores = _scores(moments.mean, jnp.sqrt(moments.variance))
        return best.include(eligible.only(scores, ids[0], utilities.num_categories), ids[0])

    shape, size = utilities.batch_shape, utilities.chunk_size
    start = RunningTop.start(shape, num_tried, size, utilities.dtype)
    found: tuple[Array, Array] = utilities.visit(add, start, RunningTop.merge).finish()
    return found


def _top_and_probs(
    gaussian: GaussianUtilities, num_tried: int, keys: Array, eligible: EligibleClasses
) -> tuple[Array, Array, Array]:
    """The same, and their log probabilities for each draw."""
    utilities, slopes = gaussian.utilities, gaussian.slopes(None)
    num_draws, noise_key = len(keys), apart_from_sites(keys[0])

    def draw(ids: Array) -> Array:
        return stratified_normals(noise_key, ids, num_draws, utilities.dtype)

    def add(part: ChunkedUtilities, found: TopAndRest, chunk: Array) -> TopAndRest:
        moments, ids = gaussian.of_chunk(part, chunk, None, slopes)
        scale = jnp.sqrt(moments.variance)
        scores = eligible.only(_scores(moments.mean, scale), ids[0], utilities.num_categories)
        return found.include(scores, moments.mean, scale, draw(ids), ids[0])

    sizes = utilities.num_visited, utilities.chunk_size
    start = TopAndRest.start(utilities.batch_shape, num_tried, num_draws, *sizes, utilities.dtype)
    found: TopAndRest = utilities.visit(add, start, TopAndRest.merge)
    finish = partial(TopAndRest.finish, num_top=num_tried, draw=draw)
    high, tried, (mean, scale, log_sums) = run_compiled(finish, found)
    return high, tried, _given_sums(log_sums, mean, scale, draw(tried))


def _scores(mean: Array, scale: Array) -> Array:
    return mean + scale * jnp.clip(scale / 2, 1, 2)


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
