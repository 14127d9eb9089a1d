# SPDX-License-Identifier: Apache-2.0
"""Passes over the batches of a corpus: memoized and stochastic."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Generator, Iterator
from functools import partial

import numpy as np
from jax import Array

from numpyro_largecat._result_so_far import held_signals
from numpyro_largecat.ops.numpy_generator import numpy_generator
from numpyro_largecat.ops.step_sizes import step_size
from numpyro_largecat.ops.threads import at_once
from numpyro_largecat.topics.choose_topics import choose_topics
from numpyro_largecat.topics.document_chunks import Batch
from numpyro_largecat.topics.learned_priors import learns_after, next_priors
from numpyro_largecat.topics.memory import Memory, sum_of_batches
from numpyro_largecat.topics.number_of_topics import best_number
from numpyro_largecat.topics.options import Options
from numpyro_largecat.topics.problem import Problem
from numpyro_largecat.topics.topic_table import topic_term
from numpyro_largecat.topics.visits import visit_batch

TRIAL_PASSES = 4  # of a number of topics
LONGER_STEP = 4  # the pass, from 0, before which counts go on from where the last one led
MOST_HALVINGS = 3  # of all candidates, to the fewest topics that trials have
ENOUGH = 0.97  # of the topics that there are: their number is not learned once more


def memoized_steps(
    problem: Problem,
    batches: list[Batch],
    memory: Memory,
    num_passes: int,
    rng_key: Array,
) -> Iterator[float | None]:
    """Replace the counts of a batch whenever it is visited, and the topics with them.

    Changes ``memory`` and its table in place, from where they are. Gives the bound of the corpus at
    stored local variables after the last batch of a pass, and NaN after the others; None after each
    batch that is visited to learn the number of topics, which leaves ``memory`` as it is.
    """
    keeps = problem.local_step.is_warm or problem.local_step.always_keeps
    for number, b, is_last in _batches_to_go(rng_key, len(batches), memory.table.changes):
        if number >= num_passes + memory.num_added:
            return
        if memory.is_before_choice():
            yield from _choose_or_learn_number(problem, batches, memory, number, rng_key)
        if number == LONGER_STEP and memory.before is not None:
            memory.take_longer_step(problem.corpus, batches)
        found = visit_batch(
            problem,
            batches[b],
            memory.table,
            memory.priors,
            memory.own[b],
            is_first=number == 0 and not problem.goes_on,
            keeps=keeps,
        )
        bound = np.nan
        with held_signals():
            memory.put(b, batches[b].rows, found)
            if is_last:
                bound = _end_pass(problem, batches, memory, number, num_passes)
        yield bound


def _end_pass(
    problem: Problem, batches: list[Batch], memory: Memory, number: int, num_passes: int
) -> float:
    """The bound after all batches; learn priors, and sum counts again.

    So the start leaves with the first pass, and rounding does not add up.
    """
    counts, absence = at_once(
        partial(sum_of_batches, batches, memory.counts, memory.table.shape),
        partial(sum_of_batches, batches, memory.log_absence, memory.table.shape),
    )
    learns = learns_after(number, num_passes, problem)
    of_topics, priors = at_once(
        partial(topic_term, counts, memory.priors.words, absence),
        partial(next_priors, problem, memory, learns, counts, absence),
    )
    bound = float(of_topics + memory.rest.sum())
    memory.table.set(counts)
    if number == LONGER_STEP - 2 and _has_longer_step(problem):
        memory.before = counts
    memory.bounds.append(bound)
    memory.priors = priors
    return bound


def _has_longer_step(problem: Problem) -> bool:
    """Whether counts once go on from where a pass has moved them.

    In the passes after the choice among candidates, topics slowly shed words that were shared with
    those that left; the step spares some of these passes. Numbers of topics are tried without it.
    """
    is_collapsed, candidates = problem.local_step.always_keeps, problem.candidates
    return is_collapsed and candidates.num_passes > 0 and candidates.num_topics is not None


def _choose_or_learn_number(
    problem: Problem, batches: list[Batch], memory: Memory, number: int, rng_key: Array
) -> Generator[None]:
    """Before a pass, by its number: choose topics, as many as there are to be or as is learned."""
    num_topics, num_added = problem.candidates.num_topics, 0
    if num_topics is None:
        num_passes = number + TRIAL_PASSES
        num_topics = yield from _learned_number(problem, batches, memory, rng_key, num_passes)
        if num_topics < ENOUGH * memory.table.shape[1]:
            num_added = problem.candidates.num_passes
    choose_topics(memory, num_topics, problem, num_added=num_added)


def _learned_number(
    problem: Problem, batches: list[Batch], memory: Memory, rng_key: Array, num_passes: int
) -> Generator[None, None, int]:
    """That of the largest bound, after four passes of each that is tried from here.

    Trials have one of four sizes, each half of the last, so that code is compiled for these alone:
    to have more topics than are tried takes less time, where they are few, than to compile.
    They learn concentrations of words early, so that each number is tried at those that suit it.
    """
    first = problem.candidates.num_first
    search = best_number(memory.table.shape[1])
    number = next(search)
    while True:
        trial = memory.copy()
        choose_topics(trial, number, problem)
        trial.pad(first >> min((first // number).bit_length() - 1, MOST_HALVINGS))
        for _ in memoized_steps(problem, batches, trial, num_passes, rng_key):
            yield None
        try:
            number = search.send(trial.bounds[-1])
        except StopIteration as end:
            number = int(end.value)
            break
    if number == first:
        warnings.warn(
            f"`num_topics` was learned to be {number}, all that there were at first: there may be "
            "more. With more documents, set `num_candidates` of `lc.topics.Options` higher.",
            stacklevel=6,
        )
    return number


def _batches_to_go(
    rng_key: Array, num_batches: int, num_done: int
) -> Iterator[tuple[int, int, bool]]:
    """The batches of endless passes but those that were done: pass, batch, whether it is the last.

    Their order is a function of the key and the number of the pass.
    """
    first, place = divmod(num_done, num_batches)
    for i in itertools.count(first):
        order = numpy_generator(rng_key, 1, i).permutation(num_batches)
        for n in range(place, num_batches):
            yield i, int(order[n]), n == num_batches - 1
        place = 0


def stochastic_steps(
    problem: Problem,
    batches: list[Batch],
    memory: Memory,
    num_passes: int,
    options: Options,
    rng_key: Array,
    num_before: int = 0,
) -> Iterator[float]:
    """Step towards the counts that each batch suggests, by ``step_size``.

    Changes the table of ``memory`` in place, from where it is. The bound of the corpus is never
    known: NaN after each batch. ``num_before`` such steps were taken by an earlier fit.
    """
    table = memory.table
    steps = itertools.count(num_before + table.changes + 1)
    delay = len(batches) if options.delay is None else options.delay
    for number, b, _ in _batches_to_go(rng_key, len(batches), table.changes):
        if number >= num_passes:
            return
        if memory.is_before_choice():
            assert problem.candidates.num_topics is not None
            choose_topics(memory, problem.candidates.num_topics, problem)
        batch = batches[b]
        is_first = number == 0 and not problem.goes_on
        found = visit_batch(
            problem, batch, table, memory.priors, is_first=is_first, is_bounded=False
        )
        rho = step_size(next(steps), delay, options.forgetting)
        share = problem.corpus.num_documents / len(batch.documents)
        table.add(batch.rows, found.sums.counts, times=rho * share, keep=1 - rho)
        yield np.nan
