# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare, norm

from numpyro_largecat.ops import noisy_max as module
from numpyro_largecat.ops.noisy_max import noisy_max
from tests.memory import temp_bytes
from tests.reference import softmax_log_prob

FALSE_ALARM = 1e-5  # how often a correct program fails a random check
DRAWS = 20_000


def check_frequencies(draws, utilities):
    counts = np.bincount(np.asarray(draws).ravel(), minlength=len(utilities))
    assert counts.shape == (len(utilities),)
    probs = np.exp([softmax_log_prob(utilities, k) for k in range(len(utilities))])
    assert chisquare(counts, counts.sum() * probs / probs.sum()).pvalue > FALSE_ALARM


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_frequencies_are_softmax_whatever_the_chunk(monkeypatch, chunk):
    """6 classes, also in chunks that do not divide them: no class is missed or drawn twice."""
    monkeypatch.setattr(module, "MAX_NOISE_ENTRIES", chunk * DRAWS)
    utilities = np.array([1.5, 0.0, 0.5, -1.0, 2.0, 1.0])
    draws = noisy_max(jax.random.key(0), jnp.array(utilities), sample_shape=(DRAWS,))
    check_frequencies(draws, utilities)


def test_chunks_have_noise_of_their_own(monkeypatch):
    """Shared noise would tie classes of several chunks, and the first would always win."""
    monkeypatch.setattr(module, "MAX_NOISE_ENTRIES", 4 * DRAWS)
    utilities = np.zeros(9)
    draws = noisy_max(jax.random.key(1), jnp.array(utilities), sample_shape=(DRAWS,))
    check_frequencies(draws, utilities)


def test_rows_of_a_batch_are_drawn_from_their_own_utilities():
    utilities = np.array([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    draws = noisy_max(jax.random.key(2), jnp.array(utilities), sample_shape=(100, 200))
    assert draws.shape == (100, 200, 2)
    assert draws.dtype == jnp.int32
    for row in range(2):
        check_frequencies(draws[..., row], utilities[row])
    together = (draws[..., 0] == 2) & (draws[..., 1] == 0)
    apart = float((draws[..., 0] == 2).mean() * (draws[..., 1] == 0).mean())
    tolerance = norm.isf(FALSE_ALARM / 2) * math.sqrt(apart * (1 - apart) / DRAWS)
    assert abs(float(together.mean()) - apart) < 2 * tolerance  # rows are independent


def test_the_only_possible_class_is_drawn(monkeypatch):
    """In the first, the middle and the overlapping last chunk."""
    monkeypatch.setattr(module, "MAX_NOISE_ENTRIES", 2 * 50 * 5)
    utilities = jnp.where(jnp.eye(5, dtype=bool), -1e4, -jnp.inf)
    draws = noisy_max(jax.random.key(3), utilities, sample_shape=(50,))
    np.testing.assert_array_equal(draws, np.broadcast_to(np.arange(5), (50, 5)))


@pytest.mark.slow
def test_many_classes_in_half_precision_are_drawn_equally_often():
    """Coarse noise would give ties at its largest value, and ties go to the first class.

    2048 classes in float16 stand for 2**24 in float32, where 2**-23 is the grid of uniform draws.
    """
    draws = noisy_max(jax.random.key(4), jnp.zeros(2048, jnp.float16), sample_shape=(4000,))
    share = float((draws < 1024).mean())
    assert abs(share - 0.5) < norm.isf(FALSE_ALARM / 2) * 0.5 / math.sqrt(4000)


def test_float64_utilities_decide_where_float32_would_tie(x64):
    """At 1e10 float32 cannot tell utilities apart that differ by 100."""
    utilities = jnp.array([1e10, 1e10 + 100, 1e10 - 100])
    assert utilities.dtype == jnp.float64
    draws = noisy_max(jax.random.key(5), utilities, sample_shape=(200,))
    np.testing.assert_array_equal(draws, 1)


def test_scratch_memory_is_bounded_for_many_draws_of_many_classes():
    """10**9 noise variables, 4 GB at once, need less than a tenth of that."""
    utilities = jax.ShapeDtypeStruct((10**5,), jnp.float32)

    def draw(key, utilities):
        return noisy_max(key, utilities, sample_shape=(10**4,))

    assert temp_bytes(draw, jax.random.key(0), utilities) < 400e6
