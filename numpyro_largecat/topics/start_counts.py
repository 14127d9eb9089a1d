# SPDX-License-Identifier: Apache-2.0
"""Where the learning of topics starts: expected counts of words in topics, (V, K)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import digamma, polygamma

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.topics.word_prior import WordPrior

CANDIDATES_PER_TOPIC = 10
SMOOTHING = 0.1  # of a chosen document with the words of all, for the divergence
# A topic that starts with one document's words alone keeps to them, since E[log phi] of all others
# is far too low; more so where it has few tokens compared to the prior. See docs/topics.md.
START_SMOOTHING = 0.9  # of a chosen document with the words of all, where topics start
START_TOKENS = 4  # times the tokens that each topic would have of the corpus


def start_from_documents(
    rng: np.random.Generator, corpus: Corpus, num_topics: int, prior: WordPrior
) -> NDArray[np.float64]:
    r"""Each topic starts as one document, far from the others (k-means++ with Bregman divergence).

    With phi_j a mixture of the words of the j-th chosen document and, a tenth, those of all
    documents, the next one is drawn with probability proportional to the least divergence from
    those chosen,

    .. math:: \min_j \sum_v c_{dv} \log \frac{c_{dv} / n_d}{\phi_{jv}}.

    The topic itself is a mixture of the same kind, nine tenths of all documents, with four times
    the tokens that each topic would have of the corpus; they leave with the first pass. A topic
    whose prior favours some words has these in place of its document.

    Cost: O(K) passes over the entries of at most 10 K candidates, drawn at random.
    """
    filled = np.flatnonzero(np.diff(corpus.offsets))
    size = min(len(filled), CANDIDATES_PER_TOPIC * num_topics)
    some = corpus[np.sort(rng.choice(filled, size=size, replace=False))]
    words, counts = some.words, some.counts.astype(float)
    owner = np.repeat(np.arange(size), np.diff(some.offsets))
    lengths = np.bincount(owner, counts, size)
    entropy = np.bincount(owner, counts * np.log(counts / lengths[owner]), size)
    everywhere = np.bincount(words, counts, corpus.num_words) / counts.sum()
    rows = csr_array((counts, words, some.offsets), (size, corpus.num_words))
    least = np.full(size, np.inf)
    table = np.zeros((corpus.num_words, num_topics))
    choice = int(rng.integers(size))
    for k in range(num_topics):
        own, own_counts = some[choice]
        np.add.at(table[:, k], own, own_counts)
        probs = (1 - SMOOTHING) * table[:, k] / lengths[choice] + SMOOTHING * everywhere
        log_probs = np.log(probs, out=np.zeros_like(probs), where=probs > 0)
        divergence = entropy - rows @ log_probs
        least = np.minimum(least, np.maximum(divergence, 0))
        least[choice] = 0
        total = least.sum()
        if total > 0:
            choice = int(rng.choice(size, p=least / total))
        else:  # fewer different documents than topics
            choice = int(rng.integers(size))
    own, favoured = _favoured_words(prior)
    table[:, own] = favoured
    return _around(everywhere, table, START_TOKENS * corpus.num_tokens / num_topics)


def start_at_random(
    rng: np.random.Generator, corpus: Corpus, num_topics: int, prior: WordPrior
) -> NDArray[np.float64]:
    """Divide the tokens of each word at random among the topics.

    A topic whose prior favours some words has these instead, as in ``start_from_documents``.
    """
    totals = np.bincount(corpus.words, corpus.counts, corpus.num_words)
    shares = rng.gamma(1.0, size=(corpus.num_words, num_topics))
    table = totals[:, None] * shares / shares.sum(axis=1, keepdims=True)
    own, favoured = _favoured_words(prior)
    if len(own):
        size = START_TOKENS * corpus.num_tokens / num_topics
        table[:, own] = _around(totals / totals.sum(), favoured, size)
    return table


def start_of_new_words(prior: WordPrior, num_known: int, *, by_log: bool) -> NDArray[np.float64]:
    r"""Words from a number on are as likely in one topic as in any other.

    By their prior alone they are likelier the less is known of a topic: those of few tokens would
    have them at first, and would then be about them. With :math:`T_k` the concentrations of the
    words that topic k knows, and :math:`a_{vk}` that of a new word, it gets so many tokens c that

    .. math:: \frac{a_{vk} + c_{vk}}{T_k} = \max_j \frac{a_{vj}}{T_j}
              \quad\text{or}\quad
              \psi(a_{vk} + c_{vk}) - \log T_k = \max_j \psi(a_{vj}) - \log T_j .

    They leave with the first pass or, of a stochastic fit, with its steps.

    Args:
        prior: Of each topic and word.
        num_known: Words that come first, and that topics know.
        by_log: Whether documents are solved by E[log phi], rather than E[phi].
    """
    counts, new = np.zeros_like(prior.each), prior.each[num_known:]
    log_known = np.log(prior.totals - new.sum(axis=0))
    log_shares = (digamma(new) if by_log else np.log(new)) - log_known
    level = log_shares.max(axis=1, keepdims=True) + log_known
    counts[num_known:] = np.maximum((_inverse_digamma if by_log else np.exp)(level) - new, 0)
    return counts


def _inverse_digamma(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """By five steps of Newton's method, from Minka's start."""
    found = np.where(values > -2.2, np.exp(values) + 0.5, -1 / (values - digamma(1)))
    for _ in range(5):
        found -= (digamma(found) - values) / polygamma(1, found)
    return found


def _favoured_words(prior: WordPrior) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Topics whose prior favours some words, and by how much, (V, topics)."""
    own = prior.favouring_topics
    if len(own) == 0:
        return own, np.zeros((len(prior.each), 0))
    return own, (prior.each - prior.each.min(axis=1, keepdims=True))[:, own]


def _around(
    everywhere: NDArray[np.float64], own: NDArray[np.float64], num_tokens: float
) -> NDArray[np.float64]:
    """Tokens of each topic, a tenth of its own words (V, K) and else those of all documents.

    Changes ``own`` in place, since time goes into memory that is new.
    """
    own *= num_tokens * (1 - START_SMOOTHING) / own.sum(axis=0)
    own += num_tokens * START_SMOOTHING * everywhere[:, None]
    return own
