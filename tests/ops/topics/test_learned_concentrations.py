# SPDX-License-Identifier: Apache-2.0
"""Concentrations that are learned are the most likely ones, where counts are known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import gammaln

from numpyro_largecat.ops.topics.learned_concentrations import (
    next_concentration,
    next_word_concentration,
)
from numpyro_largecat.ops.topics.presence import rises

CERTAIN = np.log(1e-12)  # log probability of absence of what is known to be there


def draw_counts(concentration, num_rows: int = 40, num_tokens: int = 50):
    rng = np.random.default_rng(0)
    return np.array(
        [rng.multinomial(num_tokens, rng.dirichlet(concentration)) for _ in range(num_rows)]
    )


def log_likelihood(concentration, counts) -> float:
    """Of Dirichlet-multinomial counts, up to what does not depend on the concentrations."""
    total = concentration.sum()
    own = (gammaln(concentration + counts) - gammaln(concentration)).sum()
    return own + (gammaln(total) - gammaln(total + counts.sum(axis=1))).sum()


def test_known_counts_give_the_most_likely_concentrations() -> None:
    counts = draw_counts([2.0, 0.5, 0.1])
    best = minimize(lambda x: -log_likelihood(np.exp(x), counts), np.zeros(3), tol=1e-10)
    found, absence = np.ones(3), np.where(counts > 0, CERTAIN, 0.0)
    for _ in range(2000):
        with np.errstate(invalid="ignore"):
            gains = np.where(counts > 0, rises(counts.astype(float), absence, found), 0)
        found = next_concentration(found, gains.sum(axis=0), counts.sum(axis=1))
    np.testing.assert_allclose(found, np.exp(best.x), rtol=1e-3)


def test_known_counts_give_the_most_likely_word_concentration() -> None:
    counts = draw_counts(np.full(8, 0.3))
    grid = np.linspace(0.05, 1, 2000)
    best = grid[np.argmax([log_likelihood(np.full(8, b), counts) for b in grid])]
    found, absence = 1.0, np.where(counts > 0, CERTAIN, 0.0)
    for _ in range(300):
        found = next_word_concentration(found, counts.T.astype(float), absence.T)
    assert found == pytest.approx(best, abs=1e-3)


def test_known_counts_give_the_most_likely_level_of_words_that_differ() -> None:
    """Whose proportions stay."""
    shape = np.linspace(0.2, 1.8, 8)
    counts, grid = draw_counts(0.3 * shape), np.linspace(0.05, 1, 2000)
    best = grid[np.argmax([log_likelihood(b * shape, counts) for b in grid])]
    found, absence = shape, np.where(counts > 0, CERTAIN, 0.0)
    for _ in range(300):
        found = next_word_concentration(found, counts.T.astype(float), absence.T)
    np.testing.assert_allclose(found / shape, best, atol=1e-3)


def test_a_topic_that_is_nowhere_keeps_a_concentration() -> None:
    found = next_concentration(np.array([0.1, 0.1]), np.array([3.0, 0.0]), np.array([5, 7]))
    assert found[1] > 0


def test_proportions_of_words_stay_at_the_least_level() -> None:
    """Where each topic has a word of its own alone."""
    shape = np.array([0.5, 1.0, 1.5])
    absence = np.where(np.eye(3), CERTAIN, 0.0)
    found = shape
    for _ in range(40):
        found = next_word_concentration(found, 1e6 * np.eye(3), absence)
    np.testing.assert_allclose(found / found[0], shape / shape[0])
    assert found.min() >= 1e-5 * (1 - 1e-9)
