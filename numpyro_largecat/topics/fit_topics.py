# SPDX-License-Identifier: Apache-2.0
"""Fit topics to a corpus, and read what was found."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array

from numpyro_largecat._checks import check_count, check_key, describe
from numpyro_largecat._result_so_far import attach_result
from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.ops.step_sizes import check_step_sizes
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.topics.document_chunks import Shapes, Solver, shapes_of, solve_corpus
from numpyro_largecat.topics.learning import (
    Problem,
    Table,
    learn_memoized,
    learn_stochastic,
    make_batches,
)
from numpyro_largecat.topics.start import start_at_random, start_from_documents

DEFAULT_TOTAL = 0.5  # concentration of topic frequencies over all topics
SHOWN = 20  # topics that ``print`` lists


class TopWord(NamedTuple):
    """A word of a topic, in what ``TopicFit.top_words`` gives.

    Example:
        >>> TopWord("sea", 0.2).word
        'sea'
    """

    word: str | int  # its id where the vocabulary is not known
    probability: float


@dataclass(frozen=True, repr=False, eq=False)
class TopicFit:
    """Topics with Dirichlet posteriors, as ``fit_topics`` returns them; it prints the largest.

    Attributes:
        posterior: Dirichlet concentrations of the words in each topic, (K, V).
        concentration: Of the topic frequencies, (K,).
        num_active: L.
        vocabulary: The words, or None where they are not known.
        bounds: Of the corpus after each pass, in nats. Empty if ``method`` was "stochastic", which
            never sees the whole corpus at one time.
        shapes: That code is compiled for; what is read from the fit uses it again.

    Example:
        >>> import jax, numpyro_largecat as lc
        >>> from numpyro_largecat.data import Corpus
        >>> documents = [["sea", "ship", "sea"], ["star", "moon"], ["ship", "sea"], ["moon"]] * 5
        >>> corpus = Corpus.from_documents(documents)
        >>> fit = lc.fit_topics(jax.random.key(0), corpus, num_topics=2, num_active=2)
        >>> sorted(sorted(w.word for w in topic) for topic in fit.top_words(2))
        [['moon', 'star'], ['sea', 'ship']]
        >>> fit.proportions(corpus.select([0])).max() > 0.8
        np.True_
    """

    posterior: NDArray[np.floating]
    concentration: NDArray[np.floating]
    num_active: int
    vocabulary: tuple[str, ...] | None
    bounds: tuple[float, ...]
    shapes: Shapes | None = None

    def __repr__(self) -> str:
        """The largest topics, with their shares of the tokens and top words."""
        num_topics, num_words = self.posterior.shape
        tokens = (self.posterior - self.posterior.min()).sum(axis=1)
        largest = np.argsort(-tokens, kind="stable")[: min(SHOWN, (tokens >= 0.5).sum())]
        lines = [f"TopicFit, {num_topics} topics of {num_words} words"]
        for k, words in zip(largest, self._top_words(largest, 8), strict=True):
            text = " ".join(str(w.word) for w in words)
            lines.append(f"{k:5d} {tokens[k] / tokens.sum():7.2%}  {text}")
        return "\n".join(lines + ["..."] * (num_topics > len(largest)))

    @property
    def topics(self) -> NDArray[np.floating]:
        """Posterior mean probabilities of the words in each topic, (K, V)."""
        return self.posterior / self.posterior.sum(axis=1, keepdims=True)

    def top_words(self, num_words: int = 10) -> list[list[TopWord]]:
        """The most probable words of each topic, with their posterior mean probabilities."""
        check_count("num_words", num_words, 1)
        return self._top_words(np.arange(len(self.posterior)), num_words)

    def _top_words(self, topics: NDArray[np.intp], num_words: int) -> list[list[TopWord]]:
        found = []
        for row in self.posterior[topics]:
            probs = row / row.sum()
            order = np.argsort(-probs, kind="stable")[:num_words]
            names = (
                order.tolist() if self.vocabulary is None else [self.vocabulary[i] for i in order]
            )
            found.append([TopWord(n, float(p)) for n, p in zip(names, probs[order], strict=True)])
        return found

    def proportions(self, corpus: Corpus) -> NDArray[np.floating]:
        """Posterior mean topic frequencies of documents, (N, K), each row summing to 1.

        A document without words has those of the prior, and a warning says how many there are.

        Raises:
            ValueError: If the corpus has another vocabulary.
        """
        self._check(corpus)
        empty = int((np.diff(corpus.offsets) == 0).sum())
        if empty:
            warnings.warn(
                f"{empty} of {corpus.num_documents} documents have no words; their topic "
                "frequencies are those of the prior.",
                stacklevel=2,
            )
        posterior = jnp.asarray(self.posterior)
        totals = jax.scipy.special.digamma(posterior.sum(axis=1, keepdims=True))
        log_probs = (jax.scipy.special.digamma(posterior) - totals).T
        return self._frequencies(corpus, log_probs, self.num_active)

    def score(self, corpus: Corpus, *, seed: int = 0, fraction: float = 0.2) -> float:
        r"""Mean log likelihood of held-out words by document completion, nats per token.

        A share of each document's distinct words is held out at random. From the rest come its
        topic frequencies, with dense inference and topics fixed at their means;

        .. math:: \mathrm{score} = \frac{\sum_d \sum_{n} \log \sum_k \hat\pi_{dk}
                  \hat\phi_{k x_{dn}}}{\sum_d |x_d|}

        over the tokens held out. Documents with no word held out have no part in it.

        Args:
            corpus: Documents that were not fitted, with the same vocabulary.
            seed: Of the division.
            fraction: Share of the distinct words of each document to hold out, in (0, 1).

        References:
            Hughes and Sudderth, arXiv:1609.07521, Appendix E.
        """
        self._check(corpus)
        if not 0 < fraction < 1:
            raise ValueError(f"`fraction` must be in (0, 1); got {fraction}.")
        seen, unseen = corpus.split_words(seed, fraction)
        return completion_score(self.topics, self.concentration, seen, unseen, self.shapes)

    def coherence(self, corpus: Corpus, num_words: int = 10) -> NDArray[np.floating]:
        r"""Mean normalised pointwise mutual information of each topic's top words, (K,).

        .. math:: \mathrm{NPMI}(v, w) = \frac{\log (p_{vw} / (p_v p_w))}{-\log p_{vw}}

        with p the shares of documents that have a word, or both; -1 for a pair that never occurs
        together. Cost: O(entries) and the square of K ``num_words`` at worst.
        """
        self._check(corpus)
        check_count("num_words", num_words, 2)
        tops = np.argsort(-self.topics, axis=1, kind="stable")[:, :num_words]
        used, place = np.unique(tops, return_inverse=True)
        owner = np.repeat(np.arange(corpus.num_documents), np.diff(corpus.offsets))
        is_used = np.isin(corpus.words, used)
        columns = np.searchsorted(used, corpus.words[is_used])
        shape = corpus.num_documents, len(used)
        has = csr_array((np.ones(len(columns)), (owner[is_used], columns)), shape)
        has.data[:] = 1  # a word in two slots of a document is one
        together = (has.T @ has).toarray() / corpus.num_documents
        place = place.reshape(tops.shape)
        scores = np.zeros(len(tops))
        for k, columns in enumerate(place):
            scores[k] = np.mean(
                [
                    _npmi(together[i, j], together[i, i], together[j, j])
                    for i, j in itertools.combinations(columns, 2)
                ]
            )
        return scores

    def _frequencies(
        self, corpus: Corpus, log_probs: Array, num_active: int
    ) -> NDArray[np.floating]:
        effort = Effort(100, 1e-3, 5)
        concentration = jnp.asarray(self.concentration)
        _, counts = solve_corpus(corpus, log_probs, concentration, num_active, effort, self.shapes)
        posterior = counts + self.concentration
        return posterior / posterior.sum(axis=1, keepdims=True)

    def _check(self, corpus: Corpus) -> None:
        """Raise unless it is a corpus that has the vocabulary of the fit."""
        _check_type(corpus)
        if corpus.num_words != self.posterior.shape[1]:
            raise ValueError(
                f"`corpus` must have the vocabulary of the fit, {self.posterior.shape[1]} words; "
                f"got {corpus.num_words}. Make it with the fit's `vocabulary`."
            )
        if None not in (corpus.vocabulary, self.vocabulary) and (
            corpus.vocabulary != self.vocabulary
        ):
            pairs = zip(corpus.vocabulary, self.vocabulary, strict=True)  # type: ignore[arg-type]
            place, (got, need) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
            raise ValueError(
                f"`corpus` must have the vocabulary of the fit; word {place} is {got!r}, and in "
                f"the fit {need!r}. Make it with the fit's `vocabulary`."
            )


def _check_type(corpus: object) -> None:
    if not isinstance(corpus, Corpus):
        raise TypeError(
            "`corpus` must be a `numpyro_largecat.data.Corpus`; got "
            f"{type(corpus).__name__}. Make one with `Corpus.from_csr(counts, names)` from what "
            "CountVectorizer gives, or with `Corpus.from_documents(lists_of_words)`."
        )


def _npmi(both: float, first: float, second: float) -> float:
    if both == 0:
        return -1.0
    if both == 1:
        return 1.0
    return float(np.log(both / (first * second)) / -np.log(both))


def completion_score(
    topics: NDArray[np.floating],
    concentration: NDArray[np.floating],
    seen: Corpus,
    unseen: Corpus,
    shapes: Shapes | None = None,
) -> float:
    """Document completion with point estimates of topics (K, V); see ``TopicFit.score``."""
    if unseen.num_tokens == 0:
        raise ValueError("`corpus` must have documents with words to hold out; it has none.")
    topics = np.asarray(topics, np.float32)
    log_probs = jnp.log(jnp.asarray(topics.T))
    effort = Effort(100, 1e-3, 0)
    alphas = jnp.asarray(concentration, jnp.float32)
    _, counts = solve_corpus(seen, log_probs, alphas, topics.shape[0], effort, shapes)
    frequencies = counts + np.asarray(concentration)
    frequencies /= frequencies.sum(axis=1, keepdims=True)
    total = 0.0
    for d in range(unseen.num_documents):
        words, word_counts = unseen.document(d)
        total += float(word_counts @ np.log(np.einsum("k,kn->n", frequencies[d], topics[:, words])))
    return total / unseen.num_tokens


def _concentrations(value: ArrayLike | None, num_topics: int) -> NDArray[np.floating]:
    """The concentration of each topic, (K,)."""
    found = np.asarray(DEFAULT_TOTAL / num_topics if value is None else value, float)
    if found.shape not in ((), (num_topics,)):
        raise ValueError(
            f"`concentration` must be a number or have one entry for each of {num_topics} topics; "
            f"got shape {found.shape}."
        )
    if not ((found > 0) & (found < np.inf)).all():
        raise ValueError(
            "`concentration` must be positive and finite; got numbers from "
            f"{found.min():.6g} to {found.max():.6g}."
        )
    return np.broadcast_to(found, num_topics)


def fit_topics(
    rng_key: Array,
    corpus: Corpus,
    num_topics: int,
    num_active: int | None = None,
    *,
    concentration: ArrayLike | None = None,
    word_concentration: float = 0.1,
    method: Literal["memoized", "stochastic"] = "memoized",
    num_passes: int = 10,
    batch_size: int = 512,
    start: Literal["documents", "random"] = "documents",
    warm_start: bool = False,
    max_sweeps: int = 100,
    tolerance: float = 0.05,
    num_restarts: int = 5,
    delay: float | None = None,
    forgetting: float = 0.65,
) -> TopicFit:
    r"""Fit topics with Dirichlet posteriors by closed-form steps, a batch of documents at a time.

    .. math:: \phi_k \sim \mathrm{Dirichlet}_V(\bar\lambda), \quad
              \pi_d \sim \mathrm{Dirichlet}_K(a), \quad
              \hat\lambda_{kv} = \bar\lambda + S_{kv}

    with S the expected tokens of each word in each topic, of which each word of a document has at
    most L. ``"memoized"`` keeps each batch's share of S, sparse, and replaces it when the batch is
    visited again. ``"stochastic"`` steps towards the S that a batch of B documents suggests,

    .. math:: S \leftarrow (1 - \rho_t) S + \rho_t \frac{N}{B} S_{\mathrm{batch}}, \qquad
              \rho_t = (\mathrm{delay} + t)^{-\mathrm{forgetting}}, \quad t = 1, 2, \ldots

    Documents start from scratch at each visit. What is raised during the fit, also
    ``KeyboardInterrupt``, has the fit so far as its attribute ``result_so_far``.

    Cost: per document as ``TopicDocument``; per batch O(R K) for the R different words in it;
    per pass O(V K). Documents are read as they are needed, so the corpus may be on disk.
    The memory of ``"memoized"`` is at most L numbers for each entry of the corpus.

    Args:
        rng_key: A JAX random key.
        corpus: The documents.
        num_topics: K.
        num_active: Largest number L of topics of a word in a document, in [1, K]. None for 8, or
            K if that is less.
        concentration: a, positive: one number for each topic, shape (K,), or the same for all, as
            for ``TopicDocument`` and like scikit-learn's ``doc_topic_prior``. None for 0.5 / K, the
            paper's choice: the smaller, the fewer topics in a document.
        word_concentration: Prior :math:`\bar\lambda` of each word in a topic, positive.
        method: ``"memoized"`` or ``"stochastic"``.
        num_passes: Visits of each document, at least 1.
        batch_size: Documents in a batch, at least 1. With ``"stochastic"`` there should be several
            batches, so take a smaller one for a small corpus.
        start: ``"documents"``: each topic from a document, drawn by the k-means++ rule with a
            Bregman divergence. ``"random"``: words divided at random.
        warm_start: Keep topic counts of documents between visits: the bound then never decreases,
            but often ends much lower. For ``"memoized"`` only.
        max_sweeps: Of a document and visit, at least 10.
        tolerance: Largest change in a topic's count of a document that is done, tokens.
        num_restarts: Topics that are proposed to leave a document, smallest first.
        delay: Of the stochastic step sizes, at least 0; None for the number of batches. With much
            less the first batches fill the topics with their own words.
        forgetting: Of the stochastic step sizes, in [0, 1]; steps converge above 0.5.

    Returns:
        A ``TopicFit``.

    Raises:
        ValueError: If an argument is out of range, or no document has words.
        TypeError: If ``corpus`` is no ``Corpus``, or ``rng_key`` no key.

    Example:
        >>> import jax, numpyro_largecat as lc
        >>> from numpyro_largecat.data import Corpus
        >>> corpus = Corpus.from_documents([["sea", "ship"], ["moon", "star"]] * 10)
        >>> fit = lc.fit_topics(jax.random.key(0), corpus, num_topics=2, num_active=1)
        >>> fit.topics.shape
        (2, 4)

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        arXiv:1609.07521, sections 3.4 and 5, Eqs. 35 and 41 to 49.
    """
    check_key("rng_key", rng_key)
    _check_type(corpus)
    num_topics = check_count("num_topics", num_topics, 1)
    num_active = min(8, num_topics) if num_active is None else num_active
    num_active = check_count("num_active", num_active, 1)
    if num_active > num_topics:
        raise ValueError(
            f"`num_active` must be at most `num_topics`, {num_topics}; got {num_active}."
        )
    check_count("num_passes", num_passes, 1)
    check_count("batch_size", batch_size, 1)
    check_count("max_sweeps", max_sweeps, 10)
    check_count("num_restarts", num_restarts, 0)
    if np.ndim(word_concentration) or not 0 < word_concentration < np.inf:
        raise ValueError(
            "`word_concentration` must be one number, positive and finite; got "
            f"{describe(word_concentration)}."
        )
    if method not in ("memoized", "stochastic"):
        raise ValueError(f"`method` must be 'memoized' or 'stochastic'; got {method!r}.")
    if start not in ("documents", "random"):
        raise ValueError(f"`start` must be 'documents' or 'random'; got {start!r}.")
    if warm_start and method != "memoized":
        raise ValueError("`warm_start` needs `method='memoized'`, which keeps what it visited.")
    check_step_sizes(0 if delay is None else delay, forgetting)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(rng_key)))
    dtype = jnp.result_type(float)
    if start == "documents":
        first = start_from_documents(rng, corpus, num_topics)
    else:
        first = start_at_random(rng, corpus, num_topics)
    batches = make_batches(rng, corpus, batch_size)
    shapes = shapes_of(corpus, batch_size, len(batches[0].rows), num_passes)
    problem = Problem(
        corpus,
        jnp.asarray(_concentrations(concentration, num_topics), dtype),
        word_concentration,
        Solver(num_active, Effort(max_sweeps, tolerance, num_restarts), shapes),
    )
    table, bounds = Table(first, dtype), list[float]()

    def fit() -> TopicFit:
        return TopicFit(
            np.ascontiguousarray(table.numpy().T) + word_concentration,
            np.asarray(problem.concentration),
            num_active,
            corpus.vocabulary,
            tuple(bounds),
            shapes,
        )

    def so_far() -> tuple[TopicFit, str]:
        return fit(), f"{table.changes} of {num_passes * len(batches)} batches"

    learned = rng, problem, batches, table
    with attach_result(so_far):
        if method == "memoized":
            learn_memoized(*learned, bounds, num_passes, warm_start=warm_start)
        else:
            learn_stochastic(
                *learned,
                num_passes,
                delay=len(batches) if delay is None else delay,
                forgetting=forgetting,
            )
    return fit()
