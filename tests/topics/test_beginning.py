# SPDX-License-Identifier: Apache-2.0
"""Where a fit begins: documents, earlier fits, priors of words, and more topics than remain."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from scipy.special import digamma

import numpyro_largecat as lc
from numpyro_largecat.data import Corpus
from numpyro_largecat.topics import Options, passes, topic_table
from numpyro_largecat.topics.start_counts import (
    start_at_random,
    start_from_documents,
    start_of_new_words,
)
from numpyro_largecat.topics.word_prior import WordPrior
from tests import reference_topics as reference
from tests.topics.corpora import (
    BATCHES,
    CORPUS,
    KEY,
    WORDS,
    K,
    V,
    both_inferences,
    fail_at,
    fit_of,
    fit_topics,
    topic_corpus,
)


def test_starts() -> None:
    """Chosen documents differ; the starts have the tokens of the corpus, and four times these."""
    rng = np.random.default_rng(0)
    rare = Corpus.from_documents([["w1"]] * 19 + [["w2", "w2"]], WORDS)
    table = start_from_documents(rng, rare, 2, WordPrior.of(0.1, V, 2))
    assert (table[2].max() > 2 * table[2].min()) and table.sum() == pytest.approx(4 * 21)
    table = start_at_random(rng, CORPUS, 4, WordPrior.of(0.1, V, 4))
    np.testing.assert_allclose(
        table.sum(axis=1), np.bincount(CORPUS.words, CORPUS.counts, V), atol=1e-9
    )


@pytest.mark.filterwarnings("ignore:.* in one batch")
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
    with pytest.raises(ValueError, match=r"must share words .* \('a', 'b'\), .* \('w0', 'w1'"):
        fit_topics(KEY, Corpus.from_documents([["a", "b"]]), K, start=first)


def test_stochastic_steps_after_a_memoized_fit_begin_at_one() -> None:
    """With delay 0 the first takes all from its batch, as one more memoized pass does.

    Its documents have the topics' own concentrations, since topics differ by then.
    """
    corpus, concentration = topic_corpus(30), np.linspace(0.05, 0.3, K)
    arguments = dict(num_topics=K, num_active=2, batch_size=30, concentration=concentration)
    arguments |= dict(inference="mean_field", options=Options(num_candidates=K))
    first = fit_topics(KEY, corpus, num_passes=3, **arguments)
    again = fit_topics(KEY, corpus, num_passes=1, start=first, **arguments)
    four = fit_topics(KEY, corpus, num_passes=4, **arguments)
    arguments |= dict(method="stochastic", options=Options(delay=0.0, forgetting=1.0))
    second = fit_topics(KEY, corpus, num_passes=1, start=first, **arguments)
    assert (first.num_steps, again.num_steps, second.num_steps) == (0, 0, 1)
    np.testing.assert_allclose(again.posterior, four.posterior, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(second.posterior, again.posterior, rtol=1e-3, atol=1e-3)


NEW_WORDS = Corpus.from_documents([["w0", "w1", "new", "new"], ["w0", "new"], ["w20", "w21"]] * 20)


@pytest.mark.parametrize("method", ["memoized", "stochastic"])
def test_a_posterior_is_the_prior_of_new_documents(method) -> None:
    """Of the words of both: tokens add up, and a new word joins the topic of those beside it."""
    first = fit_of(5)
    arguments = {"num_passes": 3, "method": method, "batch_size": 20}
    both = fit_topics(KEY, NEW_WORDS, K, prior=first, **arguments)
    assert both.vocabulary == (*WORDS, "new")
    earlier = first.word_concentration
    np.testing.assert_array_equal(both.word_concentration, [*earlier, earlier.min()])
    tokens = (both.posterior - both.word_concentration).sum()
    scale = 1 if method == "memoized" else 0.5  # steps have not gone all the way
    assert tokens > CORPUS.num_tokens + scale * NEW_WORDS.num_tokens * 0.99
    topic = both.topics[:, :2].sum(axis=1).argmax()
    assert both.topics[:, -1].argmax() == topic == first.topics[:, :2].sum(axis=1).argmax()
    np.testing.assert_allclose(both.concentration, first.concentration)


def test_words_of_more_documents_have_more_concentration() -> None:
    """As the root of their number, at one level, which goes on from an earlier fit."""
    rows = [(np.arange(3 if d < 8 else 2), np.ones(3 if d < 8 else 2, int)) for d in range(32)]
    corpus = Corpus.from_rows(rows, 4)  # in 32, 32, 8 and 0 documents
    roots = np.sqrt([32.5, 32.5, 8.5, 0.5])
    options = Options(num_candidates=2)
    first = fit_topics(KEY, corpus, 2, num_passes=1, options=options)
    np.testing.assert_allclose(first.word_concentration, 0.1 * roots / roots.mean())
    learned = fit_topics(KEY, corpus, 2, num_passes=3, options=options)
    again = fit_topics(KEY, corpus, 2, num_passes=3, start=learned)
    for fit in (learned, again):
        shares = fit.word_concentration / fit.word_concentration.mean()
        np.testing.assert_allclose(shares, roots / roots.mean())
    levels = [fit.word_concentration.mean() for fit in (first, learned, again)]
    assert len(set(np.round(levels, 6))) == 3


def test_concentrations_of_each_topic_and_word_are_not_learned() -> None:
    prior = np.full((K, V), 0.1) + np.arange(V) / 100
    first = dataclasses.replace(fit_of(1), word_concentration=prior)
    with pytest.raises(ValueError, match="`word_concentration` must be None or numbers where"):
        fit_topics(KEY, CORPUS, K, start=first, word_concentration="learned")


@pytest.mark.usefixtures("x64")
def test_a_prior_is_that_of_the_equations() -> None:
    """One visit from the prior alone, of all topics a word, by the reference."""
    rng = np.random.default_rng(0)
    prior = rng.gamma(1.0, size=(K, V)) + 0.01
    earlier = lc.TopicFit(prior, np.full(K, 0.2), 0.01, K, WORDS, np.zeros(0))
    corpus, exact = topic_corpus(20), Options(max_sweeps=300, tolerance=1e-9)
    how = dict(num_active=K, num_passes=1, batch_size=20)
    fit = fit_topics(KEY, corpus, K, prior=earlier, options=exact, **how)
    expected, found = prior.copy(), []
    probs = prior.T / prior.sum(axis=1)
    for words, counts in corpus:
        r = reference.collapsed_document(probs[words], counts, np.full(K, 0.2), num_sweeps=300)
        expected[:, words] += counts * r.T
        found.append(r)
    np.testing.assert_allclose(fit.posterior, expected, atol=1e-6)
    value = reference.integrated_bound(list(corpus), found, np.full(K, 0.2), prior)
    assert fit.bounds[0] == pytest.approx(value, rel=1e-7)


@pytest.mark.parametrize("start", ["documents", "random"])
def test_words_that_a_prior_favours_stay_together(start) -> None:
    """Seeds of two topics, of ten words each; the number of a topic is that of its seeds."""
    prior = np.full((K, V), 0.05)
    prior[3, :2], prior[5, 20:22] = 20, 20
    fit = fit_topics(KEY, CORPUS, K, word_concentration=prior, start=start, **BATCHES)
    for k, words in ((3, range(10)), (5, range(20, 30))):
        assert fit.topics[k, words].sum() > 0.8
    np.testing.assert_array_equal(fit.word_concentration, prior)
    by_word = (fit.posterior - prior).sum(axis=0)
    expected = np.bincount(CORPUS.words, CORPUS.counts, V)
    np.testing.assert_allclose(by_word, expected, rtol=1e-4, atol=1e-3)


def test_each_word_may_have_a_concentration() -> None:
    """One for all and the same for each are the same fit."""
    options = dict(num_active=2, num_passes=3, inference="mean_field", **BATCHES)
    one = fit_topics(KEY, CORPUS, K, word_concentration=0.2, **options)
    each = fit_topics(KEY, CORPUS, K, word_concentration=np.full(V, 0.2), **options)
    np.testing.assert_allclose(each.posterior, one.posterior, rtol=1e-4)
    np.testing.assert_allclose(each.bounds, one.bounds, rtol=1e-6)
    assert each.word_concentration.shape == (V,)


def test_what_a_prior_decides_cannot_be_given_too() -> None:
    first = fit_of(1)
    for name, value in (("start", "random"), ("word_concentration", 0.1), ("start", first)):
        with pytest.raises(ValueError, match=f"`{name}` must be None beside `prior`"):
            fit_topics(KEY, CORPUS, K, prior=first, **{name: value})
    with pytest.raises(ValueError, match="`prior` must be a fit with 5 topics; got 6"):
        fit_topics(KEY, CORPUS, 5, prior=first)
    with pytest.raises(TypeError, match="`prior` must be an earlier fit"):
        fit_topics(KEY, CORPUS, K, prior="first")
    nameless = Corpus.from_rows([([0], [1])], 3)
    with pytest.raises(ValueError, match="60 words; got 3"):
        fit_topics(KEY, nameless, K, prior=first)


def test_more_topics_than_documents_are_warned_of() -> None:
    corpus = Corpus.from_documents([["a", "b"], ["b", "c"], []])
    with pytest.warns(UserWarning, match="`num_topics` is 3, more than the 2 documents with words"):
        fit = fit_topics(KEY, corpus, 3, num_passes=1, options=Options(num_candidates=3))
    assert fit.topics.shape == (3, 3)
    fit_topics(KEY, corpus[:1], 3, num_passes=1, start=fit)  # goes on, so it may be few


def many_topics(seed, concentration=(0.1,) * 12, num_documents=400, num_words=300):
    """Topics (K, V), and documents of 60 tokens of a few of them."""
    rng = np.random.default_rng(seed)
    topics = rng.dirichlet(np.full(num_words, 0.05), len(concentration))
    frequencies = rng.dirichlet(concentration, num_documents)
    tokens = [rng.choice(num_words, 60, p=own @ topics) for own in frequencies]
    rows = [np.unique(own, return_counts=True) for own in tokens]
    return topics, Corpus.from_rows(rows, num_words)


def worst_distance(found, topics):
    """Total variation of the worst of the topics to the one that stands for it."""
    distances = np.abs(found[:, None] - topics).sum(axis=2) / 2
    return distances[linear_sum_assignment(distances)].max()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_no_topic_is_missed(seed) -> None:
    """Twelve true topics.

    A hundred of a hundred seeds find all (98 with 2 K topics at first, 26 with K), so a correct
    program would fail for less than one seed in thirty.
    """
    topics, corpus = many_topics(seed)
    fit = fit_topics(jax.random.key(seed), corpus, 12, num_passes=8)
    assert worst_distance(fit.topics, topics) < 0.3
    assert fit.posterior.shape == (12, 300) and fit.concentration.sum() == pytest.approx(0.5)


@pytest.mark.slow
def test_mean_field_misses_no_topic_either() -> None:
    """With K topics at first the worst is .65 away here; of four seeds three mix topics."""
    topics, corpus = many_topics(1, (0.1,) * 6)
    fit = fit_topics(jax.random.key(1), corpus, 6, inference="mean_field")
    assert worst_distance(fit.topics, topics) < 0.15


@pytest.mark.slow
def test_rare_topics_are_found_beside_one_of_half_of_all_tokens() -> None:
    """Most candidates are copies of that one, and must leave before the others do.

    Twenty of twenty seeds find all, worst .15 (eight of twenty if, where a copy must wait for
    another, topics of any cost fill its place).
    """
    topics, corpus = many_topics(0, (0.5, *[0.5 / 15] * 15), 800)
    fit = fit_topics(KEY, corpus, 16, num_passes=8)
    assert worst_distance(fit.topics, topics) < 0.3


@pytest.mark.slow
def test_equal_concentrations_are_one_number() -> None:
    fits = [
        fit_topics(KEY, CORPUS, K, num_passes=4, concentration=a) for a in (0.2, np.full(K, 0.2))
    ]
    np.testing.assert_array_equal(fits[0].posterior, fits[1].posterior)


@pytest.mark.slow
def test_concentrations_of_each_topic_go_by_tokens() -> None:
    """The largest are of the topics that they made; six of six seeds find all, worst .21."""
    given = np.full(8, 0.1)
    given[[2, 5]] = 1, 0.5
    topics, corpus = many_topics(3, given)
    fit = fit_topics(KEY, corpus, 8, concentration=given)
    np.testing.assert_allclose(fit.concentration, given, rtol=1e-6)
    distances = np.abs(fit.topics[[2, 5], None] - topics).sum(axis=2)
    assert distances.argmin(axis=1).tolist() == [2, 5]
    assert worst_distance(fit.topics, topics) < 0.3


@pytest.mark.slow
def test_seeded_topics_keep_their_own_concentrations() -> None:
    """By tokens topic 1 would have the largest, and topic 0 one of the others."""
    made_of = np.array([0.3, 1.0, 0.1, 0.1])
    topics, corpus = many_topics(4, made_of)
    words = np.full((4, corpus.num_words), 0.05)
    words[1, topics[1] > 0.02] = 50.0
    given = np.array([0.6, 0.05, 0.1, 0.1])
    fit = fit_topics(KEY, corpus, 4, concentration=given, word_concentration=words)
    distances = np.abs(fit.topics[:2, None] - topics).sum(axis=2)
    assert distances.argmin(axis=1).tolist() == [0, 1]
    np.testing.assert_allclose(fit.concentration, given, rtol=1e-6)


@pytest.mark.parametrize("num_passes", [1, 2, 5])
def test_tokens_of_topics_that_left_come_back(num_passes) -> None:
    """There is a pass after that in which topics are chosen, which counts each token once."""
    fit = fit_of(num_passes)
    tokens = (fit.posterior - fit.word_concentration).sum()
    assert tokens == pytest.approx(CORPUS.num_tokens, rel=1e-4)
    assert len(fit.bounds) == num_passes


def resumed_after(stop, folder, monkeypatch, options):
    """A fit that ended after so many batches, and went on from its checkpoint."""
    checkpoints = lc.Checkpoints(folder, every_steps=1)
    fail_at(monkeypatch, stop)
    with pytest.raises(OSError, match="the disk is gone"):
        fit_topics(KEY, CORPUS, K, checkpoints=checkpoints, **options)
    monkeypatch.undo()
    return fit_topics(KEY, CORPUS, K, checkpoints=checkpoints, resume=True, **options)


SEEDS = np.linspace(0.05, 0.1, K * V).reshape(K, V)
TO_GO_ON = {has_seeds: dict(num_passes=6, **BATCHES) for has_seeds in (False, True)}
TO_GO_ON[True]["word_concentration"] = SEEDS


@cache
def whole_fit(has_seeds):
    return fit_topics(KEY, CORPUS, K, **TO_GO_ON[has_seeds])


@pytest.mark.parametrize(
    ("stop", "has_seeds"),
    [
        (2, False),
        (5, False),
        (6, False),
        (8, False),
        (10, False),
        (12, False),
        (13, False),
        (5, True),
        (6, True),
        (12, True),
    ],
)
def test_a_fit_goes_on_whether_topics_were_chosen_or_not(
    stop, has_seeds, tmp_path, monkeypatch
) -> None:
    """Three batches a pass, the choice after the sixth, a longer step after the twelfth."""
    whole = whole_fit(has_seeds)
    again = resumed_after(stop, tmp_path, monkeypatch, TO_GO_ON[has_seeds])
    np.testing.assert_array_equal(again.posterior, whole.posterior)
    np.testing.assert_array_equal(again.bounds, whole.bounds)


@pytest.mark.slow
def test_learned_concentrations_go_on_bit_by_bit_in_float64(x64, tmp_path, monkeypatch) -> None:
    """After topics were chosen, of which sums are taken in the order that files have."""
    options = dict(batch_size=5, num_passes=5, concentration="learned")
    whole = fit_topics(KEY, CORPUS, K, **options)
    again = resumed_after(95, tmp_path, monkeypatch, options)
    np.testing.assert_array_equal(again.concentration, whole.concentration)
    np.testing.assert_array_equal(again.posterior, whole.posterior)


@pytest.mark.slow
def test_documents_without_a_topic_that_is_left_start_anew() -> None:
    """Mean field goes on from counts of topics; a document that had none but others would stay."""
    options = Options(num_candidates=12 * K, warm_start=True)
    fit = fit_topics(KEY, CORPUS, K, inference="mean_field", num_passes=6, options=options)
    tokens = (fit.posterior - fit.word_concentration).sum()
    assert tokens == pytest.approx(CORPUS.num_tokens, rel=1e-4)


def test_learned_concentrations_keep_their_sum_when_topics_are_chosen() -> None:
    """Which is that of documents; it is learned after the second pass, and chosen from then."""
    sums = []
    options = dict(concentration="learned", num_passes=4, **BATCHES)
    local_step = []

    def see(fit):
        sums.append(float(fit.concentration.sum()))
        local_step.append(len(fit.posterior))

    fit_topics(KEY, CORPUS, K, after_pass=see, **options)
    assert local_step == [4 * K, 4 * K, K, K]
    assert sums[0] == pytest.approx(0.5) and sums[2] / sums[1] < 1.3


FAVOURED = np.full((K, V), 0.05)
FAVOURED[3, :2] = 20


@cache
def seeded_fit():
    return fit_topics(KEY, CORPUS, K, word_concentration=FAVOURED, num_passes=2, **BATCHES)


def test_a_start_brings_its_prior_of_words() -> None:
    """Also one for each topic and word, which is then not learned."""
    again = fit_topics(KEY, CORPUS, K, start=seeded_fit(), num_passes=1, **BATCHES)
    np.testing.assert_array_equal(again.word_concentration, FAVOURED)
    assert again.topics[3, :2].sum() > 0.1


@pytest.mark.parametrize("how", ["prior", "start", "documents", "random"])
@pytest.mark.parametrize("empty", [Corpus.from_documents([[], []], WORDS), CORPUS[:0]])
def test_a_corpus_without_words_is_refused(how, empty) -> None:
    given = {how: fit_of(1)} if how in ("prior", "start") else {"start": how}
    with pytest.raises(ValueError, match="must have a document with words; all are empty"):
        fit_topics(KEY, empty, K, **given)


def test_a_prior_leaves_a_corpus_on_disk_there(tmp_path, monkeypatch) -> None:
    """If it has the words of the fit; and one without words takes those of the fit."""
    earlier = fit_of(1)
    CORPUS.save(tmp_path / "corpus")
    opened, seen = Corpus.open(tmp_path / "corpus"), []
    monkeypatch.setattr(
        passes, "visit_batch", lambda problem, *_, **__: seen.append(problem.corpus)
    )
    for corpus in (opened, dataclasses.replace(opened, vocabulary=None)):
        with pytest.raises(AttributeError):  # there is no visit
            fit_topics(KEY, corpus, K, prior=earlier)
    assert all(isinstance(corpus.words, np.memmap) for corpus in seen) and len(seen) == 2
    assert all(corpus.vocabulary == WORDS for corpus in seen)


def test_new_words_are_not_of_seeded_topics() -> None:
    """They have the concentration of words that the prior does not favour."""
    both = fit_topics(KEY, NEW_WORDS, K, prior=seeded_fit(), num_passes=2, batch_size=20)
    np.testing.assert_array_equal(both.word_concentration[:, -1], np.full(K, 0.05))


@pytest.mark.parametrize("num_candidates", [K, 4 * K])
@pytest.mark.parametrize("method", ["memoized", "stochastic"])
def test_the_table_is_copied_once_to_choose_topics(method, num_candidates, monkeypatch) -> None:
    """And once for what is returned; a batch touches the rows of its words alone."""
    copies, numpy = [], topic_table.Table.numpy
    monkeypatch.setattr(topic_table.Table, "numpy", lambda self: copies.append(1) or numpy(self))
    options = Options(num_candidates=num_candidates)
    fit_topics(KEY, CORPUS, K, method=method, num_passes=3, options=options, **BATCHES)
    assert len(copies) == 1 + (num_candidates > K)


@both_inferences
def test_new_words_are_of_the_topics_of_their_documents(inference: str) -> None:
    """Not of a topic of few tokens, of which the fit knows least."""
    rng = np.random.default_rng(0)

    def write(*parts: tuple[int, str]) -> Corpus:
        texts = [rng.choice(words.split(), 20) for number, words in parts for _ in range(number)]
        return Corpus.from_documents(texts)

    for seed in range(3):
        old = write((50, "sea ship sail wave"), (50, "law court judge jury"), (2, "junk odd"))
        before = fit_topics(jax.random.key(seed), old, 3)
        new = write((20, "sea ship whale fish"), (20, "law court crime lawyer"))
        later = fit_topics(KEY, new, 3, prior=before, inference=inference)
        assert later.vocabulary is not None
        found = dict(zip(later.vocabulary, later.topics.argmax(axis=0), strict=True))
        assert found["whale"] == found["fish"] != found["crime"] == found["lawyer"]


@pytest.mark.parametrize("by_log", [False, True])
def test_new_words_start_as_likely_in_all_topics(by_log: bool) -> None:
    """By E[phi] exactly; by E[log phi] but for log(70 / 50), the new words' part of the smallest.

    Topics differ in size by 20,000 times.
    """
    known = np.array([[10.0, 4e3, 1e6], [40.0, 6e3, 1e3]])
    prior = WordPrior.of_each(np.concatenate([known, np.full((200, 3), 0.1)]))
    counts = start_of_new_words(prior, 2, by_log=by_log)
    assert (counts[:2] == 0).all() and (counts >= 0).all()
    posterior = prior.each + counts
    totals = posterior.sum(axis=0)
    log_probs = np.log(posterior) - np.log(totals)
    if by_log:
        log_probs = digamma(posterior) - digamma(totals)
    assert np.ptp(log_probs[2:], axis=1).max() < (np.log(70 / 50) if by_log else 1e-9)
