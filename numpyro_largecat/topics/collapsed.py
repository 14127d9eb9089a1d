# SPDX-License-Identifier: Apache-2.0
"""Documents with topic frequencies and topics integrated out, a local step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import gammaln, xlogy

from numpyro_largecat.ops.rows_by_device import by_device, num_devices
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.collapsed_documents import (
    FIRST_SWEEPS,
    Assignments,
    CollapsedFit,
    Largest,
    Pieces,
    TopicProbs,
    collapsed_fit,
    no_assignments,
    through_largest,
)
from numpyro_largecat.ops.topics.presence import log_absence, log_rises, rises
from numpyro_largecat.topics.document_layout import Chunk, Layout
from numpyro_largecat.topics.document_pieces import SLOTS, Blocks, DocumentPieces
from numpyro_largecat.topics.local_step import (
    AnyArray,
    Documents,
    Given,
    Posterior,
    Solved,
    Sums,
)


@dataclass(frozen=True)
class Collapsed:
    """Topic frequencies and topics are integrated out; steps are to zeroth order."""

    num_active: int
    effort: Effort
    mesh: Mesh | None = None
    is_warm: bool = False  # whether documents start from their last visit

    layout: ClassVar[type[Layout]] = DocumentPieces
    by_word: ClassVar[bool] = True
    always_keeps: ClassVar[bool] = True

    def given(self, posterior: Posterior, concentration: AnyArray, *, is_cold: bool) -> Given:
        """The mean of phi, and the part of a token in it."""
        del is_cold
        return Given(_topic_probs(posterior), concentration)

    def solve(
        self,
        given: Given,
        documents: Documents,
        last: Assignments | None,
        most: int | None,
    ) -> CollapsedFit:
        """See ``through_largest`` and ``collapsed_fit``: each device has one block at a time."""
        assert most is not None and documents.owners is not None
        is_warm = self.is_warm and last is not None
        if last is None:
            dtype = given.concentration.dtype
            last = no_assignments(documents.words.shape, self.num_active, dtype)
        is_whole = most >= len(given.concentration)
        shared = given, is_warm, 1 if is_warm or is_whole else FIRST_SWEEPS
        blocks = Pieces(documents.words, documents.counts, documents.owners), last
        options: dict[str, Any] = {"most": most, "mesh": self.mesh}
        how: dict[str, Any] = {"num_active": self.num_active, "mesh": self.mesh}
        fits, num_together = [], num_devices(self.mesh)
        for first in range(0, len(documents.words), num_together):
            now = slice(first, first + num_together)
            own = jax.tree.map(lambda x, now=now: x[now], blocks)
            largest = _through_largest(shared, own, **options)
            fit = _solve_collapsed(self.effort, (largest, own[0]), **how)
            fits.append(jax.tree.map(np.asarray, fit))  # waits, so that no other is in memory
        found: CollapsedFit = jax.tree.map(lambda *x: np.concatenate(x), *fits)
        return found

    def compilations(
        self, num_words: int, concentration: NDArray[np.floating], kind: Blocks
    ) -> tuple[Callable[[], object], Callable[[], object]]:
        """Two calls that compile what ``solve`` needs for a block of one kind, where it finds it.

        They go by shapes, so topics need not be known yet; there is no mesh. The second is the same
        for all numbers of topics from those on that documents have room for.
        """
        real: Any = partial(jax.ShapeDtypeStruct, dtype=concentration.dtype)
        whole: Any = partial(jax.ShapeDtypeStruct, dtype=np.int32)
        a, slots = real(concentration.shape), (1, kind.num_pieces, SLOTS)
        words = real((num_words, len(concentration)))
        given = Given(jax.eval_shape(_topic_probs, Posterior(words, a, 0.0)), a)
        pieces = Pieces(whole(slots), whole(slots), whole(slots[:2]))
        of_words = *slots, self.num_active
        own = pieces, Assignments(real(of_words), whole(of_words))
        shared = given, False, FIRST_SWEEPS
        options: dict[str, Any] = {"most": kind.topics, "mesh": None}
        how: dict[str, Any] = {"num_active": self.num_active, "mesh": None}

        def look() -> object:
            return _through_largest.lower(shared, own, **options).compile()

        def sweep() -> object:
            largest = jax.eval_shape(partial(_through_largest, **options), shared, own)
            return _solve_collapsed.lower(self.effort, (largest, pieces), **how).compile()

        return look, sweep

    def counts(self, solved: Solved) -> csr_array:
        """Those of the topics that were in question."""
        topics, counts = (_by_document(x)[solved.places] for x in solved.fit[:2])
        ends = np.arange(len(topics) + 1) * topics.shape[1]
        return csr_array((counts.ravel(), topics.ravel(), ends), (len(topics), solved.num_topics))

    def kept(self, solved: Solved) -> csr_array:
        """Shares of the topics, (words, K)."""
        is_word = np.asarray(solved.documents.counts) > 0
        shares, topics = (np.asarray(x)[is_word] for x in solved.fit.assignments)
        is_used = shares > 0
        ends = np.concatenate([[0], np.cumsum(is_used.sum(axis=1))])
        shape = len(shares), solved.num_topics
        return csr_array((shares[is_used], topics[is_used], ends), shape)

    def last(self, kept: csr_array, chunk: Chunk) -> Assignments:
        """Each word's topics in slots of their own."""
        sizes, is_word = np.diff(kept.indptr), chunk.counts > 0
        is_used = np.arange(self.num_active) < sizes[:, None]
        found = []
        for values in (kept.data, kept.indices.astype(np.int32)):
            of_words = np.zeros(is_used.shape, values.dtype)
            of_words[is_used] = values
            padded = np.zeros((*is_word.shape, self.num_active), values.dtype)
            padded[is_word] = of_words
            found.append(padded)
        return Assignments(*found)

    def sums(
        self,
        given: Given,
        solved: Solved,
        kept: csr_array,
        concentration: NDArray[np.floating] | None,
    ) -> Sums:
        """By products of sparse matrices, O(U L) for each document."""
        words, counts, owners = map(np.asarray, solved.documents)
        is_word = counts > 0
        first = np.arange(len(owners))[:, None] * owners.shape[1]  # document of each block
        places = np.broadcast_to((first + owners)[..., None], counts.shape)[is_word]
        tokens, num_words = counts[is_word].astype(kept.dtype), len(kept.indptr) - 1

        def tokens_of(rows: NDArray[np.integer], size: int) -> csr_array:
            return csr_array((tokens, (rows, np.arange(num_words))), (size, num_words))

        by_word = tokens_of(words[is_word], len(given.topics.probs))
        if concentration is None:
            return Sums(by_word @ kept, np.nan)
        a = np.asarray(concentration, np.float64)
        absence = csr_array((log_absence(kept.data), kept.indices, kept.indptr), kept.shape)
        by_document = tokens_of(places, owners.size)
        found, absent = by_document @ kept, by_document @ absence
        own = found.data, absent.data, a, found.indices  # of topics in documents
        lengths = np.bincount(places, tokens, owners.size)
        rest = log_rises(*own).sum(dtype=np.float64)
        rest -= _falls_and_negentropy(tokens, lengths, kept, a.sum())
        gains = np.bincount(found.indices, rises(*own), len(a))
        return Sums(by_word @ kept, float(rest), by_word @ absence, gains)


@jax.jit
def _topic_probs(posterior: Posterior) -> TopicProbs:
    of_token = 1 / posterior.totals
    return TopicProbs(posterior.words * of_token, of_token, posterior.least * of_token)


@partial(jax.jit, static_argnames=("most", "mesh"))
def _through_largest(shared: Any, own: Any, *, most: int, mesh: Mesh | None) -> Largest:
    def look(shared: tuple[Given, Array, Array], own: tuple[Pieces, Assignments]) -> Largest:
        (topics, concentration), *how = shared
        return through_largest(topics, concentration, *own, *how, most=most)

    return by_device(_of_one_block(look), mesh)(shared, own)


@partial(jax.jit, static_argnames=("num_active", "mesh"))
def _solve_collapsed(shared: Any, own: Any, *, num_active: int, mesh: Mesh | None) -> CollapsedFit:
    def solve(effort: Effort, own: tuple[Largest, Pieces]) -> CollapsedFit:
        return collapsed_fit(*own, num_active, effort)

    return by_device(_of_one_block(solve), mesh)(shared, own)


def _of_one_block(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A function of one block, for arrays (1, ...) of the one that each device has."""

    def with_axis(shared: Any, blocks: Any) -> Any:
        found = function(shared, jax.tree.map(lambda x: x[0], blocks))
        return jax.tree.map(lambda x: x[None], found)

    return with_axis


def _by_document(values: Array) -> NDArray[Any]:
    """Of blocks of documents (B, R, A), those of one after the other."""
    return np.asarray(values).reshape(-1, values.shape[2])


def _falls_and_negentropy(
    tokens: NDArray[Any], lengths: NDArray[Any], shares: csr_array, total: float
) -> float:
    """What the bound of documents is less than its rises, nats.

    With q(z) the shares and pi integrated out, the bound without the term of log phi is for each

        log(Gamma(sum a) / Gamma(sum a + sum c)) - sum_u c[u] sum_k r[u, k] log r[u, k]
        + sum_k E log(Gamma(a[k] + N[k]) / Gamma(a[k])).
    """
    falls = gammaln(total + lengths) - gammaln(total)
    each = np.repeat(tokens, np.diff(shares.indptr))
    # No product of vectors: the threads of a BLAS would wait for work on cores in use.
    negentropy = (each * xlogy(shares.data, shares.data)).sum(dtype=np.float64)
    return float(falls.sum() + negentropy)
