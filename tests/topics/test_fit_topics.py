# SPDX-License-Identifier: Apache-2.0
"""Learning topics in closed form: what the bound does, and what can be read from a fit."""

from __future__ import annotations

import dataclasses
import signal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.special import digamma

import numpyro_largecat as lc
from numpyro_largecat.data import Corpus
from numpyro_largecat.ops.numpy_generator import numpy_generator
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.topics import (
    Options,
    document_chunks,
    local_steps,
    passes,
    topic_fit,
    topic_table,
)
from numpyro_largecat.topics.document_chunks import (
    Shapes,
    batches_within,
    chunks_of,
    widths_of,
)
from numpyro_largecat.topics.local_steps import Collapsed
from numpyro_largecat.topics.start_counts import start_at_random, start_from_documents
from tests import reference_topics as reference
from tests.slow_cases import slow_case

V, K = 60, 6
WORDS = tuple(f"w{i}" for i in range(V))


def topic_corpus(num_documents=150, seed=0):
    """Documents of six topics with ten words each; a tenth of the tokens is noise."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(num_documents):
        frequencies = 0.9 * np.repeat(rng.dirichlet(np.full(K, 0.1)), V // K) / 10 + 0.1 / V
        tokens = rng.choice(V, size=rng.integers(20, 40), p=frequencies / frequencies.sum())
        documents.append([WORDS[t] for t in tokens])
    return Corpus.from_documents(documents, WORDS)


CORPUS = topic_corpus()
KEY = jax.random.key(0)
fit_topics = partial(lc.fit_topics, progress_bar=False)
fit_mean_field = partial(fit_topics, inference="mean_field")
both_inferences = pytest.mark.parametrize("inference", ["collapsed", "mean_field"])


def corpus_bound(fit, corpus, num_sweeps=300):
    """The whole bound of Eqs. 35 and 41 to 49 by the reference, documents solved densely."""
    counts = fit.posterior - 0.1
    log_probs = (digamma(fit.posterior) - digamma(fit.posterior.sum(1, keepdims=True))).T
    value = reference.topic_term(0.1, fit.posterior)
    for d in range(corpus.num_documents):
        words, own = corpus[d]
        value += reference.solve_document(
            log_probs[words], own, fit.concentration, num_sweeps=num_sweeps
        )[2][-1]
    # Eq. 35 has (S + prior - posterior) E[log phi], and documents have S E[log phi] once more.
    return value - (counts * log_probs.T).sum()


@pytest.mark.usefixtures("x64")
def test_bound_is_that_of_the_equations() -> None:
    """After a fit that has converged, the recorded bound is the reference's."""
    corpus = topic_corpus(20)
    exact = Options(max_sweeps=400, tolerance=1e-9, num_restarts=0)
    fit = fit_mean_field(KEY, corpus, K, num_active=K, num_passes=80, options=exact)
    assert fit.bounds[-1] - fit.bounds[-2] < 1e-2
    assert fit.bounds[-1] == pytest.approx(corpus_bound(fit, corpus), abs=0.1)


@pytest.mark.usefixtures("x64")
def test_a_first_pass_has_the_mean_concentration() -> None:
    """And its bound is that of the concentrations given, at what it found with their mean."""
    corpus, concentration = topic_corpus(20, seed=3), np.linspace(0.05, 0.3, K)
    exact = Options(max_sweeps=300, tolerance=1e-9, num_restarts=0)
    arguments = {"concentration": concentration, "num_active": K, "num_passes": 1}
    fit = fit_mean_field(KEY, corpus, K, **arguments, options=exact)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(KEY)))
    start = start_from_documents(rng, corpus, K) + 0.1
    log_probs, posterior, value = reference.expected_log(start.T).T, np.full((K, V), 0.1), 0.0
    for d in range(corpus.num_documents):
        words, counts = corpus[d]
        mean = np.full(K, concentration.mean())
        r, _, _ = reference.solve_document(log_probs[words], counts, mean, num_sweeps=300)
        value += reference.collapsed_bound(log_probs[words], counts, concentration, r)
        posterior[:, words] += counts * r.T
    value += reference.topic_term(0.1, posterior) - ((posterior - 0.1) * log_probs.T).sum()
    np.testing.assert_allclose(fit.posterior, posterior, atol=1e-4)
    assert fit.bounds[0] == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize("concentration", [None, np.linspace(0.05, 0.3, K)])
@pytest.mark.parametrize("num_active", [2, K])
@pytest.mark.usefixtures("x64")
@pytest.mark.some_cases(2)
def test_warm_starts_never_lower_the_bound(num_active: int, concentration) -> None:
    arguments = {"concentration": concentration, "num_active": num_active, "num_passes": 12}
    arguments |= {"batch_size": 40, "start": "random", "options": Options(warm_start=True)}
    fit = fit_mean_field(KEY, CORPUS, K, **arguments)
    assert np.diff(fit.bounds).min() > -1e-6
    assert fit.bounds[-1] - fit.bounds[0] > 50


@pytest.mark.parametrize("start", ["documents", "random"])
@pytest.mark.some_cases(1)
def test_cold_starts_with_restarts_hardly_lower_the_bound(start) -> None:
    """Any decrease is below 1e-4 of the bound."""
    fit = fit_mean_field(KEY, CORPUS, K, num_active=3, num_passes=12, batch_size=40, start=start)
    bounds = np.array(fit.bounds)
    assert (np.diff(bounds) / np.abs(bounds[1:])).min() > -1e-4
    assert bounds[-1] > bounds[0]


@pytest.mark.parametrize("concentration", [None, slow_case(np.linspace(0.02, 0.1, 9))])
@pytest.mark.parametrize("method", ["memoized", "stochastic"])
@both_inferences
@pytest.mark.some_cases(2)
def test_topics_are_found(inference: str, method: str, concentration) -> None:
    """With a few topics to spare, each true topic's ten words lead one that was found."""
    fit = fit_topics(
        KEY,
        CORPUS,
        9,
        concentration=concentration,
        num_active=3,
        inference=inference,
        method=method,
        num_passes=20,
        batch_size=50,
    )
    found = np.array([[int(w.word[1:]) // 10 for w in topic] for topic in fit.top_words(10)])
    shares = np.array([np.bincount(row, minlength=K) for row in found])
    assert shares.max(axis=0).min() >= 8
    np.testing.assert_allclose(fit.topics.sum(axis=1), 1, rtol=1e-5)


@both_inferences
def test_counts_are_those_of_the_corpus(inference) -> None:
    """Memoized: each token is counted once, whatever was the start."""
    options = {"num_active": 2, "num_passes": 2, "batch_size": 40}
    fit = fit_topics(KEY, CORPUS, K, inference=inference, **options)
    by_word = (fit.posterior - fit.word_concentration).sum(axis=0)
    expected = np.bincount(CORPUS.words, CORPUS.counts, V)
    np.testing.assert_allclose(by_word, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("x64")
def test_a_bound_is_that_of_what_a_collapsed_fit_found() -> None:
    """With one batch and pass the whole bound follows from the start, by the reference."""
    corpus = topic_corpus(20)
    exact = Options(max_sweeps=300, tolerance=1e-9)
    arguments = {"concentration": 0.2, "num_active": K, "num_passes": 1}
    fit = fit_topics(KEY, corpus, K, **arguments, options=exact)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(KEY)))
    start = start_from_documents(rng, corpus, K) + 0.1
    probs, posterior, value = start / start.sum(axis=0), np.full((K, V), 0.1), 0.0
    for d in range(corpus.num_documents):
        words, counts = corpus[d]
        r = reference.collapsed_document(probs[words], counts, np.full(K, 0.2), num_sweeps=300)
        none = np.zeros_like(probs[words])  # the term of log phi is in that of the topics
        value += reference.collapsed_bound(none, counts, np.full(K, 0.2), r)
        posterior[:, words] += counts * r.T
    np.testing.assert_allclose(fit.posterior, posterior, atol=1e-6)
    value += reference.topic_term(0.1, posterior)
    assert fit.bounds[0] == pytest.approx(value, rel=1e-8)


@pytest.mark.usefixtures("x64")
def test_a_token_leaves_the_topics_in_the_second_visit() -> None:
    """And the word's concentration is learned after it, from what it found."""
    corpus, b, a = topic_corpus(20), 0.1, np.full(K, 0.2)
    exact = Options(max_sweeps=300, tolerance=1e-9)
    arguments = {"concentration": a, "num_active": K, "options": exact}
    once = fit_topics(KEY, corpus, K, num_passes=1, **arguments)
    twice = fit_topics(KEY, corpus, K, num_passes=2, **arguments)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(KEY)))
    start = start_from_documents(rng, corpus, K) + b
    counts, (found, log_absence) = once.posterior.T - b, np.zeros((2, V, K))
    totals = counts.sum(axis=0) + V * b
    for d in range(corpus.num_documents):
        words, own = corpus[d]
        first = start[words] / start.sum(axis=0)
        last = reference.collapsed_document(first, own, a, num_sweeps=300)
        probs = (counts[words] - last + b) / totals
        r = reference.collapsed_document(probs, own, a, num_sweeps=300)
        found[words] += own[:, None] * r
        log_absence[words] += own[:, None] * np.log1p(-np.minimum(r, 1 - 1e-12))
    np.testing.assert_allclose(twice.posterior - twice.word_concentration, found.T, atol=1e-6)
    presence = -np.expm1(log_absence)
    if_any = np.maximum(found / presence, 1)
    rise = (presence * (digamma(b + if_any) - digamma(b))).sum()
    falls = (digamma(V * b + found.sum(axis=0)) - digamma(V * b)).sum()
    assert once.word_concentration == b
    assert twice.word_concentration == pytest.approx(b * rise / (V * falls), rel=1e-4)


def test_a_batch_touches_the_rows_of_its_words() -> None:
    """Rows of the table that do not occur in a batch stay as they are, bit by bit."""
    corpus = Corpus.from_documents([["w1", "w2"], ["w2", "w5"]], WORDS)
    local_step, shapes = Collapsed(2, Effort()), Shapes((16,), 16, 3)
    problem = passes.Problem(corpus, local_step, shapes)
    batch = document_chunks.Batch(np.array([0]), np.array([1, 2, 2]))
    table = topic_table.Table(np.random.default_rng(0).gamma(1.0, size=(V, 2)), np.float32)
    before = table.numpy().copy()
    summary = passes.visit_batch(problem, batch, table, passes.Priors(jnp.full(2, 0.1), 0.1))
    assert summary.sums.counts.shape == (3, 2)
    table.add(batch.rows, summary.sums.counts)
    changed = np.flatnonzero((table.numpy() != before).any(axis=1))
    assert changed.tolist() == [1, 2]
    np.testing.assert_allclose((table.numpy() - before).sum(), 2, rtol=1e-5)
    for keep in (0.5, 1e-8):  # below the least scale: folded into the counts
        before = table.numpy().sum()
        table.add(batch.rows, csr_array(np.ones((3, 2))), keep=keep)
        np.testing.assert_allclose(table.numpy().sum(), keep * before + 6, rtol=1e-5)


def test_a_corpus_on_disk_gives_the_same_fit(tmp_path) -> None:
    CORPUS.save(tmp_path)
    options = dict(num_topics=K, num_active=2, num_passes=1)
    here, there = (fit_topics(KEY, corpus, **options) for corpus in (CORPUS, Corpus.open(tmp_path)))
    np.testing.assert_allclose(here.posterior, there.posterior, rtol=1e-6)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_active=7), "at most 6, the number of topics; got 7"),
        (dict(concentration=0.0), "`concentration` must be positive"),
        (dict(corpus=np.eye(3)), r"a `Corpus`, .*from_csr.*; got an array"),
        (
            dict(concentration=[0.1, 0.2]),
            r"one number or have shape \(6,\), for each topic; got shape \(2,\)",
        ),
        (
            dict(concentration=[0.1]),
            r"one number or have shape \(6,\), for each topic; got shape \(1,\)",
        ),
        (
            dict(word_concentration=np.array([0.1])),
            r"`word_concentration` must be one number, .* got shape \(1,\)\.$",
        ),
        (dict(word_concentration=np.inf), "`word_concentration` must be finite"),
        (
            dict(word_concentration=np.ones(V)),
            r"`word_concentration` must be one number, .* got shape \(60,\)\.$",
        ),
        (dict(concentration=np.zeros(K)), r"must be positive, .* got 0\.0"),
        (
            dict(rng_key=0),
            r"`rng_key` must be one JAX random key; got 0, of type int\. Make one with",
        ),
        (
            dict(rng_key=jax.random.split(KEY)),
            r"one JAX random key; got an array of .* of shape \(2,\)",
        ),
        (dict(inference="gibbs"), "'collapsed', 'mean_field'; got 'gibbs'"),
        (
            dict(concentration="learned", method="stochastic"),
            r"`concentration='learned'` needs .* got 'collapsed' and 'stochastic'",
        ),
        (
            dict(word_concentration="learned", inference="mean_field"),
            r"`word_concentration='learned'` needs .* got 'mean_field' and 'memoized'",
        ),
        (dict(concentration="auto"), "'learned' or numbers; got 'auto'"),
        (dict(method="online"), "'memoized', 'stochastic'; got 'online'"),
        (dict(start="zero"), "'documents', 'random' or an earlier fit; got 'zero'"),
        (
            dict(method="stochastic", options=Options(warm_start=True)),
            "needs `method='memoized'`",
        ),
        (dict(options={"delay": 1.0}), r"`options` must be lc\.topics\.Options"),
        (dict(corpus=Corpus.from_documents([[], []], WORDS)), "all are empty"),
    ],
)
def test_bad_arguments_are_refused(change, message) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fit_topics(**dict(rng_key=KEY, corpus=CORPUS, num_topics=K, num_active=2) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(forgetting=1.5), r"in \[0, 1\], .* got 0 and 1.5"),
        (dict(delay=-1.0), "`delay` of at least 0"),
        (dict(max_sweeps=9), "`max_sweeps` must be at least 10"),
        (dict(num_restarts=-1), "`num_restarts` must be at least 0"),
    ],
)
def test_bad_options_are_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**change)


def test_starts() -> None:
    """Chosen documents differ; the starts have the tokens of the corpus, and four times these."""
    rng = np.random.default_rng(0)
    rare = Corpus.from_documents([["w1"]] * 19 + [["w2", "w2"]], WORDS)
    table = start_from_documents(rng, rare, 2)
    assert (table[2].max() > 2 * table[2].min()) and table.sum() == pytest.approx(4 * 21)
    table = start_at_random(rng, CORPUS, 4)
    np.testing.assert_allclose(
        table.sum(axis=1), np.bincount(CORPUS.words, CORPUS.counts, V), atol=1e-9
    )


@pytest.mark.parametrize(
    ("sizes", "num_passes", "widths"),
    [
        ([3, 10], 1, (16,)),
        ([100] * 81 + [400] * 19, 1, (416,)),
        ([100] * 81 + [400] * 19, 1000, (112, 416)),
        ([10] * 90 + [100] * 81 + [400] * 19, 1000, (16, 112, 416)),
        ([130] * 100, 1000, (144,)),
        ([8] * 100 + [3000], 10, (16, 3072)),  # the longest does not make others longer
        ([0], 1, (16,)),
    ],
)
def test_a_width_must_be_worth_its_compilation(sizes, num_passes, widths) -> None:
    rows = [(np.arange(size), np.ones(size, int)) for size in sizes]
    corpus = Corpus.from_rows(rows, max(sizes) + 1)
    assert widths_of(corpus, num_passes) == widths
    shapes = Shapes(widths, 128, corpus.num_words)
    chunks = [make() for make in chunks_of(corpus, np.arange(len(sizes)), shapes)]
    assert sorted(d for chunk in chunks for d in chunk.documents) == list(range(len(sizes)))
    assert all(chunk.counts.sum() == sum(sizes[d] for d in chunk.documents) for chunk in chunks)
    assert all(chunk.words.size <= document_chunks.SLOTS_OF_CHUNK for chunk in chunks)
    one_size = {(shapes.documents_of(width), width) for width in widths}
    assert {chunk.words.shape for chunk in chunks} <= one_size


@pytest.mark.parametrize("warm_start", [False, True])
@pytest.mark.usefixtures("x64")
@pytest.mark.some_cases(1)
def test_code_for_short_documents_changes_nothing(warm_start, monkeypatch) -> None:
    sizes = np.diff(CORPUS.offsets)
    some = CORPUS[np.argsort(-sizes)[:80]]
    rows = [some[d] for d in range(80)]
    rows[2:] = [(words[:5], counts[:5]) for words, counts in rows[2:]]
    corpus = Corpus.from_rows(rows, CORPUS.num_words)
    fits = []
    for slots in (document_chunks.SLOTS_FOR_CODE, 0):
        monkeypatch.setattr(document_chunks, "SLOTS_FOR_CODE", slots)
        options = Options(warm_start=warm_start)
        fits.append(fit_topics(KEY, corpus, K, num_active=2, num_passes=2, options=options))
    assert [fit.shapes.widths for fit in fits] == [(32,), (16, 32)]
    np.testing.assert_allclose(fits[0].posterior, fits[1].posterior, atol=1e-9)


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


def rare_words_corpus(num_documents=60):
    """Documents of ten words from 2,000, so that a batch touches few rows of the table."""
    rng = np.random.default_rng(0)
    rows = [(np.sort(rng.choice(2000, 10, replace=False)), np.ones(10, int)) for _ in range(60)]
    return Corpus.from_rows(rows[:num_documents], 2000)


@pytest.mark.parametrize("make", [topic_corpus, rare_words_corpus])
@pytest.mark.slow
def test_what_is_read_from_a_fit_compiles_nothing_new(make) -> None:
    """Proportions and scores use the code of the fit, also where its batches touch few words."""
    corpus = make(60)
    fit = fit_mean_field(KEY, corpus, 3, num_passes=1, batch_size=16)
    assert (fit.shapes.num_rows < corpus.num_words) == (make is rare_words_corpus)
    programs = local_steps._solve_mean_field._cache_size()
    assert np.isfinite(fit.score(corpus)) and np.isfinite(fit.proportions(corpus)).all()
    assert local_steps._solve_mean_field._cache_size() == programs


def test_batches_within_rows_have_all_documents() -> None:
    corpus = rare_words_corpus()
    batches = list(batches_within(corpus, 55))
    assert np.concatenate([batch.documents for batch in batches]).tolist() == list(range(60))
    for batch in batches:
        words = np.unique(corpus[batch.documents].words)
        assert len(batch.rows) == 55 and np.unique(batch.rows).tolist() == words.tolist()
    alone = list(batches_within(corpus, 4))
    assert len(alone) == 60 and {len(batch.rows) for batch in alone} == {10}


@pytest.mark.parametrize("method", ["memoized", "stochastic"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("the disk is gone")])
def test_a_fit_that_is_interrupted_is_not_lost(method, error, monkeypatch) -> None:
    """It is that of the passes that are whole."""
    corpus = topic_corpus(30)
    options = dict(num_topics=K, num_active=2, method=method, batch_size=16)
    two = fit_topics(KEY, corpus, num_passes=2, **options)
    calls = []

    def generator(key):
        """Presses Ctrl-C, or fails, at the start of the third pass."""
        calls.append(key)
        if len(calls) == 3:
            raise error
        return numpy_generator(key)

    monkeypatch.setattr(passes, "numpy_generator", generator)
    with pytest.raises(type(error)) as raised:
        fit_topics(KEY, corpus, num_passes=9, **options)
    assert raised.value.__notes__[-1].endswith("is the fit after 4 of 18 batches.")
    np.testing.assert_array_equal(raised.value.result_so_far.posterior, two.posterior)
    np.testing.assert_array_equal(raised.value.result_so_far.bounds, two.bounds)


@pytest.mark.usefixtures("sigint_raises")
def test_ctrl_c_in_a_change_of_the_table_leaves_it_whole(monkeypatch) -> None:
    """The old counts are given away for the new ones, which must be kept then."""
    add = topic_table._add

    def pressed(*arguments):
        found = add(*arguments)
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(topic_table, "_add", pressed)
    with pytest.raises(KeyboardInterrupt) as raised:
        fit_topics(KEY, topic_corpus(30), K, num_active=2, batch_size=16)
    tokens = (raised.value.result_so_far.posterior - 0.1).sum()
    first, start = raised.value.result_so_far, 4 * topic_corpus(30).num_tokens  # see the starts
    assert first.bounds.shape == (0,) and start < tokens < 1.5 * start


@pytest.mark.slow
def test_many_small_batches_are_as_good_as_memoized() -> None:
    """The default delay is the number of batches; with 1 the score here is -3.49, 0.15 lower."""
    train, test = topic_corpus(150), topic_corpus(60, seed=1)
    options = dict(num_topics=9, num_active=3, num_passes=5, batch_size=8)
    memoized = fit_topics(jax.random.key(2), train, **options)
    options["method"] = "stochastic"
    stochastic = fit_topics(jax.random.key(2), train, **options)
    assert stochastic.score(test) > memoized.score(test) - 0.03
    given = fit_topics(jax.random.key(2), train, options=Options(delay=19), **options)
    np.testing.assert_array_equal(given.posterior, stochastic.posterior)


def test_a_stochastic_fit_follows_the_steps() -> None:
    """S <- (1 - rho) S + rho N / B S_batch, from t = 1: with delay 0 the first batch is all."""
    corpus = topic_corpus(30)
    arguments = dict(num_topics=K, num_active=2, batch_size=30, num_passes=1)
    once = fit_topics(KEY, corpus, **arguments)
    arguments["method"] = "stochastic"
    whole, half = (
        fit_topics(KEY, corpus, options=Options(delay=delay, forgetting=1.0), **arguments)
        for delay in (0.0, 1.0)
    )
    np.testing.assert_allclose(whole.posterior, once.posterior, rtol=1e-4)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(KEY)))
    start = start_from_documents(rng, corpus, K).T + 0.1
    np.testing.assert_allclose(half.posterior, (start + once.posterior) / 2, rtol=1e-4)


@pytest.mark.parametrize("method", ["memoized", "stochastic"])
def test_a_fit_goes_on_from_another(method) -> None:
    """Two passes and one more are three, with one batch; other topics or words are refused."""
    corpus = topic_corpus(30)
    arguments = dict(num_topics=K, num_active=2, batch_size=30, method=method)
    arguments["inference"] = "mean_field"  # a collapsed one needs what the last visit left
    whole = fit_topics(KEY, corpus, num_passes=3, **arguments)
    first = fit_topics(KEY, corpus, num_passes=2, **arguments)
    second = fit_topics(KEY, corpus, num_passes=1, start=first, **arguments)
    np.testing.assert_allclose(second.posterior, whole.posterior, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(second.bounds, whole.bounds[2:], rtol=1e-5)
    steps = (2, 3) if method == "stochastic" else (0, 0)
    assert (first.num_steps, second.num_steps) == steps
    with pytest.raises(ValueError, match="5 topics; got 6"):
        fit_topics(KEY, corpus, 5, start=first)
    with pytest.raises(ValueError, match="60 words; got 2"):
        fit_topics(KEY, Corpus.from_documents([["a", "b"]]), K, start=first)


def test_stochastic_steps_after_a_memoized_fit_begin_at_one() -> None:
    """With delay 0 the first takes all from its batch, as one more memoized pass does.

    Its documents have the topics' own concentrations, since topics differ by then.
    """
    corpus, concentration = topic_corpus(30), np.linspace(0.05, 0.3, K)
    arguments = dict(num_topics=K, num_active=2, batch_size=30, concentration=concentration)
    arguments["inference"] = "mean_field"
    first = fit_topics(KEY, corpus, num_passes=3, **arguments)
    again = fit_topics(KEY, corpus, num_passes=1, start=first, **arguments)
    four = fit_topics(KEY, corpus, num_passes=4, **arguments)
    arguments |= dict(method="stochastic", options=Options(delay=0.0, forgetting=1.0))
    second = fit_topics(KEY, corpus, num_passes=1, start=first, **arguments)
    assert (first.num_steps, again.num_steps, second.num_steps) == (0, 0, 1)
    np.testing.assert_allclose(again.posterior, four.posterior, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(second.posterior, again.posterior, rtol=1e-3, atol=1e-3)


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
