# SPDX-License-Identifier: Apache-2.0
"""Solving for the documents of a corpus, some of similar length at a time, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.ops.topic_document import prepare_topics, solve_documents
from numpyro_largecat.ops.topic_search import Effort

CHUNK = 128  # documents of one compiled call
SLOTS_FOR_CODE = 1_000_000  # of padding, which cost about what compiling for a width does
T = TypeVar("T")


class Widths(NamedTuple):
    """Slots for the words of documents that code is compiled for."""

    largest: int  # that documents are padded to
    narrow: int | None  # what most need, where that is far less

    def padding(self, sizes: NDArray[np.intp]) -> int:
        """Slots that documents of so many distinct words leave empty."""
        narrow = self.largest if self.narrow is None else self.narrow
        return int((np.where(sizes <= narrow, narrow, self.largest) - sizes).sum())


class Chunk(NamedTuple):
    """Documents padded to one width; rows after the documents are empty."""

    documents: NDArray[np.intp]  # (n,), n <= CHUNK, where they are in the corpus
    words: NDArray[np.int32]  # (CHUNK, width)
    counts: NDArray[np.int32]  # (CHUNK, width)


def widths_of(corpus: Corpus, num_passes: int = 1) -> Widths:
    """Widths for a corpus.

    There is a narrow one, for four fifths of the documents, where compiling for it costs less than
    their padding in all passes.
    """
    sizes = np.diff(corpus.offsets)
    longest = int(sizes.max(initial=1))
    step = max(16, (1 << (longest - 1).bit_length()) // 16)
    usual = int(np.quantile(sizes, 0.8)) if len(sizes) else longest
    largest, narrow = (step * -(-max(size, 1) // step) for size in (longest, usual))
    one, two = Widths(largest, None), Widths(largest, narrow)
    saved = num_passes * (one.padding(sizes) - two.padding(sizes))
    return two if saved > SLOTS_FOR_CODE else one


def chunks_of(
    corpus: Corpus, indices: NDArray[np.intp], width: int
) -> Iterator[Callable[[], Chunk]]:
    """Documents in the order of their lengths, longest first; each call pads some of them."""
    order = np.argsort(-np.diff(corpus.offsets)[indices], kind="stable")

    def pad(documents: NDArray[np.intp]) -> Chunk:
        words, counts = corpus.padded(documents, width)
        padding = ((0, CHUNK - len(documents)), (0, 0))
        return Chunk(documents, np.pad(words, padding), np.pad(counts, padding))

    for start in range(0, len(order), CHUNK):
        yield partial(pad, indices[order[start : start + CHUNK]])


def on_all_cores(solve: Callable[[Chunk], T], chunks: Iterator[Callable[[], Chunk]]) -> list[T]:
    """Call ``solve`` for each chunk; on a CPU in as many threads as there are cores.

    A chunk is made when it is its turn, so few are in memory.
    """
    if jax.default_backend() != "cpu":
        return [solve(make()) for make in chunks]
    enabled = jnp.result_type(float) == jnp.float64  # set for each thread by itself

    def in_thread(make: Callable[[], Chunk]) -> T:
        with jax.enable_x64(enabled):
            return solve(make())

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(in_thread, chunks))


def solve_corpus(
    corpus: Corpus,
    log_probs: Array,
    concentration: Array,
    num_active: int,
    effort: Effort,
    widths: Widths | None = None,
) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Bounds (N,) and counts (N, K) of all documents of a corpus, given topics (V, K).

    ``widths`` are those that code is compiled for already, taken unless others are much better.
    """
    sizes, own = np.diff(corpus.offsets), widths_of(corpus)
    if widths is None or sizes.max(initial=1) > widths.largest:
        widths = own
    elif widths.padding(sizes) - own.padding(sizes) > SLOTS_FOR_CODE:
        widths = own
    topics = prepare_topics(log_probs, concentration)
    bounds = np.zeros(len(sizes))
    counts = np.zeros((len(sizes), log_probs.shape[1]), log_probs.dtype)

    def solve(chunk: Chunk) -> None:
        slots = jnp.asarray(chunk.words), jnp.asarray(chunk.counts)
        fit = solve_documents(topics, *slots, num_active, effort, narrow=widths.narrow)
        size = len(chunk.documents)
        bounds[chunk.documents] = fit.bound[:size]
        counts[chunk.documents] = fit.counts[:size]

    on_all_cores(solve, chunks_of(corpus, np.arange(len(sizes)), widths.largest))
    return bounds, counts
