# SPDX-License-Identifier: Apache-2.0
r"""Which of many topics the others are mixtures of.

With more topics than there are in the documents, those that are there are found, and beside them
copies of them and mixtures of several. A topic that the others can stand in for costs little,

    N[k] min_w sum_v phi[k, v] log(phi[k, v] / sum_j w[j] phi[j, v]),    w[k] = 0,

the log probability of its N[k] tokens under the best mixture w of the other topics in its place,
which then have these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from numpyro_largecat.ops.threads import at_once

NUM_STEPS = 30  # of expectation maximisation
FIRST_STEPS = 3  # of these, over all topics
NUM_NEAR = 32  # topics of largest weight, which the others are over
LITTLE = np.float32(0.02)  # share of topics that are gone, without which a mixture is near enough
NUM_WORDS, NUM_GROUPS = 2_000, 500  # the most frequent alone, and groups of all others
DEARER = 2.0  # times the cost of one that must stay for now: those beyond wait too
MUCH = 0.2  # share of a topic in the mixture that stands for another, which then must stay
IN_A_THREAD = 128  # topics, whatever the number of cores, so that sums are the same
TOGETHER = 16  # of these: calls long enough for threads to share the interpreter
P = ParamSpec("P")
T = TypeVar("T")


def one_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Threads of a BLAS, beside ours, would wait for each other.

    Each call has limits of its own: shared ones of threadpoolctl before 3.8 stay, once nested.
    """

    @wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> T:
        with threadpool_limits(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return limited


class StandIns(NamedTuple):
    """What stands for each topic if it is removed."""

    divergence: NDArray[np.floating]  # (K,), nats per token
    weights: NDArray[np.floating]  # (K, K), of the others; 0 of itself


class Spanning(NamedTuple):
    """Topics of which the others are mixtures."""

    topics: NDArray[np.intp]  # in ascending order
    tokens: NDArray[np.floating]  # of each, with those of the others that it stands for


@one_thread
def best_stand_ins(topics: NDArray[np.floating], num_steps: int = NUM_STEPS) -> StandIns:
    """The mixture of the other topics nearest to each, of probabilities (K, V) above 0.

    The divergence is convex in the weights, and each step of EM lowers it. After the first steps
    the ``NUM_NEAR`` largest weights of each go on, where that ends nearer. Cost: O(K^2 V) for each
    first step, two products of matrices, and O(K V) for each further one.
    """
    overlap = topics @ topics.T
    weights = (overlap / overlap.max(axis=1, keepdims=True)) ** 2 + LITTLE  # steps start here
    np.fill_diagonal(weights, 0)
    return _nearest_mixtures(topics, topics, weights, num_steps)


def _nearest_mixtures(
    some: NDArray[np.floating],
    topics: NDArray[np.floating],
    weights: NDArray[np.floating],
    num_steps: int,
) -> StandIns:
    """Of all ``topics`` (K, V), those nearest to some (M, V); weights (M, K) start there."""
    parts = [slice(m, m + IN_A_THREAD) for m in range(0, len(some), IN_A_THREAD)]
    calls = (partial(_mixtures_of, some[p], topics, weights[p], num_steps) for p in parts)
    return StandIns(*map(np.concatenate, zip(*at_once(*calls), strict=True)))


def _mixtures_of(
    some: NDArray[np.floating],
    topics: NDArray[np.floating],
    weights: NDArray[np.floating],
    num_steps: int,
) -> StandIns:
    """The same, in one thread."""
    weights = weights / weights.sum(axis=1, keepdims=True)
    for _ in range(FIRST_STEPS):
        weights *= (some / (weights @ topics)) @ topics.T
    divergence = (some * np.log(some / (weights @ topics))).sum(axis=1)
    num_near = min(NUM_NEAR, len(topics))
    near = np.argpartition(weights, -num_near, axis=1)[:, -num_near:]
    for first in range(0, len(some), TOGETHER):
        few = slice(first, first + TOGETHER)
        found, own = _mixtures_of_near(
            some[few, None],
            topics[near[few]],
            np.take_along_axis(weights[few], near[few], axis=1)[:, None],
            num_steps - FIRST_STEPS,
        )
        is_nearer = found < divergence[few]  # else many topics together stand for it
        which = first + np.flatnonzero(is_nearer)
        divergence[which], weights[which] = found[is_nearer], 0
        weights[which[:, None], near[which]] = own[is_nearer]
    return StandIns(divergence, weights)


def _mixtures_of_near(
    topics: NDArray[np.floating],
    others: NDArray[np.floating],
    weights: NDArray[np.floating],
    num_steps: int,
) -> StandIns:
    """Of each of some topics (M, 1, V), over topics of its own (M, J, V), weights (M, 1, J)."""
    weights = weights / weights.sum(axis=2, keepdims=True)
    across = others.transpose(0, 2, 1)
    for _ in range(num_steps):
        weights *= (topics / (weights @ others)) @ across
    divergence = (topics * np.log(topics / (weights @ others))).sum(axis=2)
    return StandIns(divergence[:, 0], weights[:, 0])


@one_thread
def spanning_topics(
    counts: NDArray[np.floating],
    concentration: NDArray[np.floating] | float,
    num_topics: int,
    always: Sequence[int] = (),
) -> Spanning:
    """Remove topics that others can stand in for, cheapest first, until so many are left.

    At most half of those to be removed go at once, none that is a fifth or more of what stands for
    another of them, and none of more than twice the cost of the cheapest that therefore waits: of
    many copies of one topic few can go at once, and their places are not for topics that nothing
    stands for. Those that relied on what is gone are solved for again when their turn comes: they
    cost hardly less than before. Cost: as ``best_stand_ins`` with 2,500 words at most, and about as
    much for all of these together.

    Args:
        counts: Expected tokens of words in topics, (V, K).
        concentration: Of each word of a topic, positive; one number, (V,) or (K, V).
        num_topics: How many to keep, at least 1.
        always: Topics to keep whatever they cost, at most ``num_topics``.
    """
    left = np.arange(counts.shape[1])
    tokens = counts.sum(axis=0)
    if len(left) <= num_topics:
        return Spanning(left, tokens)
    of_word = np.transpose(concentration)  # (), (V,) or (V, K)
    topics = _of_frequent_words(counts + (of_word[:, None] if of_word.ndim == 1 else of_word))
    divergence, weights = best_stand_ins(topics)
    is_old = np.zeros(len(left), bool)  # relied on one that is gone: costs more, or hardly less
    while True:
        costs = np.where(np.isin(left, always), np.inf, divergence * tokens)
        gone, seen = _cheapest(costs, weights, -(-(len(left) - num_topics) // 2))
        again = seen[is_old[seen]]
        if len(again):
            others = weights[again] + LITTLE * (again[:, None] != np.arange(len(left)))
            found = _nearest_mixtures(topics[again], topics, others, NUM_STEPS)
            divergence[again], weights[again] = found
            is_old[again] = False
            continue
        is_old |= weights[:, gone].sum(axis=1) > LITTLE
        heirs = weights[gone]
        heirs[:, gone] = 0
        of_heirs = np.maximum(heirs.sum(axis=1, keepdims=True), np.finfo(heirs.dtype).tiny)
        tokens += tokens[gone] @ (heirs / of_heirs)
        left, tokens = np.delete(left, gone), np.delete(tokens, gone)
        divergence, is_old = np.delete(divergence, gone), np.delete(is_old, gone)
        if len(left) == num_topics:
            return Spanning(left, tokens)
        topics = np.delete(topics, gone, axis=0)
        weights = np.delete(np.delete(weights, gone, axis=0), gone, axis=1)


def _of_frequent_words(posterior: NDArray[np.floating]) -> NDArray[np.float32]:
    """Probabilities (K, V) above 0 of counts (V, K); words beyond the most frequent in groups."""
    if len(posterior) > NUM_WORDS + NUM_GROUPS:
        order = np.argsort(-posterior.sum(axis=1), kind="stable")
        groups = np.zeros((NUM_GROUPS, posterior.shape[1]), posterior.dtype)
        for first in range(NUM_WORDS, len(order), NUM_GROUPS):
            some = order[first : first + NUM_GROUPS]
            groups[: len(some)] += posterior[some]
        posterior = np.concatenate([posterior[order[:NUM_WORDS]], groups])
    # By topic in memory, since single topics are taken.
    probs = np.array((posterior / posterior.sum(axis=0)).T, np.float32, order="C")
    return np.maximum(probs, np.finfo(np.float32).tiny)


def _cheapest(
    costs: NDArray[np.floating], weights: NDArray[np.floating], most: int
) -> tuple[list[int], NDArray[np.intp]]:
    """Up to ``most`` topics of small cost, none of which stands for another, and all looked at."""
    gone: list[int] = []
    stays = np.zeros(len(costs), bool)
    highest = np.inf
    order = np.argsort(costs, kind="stable")
    for place, k in enumerate(order.tolist()):
        if len(gone) == most or costs[k] > highest or costs[k] == np.inf:
            return gone, order[:place]
        if not stays[k] and weights[k, gone].sum() <= MUCH:
            gone.append(k)
            stays |= weights[k] > MUCH
        else:
            highest = min(highest, DEARER * costs[k])
    return gone, order
