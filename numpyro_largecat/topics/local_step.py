# SPDX-License-Identifier: Apache-2.0
"""What solves for documents given the topics, and what a batch sums of them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpy.typing import NDArray
from scipy.sparse import csr_array

from numpyro_largecat.topics.document_layout import Chunk, Layout

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
    """Documents as their layout has them, whose words are places in the rows of the batch."""

    words: AnyArray  # (n, U) if whole, (B, R, P) in pieces
    counts: AnyArray  # of the same shape
    owners: AnyArray | None = None  # (B, R), see ``Pieces``


class Solved(NamedTuple):
    """Documents and what was found for them."""

    documents: Documents  # with others that are empty
    fit: Any  # as ``LocalStep.solve`` gives it
    num_topics: int
    places: NDArray[np.intp]  # (n,), where each document is among what is found for all


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
    def layout(self) -> type[Layout]:
        """How documents are laid out for it."""
        ...

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

    def solve(self, given: Given, documents: Documents, last: Any, most: int | None) -> Any:
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

    def last(self, kept: csr_array, chunk: Chunk) -> Any:
        """The same as ``solve`` takes it, of the documents of a chunk."""
        ...
