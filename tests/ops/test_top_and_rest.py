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


def rest_by_hand(mean, scale, draws, classes):
    """Log sums of the draws of all classes but these, (T, N)."""
    values = mean + scale * draws[:, None]
    for n in range(N):
        values[:, n, classes[n]] = -np.inf
    return logsumexp(values, axis=-1)


start = jax.jit(TopAndRest.start, static_argnums=range(6))
include, merge = jax.jit(TopAndRest.include), jax.jit(TopAndRest.merge)


@partial(jax.jit, static_argnums=1)
def finish(found, num_top, draws):
    return found.finish(num_top, lambda ids: draws[:, ids])


def visit(mean, scale, draws, chunk_size, scores=None, parts=1):
    """Take in all classes, chunk by chunk, in so many parts that are merged."""
    scores = mean + scale if scores is None else scores
    num_classes, num_draws = mean.shape[1], len(draws)
    found = []
    for part in np.split(np.arange(0, num_classes, chunk_size), parts):
        own = start((N,), NUM_TOP, num_draws, num_classes, chunk_size, jnp.float32)
        for first in part:
            these = slice(first, first + chunk_size)
            chunk = [np.float32(x[:, these]) for x in (scores, mean, scale, draws)]
            own = include(own, *chunk, first)
        found.append(own)
    for own in found[1:]:
        found[0] = merge(found[0], own)
    best, classes, rest = jax.device_get(finish(found[0], NUM_TOP, np.float32(draws)))
    own_mean, own_scale, log_rest = rest
    np.testing.assert_array_equal(own_mean, np.take_along_axis(np.float32(mean), classes, 1))
    np.testing.assert_array_equal(own_scale, np.take_along_axis(np.float32(scale), classes, 1))
    return best, classes, log_rest


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("spread", [0.1, 3.0, 60.0])
@pytest.mark.parametrize("chunk_size", [16, 35, 240])
@pytest.mark.parametrize("num_draws", [3, 11])
def test_no_class_is_left_out_or_counted_twice(spread, chunk_size, num_draws):
    """With large standard deviations, sums of one draw are nothing beside those of another."""
    rng = np.random.default_rng(0)
    mean = np.round(spread * rng.normal(size=(N, 1680)), 1)
    scale = spread * rng.gamma(2, size=(N, 1680)) / 4
    draws = rng.normal(size=(num_draws, 1680))
    best, classes, log_rest = visit(mean, scale, draws, chunk_size)
    np.testing.assert_allclose(best, -np.sort(-(mean + scale))[:, :NUM_TOP], rtol=1e-5)
    np.testing.assert_allclose(log_rest, rest_by_hand(mean, scale, draws, classes), rtol=1e-4)


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_blocks_that_others_replace_are_added(order):
    """With rising scores all blocks of a chunk come before all that were kept."""
    mean = np.linspace(-3, 3, 640)[None].repeat(N, 0)
    mean = mean if order == "rising" else -mean
    draws = np.random.default_rng(0).normal(size=(2, 640))
    scale = np.full_like(mean, 0.5)
    _, classes, log_rest = visit(mean, scale, draws, 64)
    np.testing.assert_allclose(log_rest, rest_by_hand(mean, scale, draws, classes), rtol=1e-5)


def test_one_class_that_is_nearly_all_of_the_sum_takes_no_other_with_it():
    mean = np.zeros((N, 640))
    mean[:, 100] = 70.0
    draws, scale = np.zeros((2, 640)), np.zeros((N, 640))
    _, classes, log_rest = visit(mean, scale, draws, 64)
    assert (classes[:, 0] == 100).all()
    np.testing.assert_allclose(log_rest, np.log(640 - NUM_TOP), rtol=1e-5)


def test_a_block_far_below_an_uncertain_class_is_not_lost_when_it_leaves():
    """The first chunk's scores are of one class with a standard deviation of 50."""
    mean, scale = np.full((N, 160), -30.0), np.full((N, 160), 0.1)
    scale[:, 3], mean[:, 80:] = 50.0, -20.0
    draws = np.full((2, 160), -2.0)
    _, classes, log_rest = visit(mean, scale, draws, 16)
    np.testing.assert_allclose(log_rest, rest_by_hand(mean, scale, draws, classes), rtol=1e-5)


def test_classes_that_may_not_be_named_count():
    """Their scores are -inf; those that are not available have means of -inf."""
    rng = np.random.default_rng(0)
    mean, scale = rng.normal(size=(N, 640)), np.full((N, 640), 0.3)
    mean[:, 40:600] = -np.inf
    scores = np.where(np.arange(640) < 3, mean, -np.inf)
    draws = rng.normal(size=(2, 640))
    best, classes, log_rest = visit(mean, scale, draws, 64, scores)
    assert (np.sort(classes[:, :3], axis=1) == np.arange(3)).all()
    assert (best[:, 3] == -np.inf).all()
    np.testing.assert_allclose(log_rest, rest_by_hand(mean, scale, draws, classes), rtol=1e-4)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("num_top", [100, 480])
def test_of_many_classes_smaller_blocks_are_kept_and_no_more_than_there_are(num_top):
    rng = np.random.default_rng(0)
    mean, draws = rng.normal(size=(N, 480)), rng.normal(size=(2, 480))
    found = start((N,), num_top, 2, 480, 240, jnp.float32)
    assert found.mean.size <= 2 * N * 480
    chunks = np.split(np.float32(mean), 2, axis=1), np.split(np.float32(draws), 2, axis=1)
    for i, (m, z) in enumerate(zip(*chunks, strict=True)):
        found = include(found, m, m, np.ones_like(m), z, 240 * i)
    best, classes, (_, _, log_rest) = finish(found, num_top, draws)
    np.testing.assert_allclose(best, -np.sort(-mean)[:, :num_top], rtol=1e-6)
    expected = rest_by_hand(mean, np.ones_like(mean), draws, np.asarray(classes))
    np.testing.assert_allclose(log_rest, expected, rtol=1e-5)


def test_parts_can_be_merged():
    rng = np.random.default_rng(0)
    mean, scale = rng.normal(size=(N, 640)), rng.gamma(2, size=(N, 640))
    draws = rng.normal(size=(2, 640))
    whole = visit(mean, scale, draws, 64)
    merged = visit(mean, scale, draws, 64, parts=5)
    for one, other in zip(whole, merged, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_what_is_not_known_is_nan(nan):
    mean = np.zeros((N, 640))
    mean[1, 400] = nan
    _, _, log_rest = visit(mean, np.ones_like(mean), np.zeros((2, 640)), 64, np.zeros_like(mean))
    np.testing.assert_array_equal(np.isnan(log_rest).all(axis=0), [False, True, False])
