# SPDX-License-Identifier: Apache-2.0
"""Documents in rows of their own, padded to few widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.topics.document_layout import Chunk, Demand

FEWEST = 16  # documents or words that are solved together on a CPU
CHUNK = 128  # documents of one compiled call at most
SLOTS_OF_CHUNK = 2**17  # of longer documents a chunk has fewer
SLOTS_FOR_CODE = 2_000_000  # of padding, which cost about what compiling for a width does


class WholeDocuments(NamedTuple):
    """Arrays (documents of a chunk, width)."""

    widths: tuple[int, ...]  # slots for the words of documents, ascending
    num_documents: int  # of a chunk, at most, on each device

    @classmethod
    def of(cls, corpus: Corpus, demand: Demand) -> WholeDocuments:
        """See ``widths_of``."""
        widths = widths_of(corpus, demand.num_passes)
        return cls(widths, _documents_together(demand.batch_size, demand.num_parts))

    @classmethod
    def to_read(cls, corpus: Corpus, num_topics: int) -> WholeDocuments:
        """Chunks of as many documents as there may be."""
        del num_topics
        return cls(widths_of(corpus), CHUNK)

    @classmethod
    def read(cls, values: Any) -> WholeDocuments:
        """One that was saved as lists."""
        return cls(tuple(values[0]), values[1])

    def with_room_for(self, corpus: Corpus, num_topics: int) -> WholeDocuments:
        """With more widths where they are worth it."""
        return self._replace(widths=widths_of(corpus, known=self.widths))

    def for_concentration(self, concentration: NDArray[np.floating]) -> WholeDocuments:
        """The same: documents have room for all topics."""
        del concentration
        return self

    def over(self, num_devices: int, batch_size: int) -> WholeDocuments:
        """With a device's part of a batch."""
        return self._replace(num_documents=_documents_together(batch_size, num_devices))

    def documents_of(self, width: int) -> int:
        """Documents of a chunk of this width, on each device."""
        fits = max(1, SLOTS_OF_CHUNK // width)
        return min(self.num_documents, fits if fits < FEWEST else fits // FEWEST * FEWEST)

    def chunks(
        self, corpus: Corpus, indices: NDArray[np.intp], num_devices: int = 1
    ) -> Iterator[Callable[[], Chunk]]:
        """Documents of a width each, dealt to the devices in turn, so that all have long ones."""
        sizes = np.diff(corpus.offsets)[indices]
        order = np.argsort(-sizes, kind="stable")
        which = np.searchsorted(self.widths, sizes[order])

        def pad(documents: NDArray[np.intp], size: int, width: int) -> Chunk:
            dealt = np.arange(size).reshape(-1, num_devices).T.ravel()
            missing = ((0, size - len(documents)), (0, 0))
            padded = corpus.padded(documents, width)
            words, counts = (np.pad(x, missing)[dealt] for x in padded)
            return Chunk(documents, np.argsort(dealt)[: len(documents)], words, counts)

        for i, width in reversed(list(enumerate(self.widths))):
            documents, size = indices[order[which == i]], num_devices * self.documents_of(width)
            for start in range(0, len(documents), size):
                yield partial(pad, documents[start : start + size], size, width)


def _documents_together(batch_size: int, num_parts: int) -> int:
    """Documents of a chunk at most, so that as many cores or devices all have some of a batch."""
    return min(CHUNK, FEWEST * -(-batch_size // (num_parts * FEWEST)))


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
