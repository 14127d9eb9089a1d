# SPDX-License-Identifier: Apache-2.0
"""What a fit of topics keeps between visits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from numpyro_largecat._result_so_far import held_signals
from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.topics.document_chunks import Batch, words_of_documents
from numpyro_largecat.topics.problem import Priors
from numpyro_largecat.topics.topic_table import Table, add_sparse
from numpyro_largecat.topics.visits import Visit

FURTHER = 1.5  # times what the last pass moved, see docs/measured_topics.md
NOWHERE = 1e-30  # concentration of a topic that no document has


@dataclass
class Memory:
    """What is kept of each batch, and the bounds so far; ``table.changes`` batches were visited.

    Whatever interrupts a fit, table and memory are those after the same batch.
    """

    table: Table
    priors: Priors
    counts: list[csr_array | None]  # of words in topics
    own: list[csr_array | None]  # see ``Visit``
    log_absence: list[csr_array | None]  # of words in topics, if collapsed
    rises: NDArray[np.floating]  # (batches, K), of documents, if collapsed
    rest: NDArray[np.float64]  # (batches,), of the bound
    bounds: list[float]  # of the corpus, after each pass
    next_choice: int  # the pass before which candidates leave; -1 if none do
    num_added: int = 0  # passes of more topics, while their number is learned
    before: NDArray[np.floating] | None = None  # (V, K), a pass ago, if a longer step is to come

    @classmethod
    def begin(cls, num_batches: int, table: Table, priors: Priors, next_choice: int) -> Memory:
        """Before the first visit."""
        none: list[csr_array | None] = [None] * num_batches
        rises = np.zeros((num_batches, len(priors.topics)))
        parts = none, none.copy(), none.copy()
        return cls(table, priors, *parts, rises, np.zeros(num_batches), [], next_choice)

    def copy(self) -> Memory:
        """One that goes on by itself, and has no choice before it."""
        return replace(
            self,
            table=self.table.copy(),
            counts=self.counts.copy(),
            own=self.own.copy(),
            log_absence=self.log_absence.copy(),
            rises=self.rises.copy(),
            rest=self.rest.copy(),
            bounds=self.bounds.copy(),
            next_choice=-1,
            num_added=0,
        )

    def is_before_choice(self) -> bool:
        """Whether candidates leave before the next batch."""
        return self.table.changes == self.next_choice * len(self.rest)

    def last_rise(self, num_first_passes: int) -> float | None:
        """Of the bound in the last pass; None if the one before had other topics, or none.

        Topics leave after so many first passes, and where their number is learned once more after
        as many others.
        """
        last_choice = num_first_passes + self.num_added
        if self.next_choice >= 0:
            last_choice = self.next_choice - num_first_passes
        bounds = self.bounds[last_choice:]
        return bounds[-1] - bounds[-2] if len(bounds) > 1 else None

    def put(self, b: int, rows: NDArray[np.intp], found: Visit) -> None:
        """Take what a visit of batch b left, in place of what the last one did."""
        sums = found.sums
        self.table.add(rows, sums.counts, less=self.counts[b])
        self.counts[b], self.rest[b], self.own[b] = sums.counts, sums.rest, found.own
        self.log_absence[b] = sums.log_absence
        if sums.rises is not None:
            self.rises[b] = sums.rises

    def take_longer_step(self, corpus: Corpus, batches: list[Batch]) -> None:
        """Move the counts on by one and a half times what the last pass did, none of them below 0.

        Whatever a count is made of is multiplied as it is, so that batches and tokens still leave
        it whole.
        """
        assert self.before is not None
        now = self.table.numpy()
        longer = np.maximum(now + FURTHER * (now - self.before), 0)
        ratios = np.divide(longer, now, out=np.ones_like(longer), where=now > 0)
        counts = [_times(x, b.rows, ratios) for x, b in zip(self.counts, batches, strict=True)]
        words = [words_of_documents(corpus, b.documents) for b in batches]
        own = [_times(x, of_batch, ratios) for x, of_batch in zip(self.own, words, strict=True)]
        with held_signals():
            self.counts, self.own, self.before = counts, own, None
            self.table.set(sum_of_batches(batches, counts, now.shape))

    def pad(self, num_topics: int) -> None:
        """Add topics that no document has, up to so many."""
        missing = num_topics - self.table.shape[1]
        self.table.set(np.pad(self.table.numpy(), ((0, 0), (0, missing))))
        self.rises = np.pad(self.rises, ((0, 0), (0, missing)))
        topics, words = self.priors
        nowhere = np.full(missing, NOWHERE, topics.dtype)
        self.priors = Priors(np.concatenate([topics, nowhere]), words)
        for parts in (self.counts, self.own, self.log_absence):
            for part in parts:
                if part is not None:
                    part.resize((part.shape[0], num_topics))

    def keep(
        self, topics: NDArray[np.intp], counts: NDArray[np.floating], *, forget_own: bool
    ) -> None:
        """Forget all other topics; ``counts`` (V, K) are those of these.

        ``forget_own`` if documents could not go on from those of their topics that are left.
        """
        self.table.set(counts)
        # In the order of a file's arrays, unlike `[:, topics]`: sums then round as after resuming.
        self.rises = np.take(self.rises, topics, axis=1)
        for parts in (self.counts, self.own, self.log_absence):
            parts[:] = [None if part is None else part[:, topics] for part in parts]
        if forget_own:
            self.own = [None] * len(self.own)


def sum_of_batches(
    batches: list[Batch], parts: list[csr_array | None], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """Counts of words in topics, (V, K), from those of each batch."""
    total = np.zeros(shape)
    for batch, part in zip(batches, parts, strict=True):
        if part is not None:
            add_sparse(total, batch.rows, part)
    return total


def _times(
    part: csr_array | None, words: NDArray[np.intp], ratios: NDArray[np.floating]
) -> csr_array | None:
    """Entries of words, a row for each, in topics times the ratios (V, K) of these."""
    if part is None:
        return None
    each = ratios[np.repeat(words, np.diff(part.indptr)), part.indices].astype(part.dtype)
    return csr_array((part.data * each, part.indices, part.indptr), part.shape)
