# SPDX-License-Identifier: Apache-2.0
"""How documents of a corpus are laid out in arrays of few shapes, for which code is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.data.corpus import Corpus

PARTS = 4  # chunks of a batch, for as many cores


class Chunk(NamedTuple):
    """Some documents in arrays of one of few shapes; what is left over has counts of 0."""

    documents: NDArray[np.intp]  # (n,), where they are in the corpus
    places: NDArray[np.intp]  # (n,), where each is among what is found for all, one after the other
    words: NDArray[np.int32]  # as the layout has them
    counts: NDArray[np.int32]  # of the same shape
    owners: NDArray[np.int32] | None = None  # of pieces of documents, see ``Pieces``
    most: int | None = None  # topics of each that go on after the first sweeps; None for all


class Demand(NamedTuple):
    """What a fit asks of its layout."""

    batch_size: int
    num_passes: int
    num_parts: int  # chunks of a batch, or a few more or less
    first_topics: int  # how many there are at first
    last_topics: int | None  # and after that; None if this is learned


class Layout(Protocol):
    """Shapes of documents."""

    @classmethod
    def of(cls, corpus: Corpus, demand: Demand) -> Any:
        """Shapes for a fit."""
        ...

    @classmethod
    def to_read(cls, corpus: Corpus, num_topics: int) -> Any:
        """Shapes for documents of which no fit knows."""
        ...

    @classmethod
    def read(cls, values: Any) -> Any:
        """Shapes that were saved as lists."""
        ...

    def with_room_for(self, corpus: Corpus, num_topics: int) -> Any:
        """Shapes that hold these documents too, the same where they can be."""
        ...

    def for_concentration(self, concentration: NDArray[np.floating]) -> Any:
        """The same with room for as many topics of a document as this prior expects."""
        ...

    def over(self, num_devices: int, batch_size: int) -> Any:
        """The same with chunks of which each device has its part of a batch at once."""
        ...

    def chunks(
        self, corpus: Corpus, indices: NDArray[np.intp], num_devices: int = 1
    ) -> Iterator[Callable[[], Chunk]]:
        """Documents in the order of their lengths, longest first; each call makes a chunk.

        Its arrays have the same shape for each device, one after the other.
        """
        ...
