# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_largecat.ops.random_rounding import round_to_bfloat16

rng = np.random.default_rng(0)
SIZES = 10.0 ** rng.uniform(-30, 30, size=200)
NUMBERS = (rng.choice([-1, 1], size=200) * SIZES).astype(np.float32)
rounding = jax.jit(round_to_bfloat16)
NUM_SALTS = 4000
FALSE_ALARM = 5e-5  # how often correct random bits fail a comparison of many means
STANDARD_ERRORS = 5.8  # of the farthest of 200


@pytest.fixture(scope="module")
def rounded():
    """Each number under many salts, (salts, numbers), in float64."""
    each = jax.jit(jax.vmap(round_to_bfloat16, in_axes=(None, 0)))
    salts = np.random.default_rng(1).integers(2**32, size=NUM_SALTS, dtype=np.uint32)
    return np.asarray(each(NUMBERS, salts)).astype(np.float64)


def neighbours():
    """The numbers of bfloat16 next to each, towards zero and away from it."""
    bits = NUMBERS.view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32), (bits + np.uint32(1 << 16)).view(np.float32)


def share_away(rounded):
    """Where numbers were rounded away from zero."""
    return np.abs(rounded) > np.abs(NUMBERS.astype(np.float64))


def test_results_are_the_neighbours(rounded):
    below, above = neighbours()
    assert ((rounded == below) | (rounded == above)).all()


def test_the_mean_is_the_number(rounded):
    """FALSE_ALARM of the farthest mean."""
    below, above = (x.astype(np.float64) for x in neighbours())
    p = (NUMBERS - below) / (above - below)
    error = (rounded.mean(axis=0) - NUMBERS) / np.abs(above - below)
    standard_error = np.sqrt(np.maximum(p * (1 - p), 1e-3) / NUM_SALTS)
    assert (np.abs(error) < STANDARD_ERRORS * standard_error).all()


def test_draws_of_neighbouring_salts_and_of_numbers_are_independent(rounded):
    """FALSE_ALARM of the farthest of 200 correlations."""
    away = share_away(rounded) - share_away(rounded).mean(axis=0)
    scale = (away**2).mean(axis=0)
    of_salts = (away[1:] * away[:-1]).mean(axis=0) / scale
    of_numbers = (away[:, 1:] * away[:, :-1]).mean(axis=0) / np.sqrt(scale[1:] * scale[:-1])
    for correlation in (of_salts, of_numbers):
        assert np.abs(correlation).max() < STANDARD_ERRORS / np.sqrt(NUM_SALTS)


def test_equal_numbers_are_rounded_independently():
    """FALSE_ALARM of ten counts among 10,000 equal numbers, of which one in 16 goes up."""
    number = np.float32(1 + 2.0**-7 / 16)
    for salt in range(5):
        found = np.asarray(rounding(np.full((100, 100), number), salt), float)
        is_up = found > 1
        assert abs(is_up.mean() - 1 / 16) < 4.8 * np.sqrt(1 / 16 * 15 / 16) / 100
        together = (is_up[1:] & is_up[:-1]).mean()
        assert abs(together - 1 / 256) < 4.8 / 16 / 100


def test_what_bfloat16_holds_stays():
    exact = np.array([0, -0.0, 1, -1.5, 2.0**-130, np.inf, -np.inf, np.nan], np.float32)
    found = np.asarray(rounding(exact, 3)).astype(np.float32)
    np.testing.assert_array_equal(found, exact)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(exact))


def test_finite_numbers_stay_finite():
    largest = np.finfo(np.float32).max
    found = np.asarray(rounding(np.tile([largest, -largest], 100), 0), float)
    np.testing.assert_array_equal(np.abs(found), float(jnp.finfo(jnp.bfloat16).max))


def test_small_steps_are_not_lost():
    """A thousand steps of 1e-4 from 1 on, of which bfloat16 sees none; FALSE_ALARM.

    The last place is 2**-7, so an end has a deviation of at most sqrt(1000) 2**-8 = 0.12.
    """

    def step(x, salt):
        return round_to_bfloat16(x.astype(jnp.float32) + 1e-4, salt), None

    start = np.ones(5000, jnp.bfloat16)
    salts = np.random.default_rng(2).integers(2**32, size=1000, dtype=np.uint32)
    end = jax.lax.scan(step, start, salts)[0]
    moved = np.asarray(end, np.float64) - 1
    assert abs(moved.mean() - 0.1) < 4.5 * 0.12 / np.sqrt(5000)
    nearest = jax.lax.scan(lambda x, _: (x + jnp.bfloat16(1e-4), None), start[:2], None, 1000)[0]
    np.testing.assert_array_equal(nearest, start[:2])


def test_double_precision_is_taken(x64):
    found = rounding(np.array([1 + 2.0**-40, 3.0]), 0)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found, float), [1.0, 3.0])
