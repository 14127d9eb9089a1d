# SPDX-License-Identifier: Apache-2.0
"""Fitted topics: their posterior, and what they say of documents."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, sparray, spmatrix

from numpyro_largecat._checks import check_count, check_interval, check_kind, check_one_of
from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.data.fit_values import load_fit, save_fit
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.collapsed_documents import MOST_TOPICS
from numpyro_largecat.topics.collapsed import Collapsed
from numpyro_largecat.topics.document_chunks import Shapes, read_shapes, topic_counts
from numpyro_largecat.topics.inference import INFERENCE
from numpyro_largecat.topics.local_step import Posterior
from numpyro_largecat.topics.word_order import frex, relevance

SHOWN = 20  # topics that ``print`` lists
PRECISE = Effort(100, 1e-3, 5)
AnyCorpus: TypeAlias = Corpus | sparray | spmatrix  # counts (N, V) have the words of the fit


class TopWord(NamedTuple):
    """A word of a topic, in what ``TopicFit.top_words`` gives.

    Example:
        >>> import numpyro_largecat as lc
        >>> lc.topics.TopWord("sea", 0.2).word
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
        word_concentration: Of words in topics, in the prior: one number, (V,) or (K, V).
        num_active: L.
        vocabulary: The words, or None where they are not known.
        bounds: Of the corpus after each pass in nats, shape (passes,), with the concentrations of
            that pass. The first passes may have more topics, see ``num_candidates``, and it falls
            where these leave. That of "mean_field" is at most the log evidence (in float32 to
            1e-7 of its size); "collapsed" takes tokens of a topic at their mean, which may be half
            a nat for each topic too high. Empty for "stochastic", which never sees the whole corpus
            at once.
        inference: "collapsed" or "mean_field": how documents are solved for, in the fit and by
            ``proportions``.
        num_steps: Stochastic steps that were taken, also in earlier fits that it went on from;
            memoized visits are none.
        shapes: That code is compiled for; what is read from the fit uses it again.
        last_rise: By how much the last pass raised the bound, nats per token, which ``print``
            says too; None where the pass before had other topics, or there is no bound.

    Example:
        >>> import jax, numpyro_largecat as lc
        >>> from numpyro_largecat.data import Corpus
        >>> documents = [["sea", "ship", "sea"], ["star", "moon"], ["ship", "sea"], ["moon"]] * 5
        >>> corpus = Corpus.from_documents(documents)
        >>> fit = lc.fit_topics(jax.random.key(0), corpus, num_topics=2, progress_bar=False)
        >>> sorted(sorted(w.word for w in topic) for topic in fit.top_words(2))
        [['moon', 'star'], ['sea', 'ship']]
        >>> fit.proportions(corpus[[0]]).max() > 0.8
        np.True_
    """

    posterior: NDArray[np.floating]
    concentration: NDArray[np.floating]
    word_concentration: float | NDArray[np.floating]
    num_active: int
    vocabulary: tuple[str, ...] | None
    bounds: NDArray[np.floating]
    inference: str = "collapsed"
    num_steps: int = 0
    shapes: Shapes | None = None
    last_rise: float | None = None

    def __repr__(self) -> str:
        """How far the fit came, and the largest topics with their shares of tokens and words."""
        num_topics, num_words = self.posterior.shape
        tokens = self._tokens().sum(axis=1)
        largest = np.argsort(-tokens, kind="stable")[: min(SHOWN, (tokens >= 0.5).sum())]
        lines = [f"TopicFit, {num_topics} topics of {num_words} words"]
        if self.last_rise is not None:
            change = f"{self.last_rise:+.5f} nats per token"
            lines[0] += f"; the last of {len(self.bounds)} passes changed the bound by {change}"
        for k in largest:
            probs = self.posterior[k] / self.posterior[k].sum()
            text = " ".join(str(w.word) for w in self._words_of(probs, probs, 8))
            lines.append(f"{k:5d} {tokens[k] / tokens.sum():7.2%}  {text}")
        return "\n".join(lines + ["..."] * (num_topics > len(largest)))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the fit to a folder of its own, in place of one there, for ``load`` to read.

        Raises:
            OSError: If it cannot be written. What was there before is there still.
            ValueError: If the folder holds anything but fits.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        save_fit(path, "TopicFit", values, self.posterior.dtype)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> TopicFit:
        """Read a fit that ``save`` wrote.

        Raises:
            ValueError: If the folder holds something else, or a fit that is damaged, or one of
                float64 where 64 bits are not enabled.
            OSError: If there is none, or it cannot be read.
        """
        values = load_fit(path, "TopicFit", {field.name for field in fields(cls)})
        words, shapes = values["vocabulary"], values["shapes"]
        values["vocabulary"] = None if words is None else tuple(words)
        if shapes is not None:
            values["shapes"] = read_shapes(shapes, INFERENCE[values["inference"]].layout)
        return cls(**values)

    @property
    def topics(self) -> NDArray[np.floating]:
        """Posterior mean probabilities of the words in each topic, (K, V)."""
        return self.posterior / self.posterior.sum(axis=1, keepdims=True)

    def top_words(
        self,
        num_words: int = 10,
        *,
        by: Literal["probability", "relevance", "frex"] = "probability",
        weight: float | None = None,
    ) -> list[list[TopWord]]:
        r"""The first words of each topic, with their posterior mean probabilities.

        .. math:: \mathrm{relevance}_{kv} = w \log \phi_{kv}
                  + (1 - w) \log \frac{\phi_{kv}}{p_v}, \qquad
                  \mathrm{FREX}_{kv} = \Big(\frac{w}{F_k(\phi_{kv} / \sum_j \phi_{jv})}
                  + \frac{1 - w}{F_k(\phi_{kv})}\Big)^{-1}

        with p the shares of words of the tokens that were fitted and :math:`F_k` the rank among
        the words that have tokens, in (0, 1]. Words without tokens are last in both.

        Args:
            num_words: Words of each topic, at least 1.
            by: "probability", which is highest for common words; "relevance", as in LDAvis; or
                "frex", for words that are frequent in a topic and exclusive to it.
            weight: w, in [0, 1]: of probability in relevance, None for 0.6; of exclusiveness in
                FREX, None for 0.5.

        References:
            Sievert and Shirley, LDAvis, 2014. Bischof and Airoldi, Summarizing topical content
            with word frequency and exclusivity, 2012.
        """
        check_count("num_words", num_words, 1)
        check_one_of("by", by, ("probability", "relevance", "frex"))
        if weight is not None:
            check_interval("weight", weight, "[0, 1]")
            check_one_of("by", by, ("relevance", "frex"), or_else=" where `weight` is given")
        topics, tokens = self.topics, self._tokens().sum(axis=0)
        everywhere, over_topics = tokens / tokens.sum(), topics.sum(axis=0)
        found = []
        for probs in topics:
            scores = probs
            if by == "relevance":
                scores = relevance(probs, everywhere, 0.6 if weight is None else weight)
            elif by == "frex":
                is_used, w = everywhere > 0, 0.5 if weight is None else weight
                scores = np.full(len(probs), -np.inf)
                scores[is_used] = frex(probs[is_used], (probs / over_topics)[is_used], w)
            found.append(self._words_of(probs, scores, num_words))
        return found

    def _words_of(
        self, probs: NDArray[np.floating], scores: NDArray[np.floating], num_words: int
    ) -> list[TopWord]:
        order = np.argsort(-scores, kind="stable")[:num_words]
        names = order.tolist() if self.vocabulary is None else [self.vocabulary[i] for i in order]
        return [TopWord(n, float(p)) for n, p in zip(names, probs[order], strict=True)]

    def _tokens(self) -> NDArray[np.floating]:
        """Expected tokens of words in topics, (K, V); 0 where rounding may be all there is."""
        dtype = self.posterior.dtype
        tokens = self.posterior - np.asarray(self.word_concentration, dtype)
        return np.where(tokens > 8 * np.finfo(dtype).eps * self.posterior, tokens, 0)

    def proportions(self, corpus: AnyCorpus) -> NDArray[np.floating]:
        """Posterior mean topic frequencies of documents, (N, K), each row summing to 1.

        A document without words has those of the prior, and a warning says how many there are. All
        are taken as new: those that were fitted have their own tokens in the topics, which the fit
        leaves out of them.

        Args:
            corpus: Documents with the vocabulary of the fit, or their counts (N, V) as a scipy
                sparse matrix, so that ``sklearn.preprocessing.FunctionTransformer(fit.proportions,
                accept_sparse=True)`` is a step of a scikit-learn pipeline, after
                ``CountVectorizer(vocabulary=fit.vocabulary)``: one that finds words of its own
                would count others. What has no vocabulary is taken to have the fit's.

        Raises:
            ValueError: If the corpus has another vocabulary.
        """
        corpus = self._own_corpus(corpus)
        empty = int((np.diff(corpus.offsets) == 0).sum())
        if empty:
            prior = "their topic frequencies are those of the prior"
            warnings.warn(
                f"{empty} of {corpus.num_documents} documents have no words; {prior}.", stacklevel=2
            )
        posterior = jnp.asarray(self.posterior).T
        local_step = INFERENCE[self.inference](self.num_active, PRECISE)
        least = float(np.min(self.word_concentration))
        topics = Posterior(posterior, posterior.sum(axis=0), least)
        concentration = jnp.asarray(self.concentration)
        counts = topic_counts(corpus, topics, concentration, local_step, self.shapes)
        return _shares(counts + self.concentration)

    def score(self, corpus: AnyCorpus, *, seed: int = 0, fraction: float = 0.2) -> float:
        r"""Mean log likelihood of held-out words by document completion, nats per word.

        A share of each document's distinct words is held out at random. From the rest come its
        topic frequencies, by CVB0 with topics fixed at their means, at most 32 a word;

        .. math:: \mathrm{score} = \frac{\sum_d \sum_{n} \log \sum_k \hat\pi_{dk}
                  \hat\phi_{k x_{dn}}}{\sum_d |x_d|}

        over the tokens held out. Documents with no word held out have no part in it, as those of
        one or two distinct words with the default ``fraction``, which is rounded.

        Args:
            corpus: Documents that were not fitted, as for ``proportions``.
            seed: Of the division.
            fraction: Share of the distinct words of each document to hold out, in (0, 1).

        References:
            Hughes and Sudderth, arXiv:1609.07521, Appendix E.
        """
        corpus = self._own_corpus(corpus)
        check_interval("fraction", fraction, "(0, 1)")
        seen, unseen = corpus.split_words(seed, fraction)
        return completion_score(self.topics, self.concentration, seen, unseen, self.shapes)

    def coherence(self, corpus: AnyCorpus, num_words: int = 10) -> NDArray[np.floating]:
        r"""Mean normalised pointwise mutual information of each topic's top words, (K,).

        .. math:: \mathrm{NPMI}(v, w) = \frac{\log (p_{vw} / (p_v p_w))}{-\log p_{vw}}

        with p the shares of documents that have a word, or both; -1 for a pair that never occurs
        together. The corpus is as for ``proportions``. Cost: O(entries) and the square of K
        ``num_words`` at worst.
        """
        corpus = self._own_corpus(corpus)
        check_count("num_words", num_words, 2)
        if len(corpus) == 0:
            raise ValueError("`corpus` must have a document; it has none.")
        if corpus.num_words < 2:
            raise ValueError("`coherence` is of pairs of words; the vocabulary has but one.")
        tops = np.argsort(-self.topics, axis=1, kind="stable")[:, :num_words]
        used, place = np.unique(tops, return_inverse=True)
        owner = np.repeat(np.arange(corpus.num_documents), np.diff(corpus.offsets))
        is_used = np.isin(corpus.words, used)
        columns = np.searchsorted(used, corpus.words[is_used])
        shape = corpus.num_documents, len(used)
        has = csr_array((np.ones(len(columns)), (owner[is_used], columns)), shape)
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

    def for_pyldavis(self, corpus: AnyCorpus) -> dict[str, Any]:
        """What ``pyLDAvis.prepare(**fit.for_pyldavis(corpus))`` takes for its interactive page.

        Documents without words, and words without tokens in the corpus, are left out: it divides by
        how often they occur.

        Raises:
            ValueError: If the corpus has another vocabulary, or fewer than two words with tokens.
        """
        corpus = self._own_corpus(corpus)
        counts = corpus.to_csr()
        lengths, frequency = counts.sum(axis=1), counts.sum(axis=0)
        is_used = frequency > 0
        if is_used.sum() < 2:
            raise ValueError("`corpus` must have tokens of two words or more; see `Corpus`.")
        topics = self.topics[:, is_used].astype(np.float64)
        names = self.vocabulary or tuple(map(str, range(corpus.num_words)))
        proportions = self.proportions(corpus[lengths > 0]).astype(np.float64)
        return {
            "topic_term_dists": _shares(topics),
            "doc_topic_dists": _shares(proportions),
            "doc_lengths": lengths[lengths > 0],
            "vocab": [name for name, used in zip(names, is_used, strict=True) if used],
            "term_frequency": frequency[is_used],
        }

    def _own_corpus(self, corpus: AnyCorpus) -> Corpus:
        """A corpus with the vocabulary of the fit, also from counts (N, V)."""
        if isinstance(corpus, (sparray, spmatrix)):
            corpus = Corpus.from_csr(corpus)
        self.check_vocabulary(corpus)
        return corpus

    def check_vocabulary(self, corpus: Corpus) -> None:
        """Raise unless it is a corpus that has the vocabulary of the fit."""
        check_corpus(corpus)
        fix = (
            "Count with the fit's words: `corpus.with_vocabulary(fit.vocabulary)`, or by "
            "scikit-learn's `CountVectorizer(vocabulary=fit.vocabulary)`."
        )
        if corpus.num_words != self.posterior.shape[1]:
            raise ValueError(
                f"`corpus` must have the fit's `vocabulary`, {self.posterior.shape[1]} words; got "
                f"{corpus.num_words}. {fix}"
            )
        pairs = zip(corpus.vocabulary or (), self.vocabulary or (), strict=False)
        for place, (got, need) in enumerate(pairs):
            if got != need:
                raise ValueError(
                    f"`corpus` must have the fit's `vocabulary`; word {place} is {got!r}, and in "
                    f"the fit {need!r}. {fix}"
                )


def check_corpus(corpus: object) -> None:
    """Raise TypeError unless it is a ``Corpus``, and say how to make one."""
    form = "a `Corpus`, as of `Corpus.from_csr(counts, names)` or `Corpus.from_documents(lists)`"
    if isinstance(corpus, tuple) and len(corpus) == 2:
        form += " (`corpus[d]` are the words and counts of a document, `corpus[[d]]` is a corpus)"
    check_kind("corpus", corpus, Corpus, form)


def _npmi(both: float, first: float, second: float) -> float:
    if both == 0:
        return -1.0
    if both == 1:
        return 1.0
    return float(np.log(both / (first * second)) / -np.log(both))


def _shares(posterior: NDArray[np.floating]) -> NDArray[np.floating]:
    return posterior / posterior.sum(axis=1, keepdims=True)


def completion_score(
    topics: NDArray[np.floating],
    concentration: NDArray[np.floating],
    seen: Corpus,
    unseen: Corpus,
    shapes: Shapes | None = None,
) -> float:
    """Document completion with point estimates of topics (K, V); see ``TopicFit.score``."""
    if unseen.num_tokens == 0:
        raise ValueError(
            "`corpus` must have documents with words to hold out, and it has none: of n distinct "
            "words of a document the nearest integer to n times `fraction` are held out. Those of "
            "two need a `fraction` above 0.25."
        )
    topics = np.asarray(topics, np.float32)
    known = Posterior(jnp.asarray(topics.T), jnp.ones(len(topics)), 0.0)
    alphas = jnp.asarray(concentration, jnp.float32)
    local_step = Collapsed(min(MOST_TOPICS, len(topics)), PRECISE)
    counts = topic_counts(seen, known, alphas, local_step, shapes)
    frequencies = _shares(counts + np.asarray(concentration))
    total = 0.0
    for d in range(unseen.num_documents):
        words, word_counts = unseen[d]
        total += float(word_counts @ np.log(np.einsum("k,kn->n", frequencies[d], topics[:, words])))
    return total / unseen.num_tokens
