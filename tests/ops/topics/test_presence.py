# SPDX-License-Identifier: Apache-2.0
"""Expected counts are taken for what they are: how many, if there are any."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.special import gammaln, logsumexp

from numpyro_largecat.ops.topics.presence import (
    expected_topics,
    log_absence,
    log_rises,
    rises,
)
from tests import reference_topics as reference


def test_rare_topics_count_as_often_as_they_are_there() -> None:
    """A topic with a share of 1 % of one token is there once in a hundred times, with a token."""
    shares = np.array([0.01, 1.0])
    found = rises(shares, log_absence(shares), 0.1)
    np.testing.assert_allclose(found, np.array([0.01, 1.0]) / 0.1, rtol=1e-5)


@pytest.mark.parametrize("concentration", [0.01, 0.5, 3.0])
@pytest.mark.parametrize("size", [0.001, 0.1, 1.0])
def test_a_rise_is_between_that_of_the_mean_and_the_mean_of_rises(concentration, size) -> None:
    rng = np.random.default_rng(0)
    for shares in rng.uniform(0, size, (20, 6)):
        repeats = rng.integers(1, 4, 6)
        count, absent = repeats @ shares, repeats @ log_absence(shares)
        at_mean = gammaln(concentration + count) - gammaln(concentration)
        found = log_rises(count, absent, concentration)
        assert found == pytest.approx(reference.rise_if_any(concentration, shares, repeats))
        assert at_mean <= found + 1e-9
        assert found <= reference.rise_by_counting(concentration, shares, repeats) + 1e-9


def test_rises_are_derivatives() -> None:
    count, absent, a = 1.7, np.log(0.3), 0.4
    above, below = (log_rises(count, absent, a + step) for step in (1e-6, -1e-6))
    assert rises(count, absent, a) == pytest.approx((above - below) / 2e-6, rel=1e-6)


def test_concentrations_may_be_fewer_than_counts() -> None:
    counts, absence = np.array([1.5, 2.0, 3.0]), np.array([-2.0, -5.0, -0.5])
    few, which = np.array([0.1, 0.7]), np.array([1, 0, 1])
    for function in (log_rises, rises):
        found = function(counts, absence, few, which)
        np.testing.assert_array_equal(found, function(counts, absence, few[which]))


def test_the_bound_of_a_corpus_is_below_its_evidence() -> None:
    """Six tokens in two topics: by all 64 assignments, at any responsibilities."""
    documents = [(np.array([0, 1]), np.array([2, 1])), (np.array([1, 2]), np.array([1, 2]))]
    a, prior = np.array([0.3, 0.6]), np.array([[0.2, 0.1, 0.4], [0.3, 0.3, 0.3]])
    rng = np.random.default_rng(0)
    evidence = log_evidence(documents, a, prior)
    for sharpness in (0.1, 1.0, 10.0):
        found = [rng.dirichlet(np.full(2, 1 / sharpness), 2) for _ in documents]
        arguments = documents, found, a, prior
        value = reference.integrated_bound(*arguments)
        exact = reference.integrated_bound(*arguments, reference.rise_by_counting)
        assert exact < evidence
        assert value < exact + len(a) / 2  # of sums over words the mean of rises is the larger


def log_evidence(documents, concentration, prior) -> float:
    """log p(words), summed over all assignments of tokens to two topics."""
    tokens = [(d, v) for d, (words, c) in enumerate(documents) for v in np.repeat(words, c)]
    terms = []
    for z in itertools.product(range(len(concentration)), repeat=len(tokens)):
        of_documents, of_topics = np.zeros((2, 2)), np.zeros(prior.shape)
        for (d, v), k in zip(tokens, z, strict=True):
            of_documents[d, k] += 1
            of_topics[k, v] += 1
        pairs = [(concentration, row) for row in of_documents]
        pairs += list(zip(prior, of_topics, strict=True))
        terms.append(
            sum(reference.log_normalizer(p) - reference.log_normalizer(p + n) for p, n in pairs)
        )
    return float(logsumexp(terms))


URNS = [[2.5], [1e12], [0.1, 0.7, 3.0], [1e-30, 1e12], [1e4] * 999, [1e7] * 999, [1e12] * 999]


@pytest.mark.parametrize("concentration", URNS)
@pytest.mark.parametrize("num_tokens", [1, 3, 1000])
def test_expected_topics_are_those_of_an_urn(concentration, num_tokens) -> None:
    """Topic k is in none of n tokens with probability prod_i (A - a[k] + i) / (A + i)."""
    a, i = np.array(concentration), np.arange(num_tokens)
    none = ((a.sum() - a)[:, None] + i) / (a.sum() + i)
    expected = (1 - none.prod(axis=1)).sum()
    assert expected_topics(a, num_tokens) == pytest.approx(expected, rel=1e-3)
