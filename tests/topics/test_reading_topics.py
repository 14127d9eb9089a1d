# SPDX-License-Identifier: Apache-2.0
"""What is read from fitted topics: words, proportions, scores, and files."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.sparse import coo_array, csr_array

import numpyro_largecat as lc
from numpyro_largecat.data import Corpus
from numpyro_largecat.topics import (
    topic_fit,
    whole_documents,
)
from tests import reference_topics as reference
from tests.topics.corpora import (
    BATCHES,
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
    return fit_topics(KEY, CORPUS, K, num_active=3, num_passes=5, **BATCHES)


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
    assert head.startswith("TopicFit, 6 topics of 60 words; ") and len(lines) == K
    shares = [float(line.split()[1].rstrip("%")) for line in lines]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(100, abs=0.1)
    index, _, *words = lines[0].split()
    assert words == [w.word for w in fit.top_words(8)[int(index)]]
    monkeypatch.setattr(topic_fit, "SHOWN", 2)
    assert repr(fit).splitlines() == [head, *lines[:2], "..."]


def test_a_fit_prints_by_how_much_the_last_pass_changed_the_bound(fit) -> None:
    rise = (fit.bounds[-1] - fit.bounds[-2]) / CORPUS.num_tokens
    assert fit.last_rise == pytest.approx(rise, rel=1e-9)
    for value, text in (
        (0.01234, "changed the bound by +0.01234 nats"),
        (-0.5, "changed the bound by -0.50000 nats"),
    ):
        head = repr(dataclasses.replace(fit, last_rise=value)).splitlines()[0]
        assert f"; the last of 5 passes {text}" in head and head.endswith(" nats per token")


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


@pytest.mark.parametrize("total", [5.0, 50.0])
def test_documents_have_as_many_topics_as_the_prior_expects(total) -> None:
    """Documents that could have 32 alone would be .04 to .11 and .25 to .34 away."""
    rng, num_topics = np.random.default_rng(0), 100
    topics = rng.dirichlet(np.full(200, 0.1), num_topics)
    concentration = np.full(num_topics, total / num_topics)
    posterior = (1e6 * topics + 1e-3).astype(np.float32)
    fit = lc.TopicFit(posterior, concentration, 1e-3, num_topics, None, np.zeros(0))
    frequencies = rng.dirichlet(concentration, 10)
    rows = [np.unique(rng.choice(200, 150, p=p @ topics), return_counts=True) for p in frequencies]
    found = fit.proportions(Corpus.from_rows(rows, 200))
    for (words, counts), own in zip(rows, found, strict=True):
        shares = reference.collapsed_document(fit.topics[:, words].T, counts, concentration)
        expected = counts @ shares + concentration
        assert np.abs(own - expected / expected.sum()).sum() / 2 < 0.03


def test_documents_without_words_have_the_prior(fit) -> None:
    corpus = Corpus.from_documents([["w1", "w2"], []], WORDS)
    with pytest.warns(UserWarning, match="1 of 2 documents have no words"):
        found = fit.proportions(corpus)
    np.testing.assert_allclose(found[1], 1 / K, rtol=1e-5)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)


def test_what_is_no_corpus_is_refused(fit) -> None:
    with pytest.raises(ValueError, match=r"shape \(N, V\), documents and words; got shape \(60,\)"):
        fit.proportions(coo_array(np.ones(V)))
    with pytest.raises(TypeError, match=r"must be a `Corpus`, .*, of type list"):
        fit.proportions([["w1", "w2"]])


def test_another_vocabulary_is_refused(fit) -> None:
    with pytest.raises(ValueError, match="60 words; got 2"):
        fit.proportions(Corpus.from_documents([["a", "b"]]))
    other = (*WORDS[:5], "other", *WORDS[6:])
    with pytest.raises(ValueError, match="word 5 is 'other', and in the fit 'w5'"):
        fit.score(Corpus.from_documents([["w1"]], other))


@pytest.mark.usefixtures("x64")
def test_scores_are_the_same_in_float64(fit) -> None:
    corpus = topic_corpus(30)
    double = dataclasses.replace(fit, posterior=fit.posterior.astype(np.float64))
    assert fit.posterior.dtype == np.float32
    np.testing.assert_allclose(double.score(corpus), fit.score(corpus), rtol=1e-5)


def test_no_documents_have_no_proportions(fit) -> None:
    assert fit.proportions(CORPUS[[]]).shape == (0, K)


@pytest.mark.parametrize("length", [5, 100])
@pytest.mark.some_cases(1)
def test_documents_of_any_length_are_scored(fit, length, monkeypatch) -> None:
    """Whether the fit's documents were shorter, or so long that they would be mostly padding."""
    monkeypatch.setattr(whole_documents, "SLOTS_FOR_CODE", 100)
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
    with pytest.raises(ValueError, match="a DoubleSumFit; it holds a TopicFit"):
        lc.DoubleSumFit.load(tmp_path / "fit")


def test_words_are_ordered_by_what_they_say(fit) -> None:
    """Relevance and FREX by their definitions, word by word."""
    tokens = fit.posterior - fit.word_concentration
    shares = tokens.sum(axis=0) / tokens.sum()
    phi = fit.topics
    exclusive = phi / phi.sum(axis=0)
    for weight, chosen in ((None, (0.6, 0.5)), (0.2, (0.2, 0.2)), (1, (1, 1)), (0, (0, 0))):
        by_relevance = fit.top_words(V, by="relevance", weight=weight)
        by_frex = fit.top_words(V, by="frex", weight=weight)
        for k in range(K):
            w = chosen[0]
            scores = [
                w * np.log(phi[k, v]) + (1 - w) * np.log(phi[k, v] / shares[v]) for v in range(V)
            ]
            found = [scores[WORDS.index(top.word)] for top in by_relevance[k]]
            assert (np.diff(found) <= 1e-5).all()
            w = chosen[1]
            scores = [
                1
                / (
                    w / (exclusive[k] <= exclusive[k, v]).mean()
                    + (1 - w) / (phi[k] <= phi[k, v]).mean()
                )
                for v in range(V)
            ]
            found = [scores[WORDS.index(top.word)] for top in by_frex[k]]
            assert (np.diff(found) <= 1e-12).all()
            assert by_frex[k][0].probability == pytest.approx(
                phi[k, WORDS.index(by_frex[k][0].word)]
            )
    assert fit.top_words(4) == fit.top_words(4, by="relevance", weight=1)


@pytest.mark.parametrize("prior", [0.1, np.full(V, 0.1), np.full((2, V), 0.1)])
def test_a_word_without_tokens_is_in_no_top(prior) -> None:
    """Its share of the tokens is 0, also where rounding leaves a little more than the prior."""
    corpus = Corpus.from_documents([["w1", "w2"], ["w3"]] * 9, WORDS)
    fit = fit_topics(KEY, corpus, 2, word_concentration=prior, batch_size=6)
    for by in ("relevance", "frex"):
        for topic in fit.top_words(3, by=by, weight=0):
            assert {top.word for top in topic} == {"w1", "w2", "w3"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(by="lift"), "'probability', 'relevance', 'frex'; got 'lift'"),
        (dict(by="frex", weight=1.5), r"`weight` must be in \[0, 1\]"),
        (dict(weight=0.3), r"'relevance', 'frex' where `weight` is given; got 'probability'"),
    ],
)
def test_other_orders_are_refused(fit, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        fit.top_words(**change)


def test_a_pipeline_of_scikit_learn_takes_proportions(fit) -> None:
    """From counts to the class of a document, by its topics; sparse matrices are corpora."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    counts = CORPUS.to_csr()
    np.testing.assert_array_equal(fit.proportions(counts), fit.proportions(CORPUS))
    labels = counts[:, [0, 1, 2]].sum(axis=1) > 0
    step = FunctionTransformer(fit.proportions, accept_sparse=True)
    pipeline = make_pipeline(step, LogisticRegression(C=100.0)).fit(counts, labels)
    assert labels.mean() < 0.6 and pipeline.score(counts, labels) > 0.8
    with pytest.raises(ValueError, match="60 words; got 59"):
        fit.proportions(counts[:, 1:])


def test_sparse_counts_are_read_as_a_corpus(fit) -> None:
    counts = CORPUS.to_csr()
    assert fit.score(counts, seed=1) == fit.score(CORPUS, seed=1)
    np.testing.assert_array_equal(fit.coherence(counts), fit.coherence(CORPUS))
    assert fit.for_pyldavis(counts)["vocab"] == fit.for_pyldavis(CORPUS)["vocab"]
    with pytest.raises(ValueError, match="60 words; got 59"):
        fit.score(counts[:, 1:])


def test_pyldavis_gets_what_it_checks(fit) -> None:
    """Its own checks: rows sum to 1, sizes agree, and all words and documents have tokens."""
    corpus = Corpus.concatenate([CORPUS[:20], Corpus.from_documents([[], ["w0"]], WORDS)])
    found = fit.for_pyldavis(corpus)
    assert len(found["doc_lengths"]) == 21 and found["doc_lengths"].min() == 1
    assert found["term_frequency"].min() > 0 and found["term_frequency"].sum() == corpus.num_tokens
    assert len(found["vocab"]) == len(found["term_frequency"])
    assert found["topic_term_dists"].shape == (K, len(found["vocab"]))
    assert found["doc_topic_dists"].shape == (21, K)
    for name in ("topic_term_dists", "doc_topic_dists"):
        np.testing.assert_allclose(found[name].sum(axis=1), 1, atol=1e-12)
    with pytest.raises(ValueError, match="tokens of two words or more"):
        fit.for_pyldavis(Corpus.from_documents([["w0"]], WORDS))


def test_a_corpus_without_documents_has_no_coherence(fit) -> None:
    with pytest.raises(ValueError, match="must have a document; it has none"):
        fit.coherence(CORPUS[:0])


def test_one_word_alone_has_no_coherence() -> None:
    corpus = Corpus.from_documents([["sea"], ["sea"]])
    with pytest.raises(ValueError, match="the vocabulary has but one"):
        lc.TopicFit(np.ones((1, 1)), np.ones(1), 0.1, 1, ("sea",), np.zeros(0)).coherence(corpus)


def test_messages_say_how_to_count_with_the_words_of_a_fit(fit) -> None:
    other = Corpus.from_documents([["w1", "new"], ["w2"]])
    with pytest.raises(ValueError, match=r"60 words; got 3.*with_vocabulary\(fit.vocabulary\)"):
        fit.proportions(other)
    assert fit.proportions(other.with_vocabulary(fit.vocabulary)).shape == (2, K)


def test_a_checkpoint_says_that_it_is_no_saved_fit(tmp_path) -> None:
    checkpoints = lc.Checkpoints(tmp_path / "c")
    fit_topics(KEY, CORPUS, K, num_passes=1, checkpoints=checkpoints, **BATCHES)
    with pytest.raises(ValueError, match="It is a checkpoint: go on from it"):
        lc.TopicFit.load(tmp_path / "c")


def test_a_corpus_is_not_written_beside_a_fit_nor_read_from_it(fit, tmp_path) -> None:
    fit.save(tmp_path / "out")
    with pytest.raises(ValueError, match="holds saved fits"):
        CORPUS.save(tmp_path / "out")
    with pytest.raises(ValueError, match="a saved fit, not a corpus; see the `load` of its class"):
        Corpus.open(tmp_path / "out")
    assert lc.TopicFit.load(tmp_path / "out").vocabulary == WORDS


def test_one_document_is_no_corpus(fit) -> None:
    with pytest.raises(TypeError, match=r"`corpus\[\[d\]\]` is a corpus"):
        fit.proportions(CORPUS[0])
