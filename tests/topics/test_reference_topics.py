# SPDX-License-Identifier: Apache-2.0
"""The equations of the topic model's reference, each against another way to compute it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import softmax

from tests import reference_topics as reference

rng = np.random.default_rng(0)
LOG_PROBS = np.log(rng.dirichlet(np.ones(3), size=4))  # of 4 words in 3 topics
COUNTS = np.array([2.0, 1.0, 1.0, 3.0])
CONCENTRATION = np.array([0.3, 0.7, 0.2])
R = rng.dirichlet(np.ones(3), size=4)


def test_best_theta_gives_the_collapsed_bound() -> None:
    """Eqs. 47 and 48: at theta = a + N the second line is zero, and no theta is better."""
    best = CONCENTRATION + COUNTS @ R
    collapsed = reference.collapsed_bound(LOG_PROBS, COUNTS, CONCENTRATION, R)
    full = reference.full_bound(LOG_PROBS, COUNTS, CONCENTRATION, R, best)
    assert full == pytest.approx(collapsed, abs=1e-12)
    for _ in range(20):
        theta = best * np.exp(rng.normal(size=3) * 0.3)
        assert reference.full_bound(LOG_PROBS, COUNTS, CONCENTRATION, R, theta) < collapsed


def test_sweeps_end_at_a_maximum_below_the_evidence() -> None:
    """No numerical search from there finds more, and the sum over assignments is above it."""
    r, _, bounds = reference.solve_document(LOG_PROBS, COUNTS, CONCENTRATION, num_sweeps=2000)
    assert np.diff(bounds).min() > -1e-12

    def negative(logits):
        shares = softmax(logits.reshape(4, 3), axis=1)
        return -reference.collapsed_bound(LOG_PROBS, COUNTS, CONCENTRATION, shares)

    found = -minimize(negative, np.log(r).ravel()).fun
    assert found == pytest.approx(bounds[-1], abs=1e-7)
    assert bounds[-1] < reference.log_evidence(LOG_PROBS, COUNTS, CONCENTRATION)


def test_sparse_responsibilities_are_the_best_with_so_many_topics() -> None:
    """Eq. 8: of all pairs of topics, the two largest weights give the largest objective."""
    weights = LOG_PROBS[0] + np.array([0.1, -0.4, 0.3])
    r = reference.softmax_of_largest(weights[None], 2)[0]
    objective = r[r > 0] @ (weights - np.log(np.where(r > 0, r, 1)))[r > 0]
    pairs = [np.logaddexp(weights[i], weights[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert objective == pytest.approx(max(pairs))
