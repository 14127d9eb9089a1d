# SPDX-License-Identifier: Apache-2.0
"""Where a fit of topics begins: its priors, and topics of an earlier fit or of documents."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from numpyro_largecat._checks import as_positive, check_kind, check_one_of
from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.topics.asked import Asked
from numpyro_largecat.topics.memory import Memory
from numpyro_largecat.topics.problem import Candidates, Learns, Priors
from numpyro_largecat.topics.start_counts import (
    start_at_random,
    start_from_documents,
    start_of_new_words,
)
from numpyro_largecat.topics.topic_fit import TopicFit
from numpyro_largecat.topics.topic_table import Table
from numpyro_largecat.topics.word_prior import WordPrior, by_documents

DEFAULT_TOTAL = 0.5  # concentration of topic frequencies over all topics
DEFAULT_WORD = 0.1  # concentration of a word, on average where it is learned from there
CANDIDATES_EACH = 4  # for each topic, in the first passes
CANDIDATE_PASSES = 2
MOST_LEARNED = 300  # topics at first, where their number is learned
LEAST, MOST = 1e-30, 1e8  # concentrations whose log Gamma has digits for single tokens


class Beginning(NamedTuple):
    """What the passes begin with."""

    corpus: Corpus  # by the numbers of the words of an earlier fit, if that is the prior
    priors: Priors
    learns: Learns
    candidates: Candidates
    before: Any  # concentration of words before an earlier fit saw its documents, or None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the table of topics."""
        return self.corpus.num_words, self.candidates.num_first

    def memory(self, counts: NDArray[np.floating], num_batches: int, mesh: Mesh | None) -> Memory:
        """What is kept before the first visit, with these counts of words in topics, (V, K)."""
        table = Table(counts, self.priors.topics.dtype, mesh)
        priors, choice = self.candidates.first_priors(self.priors), self.candidates.num_passes
        return Memory.begin(num_batches, table, priors, choice or -1)


def begin(asked: Asked, corpus: Corpus) -> Beginning:
    """Check what was given."""
    learns = _learns_of(asked)
    start, prior = asked.start, asked.prior
    before = None
    for name, fit in (("start", start), ("prior", prior)):
        if isinstance(fit, TopicFit):
            _check_earlier(name, fit, asked.num_topics)
    if prior is not None:
        _check_prior(asked)
        if corpus.vocabulary is None or prior.vocabulary is None:
            prior.check_vocabulary(corpus)
            corpus = dataclasses.replace(corpus, vocabulary=corpus.vocabulary or prior.vocabulary)
        else:
            names = dict.fromkeys((*prior.vocabulary, *corpus.vocabulary))
            corpus = corpus.with_vocabulary(tuple(names))
        posterior, before = _by_words_of(prior, corpus)
        asked = asked._replace(word_concentration=posterior)
    elif not isinstance(start, TopicFit) and start is not None:
        check_one_of("start", start, ("documents", "random"), or_else=" or an earlier fit")
    if corpus.num_tokens == 0:
        raise ValueError("`corpus` must have a document with words; all are empty.")
    num_filled = int((np.diff(corpus.offsets) > 0).sum())
    if asked.num_topics == "learned":
        candidates = _of_unknown_number(asked, num_filled)
        priors = _priors(asked, learns, candidates.num_first, corpus)
        return Beginning(corpus, priors, learns, candidates, before)
    num_topics = asked.num_topics
    priors = _priors(asked, learns, num_topics, corpus)
    if num_filled < num_topics and not asked.goes_on:
        warnings.warn(
            f"`num_topics` is {num_topics}, more than the {num_filled} documents with words: some "
            "topics will be alike or have no words.",
            stacklevel=4,
        )
    return Beginning(corpus, priors, learns, _candidates(asked, num_topics), before)


def _check_earlier(name: str, fit: TopicFit, num_topics: int | Literal["learned"]) -> None:
    if len(fit.posterior) == num_topics:
        return
    if num_topics == "learned":
        raise ValueError(
            f"`{name}` must be None where the number of topics is learned; give `num_topics` that "
            f"of the fit, {len(fit.posterior)}."
        )
    raise ValueError(
        f"`{name}` must be a fit with {num_topics} topics; got {len(fit.posterior)}. A fit that "
        "ended in its first passes has its candidates still, see `num_candidates` of "
        "`lc.topics.Options`."
    )


def _check_prior(asked: Asked) -> None:
    check_kind("prior", asked.prior, TopicFit, "an earlier fit of other documents")
    for name in ("start", "word_concentration"):
        if getattr(asked, name) is not None:
            raise ValueError(
                f"`{name}` must be None beside `prior`, which has the topics to begin with and the "
                "concentrations of their words."
            )


def _of_unknown_number(asked: Asked, num_filled: int) -> Candidates:
    """As many at first as asked, or 300, or one for each document with words."""
    unknown = "where `num_topics` is 'learned': how many topics there are is not known before."
    if not (asked.concentration is None or isinstance(asked.concentration, str)):
        raise ValueError(f"`concentration` must be None or 'learned' {unknown}")
    if np.ndim(asked.word_concentration) == 2:
        raise ValueError(f"`word_concentration` must be None or one or (V,) numbers {unknown}")
    if asked.num_passes == 1:
        raise ValueError("`num_passes` must be at least 2 where `num_topics` is 'learned'; got 1.")
    most = asked.options.num_candidates
    if most is None:
        most = min(MOST_LEARNED, num_filled)
    return Candidates(min(CANDIDATE_PASSES, asked.num_passes // 2), most, None)


def _candidates(asked: Asked, num_topics: int) -> Candidates:
    """None where topics go on from a fit, since each has a place of its own."""
    most, is_one_pass = asked.options.num_candidates, asked.num_passes == 1
    if most is not None and most < num_topics:
        raise ValueError(
            f"`num_candidates` must be at least the number of topics, {num_topics}; got {most}."
        )
    if most == num_topics or (most is None and (asked.goes_on or is_one_pass)):
        return Candidates(0, num_topics, num_topics)
    if asked.goes_on or is_one_pass:
        got = "one pass" if is_one_pass else "an earlier fit"
        raise ValueError(
            "`num_candidates` needs two passes or more, and no fit to go on from; got "
            f"{got}. Leave it None."
        )
    most = CANDIDATES_EACH * num_topics if most is None else most
    return Candidates(min(CANDIDATE_PASSES, asked.num_passes // 2), most, num_topics)


def _priors(asked: Asked, learns: Learns, num_topics: int, corpus: Corpus) -> Priors:
    """Those given, or where learning starts: the defaults, or what an earlier fit ended with."""
    concentration, of_word = asked.concentration, asked.word_concentration
    earlier = asked.start if asked.prior is None else asked.prior
    topics: Any = DEFAULT_TOTAL / num_topics
    words: Any = DEFAULT_WORD * by_documents(corpus) if learns.words else DEFAULT_WORD
    if isinstance(earlier, TopicFit):
        topics = earlier.concentration
        words = _by_words_of(earlier, corpus)[1]
    if not (concentration is None or isinstance(concentration, str)):
        topics = concentration
    if not (of_word is None or isinstance(of_word, str)):
        words = of_word
    each = as_positive("concentration", topics, "for each topic", (num_topics,))
    of_topics = np.full(num_topics, each, jnp.result_type(float))
    of_words = WordPrior.of(words, corpus.num_words, num_topics)
    for name, values in (("concentration", each), ("word_concentration", of_words.each)):
        low, high = values.min(), values.max()
        if low < LEAST or high > MOST:
            raise ValueError(
                f"`{name}` must be from {LEAST} to {MOST}, beyond which nothing is left of what "
                f"floats hold; got {low if low < LEAST else high:.3g}."
            )
    return Priors(of_topics, of_words)


def _learns_of(asked: Asked) -> Learns:
    """Which are learned; those of words wherever they can be and none is given."""
    by_name = {
        "concentration": asked.concentration,
        "word_concentration": asked.word_concentration,
    }
    for name, value in by_name.items():
        if isinstance(value, str):
            check_one_of(name, value, ("learned",), or_else=" or numbers")
    topics, words = (isinstance(value, str) for value in by_name.values())
    start = asked.start
    differs = isinstance(start, TopicFit) and np.ndim(start.word_concentration) == 2
    if words and differs:
        raise ValueError(
            "`word_concentration` must be None or numbers where `start` has one for each topic and "
            "word, which are not learned; got 'learned'."
        )
    can = asked.inference == "collapsed" and asked.method == "memoized"
    number = asked.num_topics == "learned"
    if (number or topics or words) and not can:
        names = "num_topics", "concentration", "word_concentration"
        name = names[(number, topics, words).index(True)]
        raise ValueError(
            f"`{name}='learned'` needs `inference='collapsed'` and `method='memoized'`; got "
            f"{asked.inference!r} and {asked.method!r}."
        )
    is_fixed = asked.prior is not None or differs
    by_default = can and asked.word_concentration is None and not is_fixed
    return Learns(topics, words or by_default)


def first_counts(
    rng: np.random.Generator, asked: Asked, beginning: Beginning
) -> NDArray[np.floating]:
    """Expected counts of words in topics before the first batch, (V, K)."""
    corpus, (_, num_topics) = beginning.corpus, beginning.shape
    if asked.prior is not None:
        words, num_known = beginning.priors.words, asked.prior.posterior.shape[1]
        return start_of_new_words(words, num_known, by_log=asked.inference == "mean_field")
    if isinstance(asked.start, TopicFit):
        posterior, before = _by_words_of(asked.start, corpus)
        return (posterior - before).T
    words = beginning.priors.words.with_topics(num_topics)
    start = start_at_random if asked.start == "random" else start_from_documents
    return start(rng, corpus, num_topics, words)


def _by_words_of(fit: TopicFit, corpus: Corpus) -> tuple[NDArray[np.floating], Any]:
    """Posterior (K, V) of a fit and its prior concentrations, for the words of a corpus.

    Words that are new to the fit have the least concentration that others have in the topic.
    """
    if corpus.vocabulary == fit.vocabulary or corpus.vocabulary is None or fit.vocabulary is None:
        fit.check_vocabulary(corpus)
        return fit.posterior, fit.word_concentration
    own = {word: i for i, word in enumerate(fit.vocabulary)}
    places = np.array([own.get(word, -1) for word in corpus.vocabulary])
    if (places < 0).all():
        raise ValueError(
            f"`corpus` must share words with the earlier fit; it has {corpus.vocabulary[:3]}, ..., "
            f"and the fit {fit.vocabulary[:3]}, ...."
        )
    before = np.asarray(fit.word_concentration)
    if before.ndim:
        before = np.where(places >= 0, before[..., places], before.min(axis=-1, keepdims=True))
    posterior = np.where(places >= 0, fit.posterior[:, places], before)
    return posterior, before if before.ndim else float(before)
