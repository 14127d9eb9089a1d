# SPDX-License-Identifier: Apache-2.0
"""Closed-form learning of topics, batch by batch: memoized and stochastic."""

from __future__ import annotations

import itertools
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import gammaln

from numpyro_largecat._result_so_far import held_signals
from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.ops.step_sizes import step_size
from numpyro_largecat.ops.topics.document_fit import DocumentFit
from numpyro_largecat.ops.topics.sweeps import digamma
from numpyro_largecat.ops.topics.word_topic_counts import word_topic_counts
from numpyro_largecat.topics.document_chunks import (
    Batch,
    Chunk,
    Solver,
    distinct_words,
    padded_rows,
    solve_batch,
)

LEAST_SCALE = 1e-6


class Problem(NamedTuple):
    """What does not change while topics are learned."""

    corpus: Corpus
    concentration: Array  # (K,), of topic frequencies
    word_concentration: float  # of the words of a topic
    solver: Solver


class Counts(NamedTuple):
    """Expected tokens of words in topics are ``scale * counts``."""

    counts: Array  # (V, K)
    totals: Array  # (K,), sums over words
    scale: float


class Table:
    """Expected counts of words in topics, of which only rows are touched.

    Whatever interrupts a change, it has the counts of before or after it.
    """

    def __init__(self, counts: NDArray[np.floating], dtype: np.dtype) -> None:
        self.dtype = np.dtype(dtype)
        self.changes = 0  # batches that were added
        self.set(counts)

    def set(self, counts: NDArray[np.floating]) -> None:
        """Replace all counts, (V, K)."""
        table, totals = (jnp.asarray(x, self.dtype) for x in (counts, counts.sum(axis=0)))
        self.state = Counts(table, totals, 1.0)

    def log_probs(self, rows: NDArray[np.intp], word_concentration: float) -> Array:
        """E[log phi] of some words, (R, K)."""
        counts, totals, scale = self.state
        return _expected_log(counts, totals, jnp.asarray(rows), word_concentration, scale)

    def add(self, rows: NDArray[np.intp], change: Array, *, keep: float = 1.0) -> None:
        """Keep a share of all counts, and add to some rows; O(R K), but for once in a while."""
        counts, totals, scale = self.state
        scale *= keep
        if scale < LEAST_SCALE:
            counts, totals, scale = counts * scale, totals * scale, 1.0
        places, scaled = jnp.asarray(rows), change / scale
        with held_signals():  # the old counts are gone before the new ones are there
            counts, totals = _add(counts, totals, places, scaled)
            self.state = Counts(counts, totals, scale)
            self.changes += 1

    def numpy(self) -> NDArray[np.floating]:
        """The counts, (V, K)."""
        return np.asarray(self.state.counts) * self.dtype.type(self.state.scale)


@jax.jit
def _expected_log(
    counts: Array, totals: Array, rows: Array, word_concentration: float, scale: float
) -> Array:
    posterior = word_concentration + jnp.maximum(scale * counts[rows], 0)
    total = counts.shape[0] * word_concentration + scale * totals
    return digamma(posterior) - digamma(total)


@partial(jax.jit, donate_argnums=(0, 1))
def _add(counts: Array, totals: Array, rows: Array, change: Array) -> tuple[Array, Array]:
    return counts.at[rows].add(change), totals + change.sum(axis=0)


Visited: TypeAlias = list[tuple[NDArray[np.intp], csr_array]]  # documents, topic counts


class Summary(NamedTuple):
    """What one visit of a batch leaves."""

    counts: Array  # (R, K), expected tokens of the rows in topics; 0 for rows that pad
    rest: float  # the bound of its documents without the data term
    visited: Visited  # for a warm start


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


def visit(
    problem: Problem,
    batch: Batch,
    table: Table,
    visited: Visited | None = None,
    *,
    is_first: bool = False,
) -> Summary:
    """Solve for the documents of a batch given the topics, and summarise them.

    In a first visit the topics are all alike, and would go to those of large concentration;
    therefore all have the mean. The bound is that of their own.
    """
    concentration, solver = problem.concentration, problem.solver
    if is_first:
        concentration = jnp.full_like(concentration, concentration.mean())
    log_probs = table.log_probs(batch.rows, problem.word_concentration)
    stored = None if visited is None else {tuple(ids[:1]): rows for ids, rows in visited}

    def summarise(
        chunk: Chunk, words: Array, counts: Array, fit: DocumentFit
    ) -> tuple[Array, float, tuple[NDArray[np.intp], csr_array]]:
        shared = log_probs, concentration, words, counts
        found = word_topic_counts(*shared, fit.basis, num_active=solver.num_active)
        own = csr_array(np.asarray(fit.counts))
        rest = float(fit.bound.sum()) - float(jnp.vdot(found, log_probs))
        if is_first:
            rest += _rise(own, np.asarray(problem.concentration)[own.indices])
            rest -= _rise(own, np.asarray(concentration)[own.indices])
        return found, rest, (chunk.documents, own)

    def initial(chunk: Chunk) -> Array:
        assert stored is not None
        return jnp.asarray(stored[tuple(chunk.documents[:1])].toarray())

    start = None if stored is None else initial
    parts = solve_batch(problem.corpus, batch, log_probs, concentration, solver, summarise, start)
    found = sum((part[0] for part in parts), jnp.zeros_like(log_probs))
    return Summary(found, sum(part[1] for part in parts), [part[2] for part in parts])


def _rise(counts: csr_array, concentration: NDArray[np.floating]) -> float:
    """Sum of log Gamma(a + N) / Gamma(a), what the bound of documents has of a's shares."""
    a = concentration.astype(np.float64)
    return float((gammaln(a + counts.data) - gammaln(a)).sum())


def topic_term(posterior_counts: NDArray[np.floating], word_concentration: float) -> float:
    """The part of the bound that is about topics at their best posterior (Eq. 35), in float64."""
    counts = np.maximum(np.asarray(posterior_counts, np.float64), 0)
    prior = counts.shape[0] * word_concentration
    used = counts[counts > 0]
    own = (gammaln(word_concentration + used) - gammaln(word_concentration)).sum()
    return float(own - (gammaln(prior + counts.sum(axis=0)) - gammaln(prior)).sum())


def learn_memoized(
    rng: np.random.Generator,
    problem: Problem,
    batches: list[Batch],
    table: Table,
    bounds: list[float],
    num_passes: int,
    *,
    warm_start: bool,
) -> None:
    """Replace the counts of a batch whenever it is visited, and the topics with them.

    ``table`` and ``bounds``, of the corpus after each pass at stored local variables, are changed
    in place, so that they are there when a fit is interrupted.
    """
    memory: list[csr_array | None] = [None] * len(batches)
    visited: list[Visited | None] = [None] * len(batches)
    rest = np.zeros(len(batches))
    for i in range(num_passes):
        for b in rng.permutation(len(batches)):
            batch = batches[b]
            summary = visit(problem, batch, table, visited[b], is_first=i == 0)
            old = memory[b]
            before = jnp.zeros(()) if old is None else jnp.asarray(old.toarray())
            table.add(batch.rows, summary.counts - before)
            memory[b] = csr_array(np.asarray(summary.counts))
            rest[b] = summary.rest
            if warm_start:
                visited[b] = summary.visited
        # Sum anew: the start leaves with the first pass, and rounding does not gather.
        total = np.zeros(table.state.counts.shape)
        for batch, part in zip(batches, memory, strict=True):
            if part is not None:
                entries = part.tocoo()  # each is there once
                total[batch.rows[entries.row], entries.col] += entries.data
        table.set(total)
        bounds.append(topic_term(total, problem.word_concentration) + float(rest.sum()))


def learn_stochastic(
    rng: np.random.Generator,
    problem: Problem,
    batches: list[Batch],
    table: Table,
    num_passes: int,
    *,
    delay: float,
    forgetting: float,
) -> None:
    """Step towards the counts that each batch suggests, by ``step_size``."""
    steps = itertools.count(1)
    for i in range(num_passes):
        for b in rng.permutation(len(batches)):
            batch = batches[b]
            summary = visit(problem, batch, table, is_first=i == 0)
            rho = step_size(next(steps), delay, forgetting)
            share = problem.corpus.num_documents / len(batch.documents)
            table.add(batch.rows, rho * share * summary.counts, keep=1 - rho)
