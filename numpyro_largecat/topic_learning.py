# SPDX-License-Identifier: Apache-2.0
"""Closed-form learning of topics, batch by batch: memoized and stochastic."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import gammaln

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.ops.topic_document import prepare_topics, solve_documents
from numpyro_largecat.ops.topic_search import Effort
from numpyro_largecat.ops.topic_statistics import word_topic_counts
from numpyro_largecat.ops.topic_sweeps import digamma
from numpyro_largecat.topic_chunks import Chunk, Widths, chunks_of, on_all_cores

LEAST_SCALE = 1e-6


class Problem(NamedTuple):
    """What does not change while topics are learned."""

    corpus: Corpus
    num_active: int
    concentration: Array  # (K,), of topic frequencies
    word_concentration: float  # of the words of a topic
    effort: Effort
    widths: Widths


class Batch(NamedTuple):
    """Some documents, with words renumbered to the rows of the table that they touch."""

    documents: NDArray[np.intp]
    rows: NDArray[np.intp]  # (R,), padded by repeating the last


class Table:
    """Expected counts of words in topics, ``scale * counts``, of which only rows are touched."""

    def __init__(self, counts: NDArray[np.floating], dtype: np.dtype) -> None:
        self.counts = jnp.asarray(counts, dtype)  # (V, K)
        self.totals = jnp.asarray(counts.sum(axis=0), dtype)  # (K,)
        self.scale = 1.0

    def log_probs(self, rows: NDArray[np.intp], word_concentration: float) -> Array:
        """E[log phi] of some words, (R, K)."""
        return _expected_log(
            self.counts, self.totals, jnp.asarray(rows), word_concentration, self.scale
        )

    def add(self, rows: NDArray[np.intp], change: Array) -> None:
        """Add to some rows; O(R K)."""
        scaled = change / self.scale
        self.counts, self.totals = _add(self.counts, self.totals, jnp.asarray(rows), scaled)

    def shrink(self, factor: float) -> None:
        """Multiply all rows; O(1), but for once in a while."""
        self.scale *= factor
        if self.scale < LEAST_SCALE:
            self.counts, self.totals = self.counts * self.scale, self.totals * self.scale
            self.scale = 1.0

    def numpy(self) -> NDArray[np.floating]:
        """The counts, (V, K)."""
        return np.asarray(self.counts) * self.counts.dtype.type(self.scale)


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

    Where that is more than half of the table all batches have all of it, so that code that is
    compiled for a fit also serves for its scores.
    """
    order = rng.permutation(corpus.num_documents)
    num_batches = max(-(-len(order) // batch_size), 1)
    parts = [np.sort(part) for part in np.array_split(order, num_batches)]
    rows = [_distinct_words(corpus, part) for part in parts]
    most = 64 * -(-max(map(len, rows)) // 64)
    if 2 * most > corpus.num_words:
        return [Batch(part, np.arange(corpus.num_words)) for part in parts]
    padded = [np.pad(r, (0, most - len(r)), mode="edge") for r in rows]
    return [Batch(p, r) for p, r in zip(parts, padded, strict=True)]


def _distinct_words(corpus: Corpus, documents: NDArray[np.intp]) -> NDArray[np.intp]:
    found = np.zeros(corpus.num_words, bool)
    for d in documents:
        found[corpus.document(int(d))[0]] = True
    return np.flatnonzero(found) if found.any() else np.zeros(1, np.intp)


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
    concentration = problem.concentration
    if is_first:
        concentration = jnp.full_like(concentration, concentration.mean())
    log_probs = table.log_probs(batch.rows, problem.word_concentration)
    topics = prepare_topics(log_probs, concentration, for_most=visited is None)
    stored = None if visited is None else {tuple(ids[:1]): rows for ids, rows in visited}

    def solve(chunk: Chunk) -> tuple[Array, float, tuple[NDArray[np.intp], csr_array]]:
        places = np.searchsorted(batch.rows, chunk.words).clip(0, len(batch.rows) - 1)
        words = jnp.asarray(np.where(chunk.counts > 0, places, 0))
        counts = jnp.asarray(chunk.counts)
        initial = None
        if stored is not None:
            initial = jnp.asarray(stored[tuple(chunk.documents[:1])].toarray())
        num_active, narrow = problem.num_active, problem.widths.narrow
        fit = solve_documents(
            topics, words, counts, num_active, problem.effort, initial, narrow=narrow
        )
        shared = log_probs, concentration, words, counts
        found = word_topic_counts(*shared, fit.basis, num_active=num_active, narrow=narrow)
        data = float(jnp.vdot(found, log_probs))
        own = csr_array(np.asarray(fit.counts))
        rest = float(fit.bound.sum()) - data
        if is_first:
            rest += _rise(own, np.asarray(problem.concentration)[own.indices])
            rest -= _rise(own, np.asarray(concentration)[own.indices])
        return found, rest, (chunk.documents, own)

    chunks = chunks_of(problem.corpus, batch.documents, problem.widths.largest)
    parts = on_all_cores(solve, chunks)
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
    start: NDArray[np.floating],
    batch_size: int,
    num_passes: int,
    *,
    warm_start: bool,
    dtype: np.dtype,
) -> tuple[NDArray[np.floating], list[float]]:
    """Replace the counts of a batch whenever it is visited, and the topics with them.

    Returns:
        The counts (V, K), and the bound of the corpus after each pass, at stored local variables.
    """
    batches = make_batches(rng, problem.corpus, batch_size)
    table = Table(start, dtype)
    memory: list[csr_array | None] = [None] * len(batches)
    visited: list[Visited | None] = [None] * len(batches)
    rest = np.zeros(len(batches))
    bounds = []
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
        total = np.zeros(start.shape)
        for batch, part in zip(batches, memory, strict=True):
            if part is not None:
                entries = part.tocoo()  # each is there once
                total[batch.rows[entries.row], entries.col] += entries.data
        table = Table(total, dtype)
        bounds.append(topic_term(total, problem.word_concentration) + float(rest.sum()))
    return table.numpy(), bounds


def learn_stochastic(
    rng: np.random.Generator,
    problem: Problem,
    start: NDArray[np.floating],
    batch_size: int,
    num_passes: int,
    *,
    delay: float,
    forgetting: float,
    dtype: np.dtype,
) -> NDArray[np.floating]:
    """Step towards the counts that each batch suggests, by rho_t = (delay + t) ** -forgetting."""
    batches = make_batches(rng, problem.corpus, batch_size)
    table = Table(start, dtype)
    t = 0
    for i in range(num_passes):
        for b in rng.permutation(len(batches)):
            batch = batches[b]
            t += 1
            rho = (delay + t) ** -forgetting
            summary = visit(problem, batch, table, is_first=i == 0)
            table.shrink(1 - rho)
            share = problem.corpus.num_documents / len(batch.documents)
            table.add(batch.rows, rho * share * summary.counts)
    return table.numpy()
