# SPDX-License-Identifier: Apache-2.0
"""What is read from fitted topics: words, proportions, scores, and files."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.sparse import csr_array

import numpyro_largecat as lc
from numpyro_largecat.data import Corpus
from numpyro_largecat.topics import (
    document_chunks,
    topic_fit,
)
from tests import reference_topics as reference
from tests.topics.corpora import (
    CORPUS,
    KEY,
    WORDS,
    K,
    V,
    fit_topics,
    topic_corpus,
)


@pytest.fixture(scope="module")
def fit():
    return fit_topics(KEY, CORPUS, K, num_active=3, num_passes=5)


def test_score_is_document_completion(fit) -> None:
    """Appendix E, document by document."""
    corpus = topic_corpus(20, seed=1)
    seen, unseen = corpus.split_words(seed=3)
    total = tokens = 0.0
    for d in range(20):
        part, size = reference.completion_score(fit.topics, fit.concentration, *seen[d], *unseen[d])
        total, tokens = total + part, tokens + size
    assert fit.score(corpus, seed=3) == pytest.approx(total / tokens, abs=2e-3)


def test_a_fit_prints_its_topics(fit, monkeypatch) -> None:
    """The largest first, each with its share of the tokens and its top words."""
    head, *lines = repr(fit).splitlines()
    assert head == "TopicFit, 6 topics of 60 words" and len(lines) == K
    shares = [float(line.split()[1].rstrip("%")) for line in lines]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(100, abs=0.1)
    index, _, *words = lines[0].split()
    assert words == [w.word for w in fit.top_words(8)[int(index)]]
    monkeypatch.setattr(topic_fit, "SHOWN", 2)
    assert repr(fit).splitlines() == [head, *lines[:2], "..."]


def test_topics_without_tokens_are_not_printed() -> None:
    posterior = np.full((4, V), 0.1)
    posterior[1, 3] += 7
    empty = lc.TopicFit(posterior, np.full(4, 0.1), 0.1, 2, None, np.zeros(0))
    head, line, rest = repr(empty).splitlines()
    assert head == "TopicFit, 4 topics of 60 words" and rest == "..."
    assert line.split()[:3] == ["1", "100.00%", "3"]


def test_coherence_is_npmi(fit) -> None:
    found = fit.coherence(CORPUS, 4)
    documents = [set(CORPUS[d][0].tolist()) for d in range(CORPUS.num_documents)]
    for k in range(K):
        top = np.argsort(-fit.topics[k], kind="stable")[:4]
        assert found[k] == pytest.approx(reference.npmi(documents, top, 150), abs=1e-4)


def test_documents_without_words_have_the_prior(fit) -> None:
    corpus = Corpus.from_documents([["w1", "w2"], []], WORDS)
    with pytest.warns(UserWarning, match="1 of 2 documents have no words"):
        found = fit.proportions(corpus)
    np.testing.assert_allclose(found[1], 1 / K, rtol=1e-5)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)


def test_lists_of_words_are_refused(fit) -> None:
    with pytest.raises(TypeError, match=r"must be a `Corpus`, .*, of type list"):
        fit.proportions([["w1", "w2"]])


def test_another_vocabulary_is_refused(fit) -> None:
    with pytest.raises(ValueError, match="60 words; got 2"):
        fit.proportions(Corpus.from_documents([["a", "b"]]))
    other = (*WORDS[:5], "other", *WORDS[6:])
    with pytest.raises(ValueError, match="word 5 is 'other', and in the fit 'w5'"):
        fit.score(Corpus.from_documents([["w1"]], other))


@pytest.mark.parametrize("length", [5, 100])
@pytest.mark.some_cases(1)
def test_documents_of_any_length_are_scored(fit, length, monkeypatch) -> None:
    """Whether the fit's documents were shorter, or so long that they would be mostly padding."""
    monkeypatch.setattr(document_chunks, "SLOTS_FOR_CODE", 100)
    words = np.resize(np.arange(V), length)
    rows = [(np.roll(words, d)[:length], np.ones(length, int)) for d in range(40)]
    corpus = Corpus.from_rows(rows, V, CORPUS.vocabulary)
    made_by_hand = dataclasses.replace(fit, shapes=None)
    np.testing.assert_allclose(fit.proportions(corpus), made_by_hand.proportions(corpus), atol=1e-5)


def test_words_from_numpy_are_shown_as_strings() -> None:
    corpus = topic_corpus(30)
    counts = csr_array((corpus.counts, corpus.words, corpus.offsets), (30, V))
    fit = fit_topics(KEY, Corpus.from_csr(counts, np.array(WORDS)), K, num_active=2, num_passes=1)
    assert {type(top.word) for topic in fit.top_words() for top in topic} == {str}
    with pytest.raises(ValueError, match="word 0 is 'v0', and in the fit 'w0'"):
        fit.score(Corpus.from_csr(counts, np.array([f"v{i}" for i in range(V)])))


def test_a_saved_fit_is_the_same(fit, tmp_path) -> None:
    fit.save(tmp_path / "fit")
    loaded = lc.TopicFit.load(tmp_path / "fit")
    assert repr(loaded) == repr(fit)
    for field in dataclasses.fields(fit):
        value, wanted = getattr(loaded, field.name), getattr(fit, field.name)
        assert type(value) is type(wanted) and np.all(value == wanted)
    with pytest.raises(ValueError, match="a DoubleSumFit in format 1; it holds a TopicFit"):
        lc.DoubleSumFit.load(tmp_path / "fit")
