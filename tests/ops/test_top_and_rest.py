# SPDX-License-Identifier: Apache-2.0
"""The highest classes and the sums of all others, beside sums over all classes at once."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from numpyro_largecat.ops.top_and_rest import TopAndRest

N, NUM_TOP = 3, 4
start = jax.jit(TopAndRest.start, static_argnums=range(5))
include = jax.jit(TopAndRest.include, static_argnums=1)
merge = jax.jit(TopAndRest.merge)


def score_of_moments(mean, variance, ids):
    return mean + jnp.sqrt(variance)


@partial(jax.jit, static_argnums=(1, 3))
def finish(found, num_top, draws, score):
    return found.finish(num_top, score, lambda ids: draws[:, ids])


def taken_in(mean, variance, chunk_size, score=score_of_moments, parts=1, num_top=NUM_TOP):
    """Take in all classes, chunk by chunk, in so many parts that are merged."""
    num_classes = mean.shape[1]
    found = []
    for part in np.split(np.arange(0, num_classes, chunk_size), parts):
        own = start((N,), num_top, num_classes, chunk_size, jnp.float32)
        for first in part:
            these = slice(first, first + chunk_size)
            moments = (np.float32(x[:, these]) for x in (mean, variance))
            own = include(own, score, *moments, first, num_classes)
        found.append(own)
    for own in found[1:]:
        found[0] = merge(found[0], own)
    return jax.device_get(found[0])


def are_in_blocks(found, num_classes):
    """Which classes are in the blocks that are kept, (N, K)."""
    are_in = np.zeros((N, num_classes), bool)
    ids = found.top.first[..., None] + np.arange(found.variance.shape[-1])
    np.put_along_axis(are_in, ids.reshape(N, -1), True, axis=1)
    return are_in


def assert_rest_is_that_of_all_others(found, mean, variance, rtol=1e-4):
    """Log mean and variance of the sum over all classes that are in no block."""
    are_in = are_in_blocks(found, mean.shape[1])
    log_means = np.where(are_in, -np.inf, mean + variance / 2)
    with np.errstate(divide="ignore"):  # a variance of 0
        log_variances = 2 * (mean + variance) + np.log(-np.expm1(-variance))
    log_variances = np.where(are_in, -np.inf, log_variances)
    np.testing.assert_allclose(found.rest.mean, logsumexp(log_means, axis=1), rtol=rtol)
    np.testing.assert_allclose(found.rest.variance, logsumexp(log_variances, axis=1), rtol=rtol)


def assert_others_are_all_but(found, mean, variance, draws, rtol=1e-4, score=score_of_moments):
    """Of the highest classes their moments, and the log sums of all others."""
    best, classes, own_mean, own_variance, log_sums = jax.device_get(
        finish(found, NUM_TOP, np.float32(draws), score)
    )
    np.testing.assert_array_equal(own_mean, np.take_along_axis(np.float32(mean), classes, 1))
    taken = np.take_along_axis(np.float32(variance), classes, 1)
    np.testing.assert_array_equal(own_variance, taken)
    values = mean + np.sqrt(variance) * draws[:, None]
    are_drawn = are_in_blocks(found, mean.shape[1])
    np.put_along_axis(are_drawn, classes, False, axis=1)
    drawn = logsumexp(np.where(are_drawn, values, -np.inf), axis=-1)
    np.testing.assert_allclose(log_sums, np.logaddexp(found.rest.mean, drawn), rtol=rtol)
    return best, classes, log_sums


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("spread", [0.1, 3.0, 60.0])
@pytest.mark.parametrize("chunk_size", [16, 35, 240])
def test_no_class_is_left_out_or_counted_twice(spread, chunk_size):
    """With large standard deviations, some classes are nothing beside the mean of others."""
    rng = np.random.default_rng(0)
    mean = np.round(spread * rng.normal(size=(N, 1680)), 1)
    variance = (spread * rng.gamma(2, size=(N, 1680)) / 4) ** 2
    draws = rng.normal(size=(3, 1680))
    found = taken_in(mean, variance, chunk_size)
    assert_rest_is_that_of_all_others(found, mean, variance)
    best, _, _ = assert_others_are_all_but(found, mean, variance, draws)
    expected = -np.sort(-(mean + np.sqrt(variance)))[:, :NUM_TOP]
    np.testing.assert_allclose(best, expected, rtol=1e-5)


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_blocks_that_others_replace_are_added(order):
    """With rising scores all blocks of a chunk come before all that were kept."""
    mean = np.linspace(-3, 3, 640)[None].repeat(N, 0)
    mean = mean if order == "rising" else -mean
    variance = np.full_like(mean, 0.25)
    found = taken_in(mean, variance, 64)
    assert_rest_is_that_of_all_others(found, mean, variance)


def test_one_class_that_is_nearly_all_of_the_sum_takes_no_other_with_it():
    mean, variance = np.zeros((N, 640)), np.zeros((N, 640))
    mean[:, 100] = 70.0
    found = taken_in(mean, variance, 64)
    _, classes, log_sums = assert_others_are_all_but(found, mean, variance, np.zeros((2, 640)))
    assert (classes[:, 0] == 100).all()
    np.testing.assert_allclose(log_sums, np.log(640 - NUM_TOP), rtol=1e-5)


def test_a_sum_without_variance_has_none_but_rounding():
    found = taken_in(np.zeros((N, 640)), np.zeros((N, 640)), 64)
    assert (found.rest.variance - 2 * found.rest.mean < np.log(1e-6)).all()


def test_the_variance_is_that_of_draws():
    """Of 20,000 draws; a right program is off by 4 % once in 10,000 runs."""
    rng = np.random.default_rng(0)
    mean, variance = rng.normal(size=(N, 160)), rng.gamma(2, size=(N, 160)) / 8
    found = taken_in(mean, variance, 16)
    values = mean + np.sqrt(variance) * rng.normal(size=(20_000, 1, 160))
    sums = np.where(are_in_blocks(found, 160), 0, np.exp(values)).sum(-1)
    np.testing.assert_allclose(np.exp(found.rest.mean), sums.mean(0), rtol=0.01)
    np.testing.assert_allclose(np.exp(found.rest.variance), sums.var(0), rtol=0.06)


def test_classes_that_may_not_be_named_count():
    """Their scores are -inf; those that are not available have means of -inf."""
    rng = np.random.default_rng(0)
    mean, variance = rng.normal(size=(N, 640)), np.full((N, 640), 0.1)
    mean[:, 40:600] = -np.inf

    def score(mean, variance, ids):
        return jnp.where(ids < 3, mean, -jnp.inf)

    found = taken_in(mean, variance, 64, score)
    draws = rng.normal(size=(2, 640))
    best, classes, _ = assert_others_are_all_but(found, mean, variance, draws, score=score)
    assert (np.sort(classes[:, :3], axis=1) == np.arange(3)).all()
    assert (best[:, 3] == -np.inf).all()
    assert_rest_is_that_of_all_others(found, mean, variance)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("num_top", [100, 480])
def test_of_many_classes_smaller_blocks_are_kept_and_no_more_than_there_are(num_top):
    mean = np.random.default_rng(0).normal(size=(N, 480))
    found = taken_in(mean, np.ones_like(mean), 240, num_top=num_top)
    assert found.variance.size <= 2 * N * 480
    best, *_ = finish(found, num_top, np.zeros((2, 480), np.float32), score_of_moments)
    np.testing.assert_allclose(best, 1 - np.sort(-mean)[:, :num_top], atol=1e-6)
    if num_top < 480:
        assert_rest_is_that_of_all_others(found, mean, np.ones_like(mean))


def test_parts_can_be_merged():
    rng = np.random.default_rng(0)
    mean, variance = rng.normal(size=(N, 640)), rng.gamma(2, size=(N, 640))
    whole, merged = (taken_in(mean, variance, 64, parts=parts) for parts in (1, 5))
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(merged), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_what_is_not_known_is_nan(nan):
    mean = np.zeros((N, 640))
    mean[1, 400] = nan
    found = taken_in(mean, np.ones_like(mean), 64, lambda mean, variance, ids: variance)
    np.testing.assert_array_equal(np.isnan(found.rest.mean), [False, True, False])


def test_what_fills_a_chunk_is_no_class():
    """Also where another part goes on with its ids, as classes on other devices do."""
    mean = np.zeros((N, 64), np.float32)
    mean[:, 40:] = -np.inf  # 40 classes, and the next part has those from 40 on

    def score(mean, variance, ids):
        return jnp.where(ids == 45, jnp.inf, mean)

    first = start((N,), NUM_TOP, 128, 64, jnp.float32)
    first = include(first, score, mean, np.ones_like(mean), 0, 40)
    best, classes, *_ = finish(first, 64, np.zeros((2, 128), np.float32), score)
    assert (classes[:, 40:] == -1).all()
    assert (best[:, :40] == 0).all()
    other = start((N,), NUM_TOP, 128, 64, jnp.float32)
    other = include(other, score, np.full_like(mean, -3.0), np.ones_like(mean), 40, 104)
    best, classes, own_mean, *_ = finish(
        merge(first, other), NUM_TOP, np.zeros((2, 128), np.float32), score
    )
    assert (classes[:, 0] == 45).all()
    assert (own_mean[:, 0] == -3).all()
