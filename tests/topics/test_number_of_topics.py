# SPDX-License-Identifier: Apache-2.0
"""The number of topics is learned: that of the largest bound."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import numpyro_largecat as lc
from numpyro_largecat.data import Corpus
from numpyro_largecat.topics import Options, collapsed, passes
from numpyro_largecat.topics.number_of_topics import PRECISION, best_number
from tests.topics.corpora import (
    CORPUS,
    KEY,
    WORDS,
    K,
    V,
    fail_at,
    fit_of,
    fit_topics,
    topic_corpus,
)

SOME = Options(num_candidates=24)


def search(bound, most: int) -> tuple[int, list[int]]:
    """What is found, and the numbers asked for."""
    asking, asked = best_number(most), []
    try:
        number = next(asking)
        while True:
            asked.append(number)
            number = asking.send(bound(number))
    except StopIteration as end:
        return end.value, asked


@pytest.mark.parametrize("most", [1, 2, 3, 7, 36, 66, 300])
def test_a_maximum_is_found_in_few_steps(most) -> None:
    """Not below it: where the quarter is best, the search goes on from the half."""
    for peak in range(1, most + 1):
        left, number = most + 1, most
        while number < left:
            left = number
            number, asked = search(lambda k, peak=peak: -abs(np.log(k / peak)), left)
            half = (left + 1) // 2
            assert number >= half or number >= peak / PRECISION
            assert len(set(asked)) == len(asked) <= 16
            assert min(asked) >= (half + 1) // 2 and max(asked) == left
        assert 1 / PRECISION <= number / peak <= PRECISION
        assert number == peak or peak > 66


def test_a_search_ends_whatever_the_bounds_are() -> None:
    """And where they are equal the fewest topics are best."""
    rng = np.random.default_rng(0)
    assert search(lambda _: 0.0, 3)[0] == 2 and search(lambda _: 0.0, 2)[0] == 1
    for _ in range(100):
        bounds = rng.normal(size=101)
        found, asked = search(lambda k, bounds=bounds: bounds[k], 100)
        assert bounds[found] == bounds[asked].max() or bounds[25] == bounds[asked].max()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("concentration", ["learned", None])
def test_as_many_topics_are_found_as_there_are(concentration, seed) -> None:
    """Ten other pairs of a key and a corpus gave six each time."""
    corpus = topic_corpus(200, seed)
    arguments = {"concentration": concentration, "num_passes": 4, "options": SOME}
    arguments["batch_size"] = 100  # of so few documents there would be fifteen batches
    fit = fit_topics(jax.random.key(seed), corpus, "learned", **arguments)
    assert fit.posterior.shape == (K, V) and fit.num_active == K
    blocks = fit.topics.reshape(K, K, -1).sum(axis=2)
    assert sorted(blocks.argmax(axis=1)) == list(range(K)) and blocks.max(axis=1).min() > 0.8
    assert fit.concentration.shape == (K,)


@pytest.mark.slow
def test_another_number_is_found_too() -> None:
    rng = np.random.default_rng(3)
    topics = rng.dirichlet(np.full(500, 0.05), 20)
    shares = rng.dirichlet(np.full(20, 0.1), 1000)
    rows = [np.unique(rng.choice(500, 80, p=f @ topics), return_counts=True) for f in shares]
    fit = fit_topics(KEY, Corpus.from_rows(rows, 500), "learned", batch_size=250)
    assert len(fit.posterior) == 20
    distances = np.abs(fit.topics[:, None] - topics).sum(axis=2) / 2
    assert distances.min(axis=0).max() < 0.15


@pytest.mark.slow
def test_all_passes_asked_for_follow_the_last_choice() -> None:
    """Each is seen once, tokens are counted once, and the bound rises after the last choice."""
    seen = []
    arguments = {"batch_size": 50, "num_passes": 6, "options": SOME}
    fit = fit_topics(KEY, CORPUS, "learned", **arguments, after_pass=seen.append)
    sizes = [len(each.posterior) for each in seen]
    assert len(sizes) == len(fit.bounds) >= 6
    assert sizes[:2] == [24, 24] and sizes == sorted(sizes, reverse=True)
    assert sizes[-4:] == 4 * [len(fit.posterior)]
    tokens = (fit.posterior - fit.word_concentration).sum()
    assert tokens == pytest.approx(CORPUS.num_tokens, rel=1e-4)
    assert fit.bounds[-1] > fit.bounds[-4]
    has_risen = [each.last_rise is not None for each in seen]
    assert has_risen[:3] == [False, True, False] and has_risen[-4:] == [False, True, True, True]


FROM_TWELVE = dict(batch_size=50, num_passes=4, options=Options(num_candidates=12))


@pytest.fixture(scope="module")
def whole():
    """The fit that nothing stops."""
    return fit_topics(KEY, CORPUS, "learned", **FROM_TWELVE)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 40, 92, 130])
def test_a_fit_goes_on_wherever_it_stopped(stop, whole, tmp_path, monkeypatch) -> None:
    """Also within trials of a number, from 6 to 89 and to 155, which then begin again."""
    checkpoints = lc.Checkpoints(tmp_path, every_steps=1)
    fail_at(monkeypatch, stop)
    with pytest.raises(OSError, match="the disk is gone"):
        fit_topics(KEY, CORPUS, "learned", checkpoints=checkpoints, **FROM_TWELVE)
    monkeypatch.undo()
    arguments = dict(checkpoints=checkpoints, resume=True, **FROM_TWELVE)
    again = fit_topics(KEY, CORPUS, "learned", **arguments)
    np.testing.assert_array_equal(again.posterior, whole.posterior)
    np.testing.assert_array_equal(again.bounds, whole.bounds)


@pytest.mark.slow
def test_code_is_compiled_for_few_numbers_of_topics(compiled) -> None:
    """For 24, 12, 6 and 3, and for the one that is found, of some fifteen that are tried."""
    collapsed._through_largest.clear_cache()
    fit = fit_topics(KEY, CORPUS, "learned", num_passes=4, options=SOME)
    assert len(fit.posterior) not in (24, 12, 3)
    assert 4 <= compiled().count("_through_largest") <= 5


@pytest.mark.slow
def test_topics_that_no_document_has_change_no_bound(monkeypatch) -> None:
    """A trial has the bound of a fit with its number of topics, four passes after the choice."""
    bounds, options = {}, dict(num_active=3, options=SOME)

    def three(most):
        for number in (20, 7, 6) if most == 24 else ():  # and once more from 6
            bounds[number] = yield number
        if most != 24:
            yield most
        return 6

    monkeypatch.setattr(passes, "best_number", three)
    fit_topics(KEY, CORPUS, "learned", num_passes=4, **options)
    monkeypatch.setattr(passes, "LONGER_STEP", -1)  # trials have none
    for number, bound in bounds.items():
        fit = fit_topics(KEY, CORPUS, number, num_passes=6, **options)
        assert bound == pytest.approx(fit.bounds[5], rel=1e-6)


@pytest.mark.slow
def test_too_few_candidates_are_warned_of() -> None:
    message = "was learned to be 3, all that there were at first"
    with pytest.warns(UserWarning, match=message) as found:
        fit_topics(KEY, CORPUS, "learned", num_passes=2, options=Options(num_candidates=3))
    assert found[0].filename == __file__


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_topics="many"), "`num_topics` must be one of 'learned' or a number; got 'many'"),
        (dict(concentration=0.1), "`concentration` must be None or 'learned' where `num_topics`"),
        (
            dict(word_concentration=np.full((K, V), 0.1)),
            r"`word_concentration` must be None or one or \(V,\) numbers where `num_topics`",
        ),
        (dict(num_passes=1), "`num_passes` must be at least 2 where `num_topics` is 'learned'"),
        (dict(inference="mean_field"), "`num_topics='learned'` needs `inference='collapsed'`"),
        (dict(method="stochastic"), "`num_topics='learned'` needs .* `method='memoized'`"),
        (dict(num_active=25), "at most 24, the number of topics; got 25"),
    ],
)
def test_what_cannot_be_known_before_is_refused(change, message) -> None:
    arguments = {"num_topics": "learned", "options": SOME} | change
    with pytest.raises(ValueError, match=message):
        fit_topics(KEY, CORPUS, **arguments)


@pytest.mark.parametrize("how", ["start", "prior"])
def test_an_earlier_fit_has_a_number_of_topics(how) -> None:
    with pytest.raises(ValueError, match=f"`{how}` must be None where the number of topics is"):
        fit_topics(KEY, CORPUS, "learned", **{how: fit_of(1)})


@pytest.mark.slow
def test_words_may_have_a_prior_of_their_own() -> None:
    prior = np.linspace(0.05, 0.15, V)
    fit = fit_topics(KEY, CORPUS, "learned", word_concentration=prior, **FROM_TWELVE)
    np.testing.assert_array_equal(fit.word_concentration, prior)
    assert len(fit.posterior) <= 12 and fit.vocabulary == WORDS
