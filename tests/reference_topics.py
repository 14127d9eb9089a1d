# SPDX-License-Identifier: Apache-2.0
"""Slow, obvious versions of the topic model's mathematics, in NumPy and float64."""

from __future__ import annotations

import itertools

import numpy as np
from scipy.special import digamma, gammaln, logsumexp


def log_normalizer(concentration):
    """Eq. 49."""
    return gammaln(concentration.sum()) - gammaln(concentration).sum()


def expected_log(concentration):
    """E[log p] under a Dirichlet, over the last axis (Eq. 10)."""
    concentration = np.asarray(concentration)
    return digamma(concentration) - digamma(concentration.sum(-1, keepdims=True))


def full_bound(log_probs, word_counts, concentration, responsibilities, theta):
    """Eqs. 42 to 49 for one document, term by term, at any q(z) and q(pi).

    log_probs (U, K), word_counts (U,), concentration and theta (K,), responsibilities (U, K).
    The entropy sums over topics too, which Eq. 46 leaves out as printed.
    """
    r, c = responsibilities, word_counts
    used = r > 0
    data = (c[:, None] * r)[used] @ log_probs[used]
    entropy = -((c[:, None] * r)[used] @ np.log(r[used]))
    counts = c @ r
    allocation = (
        log_normalizer(concentration)
        - log_normalizer(theta)
        + (counts + concentration - theta) @ expected_log(theta)
    )
    return data + entropy + allocation


def collapsed_bound(log_probs, word_counts, concentration, responsibilities):
    """The bound at the best theta, a + N: the second line of Eq. 48 is gone."""
    r, c = responsibilities, word_counts
    counts = c @ r
    used = r > 0
    words = (c[:, None] * r)[used] @ (log_probs[used] - np.log(r[used]))
    return words + log_normalizer(concentration) - log_normalizer(concentration + counts)


def rise_if_any(concentration, shares, repeats):
    """Lower bound of E log(Gamma(a + n) / Gamma(a)), n of tokens with these shares of a topic.

    Jensen's inequality given that there is a token; shares and repeats have the same shape.
    """
    absent = np.prod((1 - np.minimum(shares, 1 - 1e-6)) ** repeats)
    if absent == 1:
        return 0.0
    if_any = repeats @ shares / (1 - absent)
    return (1 - absent) * (gammaln(concentration + if_any) - gammaln(concentration))


def rise_by_counting(concentration, shares, repeats):
    """E log(Gamma(a + n) / Gamma(a)) itself, from the distribution of n."""
    distribution = np.ones(1)
    for share in np.repeat(shares, repeats):
        distribution = np.convolve(distribution, [1 - share, share])
    n = np.arange(len(distribution))
    return distribution @ (gammaln(concentration + n) - gammaln(concentration))


def integrated_bound(documents, responsibilities, concentration, prior, rise=rise_if_any):
    """Of a corpus with topics and frequencies integrated out, q(z) the responsibilities (U, K)."""
    value, num_topics = 0.0, len(concentration)
    for (_, c), r in zip(documents, responsibilities, strict=True):
        value += gammaln(concentration.sum()) - gammaln(concentration.sum() + c.sum())
        value += sum(rise(concentration[k], r[:, k], c) for k in range(num_topics))
        value -= (c[:, None] * r)[r > 0] @ np.log(r[r > 0])
    words = np.concatenate([words for words, _ in documents])
    counts = np.concatenate([c for _, c in documents])
    shares = np.concatenate(responsibilities)
    for k, of_words in enumerate(prior):
        for v in np.unique(words):
            value += rise(of_words[v], shares[words == v, k], counts[words == v])
        value -= rise(of_words.sum(), shares[:, k], counts)
    return value


def softmax_of_largest(weights, num_active):
    """Alg. 1, right: the best responsibilities with at most L above zero; ties by position."""
    last = np.sort(weights, axis=1)[:, -num_active, None]
    above, tied = weights > last, weights == last
    room = num_active - above.sum(axis=1, keepdims=True)
    kept = above | (tied & (np.cumsum(tied, axis=1) <= room))
    kept &= weights > -np.inf
    return np.exp(np.where(kept, weights, -np.inf) - logsumexp(weights, 1, kept, True))


def solve_document(log_probs, word_counts, concentration, *, num_active=None, num_sweeps=100):
    """Alg. 2 for one document, with the selection in every sweep.

    Returns:
        Responsibilities (U, K), counts (K,), and the bound after each sweep.
    """
    num_active = log_probs.shape[1] if num_active is None else num_active
    with np.errstate(divide="ignore"):
        start = np.log(concentration / concentration.sum())
    r = softmax_of_largest(log_probs + start, num_active)
    bounds = []
    for _ in range(num_sweeps):
        counts = word_counts @ r
        r = softmax_of_largest(log_probs + digamma(concentration + counts), num_active)
        bounds.append(collapsed_bound(log_probs, word_counts, concentration, r))
    return r, word_counts @ r, np.array(bounds)


def collapsed_document(probs, word_counts, concentration, num_sweeps=100):
    """CVB0 for one document, a token of each word: responsibilities (U, K) of probs (U, K)."""
    r, first = np.zeros_like(probs), probs * concentration
    counts = word_counts @ (first / first.sum(axis=1, keepdims=True))
    for _ in range(num_sweeps):
        r = probs * (concentration + counts - r)
        r /= r.sum(axis=1, keepdims=True)
        counts = word_counts @ r
    return r


def restart_document(log_probs, word_counts, concentration, topic, counts, num_sweeps=100):
    """A restart proposal: ``topic`` leaves the document for good, and the rest converges."""
    kept = np.arange(len(counts)) != topic
    counts = np.where(kept, counts, 0)
    for _ in range(num_sweeps):
        weights = log_probs + np.where(kept, digamma(concentration + counts), -np.inf)
        r = softmax_of_largest(weights, len(counts))
        counts = word_counts @ r
    return collapsed_bound(log_probs, word_counts, concentration, r)


def log_evidence(log_probs, word_counts, concentration):
    """log p(document), summed over all assignments of its tokens to topics."""
    tokens = np.repeat(np.arange(len(word_counts)), word_counts.astype(int))
    num_topics = len(concentration)
    terms = []
    for z in itertools.product(range(num_topics), repeat=len(tokens)):
        counts = np.bincount(z, minlength=num_topics)
        prior = log_normalizer(concentration) - log_normalizer(concentration + counts)
        terms.append(prior + sum(log_probs[u, k] for u, k in zip(tokens, z, strict=True)))
    return logsumexp(terms)


def topic_term(prior, posterior):
    """The part of Eq. 35 that is about topics, at S = posterior - prior, (K, V)."""
    prior = np.full(posterior.shape[1], prior)
    return sum(log_normalizer(prior) - log_normalizer(row) for row in posterior)


def completion_score(topics, concentration, seen, seen_counts, unseen, unseen_counts):
    """Document completion: log likelihood of the unseen part, and its tokens."""
    r = collapsed_document(topics[:, seen].T, seen_counts, concentration)
    frequencies = seen_counts @ r + concentration
    frequencies /= frequencies.sum()
    return unseen_counts @ np.log(frequencies @ topics[:, unseen]), unseen_counts.sum()


def npmi(documents, words, num_docs):
    """Mean normalised pointwise mutual information of pairs of words, over documents."""
    scores = []
    for i, j in itertools.combinations(words, 2):
        p_i, p_j = (np.mean([w in d for d in documents]) for w in (i, j))
        p_ij = np.mean([i in d and j in d for d in documents])
        if p_ij == 0:
            scores.append(-1.0)
        elif p_ij == 1:
            scores.append(1.0)
        else:
            scores.append(np.log(p_ij / (p_i * p_j)) / -np.log(p_ij))
    return float(np.mean(scores))
