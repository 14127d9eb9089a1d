# SPDX-License-Identifier: Apache-2.0
"""Batches of a corpus, and a visit of one, which solves for its documents and sums their counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.ops.threads import at_once
from numpyro_largecat.topics.document_chunks import (
    Batch,
    distinct_words,
    padded_rows,
    solve_batch,
)
from numpyro_largecat.topics.document_layout import Chunk
from numpyro_largecat.topics.local_step import Solved, Sums
from numpyro_largecat.topics.problem import Priors, Problem
from numpyro_largecat.topics.topic_table import Table


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
