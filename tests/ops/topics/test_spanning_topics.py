# SPDX-License-Identifier: Apache-2.0
"""Topics that others are mixtures of, against a general optimiser and topics made for it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import softmax
from threadpoolctl import threadpool_info, threadpool_limits

from numpyro_largecat.ops.topics.spanning_topics import best_stand_ins, spanning_topics

rng = np.random.default_rng(0)
TRUE = rng.dirichlet(np.full(40, 0.1), 5)


def test_the_stand_in_is_the_nearest_mixture() -> None:
    topics = rng.dirichlet(np.ones(8), 4)
    found = best_stand_ins(topics, 2000)
    for k in range(4):
        others = np.delete(topics, k, axis=0)

        def divergence(scores, k=k, others=others):
            return topics[k] @ np.log(topics[k] / (softmax(scores) @ others))

        assert found.divergence[k] == pytest.approx(minimize(divergence, np.zeros(3)).fun, abs=1e-5)
    np.testing.assert_allclose(found.weights.sum(axis=1), 1)
    assert not np.diag(found.weights).any()


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_few_topics_of_many_stand_in_as_well_as_all(noise) -> None:
    """Of 120, half of them mixtures of four others: steps over all of these end hardly nearer."""
    rng = np.random.default_rng(0)
    parts = rng.dirichlet(np.full(200, 0.1), 60)
    shares = np.zeros((60, 60))
    for row in shares:
        row[rng.choice(60, 4, replace=False)] = rng.dirichlet(np.ones(4))
    mixtures = (1 - noise) * shares @ parts + noise * rng.dirichlet(np.full(200, 0.1), 60)
    topics = np.concatenate([parts, mixtures]) + 1e-6
    topics /= topics.sum(axis=1, keepdims=True)
    found = best_stand_ins(topics)
    assert np.median((found.weights > 0).sum(axis=1)) <= 32
    np.testing.assert_allclose(found.weights.sum(axis=1), 1)
    weights = np.full((120, 120), 1 / 119)
    np.fill_diagonal(weights, 0)
    for _ in range(30):
        weights *= (topics / (weights @ topics)) @ topics.T
    of_all = (topics * np.log(topics / (weights @ topics))).sum(axis=1)
    further = found.divergence - of_all  # nats, where topics are .3 and .6 from the others
    assert further.max() < 0.03 and further.mean() < 0.003
    np.testing.assert_allclose(
        found.divergence, (topics * np.log(topics / (found.weights @ topics))).sum(axis=1)
    )


@pytest.mark.parametrize("times", [1, 20, 100])
def test_a_mixture_of_very_many_topics_leaves(times) -> None:
    """Though it has many times their tokens."""
    parts = np.random.default_rng(0).dirichlet(np.full(400, 0.02), 48)
    tokens = [*[5_000] * 48, 5_000 * times]
    counts = (np.concatenate([parts, parts.mean(axis=0, keepdims=True)]).T) * tokens
    assert spanning_topics(counts, 0.01, 48).topics.tolist() == list(range(48))


@pytest.mark.parametrize("num_extra", [1, 6, 12])
def test_copies_and_mixtures_leave(num_extra) -> None:
    """Of copies of one topic one is left, and of mixtures none, however many tokens they have."""
    mixtures = rng.dirichlet(np.full(5, 0.5), num_extra) @ TRUE
    mixtures[0] = TRUE[2]
    tokens = rng.uniform(500, 5000, 5 + num_extra)
    counts = (np.concatenate([TRUE, mixtures]) * tokens[:, None]).T
    kept = spanning_topics(counts, 0.01, 5).topics
    assert kept.tolist() == sorted(kept.tolist()) and len(kept) == 5
    nearest = np.abs(TRUE[:, None] - (counts / counts.sum(axis=0)).T[kept]).sum(axis=2).min(axis=1)
    assert nearest.max() < 1e-6


def test_no_rare_topic_leaves_in_place_of_copies_that_must_wait() -> None:
    """One of four copies at a time, since the others stand for it."""
    noise = np.random.default_rng(0).gamma(200, 1 / 200, (4, 40))
    topics = np.concatenate([TRUE[:1] * noise, TRUE[1:]])
    topics /= topics.sum(axis=1, keepdims=True)
    counts = (topics * np.array([*[20_000] * 4, *[1_000] * 4])[:, None]).T
    kept = spanning_topics(counts, 0.01, 5).topics
    assert kept[1:].tolist() == [4, 5, 6, 7]


def test_each_that_leaves_is_the_cheapest_then() -> None:
    """Though several go at once, and others are not solved for until their turn comes."""
    rng = np.random.default_rng(1)
    parts = rng.dirichlet(np.full(60, 0.1), 8)
    topics = rng.dirichlet(np.full(8, 0.3), 20) @ parts
    tokens = rng.uniform(100, 1000, 20)
    left = np.arange(20)
    expected = tokens.copy()
    while len(left) > 12:
        found = best_stand_ins(topics[left], 2000)
        least = int((found.divergence * expected[left]).argmin())
        expected[left] += expected[left[least]] * found.weights[least]
        left = np.delete(left, least)
    kept = spanning_topics((topics * tokens[:, None]).T, 1e-9, 12).topics
    assert kept.tolist() == left.tolist()


@pytest.mark.parametrize("concentration", [1e-30, 1e-3])
def test_topics_without_a_word_in_common_stay(concentration) -> None:
    """Also where most words are in groups."""
    counts = np.kron(np.eye(4), np.ones((5000, 1)))
    counts = np.concatenate([counts, counts[:, :1] + counts[:, 1:2]], axis=1)
    assert spanning_topics(counts, concentration, 4).topics.tolist() == [0, 1, 2, 3]


def test_what_stands_for_others_has_their_tokens() -> None:
    """A mixture leaves for its parts; of these one then costs half of the mixture's tokens."""
    first, second, third, fourth = np.kron(np.eye(4), np.ones(10)) / 10
    topics = [10_000 * (first + second) / 2, 100 * first, 100 * second, 300 * third, 5_000 * fourth]
    assert spanning_topics(np.stack(topics, axis=1), 0.001, 3).topics.tolist() == [1, 2, 4]


def test_topics_of_few_tokens_leave_first() -> None:
    counts = (TRUE * np.array([1000, 900, 5, 800, 700])[:, None]).T
    assert spanning_topics(counts, 0.01, 4).topics.tolist() == [0, 1, 3, 4]
    assert spanning_topics(counts, 0.01, 1).topics.tolist() == [0]
    assert spanning_topics(counts, 0.01, 9).topics.tolist() == [0, 1, 2, 3, 4]
    assert spanning_topics(counts, 0.01, 2, [2]).topics.tolist() == [0, 2]
    assert spanning_topics(counts, 0.01, 2, [2, 4]).topics.tolist() == [2, 4]


def test_threads_change_nothing(monkeypatch) -> None:
    """Of 300 topics each thread has 128 at a time."""
    topics = np.random.default_rng(0).dirichlet(np.full(50, 0.1), 300) + 1e-6
    found = best_stand_ins(topics)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    for several, one in zip(found, best_stand_ins(topics), strict=True):
        np.testing.assert_array_equal(several, one)


def test_products_take_one_thread_of_the_blas() -> None:
    """Its threads would wait for each other on a machine with other jobs; afterwards it has all."""
    seen: set[int] = set()

    class Seen(np.ndarray):
        def __truediv__(self, other):
            blas = (lib for lib in threadpool_info() if lib["user_api"] == "blas")
            seen.update(lib["num_threads"] for lib in blas)
            return np.asarray(self) / other

    topics = np.random.default_rng(0).dirichlet(np.ones(20), 3)
    with threadpool_limits(2, "blas"):
        best_stand_ins(topics.view(Seen))
        spanning_topics(1000 * topics.T, 0.1, 2)
        blas = [lib for lib in threadpool_info() if lib["user_api"] == "blas"]
        assert {lib["num_threads"] for lib in blas} == {2}
    assert seen == {1}
