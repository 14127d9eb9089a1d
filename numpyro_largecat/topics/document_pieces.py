# SPDX-License-Identifier: Apache-2.0
"""Documents of all lengths in pieces of as many words, in blocks of whole documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.ops.topics.collapsed_documents import (
    MOST_TOPICS,
    WORDS_PER_TOPIC,
    most_topics,
)
from numpyro_largecat.topics.document_layout import FEWEST, Chunk, Demand, MostTopics

SHORT = MOST_TOPICS * WORDS_PER_TOPIC  # words at most of a document that needs no more topics
SLOTS = FEWEST  # of a piece: the fewer, the less padding
SLOTS_OF_BLOCK = 2**11  # of a CPU, whose cache holds them with the topics that go on
SLOTS_ELSEWHERE = 2**16
NUMBERS_OF_BLOCK = 2**21  # slots times all topics, likewise
NUMBERS_ELSEWHERE = 2**27
NUMBERS_OF_CHUNK = 2**22  # slots times topics that go on
NUMBERS_FOR_CODE = 10**8  # of all passes, which cost about what compiling sweeps once more does


class DocumentPieces(NamedTuple):
    """Arrays (blocks of a chunk, pieces of a block, slots of a piece)."""

    num_pieces: int  # of a block; no document has more
    num_blocks: int  # of a chunk, on each device
    most_topics: int  # of a document that go on
    short_topics: int  # of one so short that it never has more, or as many

    @classmethod
    def of(cls, corpus: Corpus, demand: Demand) -> DocumentPieces:
        """Blocks that a cache holds, smaller and fewer where batches are small."""
        sizes = np.diff(corpus.offsets)
        longest = int(sizes.max(initial=1))
        topics = max(MOST_TOPICS, demand.last_topics or demand.first_topics)
        topics = min(most_topics(longest), topics)
        share = min(1.0, demand.batch_size / max(1, len(sizes))) / demand.num_parts
        of_part = max(1, int(np.ceil(share * pieces_of(sizes).sum())))
        in_cache = min(of_part, _slots_of_block(demand.first_topics) // SLOTS)
        num_pieces = max(in_cache, int(pieces_of(longest)))
        most_blocks = max(1, NUMBERS_OF_CHUNK // (num_pieces * SLOTS * topics))
        slots = SLOTS * int(pieces_of(sizes[sizes <= SHORT]).sum())
        is_worth_it = demand.num_passes * slots * (topics - MOST_TOPICS) > NUMBERS_FOR_CODE
        short_topics = MOST_TOPICS if is_worth_it else topics
        return cls(num_pieces, min(most_blocks, -(-of_part // num_pieces)), topics, short_topics)

    def with_room_for(self, corpus: Corpus, num_topics: int) -> DocumentPieces:
        """With larger blocks for longer documents."""
        longest = int(np.diff(corpus.offsets).max(initial=1))
        topics = max(self.most_topics, min(most_topics(longest), num_topics))
        pieces = max(self.num_pieces, int(pieces_of(longest)))
        short = topics if self.short_topics == self.most_topics else self.short_topics
        return DocumentPieces(pieces, self.num_blocks, topics, short)

    def chunks(
        self, corpus: Corpus, indices: NDArray[np.intp], num_devices: int = 1
    ) -> Iterator[Callable[[], Chunk]]:
        """Whole documents in each block, as many as there is room for."""
        sizes = np.diff(corpus.offsets)[indices]
        order = np.argsort(-sizes, kind="stable")
        indices, sizes = indices[order], sizes[order]
        firsts = _first_of_blocks(pieces_of(sizes), self.num_pieces)
        blocks = [slice(*ends) for ends in zip(firsts, [*firsts[1:], len(sizes)], strict=True)]
        size = num_devices * self.num_blocks
        for start in range(0, len(blocks), size):
            own = [indices[block] for block in blocks[start : start + size]]
            yield partial(self._chunk, corpus, own, size)

    def _chunk(self, corpus: Corpus, blocks: list[NDArray[np.intp]], num_blocks: int) -> Chunk:
        documents = np.concatenate(blocks)
        starts, sizes = corpus.offsets[:-1][documents], np.diff(corpus.offsets)[documents]
        pieces = [pieces_of(sizes[b]) for b in np.split(np.arange(len(sizes)), _ends(blocks))]
        shape = num_blocks, self.num_pieces, SLOTS
        words, counts = np.zeros((2, num_blocks * self.num_pieces * SLOTS), np.int32)
        # Pieces that no document has belong to the last, which is then no document's.
        owners = np.full(shape[:2], self.num_pieces - 1, np.int32)
        for row, own in zip(owners, pieces, strict=False):
            row[: own.sum()] = np.repeat(np.arange(len(own)), own)
        before = [np.cumsum(own) - own + b * self.num_pieces for b, own in enumerate(pieces)]
        within = _ranges(sizes)
        slots = np.repeat(SLOTS * np.concatenate(before), sizes) + within
        sources = np.repeat(starts, sizes) + within
        words[slots], counts[slots] = corpus.words[sources], corpus.counts[sources]
        places = [b * self.num_pieces + np.arange(len(own)) for b, own in enumerate(pieces)]
        arrays = words.reshape(shape), counts.reshape(shape), owners
        all_short = sizes.max() <= SHORT
        most = MostTopics(self.most_topics, self.short_topics if all_short else self.most_topics)
        return Chunk(documents, np.concatenate(places), *arrays, most)


def pieces_of(sizes: int | np.integer | NDArray[np.integer]) -> NDArray[np.intp]:
    """Pieces that documents with so many words have, 1 at least."""
    return np.maximum(1, -(-np.asarray(sizes, np.intp) // SLOTS))


def _slots_of_block(num_topics: int) -> int:
    """What a cache holds of words seen through all topics, and through those that go on."""
    if jax.default_backend() == "cpu":
        return min(SLOTS_OF_BLOCK, NUMBERS_OF_BLOCK // num_topics)
    return min(SLOTS_ELSEWHERE, NUMBERS_ELSEWHERE // num_topics)


def _ends(blocks: list[NDArray[np.intp]]) -> NDArray[np.intp]:
    return np.cumsum([len(block) for block in blocks])[:-1]


def _ranges(sizes: NDArray[np.integer]) -> NDArray[np.intp]:
    """Numbers from 0 of each, one after the other."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _first_of_blocks(pieces: NDArray[np.intp], size: int) -> list[int]:
    """The first document of each block; blocks are filled one after the other."""
    ends, firsts = np.cumsum(pieces), [0][: len(pieces)]
    while firsts and ends[-1] - _before(ends, firsts[-1]) > size:
        full = _before(ends, firsts[-1]) + size
        firsts.append(int(np.searchsorted(ends, full, side="right")))
    return firsts


def _before(ends: NDArray[np.intp], document: int) -> int:
    return int(ends[document - 1]) if document else 0
