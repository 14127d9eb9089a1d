# SPDX-License-Identifier: Apache-2.0
"""Passes over the batches of a corpus: memoized and stochastic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack
from scipy.special import gammaln

from numpyro_largecat._result_so_far import held_signals
from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.ops.numpy_generator import numpy_generator
from numpyro_largecat.ops.rows_by_device import sums_by_device, total
from numpyro_largecat.ops.step_sizes import step_size
from numpyro_largecat.ops.topics.document_fit import DocumentFit
from numpyro_largecat.ops.topics.word_topic_counts import word_topic_counts
from numpyro_largecat.topics.document_chunks import (
    Batch,
    Chunk,
    Solved,
    Solver,
    distinct_words,
    padded_rows,
    solve_batch,
)
from numpyro_largecat.topics.options import Options
from numpyro_largecat.topics.topic_table import Table, topic_term


class Problem(NamedTuple):
    """What does not change while topics are learned."""

    corpus: Corpus
    concentration: Array  # (K,), of topic frequencies
    word_concentration: float  # of the words of a topic
    solver: Solver
    goes_on: bool = False  # from an earlier fit, so that topics differ before the first visit


class Visit(NamedTuple):
    """What one visit of a batch leaves."""

    counts: Array  # (R, K), expected tokens of the rows in topics; 0 for rows that pad
    rest: float  # the bound of its documents without the data term
    own: csr_array | None  # (B, K), topic counts of its documents, for a warm start


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
    stored: csr_array | None = None,
    *,
    is_first: bool = False,
    keeps: bool = False,
) -> Visit:
    """Solve for the documents of a batch given the topics, and sum their counts.

    They start from the topic counts ``stored``, those that the last visit left, or from scratch.
    Theirs are in what is returned if the visit ``keeps`` them.

    In a first visit the topics are all alike, and would go to those of large concentration;
    therefore all have the mean. The bound is that of their own.
    """
    concentration, solver = problem.concentration, problem.solver
    if is_first:
        all_alike = np.asarray(concentration)
        concentration = jnp.asarray(np.full_like(all_alike, all_alike.mean()))
    log_probs = table.log_probs(batch.rows, problem.word_concentration)

    def keep(solved: Solved) -> tuple[Array, float, NDArray[np.intp], csr_array | None]:
        fit, ids = solved.fit, solved.chunk.documents
        shared, documents = (log_probs, concentration), (solved.words, solved.counts, fit)
        options = {"num_active": solver.num_active, "size": solved.size, "mesh": solver.mesh}
        found, bounds, terms = _sums_of(shared, documents, **options)
        rest = float(np.asarray(bounds).sum()) - float(np.asarray(terms).sum())
        own = None
        if is_first or keeps:
            own = csr_array(np.asarray(fit.counts)[solved.places])
        if is_first:
            assert own is not None
            rest += _rise(own, np.asarray(problem.concentration)[own.indices])
            rest -= _rise(own, np.asarray(concentration)[own.indices])
        return found, rest, ids, own

    def initial(chunk: Chunk) -> NDArray[np.floating]:
        assert stored is not None
        counts = stored[np.searchsorted(batch.documents, chunk.documents)].toarray()
        padding = len(chunk.words) - len(counts)
        return np.pad(counts, ((0, padding), (0, 0)))

    start = None if stored is None else initial
    parts = solve_batch(problem.corpus, batch, log_probs, concentration, solver, keep, start)
    counts, rests, ids, owns = zip(*parts, strict=True)
    own = None
    if keeps:
        own = csr_array(vstack(owns, format="csr"))[np.argsort(np.concatenate(ids))]
    return Visit(total(reduce(jnp.add, counts)), sum(rests), own)


@partial(jax.jit, static_argnames=("num_active", "size", "mesh"))
def _sums_of(
    shared: tuple[Array, Array],
    documents: tuple[Array, Array, DocumentFit],
    *,
    num_active: int,
    size: int,
    mesh: Mesh | None,
) -> tuple[Array, Array, Array]:
    """Counts of words in topics, the bound of all documents, and the part of it in log_probs.

    Those of each device by itself.
    """

    def sums(
        shared: tuple[Array, Array], documents: tuple[Array, Array, DocumentFit]
    ) -> tuple[Array, Array, Array]:
        words, counts, fit = documents
        given = *shared, words, counts, fit.basis
        found = word_topic_counts(*given, num_active=num_active, size=size)
        return found, fit.bound.sum(), jnp.vdot(found, shared[0])

    return sums_by_device(sums, mesh)(shared, documents)


def _rise(counts: csr_array, concentration: NDArray[np.floating]) -> float:
    """Sum of log Gamma(a + N) / Gamma(a), what the bound of documents has of a's shares."""
    a = concentration.astype(np.float64)
    return float((gammaln(a + counts.data) - gammaln(a)).sum())


class Memory:
    """What is kept of each batch, and the bounds so far; ``table.changes`` batches were visited.

    Whatever interrupts a fit, table and memory are those after the same batch.
    """

    def __init__(self, num_batches: int, table: Table) -> None:
        self.table = table
        self.counts: list[csr_array | None] = [None] * num_batches
        self.own: list[csr_array | None] = [None] * num_batches  # for a warm start
        self.rest = np.zeros(num_batches)
        self.bounds: list[float] = []  # of the corpus, after each pass


def memoized_steps(
    problem: Problem,
    batches: list[Batch],
    memory: Memory,
    num_passes: int,
    options: Options,
    rng_key: Array,
) -> Iterator[float]:
    """Replace the counts of a batch whenever it is visited, and the topics with them.

    Changes ``memory`` and its table in place, from where they are. Gives the bound of the corpus at
    stored local variables after the last batch of a pass, and NaN after the others.
    """
    table = memory.table
    for i, b, is_last in _batches_to_go(rng_key, len(batches), num_passes, table.changes):
        batch, bound = batches[b], np.nan
        is_first = i == 0 and not problem.goes_on
        how = {"is_first": is_first, "keeps": options.warm_start}
        found = visit_batch(problem, batch, table, memory.own[b], **how)
        counts = csr_array(np.asarray(found.counts))
        with held_signals():
            table.add(batch.rows, found.counts, less=memory.counts[b])
            memory.counts[b], memory.rest[b] = counts, found.rest
            memory.own[b] = found.own
            if is_last:
                # Sum again: the start leaves with the first pass, and rounding does not add up.
                total = _sum_of(batches, memory.counts, table.shape)
                bound = topic_term(total, problem.word_concentration) + float(memory.rest.sum())
                table.set(total)
                memory.bounds.append(bound)
        yield bound


def _sum_of(
    batches: list[Batch], parts: list[csr_array | None], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """Counts of words in topics, (V, K), from those of each batch."""
    total = np.zeros(shape)
    for batch, part in zip(batches, parts, strict=True):
        if part is not None:
            entries = part.tocoo()  # each is there once
            total[batch.rows[entries.row], entries.col] += entries.data
    return total


def _batches_to_go(
    rng_key: Array, num_batches: int, num_passes: int, num_done: int
) -> Iterator[tuple[int, int, bool]]:
    """The batches of all passes but those that were done: pass, batch, whether it is the last.

    Their order is a function of the key and the number of the pass.
    """
    first, place = divmod(num_done, num_batches)
    for i in range(first, num_passes):
        order = numpy_generator(jax.random.fold_in(rng_key, i)).permutation(num_batches)
        for n in range(place, num_batches):
            yield i, int(order[n]), n == num_batches - 1
        place = 0


def stochastic_steps(
    problem: Problem,
    batches: list[Batch],
    table: Table,
    num_passes: int,
    options: Options,
    rng_key: Array,
    num_before: int = 0,
) -> Iterator[float]:
    """Step towards the counts that each batch suggests, by ``step_size``.

    Changes ``table`` in place, from where it is. The bound of the corpus is never known: NaN after
    each batch. ``num_before`` such steps were taken by an earlier fit.
    """
    steps = itertools.count(num_before + table.changes + 1)
    delay = len(batches) if options.delay is None else options.delay
    for i, b, _ in _batches_to_go(rng_key, len(batches), num_passes, table.changes):
        batch = batches[b]
        is_first = i == 0 and not problem.goes_on
        found = visit_batch(problem, batch, table, is_first=is_first)
        rho = step_size(next(steps), delay, options.forgetting)
        share = problem.corpus.num_documents / len(batch.documents)
        table.add(batch.rows, found.counts, times=rho * share, keep=1 - rho)
        yield np.nan
