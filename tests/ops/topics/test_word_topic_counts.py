# SPDX-License-Identifier: Apache-2.0
"""Expected counts of words in topics against sums over explicit responsibilities."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.document_fit import fit_documents
from numpyro_largecat.ops.topics.word_topic_counts import word_topic_counts
from tests import reference_topics as reference

rng = np.random.default_rng(3)
LOG_PROBS = np.log(rng.dirichlet(np.full(40, 0.1), size=50).T + 1e-9)
WORDS = np.array([rng.permutation(40)[:15] for _ in range(20)])
COUNTS = rng.integers(0, 4, size=(20, 15)).astype(float)
CONCENTRATION = np.full(50, 0.02)


@pytest.mark.parametrize("num_active", [1, 3, 40, 50])
@pytest.mark.usefixtures("x64")
@pytest.mark.some_cases(1)
def test_counts_are_sums_of_responsibilities(num_active: int) -> None:
    """For few topics a word and for many, which are added in different ways."""
    effort = Effort(60, 1e-6, 2)
    basis = np.asarray(
        fit_documents(
            LOG_PROBS, CONCENTRATION, WORDS, COUNTS, num_active=num_active, effort=effort
        ).basis
    )
    scale = rng.uniform(size=20)
    expected = np.zeros_like(LOG_PROBS)
    for d in range(20):
        weights = np.where(basis[d] > 0, reference.digamma(CONCENTRATION + basis[d]), -np.inf)
        r = reference.softmax_of_largest(LOG_PROBS[WORDS[d]] + weights, num_active)
        np.add.at(expected, WORDS[d], scale[d] * COUNTS[d][:, None] * r)
    found = word_topic_counts(
        LOG_PROBS,
        CONCENTRATION,
        WORDS,
        COUNTS,
        basis,
        num_active=num_active,
        scale=jnp.asarray(scale),
    )
    np.testing.assert_allclose(found, expected, atol=1e-9)
