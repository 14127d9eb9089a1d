# SPDX-License-Identifier: Apache-2.0
"""Passes over the batches of a corpus: memoized and stochastic."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from numpyro_largecat._result_so_far import held_signals
from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.ops.numpy_generator import numpy_generator
from numpyro_largecat.ops.step_sizes import step_size
from numpyro_largecat.ops.threads import at_once
from numpyro_largecat.ops.topics.learned_concentrations import (
    next_concentration,
    next_word_concentration,
)
from numpyro_largecat.ops.topics.spanning_topics import spanning_topics
from numpyro_largecat.topics.document_chunks import (
    Batch,
    distinct_words,
    padded_rows,
    solve_batch,
    tokens_of_documents,
)
from numpyro_largecat.topics.document_layout import Chunk, Layout
from numpyro_largecat.topics.local_step import LocalStep, Solved, Sums
from numpyro_largecat.topics.number_of_topics import best_number
from numpyro_largecat.topics.options import Options
from numpyro_largecat.topics.topic_table import Table, add_sparse, topic_term
from numpyro_largecat.topics.word_prior import WordPrior

NOWHERE = 1e-30  # concentration of a topic that no document has
TRIAL_PASSES = 4  # of a number of topics
MOST_HALVINGS = 3  # of all candidates, to the fewest topics that trials have
SETTLED = 5  # passes, or half of them, after which the concentrations of words are learned
ENOUGH = 0.97  # of the topics that there are: their number is not learned once more


class Priors(NamedTuple):
    """Dirichlet concentrations."""

    topics: NDArray[np.floating]  # (K,), of the topic frequencies of a document
    words: WordPrior


class Learns(NamedTuple):
    """Which of them are learned: topics' after each pass but the first, words' later."""

    topics: bool
    words: bool


class Candidates(NamedTuple):
    """More topics at first, of which those remain that the others are mixtures of."""

    num_passes: int  # that they have; 0 for none
    num_first: int
    num_topics: int | None  # that remain; None for as many as have the largest bound

    def first_priors(self, priors: Priors) -> Priors:
        """With the same concentration over all topics of a document."""
        if self.num_passes == 0:
            return priors
        each = priors.topics.sum() / self.num_first
        topics = np.full(self.num_first, each, priors.topics.dtype)
        return Priors(topics, priors.words.with_topics(self.num_first))


class Problem(NamedTuple):
    """What does not change while topics are learned."""

    corpus: Corpus
    local_step: LocalStep
    layout: Layout
    learns: Learns = Learns(False, False)
    goes_on: bool = False  # from an earlier fit, so that topics differ before the first visit
    candidates: Candidates = Candidates(0, 0, 0)
    concentration: NDArray[np.floating] | None = None  # (K,) as given, if topics' differ


class Visit(NamedTuple):
    """What one visit of a batch leaves."""

    sums: Sums
    own: csr_array | None  # what the next visit needs, as ``LocalStep.kept`` gives it


def make_batches(rng: np.random.Generator, corpus: Corpus, batch_size: int) -> list[Batch]:
    """Divide a corpus at random; each batch touches as many rows of the table, some repeated.

    Where that is more than half of the table all batches have all of it.
    """
    order = rng.permutation(corpus.num_documents)
    num_batches = max(-(-len(order) // batch_size), 1)
    parts = [np.sort(part) for part in np.array_split(order, num_batches)]
    rows = [distinct_words(corpus, part) for part in parts]
    most = 64 * -(-max(map(len, rows)) // 64)
    if 2 * most > corpus.num_words:
        return [Batch(part, np.arange(corpus.num_words)) for part in parts]
    return [Batch(p, padded_rows(r, most)) for p, r in zip(parts, rows, strict=True)]


def visit_batch(
    problem: Problem,
    batch: Batch,
    table: Table,
    priors: Priors,
    stored: csr_array | None = None,
    *,
    is_first: bool = False,
    keeps: bool = False,
    is_bounded: bool = True,
) -> Visit:
    """Solve for the documents of a batch given the topics, and sum their counts.

    ``stored`` is what the last visit left, and in what is returned if the visit ``keeps`` it.

    In a first visit the topics are all alike, and would go to those of large concentration;
    therefore all have the mean. The bound is that of their own, and there is one if it
    ``is_bounded``.
    """
    concentration, local_step = priors.topics, problem.local_step
    if is_first:
        concentration = np.full_like(concentration, concentration.mean())
    posterior = table.posterior(batch.rows, priors.words)
    given = local_step.given(posterior, concentration, is_cold=stored is None)
    rows = _RowsKept(problem.corpus, batch.documents, by_word=local_step.by_word)

    def keep(chunk: Chunk, solved: Solved) -> tuple[Sums, NDArray[np.intp], csr_array]:
        own = local_step.kept(solved)
        sums = local_step.sums(given, solved, own, priors.topics if is_bounded else None)
        return sums, chunk.documents, own

    def last(chunk: Chunk) -> Any:
        assert stored is not None
        return local_step.last(stored[rows.of(chunk.documents)], chunk)

    parts = solve_batch(
        problem.corpus,
        batch,
        given,
        local_step,
        problem.layout.for_concentration(priors.topics),
        keep,
        last if stored is not None else None,
    )
    sums, ids, owns = zip(*parts, strict=True)
    places = rows.of(np.concatenate(ids))
    calls = [partial(_plus, of_parts) for of_parts in zip(*sums, strict=True)]
    *found, own = at_once(*calls, partial(_in_order, owns if keeps else (), places))
    return Visit(Sums(*found), own)


def _plus(parts: Sequence[Any]) -> Any:
    return None if parts[0] is None else sum(parts[1:], start=parts[0])


def _in_order(parts: Sequence[csr_array], places: NDArray[np.intp]) -> csr_array | None:
    """Rows of all parts, one after the other, each at its place."""
    if not parts:
        return None
    order = np.empty_like(places)
    order[places] = np.arange(len(places))
    return csr_array(vstack(parts, format="csr"))[order]


class _RowsKept:
    """Where what is kept of each document of a batch is: in a row, or one for each word."""

    def __init__(self, corpus: Corpus, documents: NDArray[np.intp], *, by_word: bool) -> None:
        sizes = np.diff(corpus.offsets)[documents] if by_word else np.ones_like(documents)
        self._documents = documents
        self._ends = np.concatenate([[0], np.cumsum(sizes)])

    def of(self, documents: NDArray[np.intp]) -> NDArray[np.intp]:
        """The rows of some documents, one after the other."""
        places = np.searchsorted(self._documents, documents)
        first, sizes = self._ends[places], np.diff(self._ends)[places]
        before = np.cumsum(sizes) - sizes
        return np.repeat(first - before, sizes) + np.arange(sizes.sum())


class Memory:
    """What is kept of each batch, and the bounds so far; ``table.changes`` batches were visited.

    Whatever interrupts a fit, table and memory are those after the same batch.
    """

    next_choice = -1  # the pass before which candidates leave, if any do
    num_added = 0  # passes of more topics, while their number is learned

    def __init__(self, num_batches: int, table: Table, priors: Priors) -> None:
        self.table, self.priors = table, priors
        self.counts: list[csr_array | None] = [None] * num_batches
        self.own: list[csr_array | None] = [None] * num_batches
        self.log_absence: list[csr_array | None] = [None] * num_batches  # if collapsed
        self.rises = np.zeros((num_batches, len(priors.topics)))  # if collapsed
        self.rest = np.zeros(num_batches)
        self.bounds: list[float] = []  # of the corpus, after each pass

    def copy(self) -> Memory:
        """One that goes on by itself, and has no choice before it."""
        table = Table(self.table.numpy(), self.table.dtype, self.table.mesh)
        table.changes = self.table.changes
        other = Memory(len(self.counts), table, self.priors)
        for name in ("counts", "own", "log_absence", "bounds"):
            setattr(other, name, list(getattr(self, name)))
        other.rises, other.rest = self.rises.copy(), self.rest.copy()
        return other

    def pad(self, num_topics: int) -> None:
        """Add topics that no document has, up to so many."""
        missing = num_topics - self.table.shape[1]
        self.table.set(np.pad(self.table.numpy(), ((0, 0), (0, missing))))
        self.rises = np.pad(self.rises, ((0, 0), (0, missing)))
        topics, words = self.priors
        nowhere = np.full(missing, NOWHERE, topics.dtype)
        self.priors = Priors(np.concatenate([topics, nowhere]), words)
        for parts in (self.counts, self.own, self.log_absence):
            for part in parts:
                if part is not None:
                    part.resize((part.shape[0], num_topics))

    def keep(
        self, topics: NDArray[np.intp], counts: NDArray[np.floating], *, forget_own: bool
    ) -> None:
        """Forget all other topics; ``counts`` (V, K) are those of these.

        ``forget_own`` if documents could not go on from those of their topics that are left.
        """
        self.table.set(counts)
        self.rises = self.rises[:, topics]
        for parts in (self.counts, self.own, self.log_absence):
            parts[:] = [None if part is None else part[:, topics] for part in parts]
        if forget_own:
            self.own = [None] * len(self.own)


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
    table, candidates = memory.table, problem.candidates
    keeps = problem.local_step.is_warm or problem.local_step.always_keeps
    for i, b, is_last in _batches_to_go(rng_key, len(batches), table.changes):
        if i >= num_passes + memory.num_added:
            return
        if table.changes == memory.next_choice * len(batches):
            number = candidates.num_topics
            if number is None:
                number = yield from _learned_number(
                    problem, batches, memory, rng_key, i + TRIAL_PASSES
                )
            goes_on = candidates.num_topics is None and number < ENOUGH * table.shape[1]
            added = candidates.num_passes if goes_on else 0
            _choose(memory, number, problem, num_added=added)
        batch, bound = batches[b], np.nan
        is_first = i == 0 and not problem.goes_on
        how = {"is_first": is_first, "keeps": keeps}
        found = visit_batch(problem, batch, table, memory.priors, memory.own[b], **how)
        sums = found.sums
        with held_signals():
            table.add(batch.rows, sums.counts, less=memory.counts[b])
            memory.counts[b], memory.rest[b], memory.own[b] = sums.counts, sums.rest, found.own
            memory.log_absence[b] = sums.log_absence
            if sums.rises is not None:
                memory.rises[b] = sums.rises
            if is_last:
                # Sum again: the start leaves with the first pass, and rounding does not add up.
                total, absence = at_once(
                    partial(_sum_of, batches, memory.counts, table.shape),
                    partial(_sum_of, batches, memory.log_absence, table.shape),
                )
                learns = _learns_after(i, num_passes, problem)
                of_topics, priors = at_once(
                    partial(topic_term, total, memory.priors.words, absence),
                    partial(_learned, learns, problem.corpus, memory, total, absence),
                )
                bound = of_topics + float(memory.rest.sum())
                table.set(total)
                memory.bounds.append(bound)
                memory.priors = priors
        yield bound


def _learns_after(i: int, num_passes: int, problem: Problem) -> Learns:
    """What is learned after pass i, from 0: nothing after the first, unless a fit goes on.

    Topics that are still alike share words, for which the best concentration of these is high; it
    would keep them alike. So that of words waits until topics are settled.
    """
    topics, words = problem.learns
    are_settled = problem.goes_on or i >= min(SETTLED, num_passes / 2)
    return Learns(topics and (i > 0 or problem.goes_on), words and are_settled)


def _learned(
    learns: Learns,
    corpus: Corpus,
    memory: Memory,
    counts: NDArray[np.float64],
    log_absence: NDArray[np.float64],
) -> Priors:
    """The next priors, of those that learn, after a pass that left these of words (V, K)."""
    topics, words = memory.priors
    if learns.topics:
        lengths = tokens_of_documents(corpus)
        found = next_concentration(topics, memory.rises.sum(axis=0), lengths)
        topics = found.astype(topics.dtype)
    if learns.words:
        learned = next_word_concentration(words.as_given, counts, log_absence)
        words = WordPrior.of(learned, *counts.shape)
    return Priors(topics, words)


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
        _choose(trial, number, problem)
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
            stacklevel=5,
        )
    return number


def _choose(memory: Memory, num_topics: int, problem: Problem, *, num_added: int = 0) -> None:
    """Of the candidates keep those that the others are mixtures of.

    Those whose prior favours some words stay. Tokens of topics that leave are of none until their
    documents are visited again. Of concentrations that were given for each topic the largest is
    then that of the topic with most tokens, and so on. ``num_added`` passes follow before there is
    a choice once more; 0 if there is none.
    """
    counts, (topics, words) = memory.table.numpy(), memory.priors
    own = words.favouring_topics
    spanning = spanning_topics(counts, words.as_given, num_topics, own.tolist())
    kept = np.full(num_topics, -1)
    kept[own] = own  # these keep their numbers
    free, is_other = np.flatnonzero(kept < 0), ~np.isin(spanning.topics, own)
    others, given = spanning.topics[is_other], problem.concentration
    if given is not None:
        free = free[np.argsort(-given[free], kind="stable")]
        others = others[np.argsort(-spanning.tokens[is_other], kind="stable")]
    kept[free] = others
    found = topics[kept] * (topics.sum() / topics[kept].sum()) if given is None else given
    with held_signals():
        memory.priors = Priors(found, words.of_topics(kept))
        forget_own = not problem.local_step.always_keeps
        memory.keep(kept, counts[:, kept], forget_own=forget_own)
        memory.next_choice = memory.next_choice + num_added if num_added else -1
        memory.num_added += num_added


def _sum_of(
    batches: list[Batch], parts: list[csr_array | None], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """Counts of words in topics, (V, K), from those of each batch."""
    total = np.zeros(shape)
    for batch, part in zip(batches, parts, strict=True):
        if part is not None:
            add_sparse(total, batch.rows, part)
    return total


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
    for i, b, _ in _batches_to_go(rng_key, len(batches), table.changes):
        if i >= num_passes:
            return
        if table.changes == memory.next_choice * len(batches):
            assert problem.candidates.num_topics is not None
            _choose(memory, problem.candidates.num_topics, problem)
        batch = batches[b]
        is_first = i == 0 and not problem.goes_on
        how = {"is_first": is_first, "is_bounded": False}
        found = visit_batch(problem, batch, table, memory.priors, **how)
        rho = step_size(next(steps), delay, options.forgetting)
        share = problem.corpus.num_documents / len(batch.documents)
        table.add(batch.rows, found.sums.counts, times=rho * share, keep=1 - rho)
        yield np.nan
