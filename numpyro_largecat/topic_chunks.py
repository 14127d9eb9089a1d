# SPDX-License-Identifier: Apache-2.0
"""Solving for the documents of a corpus, some of similar length at a time, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.ops.topic_document import DocumentFit, fit_documents
from numpyro_largecat.ops.topic_search import Effort

CHUNK = 128  # documents of one compiled call
SLOTS_FOR_CODE = 2_000_000  # of padding, which cost about what compiling for a width does
T = TypeVar("T")


class Chunk(NamedTuple):
    """Documents padded to one width; rows after the documents are empty."""

    documents: NDArray[np.intp]  # (n,), n <= CHUNK, where they are in the corpus
    words: NDArray[np.int32]  # (CHUNK, width)
    counts: NDArray[np.int32]  # (CHUNK, width)


def widths_of(corpus: Corpus, num_passes: int = 1) -> tuple[int, ...]:
    """One or two widths that documents are padded to; code is compiled for each of them.

    The largest is a power of two, so that what was compiled for one corpus fits the next. There
    is another for four fifths of the documents where compiling once more costs less than their
    padding in all passes.
    """
    sizes = np.diff(corpus.offsets)
    largest = max(16, 1 << (int(sizes.max(initial=1)) - 1).bit_length())
    usual = int(np.quantile(sizes, 0.8)) if len(sizes) else largest
    step = max(16, largest // 16)
    usual = step * -(-max(usual, 1) // step)
    padding = num_passes * int((sizes <= usual).sum()) * (largest - usual)
    return (usual, largest) if padding > SLOTS_FOR_CODE else (largest,)


def chunks_of(corpus: Corpus, indices: NDArray[np.intp], widths: Sequence[int]) -> Iterator[Chunk]:
    """Pad documents in the order of their lengths, longest first; the widths take turns.

    So threads that come first meet different widths, and compile for these at the same time.
    """
    sizes = np.diff(corpus.offsets)[indices]
    order = np.argsort(-sizes, kind="stable")
    place = np.searchsorted(widths, sizes[order])
    groups = [order[place == i] for i in range(len(widths))]
    for start in range(0, max(map(len, groups)), CHUNK):
        for group, width in zip(groups, widths, strict=True):
            documents = indices[group[start : start + CHUNK]]
            if len(documents):
                words, counts = corpus.padded(documents, width)
                padding = ((0, CHUNK - len(documents)), (0, 0))
                yield Chunk(documents, np.pad(words, padding), np.pad(counts, padding))


def on_all_cores(solve: Callable[[Chunk], T], chunks: Iterator[Chunk]) -> list[T]:
    """Call ``solve`` for each chunk; on a CPU in as many threads as there are cores."""
    if jax.default_backend() != "cpu":
        return [solve(chunk) for chunk in chunks]
    enabled = jnp.result_type(float) == jnp.float64  # set for each thread by itself

    def in_thread(chunk: Chunk) -> T:
        with jax.enable_x64(enabled):
            return solve(chunk)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(in_thread, chunks))


def solve_corpus(
    corpus: Corpus,
    log_probs: Array,
    concentration: Array,
    num_active: int,
    effort: Effort,
) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Bounds (N,) and counts (N, K) of all documents of a corpus, given topics (V, K)."""
    indices = np.arange(corpus.num_documents)
    solve = partial(_solve, log_probs, concentration, num_active, effort)
    chunks = list(chunks_of(corpus, indices, widths_of(corpus)))
    fits = on_all_cores(solve, iter(chunks))
    bounds = np.zeros(len(indices))
    counts = np.zeros((len(indices), log_probs.shape[1]), log_probs.dtype)
    for chunk, fit in zip(chunks, fits, strict=True):
        size = len(chunk.documents)
        bounds[chunk.documents] = fit.bound[:size]
        counts[chunk.documents] = fit.counts[:size]
    return bounds, counts


def _solve(
    log_probs: Array, concentration: Array, num_active: int, effort: Effort, chunk: Chunk
) -> DocumentFit:
    words, counts = jnp.asarray(chunk.words), jnp.asarray(chunk.counts)
    return jax.block_until_ready(
        fit_documents(log_probs, concentration, words, counts, num_active, effort)
    )
