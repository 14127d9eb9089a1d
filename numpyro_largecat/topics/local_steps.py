# SPDX-License-Identifier: Apache-2.0
"""The two ways to solve for documents given the topics, and what a batch sums of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpy.typing import NDArray
from scipy.sparse import csr_array

from numpyro_largecat.ops.rows_by_device import by_device, sums_by_device
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.collapsed_documents import (
    Assignments,
    CollapsedFit,
    TopicProbs,
    collapsed_fit,
)
from numpyro_largecat.ops.topics.document_fit import (
    DocumentFit,
    Topics,
    least_size,
    prepare_topics,
    solve_documents,
    start_documents,
)
from numpyro_largecat.ops.topics.learned_concentrations import log_absence, rises
from numpyro_largecat.ops.topics.sweeps import digamma
from numpyro_largecat.ops.topics.word_topic_counts import word_topic_counts


class Posterior(NamedTuple):
    """Dirichlet concentrations of the topics, for the words that a batch has."""

    words: Array  # (R, K)
    totals: Array  # (K,), sums over all words
    prior: float  # of each word, which is in both


class Given(NamedTuple):
    """What all documents of a batch share."""

    topics: Any  # of its words, as a local step needs them
    concentration: Array  # (K,)


class Documents(NamedTuple):
    """Padded documents, whose words are places in the rows of the batch."""

    words: Array  # (n, U)
    counts: Array  # (n, U)


class Sums(NamedTuple):
    """Sums over documents, each with an axis for the devices before its own."""

    counts: Array  # (R, K), expected tokens of words in topics
    rest: Array  # (), the bound without the term of log phi
    log_absence: Array | None = None  # (R, K), log probability that no token is of the topic
    rises: Array | None = None  # (K,), see ``ops.topics.learned_concentrations``


class LocalStep(Protocol):
    """How documents are solved for."""

    @property
    def mesh(self) -> Mesh | None:
        """Devices over which the documents of a chunk are spread."""
        ...

    @property
    def by_word(self) -> bool:
        """Whether what is kept has a row for each word of a document."""
        ...

    @property
    def always_keeps(self) -> bool:
        """Whether a visit needs what the last one left, also without a warm start."""
        ...

    def given(self, posterior: Posterior, concentration: Array, *, is_cold: bool) -> Given:
        """What all documents share; ``is_cold`` if they start from scratch."""
        ...

    def solve(self, given: Given, documents: Documents, last: Any) -> Any:
        """Topics of documents, with ``counts`` (n, K); ``last`` is of their last visit, or None."""
        ...

    def kept(self, fit: Any, places: NDArray[np.intp], is_word: NDArray[np.bool_]) -> csr_array:
        """What the next visit needs of the documents at ``places``, with words (n, U) or not.

        It has a row for each document, or for each of its words if the step is ``by_word``.
        """
        ...

    def last(self, kept: csr_array, is_word: NDArray[np.bool_]) -> Any:
        """The same as ``solve`` takes it, of documents with words (n, U) or not."""
        ...

    def sums(self, given: Given, documents: Documents, fit: Any, *, learns: bool) -> Sums:
        """What a batch sums of them; what priors are learned from if it ``learns``."""
        ...


@dataclass(frozen=True)
class Collapsed:
    """Topic frequencies and topics are integrated out, to zeroth order."""

    num_active: int
    effort: Effort
    mesh: Mesh | None = None
    is_warm: bool = False  # whether documents start from their last visit

    by_word: ClassVar[bool] = True
    always_keeps: ClassVar[bool] = True

    def given(self, posterior: Posterior, concentration: Array, *, is_cold: bool) -> Given:
        """The mean of phi, and the part of a token in it."""
        del is_cold
        probs, of_token = posterior.words / posterior.totals, 1 / posterior.totals
        return Given(TopicProbs(probs, of_token, posterior.prior * of_token), concentration)

    def solve(self, given: Given, documents: Documents, last: Assignments | None) -> CollapsedFit:
        """See ``collapsed_fit``."""
        is_warm = self.is_warm and last is not None
        options = {"num_active": self.num_active, "is_warm": is_warm, "mesh": self.mesh}
        return _solve_collapsed((given, self.effort), (documents, last), **options)

    def kept(
        self, fit: CollapsedFit, places: NDArray[np.intp], is_word: NDArray[np.bool_]
    ) -> csr_array:
        """Shares of the topics, (words, K)."""
        shares, topics = (np.asarray(x)[places][is_word] for x in fit.assignments)
        is_used = shares > 0
        ends = np.concatenate([[0], np.cumsum(is_used.sum(axis=1))])
        return csr_array(
            (shares[is_used], topics[is_used], ends), (len(shares), fit.counts.shape[1])
        )

    def last(self, kept: csr_array, is_word: NDArray[np.bool_]) -> Assignments:
        """Each word's topics in slots of their own."""
        sizes = np.diff(kept.indptr)
        is_used = np.arange(self.num_active) < sizes[:, None]
        found = []
        for values in (kept.data, kept.indices.astype(np.int32)):
            of_words = np.zeros(is_used.shape, values.dtype)
            of_words[is_used] = values
            padded = np.zeros((*is_word.shape, self.num_active), values.dtype)
            padded[is_word] = of_words
            found.append(padded)
        shares, topics = map(jnp.asarray, found)
        return Assignments(shares, topics)

    def sums(self, given: Given, documents: Documents, fit: CollapsedFit, *, learns: bool) -> Sums:
        """Cost: O(U L) entries for each document, and as many again if it learns."""
        return _sum_collapsed(given, (documents, fit), learns=learns, mesh=self.mesh)


class FitOfSize(NamedTuple):
    """The fit of documents by their bounds, and the number of topics code was compiled for."""

    fit: DocumentFit
    size: int  # holds the active topics of each document

    @property
    def counts(self) -> Array:
        """Expected tokens of each topic, (n, K)."""
        return self.fit.counts


@dataclass(frozen=True)
class MeanField:
    """The largest bound over responsibilities and topic frequencies, given E[log phi]."""

    num_active: int
    effort: Effort
    mesh: Mesh | None = None
    is_warm: bool = False  # whether documents start from their last visit

    by_word: ClassVar[bool] = False
    always_keeps: ClassVar[bool] = False

    def given(self, posterior: Posterior, concentration: Array, *, is_cold: bool) -> Given:
        """E[log phi], with exponentials of it if documents start from scratch."""
        log_probs = digamma(posterior.words) - digamma(posterior.totals)
        topics = prepare_topics(log_probs, concentration, for_most=is_cold)
        return Given(topics, concentration)

    def solve(self, given: Given, documents: Documents, last: Array | None) -> FitOfSize:
        """See ``solve_documents``."""
        start = last
        if start is None:
            start = _start_mean_field(given.topics, documents, mesh=self.mesh)
        size = least_size(start)
        shared = given.topics, self.num_active, self.effort
        fit = _solve_mean_field(shared, (documents, start), size=size, mesh=self.mesh)
        return FitOfSize(fit, size)

    def kept(
        self, fit: FitOfSize, places: NDArray[np.intp], is_word: NDArray[np.bool_]
    ) -> csr_array:
        """Counts of the topics, (documents, K)."""
        del is_word
        return csr_array(np.asarray(fit.counts)[places])

    def last(self, kept: csr_array, is_word: NDArray[np.bool_]) -> NDArray[np.floating]:
        """The same, dense, with rows for documents that pad."""
        counts = kept.toarray()
        return np.pad(counts, ((0, len(is_word) - len(counts)), (0, 0)))

    def sums(self, given: Given, documents: Documents, fit: FitOfSize, *, learns: bool) -> Sums:
        """See ``word_topic_counts``."""
        assert not learns
        shared = given.topics.table, given.concentration
        options = {"num_active": self.num_active, "size": fit.size, "mesh": self.mesh}
        return _sum_mean_field(shared, (documents, fit.fit), **options)


INFERENCE: dict[str, type[Collapsed | MeanField]] = {
    "collapsed": Collapsed,
    "mean_field": MeanField,
}


@partial(jax.jit, static_argnames=("num_active", "is_warm", "mesh"))
def _solve_collapsed(
    shared: Any, own: Any, *, num_active: int, is_warm: bool, mesh: Mesh | None
) -> CollapsedFit:
    def solve(shared: tuple[Given, Effort], own: tuple[Documents, Any]) -> CollapsedFit:
        (given, effort), (documents, last) = shared, own
        return collapsed_fit(*given, *documents, num_active, effort, last, is_warm=is_warm)

    return by_device(solve, mesh)(shared, own)


@partial(jax.jit, static_argnames=("learns", "mesh"))
def _sum_collapsed(given: Given, own: Any, *, learns: bool, mesh: Mesh | None) -> Sums:
    def sums(given: Given, own: tuple[Documents, CollapsedFit]) -> Sums:
        documents, fit = own
        tokens, places = (
            documents.counts[..., None],
            (documents.words[..., None], fit.assignments.topics),
        )
        none = jnp.zeros_like(given.topics.probs)
        counts, rest = none.at[places].add(tokens * fit.assignments.shares), fit.rest.sum()
        if not learns:
            return Sums(counts, rest)
        absence = tokens * log_absence(fit.assignments.shares)
        of_documents = (jnp.arange(len(tokens))[:, None, None], fit.assignments.topics)
        absent = jnp.zeros_like(fit.counts).at[of_documents].add(absence)
        gains = rises(fit.counts, absent, given.concentration).sum(axis=0)
        return Sums(counts, rest, none.at[places].add(absence), gains)

    return sums_by_device(sums, mesh)(given, own)


@partial(jax.jit, static_argnames="mesh")
def _start_mean_field(topics: Any, documents: Documents, *, mesh: Mesh | None) -> Array:
    return by_device(lambda topics, own: start_documents(topics, *own), mesh)(topics, documents)


@partial(jax.jit, static_argnames=("size", "mesh"))
def _solve_mean_field(shared: Any, own: Any, *, size: int, mesh: Mesh | None) -> DocumentFit:
    def solve(shared: tuple[Topics, int, Effort], own: tuple[Documents, Array]) -> DocumentFit:
        (topics, num_active, effort), (documents, start) = shared, own
        return solve_documents(topics, *documents, start, num_active, effort, size=size)

    return by_device(solve, mesh)(shared, own)


@partial(jax.jit, static_argnames=("num_active", "size", "mesh"))
def _sum_mean_field(
    shared: Any, own: Any, *, num_active: int, size: int, mesh: Mesh | None
) -> Sums:
    def sums(shared: tuple[Array, Array], own: tuple[Documents, DocumentFit]) -> Sums:
        documents, fit = own
        options = {"num_active": num_active, "size": size}
        found = word_topic_counts(*shared, *documents, fit.basis, **options)
        return Sums(found, fit.bound.sum() - jnp.vdot(found, shared[0]))

    return sums_by_device(sums, mesh)(shared, own)
