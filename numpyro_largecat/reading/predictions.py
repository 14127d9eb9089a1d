# SPDX-License-Identifier: Apache-2.0
"""Predictions over all classes, chunk of classes by chunk; ``Fitted`` says what each means."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_in_range, check_integers, fits
from numpyro_largecat._conversions import NO_ID, as_array, as_ids
from numpyro_largecat.choices.error_families import GUMBEL
from numpyro_largecat.handlers.closed_over_arrays import run_compiled
from numpyro_largecat.handlers.row_noise import apart_from_sites
from numpyro_largecat.ops.choice_quadrature import choice_log_prob
from numpyro_largecat.ops.noisy_max import draw_gumbel
from numpyro_largecat.ops.running_top import RunningTop
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.eligible_classes import EligibleClasses
from numpyro_largecat.reading.gaussian_utilities import GaussianUtilities
from numpyro_largecat.reading.mean_softmax import log_mean_probs, top_over_utilities
from numpyro_largecat.reading.parts_of_classes import LogSums, merge_sums, own_utilities


class TopClasses(NamedTuple):
    """The most probable classes of each observation.

    Example:
        >>> import numpyro_largecat as lc
        >>> lc.TopClasses._fields
        ('classes', 'log_probs')
    """

    classes: Array  # (..., num_top), best first
    log_probs: Array  # (..., num_top), in nats, normalised over all K classes


def top_classes(
    utilities: ChunkedUtilities, num_top: int, keys: Array | None, eligible: EligibleClasses
) -> TopClasses:
    """The most probable classes over draws with these keys, or at the centre of the guide."""
    if utilities.has_no_rows:
        shape = (*utilities.batch_shape, num_top)
        return TopClasses(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, utilities.dtype))
    gaussian = None if keys is None else _gaussian(utilities)
    if gaussian is not None and keys is not None:
        top = _known_classes(*top_over_utilities(gaussian, num_top, keys, eligible))
    elif keys is not None:
        top = _top_over_draws(utilities, num_top, keys, eligible)
    elif utilities.family is GUMBEL:
        top = _top_of_softmax(utilities.with_progress(1), num_top, eligible)
    else:
        psi = utilities.with_progress(1).of_all_classes(None)
        own = eligible.only(psi, jnp.array(0), utilities.num_categories)
        best, classes = lax.top_k(own, num_top)
        log_probs = jnp.where(best == -jnp.inf, best, _log_probs(utilities, psi, classes))
        top = _known_classes(classes.astype(jnp.int32), jnp.where(jnp.isnan(best), best, log_probs))
    return top._replace(classes=jnp.where(top.log_probs == -jnp.inf, NO_ID, top.classes))


def log_likelihood(utilities: ChunkedUtilities, labels: Array, keys: Array | None) -> Array:
    """Log probabilities of observed classes, for each key, or at the centre of the guide."""
    if utilities.has_no_rows:
        return jnp.zeros(labels.shape if keys is None else (len(keys), *labels.shape))
    utilities = utilities.with_progress(1 if keys is None else len(keys))

    def of_draw(key: Array | None) -> Array:
        if utilities.family is not GUMBEL:
            log_probs = _log_prob(utilities, utilities.of_all_classes(key), labels)
        else:
            log_sum, observed = _normaliser(utilities, key, labels)
            log_probs = observed - log_sum
        is_class = (labels >= 0) & (labels < utilities.num_categories)
        return utilities.unless_masked(jnp.where(is_class, log_probs, jnp.nan))

    return of_draw(None) if keys is None else run_compiled(partial(lax.map, of_draw), keys)


def log_predictive(utilities: ChunkedUtilities, labels: Array, keys: Array) -> Array:
    """Log of the mean probabilities of observed classes over draws with these keys."""
    gaussian = None if utilities.has_no_rows else _gaussian(utilities)
    if gaussian is not None:
        log_probs = log_mean_probs(gaussian, labels, keys)
        is_class = (labels >= 0) & (labels < utilities.num_categories)
        return utilities.unless_masked(jnp.where(is_class, log_probs, jnp.nan))
    by_draw = log_likelihood(utilities, labels, keys)
    return jax.nn.logsumexp(by_draw, axis=0) - jnp.log(len(keys))


def draw_choices(utilities: ChunkedUtilities, keys: Array, shape: tuple[int, ...]) -> Array:
    """Draw a class for each key and observation; ``shape`` may repeat rows of the utilities."""
    if utilities.has_no_rows:
        return jnp.zeros((len(keys), *shape), jnp.int32)
    utilities = utilities.with_progress(len(keys))
    draw_noise = draw_gumbel if utilities.family is GUMBEL else utilities.family.sample

    def of_draw(key: Array) -> Array:
        noise_key = apart_from_sites(key)

        def add(part: ChunkedUtilities, best: RunningTop, chunk: Array) -> RunningTop:
            psi, classes = part.of_chunk(chunk, key)
            noise = draw_noise(jax.random.fold_in(noise_key, classes[0]), (*shape, psi.shape[-1]))
            return best.include(psi + noise.astype(psi.dtype), classes[0])

        start = RunningTop.start(shape, 1, utilities.chunk_size, utilities.dtype)
        values, classes = utilities.visit(add, start, RunningTop.merge).finish()
        return _known_classes(classes, values).classes[..., 0]

    drawn: Array = run_compiled(partial(lax.map, of_draw), keys)
    return drawn


def labels_of_rows(obs: ArrayLike, utilities: ChunkedUtilities) -> Array:
    """Labels with the shape of the choice; a model of one row may stand for many."""
    obs = as_array(obs)
    check_integers("obs", obs)
    check_in_range("`obs`", obs, utilities.num_categories, "classes")
    shape, batch_shape = jnp.shape(obs), utilities.batch_shape
    if len(shape) != len(batch_shape) or not fits(batch_shape, shape):
        need = f"a class for each row of the model's arguments, shape {batch_shape}"
        raise ValueError(f"`obs` must have {need}; got shape {shape}.")
    return as_ids(obs)


def _gaussian(utilities: ChunkedUtilities) -> GaussianUtilities | None:
    """The utilities of a softmax, if they are Gaussian."""
    return GaussianUtilities.of(utilities) if utilities.family is GUMBEL else None


def _top_of_softmax(
    utilities: ChunkedUtilities, num_top: int, eligible: EligibleClasses
) -> TopClasses:
    """Find the normaliser and the highest utilities in one pass."""
    Found = tuple[Array, RunningTop]

    def add(part: ChunkedUtilities, found: Found, chunk: Array) -> Found:
        log_sum, best = found
        psi, classes = part.of_chunk(chunk, None)
        log_sum = jnp.logaddexp(log_sum, jax.nn.logsumexp(psi, axis=-1))
        own = eligible.only(psi, classes[0], utilities.num_categories)
        return log_sum, best.include(own, classes[0])

    def merge(found: Found, other: Found) -> Found:
        return jnp.logaddexp(found[0], other[0]), found[1].merge(other[1])

    nothing = jnp.full(utilities.batch_shape, -jnp.inf, utilities.dtype)
    log_sum, top = utilities.visit(add, (nothing, _no_classes(utilities, num_top)), merge)
    values, classes = top.finish()
    return _known_classes(classes, values - log_sum[..., None])


def _top_over_draws(
    utilities: ChunkedUtilities, num_top: int, keys: Array, eligible: EligibleClasses
) -> TopClasses:
    """The highest mean softmax; of other errors the best of four times as many by it."""
    is_softmax = utilities.family is GUMBEL
    utilities = utilities.with_progress((2 if is_softmax else 3) * len(keys))
    if is_softmax:
        return _top_of_mean_softmax(utilities, num_top, keys, eligible)
    num_tried = min(4 * num_top, utilities.num_categories)
    tried, mean_softmax = _top_of_mean_softmax(utilities, num_tried, keys, eligible)

    def of_draw(key: Array) -> Array:
        return _log_probs(utilities, utilities.of_all_classes(key), tried)

    log_probs = jax.nn.logsumexp(run_compiled(partial(lax.map, of_draw), keys), axis=0) - jnp.log(
        len(keys)
    )
    log_probs = jnp.where(jnp.isfinite(mean_softmax), log_probs, mean_softmax)
    best, place = lax.top_k(log_probs, num_top)
    return _known_classes(jnp.take_along_axis(tried, place, axis=-1), best)


def _top_of_mean_softmax(
    utilities: ChunkedUtilities, num_top: int, keys: Array, eligible: EligibleClasses
) -> TopClasses:
    """Find the normalisers of all draws first, and then the mean probabilities of each chunk."""
    of_draw = partial(lax.map, lambda key: _normaliser(utilities, key, None)[0])
    log_sums = run_compiled(of_draw, keys)

    def add(part: ChunkedUtilities, best: RunningTop, chunk: Array) -> RunningTop:
        def add_draw(total: Array, draw: tuple[Array, Array]) -> tuple[Array, None]:
            key, log_sum = draw
            psi, _ = part.of_chunk(chunk, key)
            return jnp.logaddexp(total, psi - log_sum[..., None]), None

        shape = (*utilities.batch_shape, utilities.chunk_size)
        nothing = jnp.full(shape, -jnp.inf, utilities.dtype)
        total, _ = lax.scan(add_draw, nothing, (keys, log_sums))
        first = part.classes_of(chunk)[0]
        return best.include(eligible.only(total, first, utilities.num_categories), first)

    start = _no_classes(utilities, num_top)
    values, classes = utilities.visit(add, start, RunningTop.merge).finish()
    return _known_classes(classes, values - jnp.log(len(keys)))


def _known_classes(classes: Array, log_probs: Array) -> TopClasses:
    """Class -1 where the log probability is NaN, so that no class is taken for the best."""
    return TopClasses(jnp.where(jnp.isnan(log_probs), -1, classes), log_probs)


def _no_classes(utilities: ChunkedUtilities, num_top: int) -> RunningTop:
    return RunningTop.start(utilities.batch_shape, num_top, utilities.chunk_size, utilities.dtype)


def _normaliser(
    utilities: ChunkedUtilities, key: Array | None, labels: Array | None
) -> tuple[Array, Array]:
    """Log of the sum of exp(utility) over all classes, and the utilities of the labels."""
    shape = utilities.batch_shape if labels is None else labels.shape

    def add(part: ChunkedUtilities, found: LogSums, chunk: Array) -> LogSums:
        log_sum, observed = found
        psi, classes = part.of_chunk(chunk, key)
        if labels is not None:
            psi_of_rows = jnp.broadcast_to(psi, (*shape, psi.shape[-1]))
            observed = jnp.maximum(observed, own_utilities(psi_of_rows, labels, classes))
        return jnp.logaddexp(log_sum, jax.nn.logsumexp(psi, axis=-1)), observed

    nothing = jnp.full(utilities.batch_shape, -jnp.inf, utilities.dtype)
    start = (nothing, jnp.full(shape, -jnp.inf, utilities.dtype))
    return utilities.visit(add, start, merge_sums)


def _log_prob(utilities: ChunkedUtilities, psi: Array, labels: Array) -> Array:
    family = utilities.family
    return choice_log_prob(psi, labels, family.log_prob, family.log_cdf)


def _log_probs(utilities: ChunkedUtilities, psi: Array, classes: Array) -> Array:
    """Log probabilities of ``classes``, shape (..., n), one of the n after the other."""
    by_rank = lax.map(partial(_log_prob, utilities, psi), jnp.moveaxis(classes, -1, 0))
    return jnp.moveaxis(by_rank, 0, -1)
