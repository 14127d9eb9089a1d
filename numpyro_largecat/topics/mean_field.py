# SPDX-License-Identifier: Apache-2.0
"""Documents by the largest bound over responsibilities and topic frequencies, a local step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import gammaln

from numpyro_largecat.ops.rows_by_device import by_device, sums_by_device, total
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.document_fit import (
    DocumentFit,
    Topics,
    least_size,
    prepare_topics,
    solve_documents,
    start_documents,
)
from numpyro_largecat.ops.topics.sweeps import digamma
from numpyro_largecat.ops.topics.word_topic_counts import word_topic_counts
from numpyro_largecat.topics.document_layout import Chunk, Layout
from numpyro_largecat.topics.local_step import (
    AnyArray,
    Documents,
    Given,
    Posterior,
    Solved,
    Sums,
)
from numpyro_largecat.topics.whole_documents import WholeDocuments


class FitOfSize(NamedTuple):
    """The fit of documents by their bounds, and the number of topics code was compiled for."""

    fit: DocumentFit
    size: int  # holds the active topics of each document


@dataclass(frozen=True)
class MeanField:
    """The largest bound over responsibilities and topic frequencies, given E[log phi]."""

    num_active: int
    effort: Effort
    mesh: Mesh | None = None
    is_warm: bool = False  # whether documents start from their last visit

    layout: ClassVar[type[Layout]] = WholeDocuments
    by_word: ClassVar[bool] = False
    always_keeps: ClassVar[bool] = False

    def given(self, posterior: Posterior, concentration: AnyArray, *, is_cold: bool) -> Given:
        """E[log phi], with exponentials of it if documents start from scratch."""
        log_probs = digamma(posterior.words) - digamma(posterior.totals)
        topics = prepare_topics(log_probs, concentration, for_most=is_cold)
        return Given(topics, concentration)

    def solve(
        self, given: Given, documents: Documents, last: Array | None, most: int | None
    ) -> FitOfSize:
        """See ``solve_documents``."""
        del most  # whole documents have all topics
        start = last
        if start is None:
            start = _start_mean_field(given.topics, documents, mesh=self.mesh)
        size = least_size(start)
        shared = given.topics, self.num_active, self.effort
        fit = _solve_mean_field(shared, (documents, start), size=size, mesh=self.mesh)
        return FitOfSize(fit, size)

    def counts(self, solved: Solved) -> csr_array:
        """See ``DocumentFit``."""
        return csr_array(np.asarray(solved.fit.fit.counts)[solved.places])

    def kept(self, solved: Solved) -> csr_array:
        """The counts."""
        return self.counts(solved)

    def last(self, kept: csr_array, chunk: Chunk) -> NDArray[np.floating]:
        """The same, dense, with rows for documents that pad."""
        counts = np.zeros((len(chunk.counts), kept.shape[1]), kept.dtype)
        counts[chunk.places] = kept.toarray()
        return counts

    def sums(
        self,
        given: Given,
        solved: Solved,
        kept: csr_array,
        concentration: NDArray[np.floating] | None,
    ) -> Sums:
        """See ``word_topic_counts``."""
        fit, size = solved.fit
        shared = given.topics.table, given.concentration
        options = {"num_active": self.num_active, "size": size, "mesh": self.mesh}
        found, rests = _sum_mean_field(shared, (solved.documents, fit), **options)
        counts = csr_array(np.asarray(total(found)))
        if concentration is None:
            return Sums(counts, np.nan)
        rest = float(np.asarray(rests, np.float64).sum())
        rest += _log_rise(kept, concentration) - _log_rise(kept, np.asarray(given.concentration))
        return Sums(counts, rest)


def _log_rise(counts: csr_array, concentration: NDArray[np.floating]) -> float:
    """Sum of log(Gamma(a + N) / Gamma(a)) over topics of documents, in float64."""
    a = concentration.astype(np.float64)[counts.indices]
    return float((gammaln(a + counts.data) - gammaln(a)).sum())


@partial(jax.jit, static_argnames="mesh")
def _start_mean_field(topics: Any, documents: Documents, *, mesh: Mesh | None) -> Array:
    def start(topics: Topics, own: Documents) -> Array:
        return start_documents(topics, own.words, own.counts)

    return by_device(start, mesh)(topics, documents)


@partial(jax.jit, static_argnames=("size", "mesh"))
def _solve_mean_field(shared: Any, own: Any, *, size: int, mesh: Mesh | None) -> DocumentFit:
    def solve(shared: tuple[Topics, int, Effort], own: tuple[Documents, Array]) -> DocumentFit:
        (topics, num_active, effort), (documents, start) = shared, own
        return solve_documents(
            topics, documents.words, documents.counts, start, num_active, effort, size=size
        )

    return by_device(solve, mesh)(shared, own)


@partial(jax.jit, static_argnames=("num_active", "size", "mesh"))
def _sum_mean_field(
    shared: Any, own: Any, *, num_active: int, size: int, mesh: Mesh | None
) -> tuple[Array, Array]:
    """Counts of words in topics, (devices, R, K), and the bound without log phi, (devices,)."""

    def sums(
        shared: tuple[Array, Array], own: tuple[Documents, DocumentFit]
    ) -> tuple[Array, Array]:
        documents, fit = own
        options = {"num_active": num_active, "size": size}
        found = word_topic_counts(*shared, documents.words, documents.counts, fit.basis, **options)
        return found, fit.bound.sum() - jnp.vdot(found, shared[0])

    return sums_by_device(sums, mesh)(shared, own)
