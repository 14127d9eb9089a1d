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
from scipy.special import gammaln, xlogy

from numpyro_largecat.ops.rows_by_device import by_device, sums_by_device, total
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.collapsed_documents import (
    Assignments,
    CollapsedFit,
    Largest,
    TopicProbs,
    collapsed_fit,
    no_assignments,
    through_largest,
)
from numpyro_largecat.ops.topics.document_fit import (
    DocumentFit,
    Topics,
    least_size,
    prepare_topics,
    solve_documents,
    start_documents,
)
from numpyro_largecat.ops.topics.presence import log_absence, log_rises, rises
from numpyro_largecat.ops.topics.sweeps import digamma
from numpyro_largecat.ops.topics.word_topic_counts import word_topic_counts

AnyArray = Array | NDArray[Any]


class Posterior(NamedTuple):
    """Dirichlet concentrations of the topics, for the words that a batch has."""

    words: Array  # (R, K)
    totals: Array  # (K,), sums over all words
    least: float  # of a word in the prior, which is in both


class Given(NamedTuple):
    """What all documents of a batch share."""

    topics: Any  # of its words, as a local step needs them
    concentration: AnyArray  # (K,)


class Documents(NamedTuple):
    """Padded documents, whose words are places in the rows of the batch."""

    words: Array  # (n, U)
    counts: Array  # (n, U)


class Solved(NamedTuple):
    """Documents and what was found for them."""

    documents: Documents  # with others that are empty
    fit: Any  # as ``LocalStep.solve`` gives it
    num_topics: int
    places: NDArray[np.intp]  # (n,), the rows of these where the documents are


class Sums(NamedTuple):
    """Sums over documents."""

    counts: csr_array  # (R, K), expected tokens of words in topics
    rest: float  # the bound without the term of log phi
    # Of ``Collapsed`` alone, see ``ops.topics.presence``:
    log_absence: csr_array | None = None  # (R, K), log probability that no token is of the topic
    rises: NDArray[Any] | None = None  # (K,), of documents


class LocalStep(Protocol):
    """How documents are solved for."""

    @property
    def mesh(self) -> Mesh | None:
        """Devices over which the documents of a chunk are spread."""
        ...

    @property
    def is_warm(self) -> bool:
        """Whether documents start from what their last visit found."""
        ...

    @property
    def by_word(self) -> bool:
        """Whether what is kept has a row for each word of a document."""
        ...

    @property
    def always_keeps(self) -> bool:
        """Whether a visit needs what the last one left, also without a warm start."""
        ...

    def given(self, posterior: Posterior, concentration: AnyArray, *, is_cold: bool) -> Given:
        """What all documents share; ``is_cold`` if they start from scratch."""
        ...

    def solve(self, given: Given, documents: Documents, last: Any) -> Any:
        """Topics of documents; ``last`` is of their last visit, or None."""
        ...

    def counts(self, solved: Solved) -> csr_array:
        """Expected tokens of each topic in each document, (n, K)."""
        ...

    def kept(self, solved: Solved) -> csr_array:
        """What the next visit needs: a row for each document, or for each word if ``by_word``."""
        ...

    def sums(
        self,
        given: Given,
        solved: Solved,
        kept: csr_array,
        concentration: NDArray[np.floating] | None,
    ) -> Sums:
        """What a batch sums of them; ``concentration`` (K,) is that of the bound.

        Counts alone if it is None; the rest is NaN.
        """
        ...

    def last(self, kept: csr_array, is_word: NDArray[np.bool_]) -> Any:
        """The same as ``solve`` takes it, of documents with words (n, U) or not."""
        ...


@dataclass(frozen=True)
class Collapsed:
    """Topic frequencies and topics are integrated out; steps are to zeroth order."""

    num_active: int
    effort: Effort
    mesh: Mesh | None = None
    is_warm: bool = False  # whether documents start from their last visit

    by_word: ClassVar[bool] = True
    always_keeps: ClassVar[bool] = True

    def given(self, posterior: Posterior, concentration: AnyArray, *, is_cold: bool) -> Given:
        """The mean of phi, and the part of a token in it."""
        del is_cold
        return Given(_topic_probs(posterior), concentration)

    def solve(self, given: Given, documents: Documents, last: Assignments | None) -> CollapsedFit:
        """See ``collapsed_fit``."""
        is_warm = self.is_warm and last is not None
        if last is None:
            dtype = given.concentration.dtype
            none = no_assignments(documents.words.shape, self.num_active, dtype)
            last = jax.tree.map(jnp.asarray, none)
        largest = _through_largest((given, is_warm), (documents, last), mesh=self.mesh)
        own = largest, documents.counts
        return _solve_collapsed(self.effort, own, num_active=self.num_active, mesh=self.mesh)

    def counts(self, solved: Solved) -> csr_array:
        """Those of the topics that were in question."""
        topics, counts = (np.asarray(x)[solved.places] for x in solved.fit[:2])
        ends = np.arange(len(topics) + 1) * topics.shape[1]
        return csr_array((counts.ravel(), topics.ravel(), ends), (len(topics), solved.num_topics))

    def kept(self, solved: Solved) -> csr_array:
        """Shares of the topics, (words, K)."""
        is_word = np.asarray(solved.documents.counts)[solved.places] > 0
        assignments = solved.fit.assignments
        shares, topics = (np.asarray(x)[solved.places][is_word] for x in assignments)
        is_used = shares > 0
        ends = np.concatenate([[0], np.cumsum(is_used.sum(axis=1))])
        shape = len(shares), solved.num_topics
        return csr_array((shares[is_used], topics[is_used], ends), shape)

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
        return Assignments(*found)

    def sums(
        self,
        given: Given,
        solved: Solved,
        kept: csr_array,
        concentration: NDArray[np.floating] | None,
    ) -> Sums:
        """By products of sparse matrices, O(U L) for each document."""
        words, counts = (np.asarray(x)[solved.places] for x in solved.documents)
        is_word = counts > 0
        tokens, num_words = counts[is_word].astype(kept.dtype), len(kept.indptr) - 1

        def tokens_of(rows: NDArray[np.integer], size: int) -> csr_array:
            return csr_array((tokens, (rows, np.arange(num_words))), (size, num_words))

        by_word = tokens_of(words[is_word], len(given.topics.probs))
        if concentration is None:
            return Sums(by_word @ kept, np.nan)
        a = np.asarray(concentration, np.float64)
        absence = csr_array((log_absence(kept.data), kept.indices, kept.indptr), kept.shape)
        by_document = tokens_of(np.nonzero(is_word)[0], len(is_word))
        found, absent = by_document @ kept, by_document @ absence
        own = found.data, absent.data, a[found.indices]  # of topics in documents
        rest = log_rises(*own).sum(dtype=np.float64) - _falls_and_negentropy(counts, kept, a.sum())
        gains = np.bincount(found.indices, rises(*own), len(a))
        return Sums(by_word @ kept, float(rest), by_word @ absence, gains)


def _falls_and_negentropy(
    word_counts: NDArray[np.integer], shares: csr_array, total: float
) -> float:
    """What the bound of documents is less than its rises, nats.

    With q(z) the shares and pi integrated out, the bound without the term of log phi is for each

        log(Gamma(sum a) / Gamma(sum a + sum c)) - sum_u c[u] sum_k r[u, k] log r[u, k]
        + sum_k E log(Gamma(a[k] + N[k]) / Gamma(a[k])).
    """
    tokens = np.repeat(word_counts[word_counts > 0], np.diff(shares.indptr))
    falls = gammaln(total + word_counts.sum(axis=1)) - gammaln(total)
    # No product of vectors: the threads of a BLAS would wait for work on cores in use.
    negentropy = (tokens * xlogy(shares.data, shares.data)).sum(dtype=np.float64)
    return float(falls.sum() + negentropy)


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

    by_word: ClassVar[bool] = False
    always_keeps: ClassVar[bool] = False

    def given(self, posterior: Posterior, concentration: AnyArray, *, is_cold: bool) -> Given:
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

    def counts(self, solved: Solved) -> csr_array:
        """See ``DocumentFit``."""
        return csr_array(np.asarray(solved.fit.fit.counts)[solved.places])

    def kept(self, solved: Solved) -> csr_array:
        """The counts."""
        return self.counts(solved)

    def last(self, kept: csr_array, is_word: NDArray[np.bool_]) -> NDArray[np.floating]:
        """The same, dense, with rows for documents that pad."""
        counts = kept.toarray()
        return np.pad(counts, ((0, len(is_word) - len(counts)), (0, 0)))

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


INFERENCE: dict[str, type[Collapsed | MeanField]] = {
    "collapsed": Collapsed,
    "mean_field": MeanField,
}


@jax.jit
def _topic_probs(posterior: Posterior) -> TopicProbs:
    of_token = 1 / posterior.totals
    return TopicProbs(posterior.words * of_token, of_token, posterior.least * of_token)


@partial(jax.jit, static_argnames="mesh")
def _through_largest(shared: Any, own: Any, *, mesh: Mesh | None) -> Largest:
    def look(shared: tuple[Given, Array], own: tuple[Documents, Assignments]) -> Largest:
        ((topics, concentration), is_warm), (documents, last) = shared, own
        return through_largest(topics, concentration, *documents, last, is_warm)

    return by_device(look, mesh)(shared, own)


@partial(jax.jit, static_argnames=("num_active", "mesh"))
def _solve_collapsed(shared: Any, own: Any, *, num_active: int, mesh: Mesh | None) -> CollapsedFit:
    def solve(effort: Effort, own: tuple[Largest, Array]) -> CollapsedFit:
        return collapsed_fit(*own, num_active, effort)

    return by_device(solve, mesh)(shared, own)


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
) -> tuple[Array, Array]:
    """Counts of words in topics, (devices, R, K), and the bound without log phi, (devices,)."""

    def sums(
        shared: tuple[Array, Array], own: tuple[Documents, DocumentFit]
    ) -> tuple[Array, Array]:
        documents, fit = own
        options = {"num_active": num_active, "size": size}
        found = word_topic_counts(*shared, *documents, fit.basis, **options)
        return found, fit.bound.sum() - jnp.vdot(found, shared[0])

    return sums_by_device(sums, mesh)(shared, own)
