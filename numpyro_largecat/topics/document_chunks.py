# SPDX-License-Identifier: Apache-2.0
"""Solving for the documents of a corpus, some of similar length at a time, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpy.typing import NDArray

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.ops.rows_by_device import num_devices
from numpyro_largecat.ops.topics.collapsed_documents import most_topics
from numpyro_largecat.topics.local_steps import Documents, Given, LocalStep, Posterior, Solved

CHUNK = 128  # documents of one compiled call at most
FEWEST = 16  # what is solved together on a CPU
NUMBERS_OF_CHUNK = 2**22  # slots times topics that go on; of longer documents a chunk has fewer
SLOTS_FOR_CODE = 2_000_000  # of padding, which cost about what compiling for a width does
T = TypeVar("T")


class Shapes(NamedTuple):
    """What code is compiled for: once for a fit and all that is read from it."""

    widths: tuple[int, ...]  # slots for the words of documents, ascending
    num_documents: int  # of a chunk, at most, on each device
    num_rows: int  # of the table of topics, the words that a batch may have

    def documents_of(self, width: int) -> int:
        """Documents of a chunk of this width, on each device."""
        fits = max(1, NUMBERS_OF_CHUNK // (width * most_topics(width)))
        return min(self.num_documents, fits if fits < FEWEST else fits // FEWEST * FEWEST)


class Batch(NamedTuple):
    """Some documents, and the rows of the table of topics that they touch."""

    documents: NDArray[np.intp]
    rows: NDArray[np.intp]  # (R,), words in order, padded by repeating the last


class Chunk(NamedTuple):
    """Documents padded to one width; rows after the documents are empty."""

    documents: NDArray[np.intp]  # (n,), where they are in the corpus
    words: NDArray[np.int32]  # (documents of the width, width), times the number of devices
    counts: NDArray[np.int32]  # of the same shape


def shapes_of(corpus: Corpus, batch_size: int, num_rows: int, num_passes: int) -> Shapes:
    """Shapes for a fit; a batch is four chunks or more, for as many cores."""
    return Shapes(widths_of(corpus, num_passes), documents_together(batch_size, 4), num_rows)


def documents_together(batch_size: int, num_parts: int) -> int:
    """Documents of a chunk at most, so that as many cores or devices all have some of a batch."""
    return min(CHUNK, FEWEST * -(-batch_size // (num_parts * FEWEST)))


def tokens_of_documents(corpus: Corpus) -> NDArray[np.int64]:
    """Number of tokens of each document, (N,)."""
    up_to = np.concatenate([[0], np.cumsum(corpus.counts, dtype=np.int64)])
    return np.diff(up_to[corpus.offsets])


def widths_of(corpus: Corpus, num_passes: int = 1, known: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Widths that the documents are padded to, each to the least that holds it.

    One is for the longest. Then the one that saves most padding is added, as long as compiling for
    it costs less than that padding in all passes. Code for those in ``known`` is there already.
    """
    needed, counts = np.unique(_rounded(np.diff(corpus.offsets)), return_counts=True)
    if not len(needed):
        return known or (FEWEST,)

    def slots(widths: tuple[int, ...]) -> int:
        return int(counts @ np.asarray(widths)[np.searchsorted(widths, needed)])

    widths = tuple(sorted({*known, *([] if known and known[-1] >= needed[-1] else needed[-1:])}))
    while True:
        others = [tuple(sorted({*widths, width})) for width in needed.tolist()]
        best = min(others, key=slots)
        if num_passes * (slots(widths) - slots(best)) <= SLOTS_FOR_CODE:
            return tuple(map(int, widths))
        widths = best


def _rounded(sizes: NDArray[np.intp]) -> NDArray[np.intp]:
    """The next multiple of 16, or of a sixteenth of the next power of two where that is more."""
    sizes = np.maximum(sizes, 1)
    steps = np.maximum(16, 2 ** np.ceil(np.log2(sizes)).astype(np.intp) // 16)
    return steps * -(-sizes // steps)


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


def chunks_of(
    corpus: Corpus, indices: NDArray[np.intp], shapes: Shapes, num_parts: int = 1
) -> Iterator[Callable[[], Chunk]]:
    """Documents in the order of their lengths, longest first; each call pads some of them.

    They are as many as ``num_parts`` devices take at once.
    """
    sizes = np.diff(corpus.offsets)[indices]
    order = np.argsort(-sizes, kind="stable")
    which = np.searchsorted(shapes.widths, sizes[order])

    def pad(documents: NDArray[np.intp], size: int, width: int) -> Chunk:
        words, counts = corpus.padded(documents, width)
        padding = ((0, size - len(documents)), (0, 0))
        return Chunk(documents, np.pad(words, padding), np.pad(counts, padding))

    for i, width in reversed(list(enumerate(shapes.widths))):
        documents, size = indices[order[which == i]], num_parts * shapes.documents_of(width)
        for start in range(0, len(documents), size):
            yield partial(pad, documents[start : start + size], size, width)


def on_all_cores(
    solve: Callable[[Chunk], T],
    chunks: Iterator[Callable[[], Chunk]],
    mesh: Mesh | None = None,
) -> list[T]:
    """Call ``solve`` for each chunk; on a CPU in as many threads as there are cores.

    A chunk is made when it is its turn, so few are in memory. A mesh has all its devices work on
    one chunk.
    """
    if jax.default_backend() != "cpu" or mesh is not None:
        return [solve(make()) for make in chunks]
    enabled = jnp.result_type(float) == jnp.float64  # set for each thread by itself

    def in_thread(make: Callable[[], Chunk]) -> T:
        with jax.enable_x64(enabled):
            return solve(make())

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(in_thread, chunks))


def solve_batch(
    corpus: Corpus,
    batch: Batch,
    given: Given,
    local_step: LocalStep,
    shapes: Shapes,
    then: Callable[[Chunk, Solved], T],
    last: Callable[[Chunk], Any] | None = None,
) -> list[T]:
    """Solve for the documents of a batch, given the topics of its rows.

    ``then`` gets each chunk and its fit. ``last`` gives what their last visit left.
    """
    mesh = local_step.mesh

    def solve(chunk: Chunk) -> T:
        # Dealt to the devices in turn: the longest come first, and rows that are empty last.
        dealt = np.arange(len(chunk.words)).reshape(-1, num_devices(mesh)).T.ravel()
        places = np.searchsorted(batch.rows, chunk.words).clip(0, len(batch.rows) - 1)
        words = jnp.asarray(np.where(chunk.counts > 0, places, 0).astype(np.int32)[dealt])
        documents = Documents(words, jnp.asarray(chunk.counts[dealt]))
        left = None if last is None else jax.tree.map(lambda x: jnp.asarray(x[dealt]), last(chunk))
        fit = local_step.solve(given, documents, left)
        own = np.argsort(dealt)[: len(chunk.documents)]
        return then(chunk, Solved(documents, fit, len(given.concentration), own))

    chunks = chunks_of(corpus, batch.documents, shapes, num_devices(mesh))
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
    if shapes is None:
        shapes = Shapes((), CHUNK, corpus.num_words)
    shapes = shapes._replace(widths=widths_of(corpus, known=shapes.widths))
    num_topics, dtype = len(posterior.totals), posterior.words.dtype
    counts = np.zeros((corpus.num_documents, num_topics), dtype)

    def keep(chunk: Chunk, solved: Solved) -> None:
        counts[chunk.documents] = local_step.counts(solved).toarray()

    for batch in batches_within(corpus, shapes.num_rows):
        is_whole = len(batch.rows) == corpus.num_words
        words = posterior.words if is_whole else posterior.words[jnp.asarray(batch.rows)]
        own = posterior._replace(words=words)
        given = local_step.given(own, concentration, is_cold=True)
        solve_batch(corpus, batch, given, local_step, shapes, keep)
    return counts
