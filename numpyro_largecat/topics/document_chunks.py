# SPDX-License-Identifier: Apache-2.0
"""Solving for the documents of a corpus, some of similar length at a time, on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.ops.rows_by_device import num_devices
from numpyro_largecat.ops.threads import on_all_cores
from numpyro_largecat.topics.document_layout import Chunk, Layout
from numpyro_largecat.topics.local_step import Documents, Given, LocalStep, Posterior, Solved

T = TypeVar("T")


class Shapes(NamedTuple):
    """What code is compiled for: once for a fit and all that is read from it."""

    layout: Layout  # of documents
    num_rows: int  # of the table of topics, the words that a batch may have


def read_shapes(values: Any, layout: type[Layout]) -> Shapes:
    """Those that were saved as lists."""
    return Shapes(layout.read(values[0]), values[1])


class Batch(NamedTuple):
    """Some documents, and the rows of the table of topics that they touch."""

    documents: NDArray[np.intp]
    rows: NDArray[np.intp]  # (R,), words in order, padded by repeating the last


def tokens_of_documents(corpus: Corpus) -> NDArray[np.int64]:
    """Number of tokens of each document, (N,)."""
    up_to = np.concatenate([[0], np.cumsum(corpus.counts, dtype=np.int64)])
    return np.diff(up_to[corpus.offsets])


def words_of_documents(corpus: Corpus, documents: Iterable[int]) -> NDArray[np.intp]:
    """The different words of each of some documents, one document after the other."""
    words = [np.asarray(corpus[int(d)][0], np.intp) for d in documents]
    return np.concatenate([np.zeros(0, np.intp), *words])


def distinct_words(corpus: Corpus, documents: Iterable[int]) -> NDArray[np.intp]:
    """The words of some documents, in order; word 0 if there are none."""
    found = np.zeros(corpus.num_words, bool)
    for d in documents:
        found[corpus[int(d)][0]] = True
    return np.flatnonzero(found) if found.any() else np.zeros(1, np.intp)


def padded_rows(rows: NDArray[np.intp], num_rows: int) -> NDArray[np.intp]:
    """Repeat the last row; more than ``num_rows`` stay as they are."""
    return np.pad(rows, (0, max(0, num_rows - len(rows))), mode="edge")


def batches_within(corpus: Corpus, num_rows: int) -> Iterator[Batch]:
    """Documents in order, as many together as have ``num_rows`` different words; all of a table.

    A document with more is alone.
    """
    if num_rows >= corpus.num_words:
        yield Batch(np.arange(corpus.num_documents), np.arange(corpus.num_words))
        return
    found: set[int] = set()
    first = 0
    for d in range(corpus.num_documents):
        own = set(corpus[d][0].tolist())
        if d > first and len(found | own) > num_rows:
            documents, found = np.arange(first, d), set()
            yield Batch(documents, padded_rows(distinct_words(corpus, documents), num_rows))
            first = d
        found |= own
    documents = np.arange(first, corpus.num_documents)
    yield Batch(documents, padded_rows(distinct_words(corpus, documents), num_rows))


def solve_batch(
    corpus: Corpus,
    batch: Batch,
    given: Given,
    local_step: LocalStep,
    layout: Layout,
    then: Callable[[Chunk, Solved], T],
    last: Callable[[Chunk], Any] | None = None,
) -> list[T]:
    """Solve for the documents of a batch, given the topics of its rows.

    ``then`` gets each chunk and its fit. ``last`` gives what their last visit left.
    """
    mesh = local_step.mesh

    def solve(chunk: Chunk) -> T:
        places = np.searchsorted(batch.rows, chunk.words).clip(0, len(batch.rows) - 1)
        words = np.where(chunk.counts > 0, places, 0).astype(np.int32)
        documents = Documents(words, chunk.counts, chunk.owners)
        left = None if last is None else last(chunk)
        fit = local_step.solve(given, documents, left, chunk.most)
        return then(chunk, Solved(documents, fit, len(given.concentration), chunk.places))

    chunks = layout.chunks(corpus, batch.documents, num_devices(mesh))
    return on_all_cores(solve, chunks, mesh)


def topic_counts(
    corpus: Corpus,
    posterior: Posterior,
    concentration: Array,
    local_step: LocalStep,
    shapes: Shapes | None = None,
) -> NDArray[np.floating]:
    """Tokens of each topic (N, K) in all documents of a corpus, given topics of all words.

    ``shapes`` are those that code is compiled for already.
    """
    num_topics, dtype = len(posterior.totals), posterior.words.dtype
    num_rows = corpus.num_words if shapes is None else shapes.num_rows
    if shapes is not None and isinstance(shapes.layout, local_step.layout):
        layout = shapes.layout.with_room_for(corpus, num_topics)
    else:
        layout = local_step.layout.to_read(corpus, num_topics)
    layout = layout.for_concentration(np.asarray(concentration))
    counts = np.zeros((corpus.num_documents, num_topics), dtype)

    def keep(chunk: Chunk, solved: Solved) -> None:
        counts[chunk.documents] = local_step.counts(solved).toarray()

    for batch in batches_within(corpus, num_rows):
        is_whole = len(batch.rows) == corpus.num_words
        words = posterior.words if is_whole else posterior.words[jnp.asarray(batch.rows)]
        own = posterior._replace(words=words)
        given = local_step.given(own, concentration, is_cold=True)
        solve_batch(corpus, batch, given, local_step, layout, keep)
    return counts
