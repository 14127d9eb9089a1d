# SPDX-License-Identifier: Apache-2.0
"""Documents of all lengths in pieces of as many words, in blocks of whole documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.ops.topics.collapsed_documents import (
    MOST_TOPICS,
    WORDS_PER_TOPIC,
    most_topics,
)
from numpyro_largecat.ops.topics.presence import expected_topics
from numpyro_largecat.topics.document_layout import PARTS, Chunk, Demand

SLOTS = 16  # of a piece: the fewer, the less padding
SHORT = MOST_TOPICS * WORDS_PER_TOPIC  # words at most of a document that needs no more topics
TOKENS_OF_WORD = 2  # in a document, to expect its number of topics
MARGIN = 1.5  # topics that there is room for, over those expected
FILLED = 1.06  # times the pieces of a batch, since blocks are not full and batches differ
SLOTS_OF_BLOCK = 2**11  # of a CPU, whose cache holds them with the topics that go on
SLOTS_ELSEWHERE = 2**16
NUMBERS_OF_BLOCK = 2**21  # slots times all topics, likewise
NUMBERS_ELSEWHERE = 2**27
NUMBERS_OF_CHUNK = 2**22  # slots times topics that go on
NUMBERS_FOR_CODE = 2 * 10**8  # of all passes, which cost about what compiling once more does


class Blocks(NamedTuple):
    """Arrays (blocks of a chunk, pieces of a block, slots of a piece) of some documents."""

    longest: int  # different words of a document at most
    num_pieces: int  # of a block
    num_blocks: int  # of a chunk at most, on each device
    topics: int  # of a document that go on


class DocumentPieces(NamedTuple):
    """Blocks of documents, each in the first that hold it: of short ones apart, if worth it."""

    kinds: tuple[Blocks, ...]

    @classmethod
    def of(cls, corpus: Corpus, demand: Demand) -> DocumentPieces:
        """Blocks that a cache holds, smaller and fewer where batches are small."""
        sizes = np.diff(corpus.offsets)
        whole = _blocks(sizes, int(sizes.max(initial=1)), demand)
        short = _blocks(sizes[sizes <= SHORT], SHORT, demand)
        is_long = sizes > SHORT
        apart = _numbers(sizes[~is_long], short, demand) + _numbers(sizes[is_long], whole, demand)
        saved = demand.num_passes * (_numbers(sizes, whole, demand) - apart)
        is_worth_it = is_long.any() and not is_long.all() and saved > NUMBERS_FOR_CODE
        return cls((short, whole) if is_worth_it else (whole,))

    @classmethod
    def to_read(cls, corpus: Corpus, num_topics: int) -> DocumentPieces:
        """The same for all corpora of short documents."""
        num_pieces = max(_slots_of_block(num_topics) // SLOTS, int(pieces_of(SHORT)))
        short = Blocks(SHORT, num_pieces, PARTS, MOST_TOPICS)
        return cls((short,)).with_room_for(corpus, num_topics)

    @classmethod
    def read(cls, values: Any) -> DocumentPieces:
        """One that was saved as lists."""
        return cls(tuple(Blocks(*kind) for kind in values[0]))

    def with_room_for(self, corpus: Corpus, num_topics: int) -> DocumentPieces:
        """With blocks of their own for documents that are longer."""
        sizes = np.diff(corpus.offsets)
        longer = sizes[sizes > self.kinds[-1].longest]
        if not len(longer):
            return self
        demand = Demand(len(longer), 1, PARTS, num_topics, num_topics)
        return DocumentPieces((*self.kinds, _blocks(longer, int(longer.max()), demand)))

    def for_concentration(self, concentration: NDArray[np.floating]) -> DocumentPieces:
        """Twice the topics of a document, and so on, until these are what the prior expects.

        Documents are taken to have two tokens of each word.
        """

        def grown(kind: Blocks) -> Blocks:
            expected = expected_topics(concentration, TOKENS_OF_WORD * kind.longest)
            times = 1
            while times * kind.topics < min(MARGIN * expected, len(concentration)):
                times *= 2
            num_blocks = max(1, kind.num_blocks // times)
            return kind._replace(topics=times * kind.topics, num_blocks=num_blocks)

        return DocumentPieces(tuple(map(grown, self.kinds)))

    def over(self, num_devices: int, batch_size: int) -> DocumentPieces:
        """With a device's part of a batch."""
        del batch_size

        def part(kind: Blocks) -> Blocks:
            return kind._replace(num_blocks=-(-PARTS * kind.num_blocks // num_devices))

        return DocumentPieces(tuple(map(part, self.kinds)))

    def chunks(
        self, corpus: Corpus, indices: NDArray[np.intp], num_devices: int = 1
    ) -> Iterator[Callable[[], Chunk]]:
        """Whole documents in each block, as many as there is room for."""
        sizes = np.diff(corpus.offsets)[indices]
        order = np.argsort(-sizes, kind="stable")
        which = np.searchsorted([kind.longest for kind in self.kinds], sizes[order])
        for i, kind in reversed(list(enumerate(self.kinds))):
            documents, size = indices[order[which == i]], num_devices * kind.num_blocks
            pieces = pieces_of(np.diff(corpus.offsets)[documents])
            blocks = np.split(documents, _first_of_blocks(pieces, kind.num_pieces)[1:])
            num_chunks = -(-len(blocks) // size) if len(documents) else 0
            for chunk in range(num_chunks):  # as even as can be, since cores wait for the last
                own = slice(*(len(blocks) * end // num_chunks for end in (chunk, chunk + 1)))
                yield partial(_chunk, corpus, blocks[own], num_devices, kind)


def _blocks(sizes: NDArray[np.integer], longest: int, demand: Demand) -> Blocks:
    """For some documents of a corpus, of which a batch has its share."""
    will_be = max(MOST_TOPICS, demand.last_topics or demand.first_topics)
    topics = min(most_topics(longest), will_be)
    share = min(1.0, demand.batch_size / max(1, len(sizes))) / demand.num_parts
    of_part = max(1, int(np.ceil(FILLED * share * pieces_of(sizes).sum())))
    in_cache = min(of_part, _slots_of_block(demand.first_topics) // SLOTS)
    num_pieces = max(in_cache, int(pieces_of(longest)))
    most_blocks = max(1, NUMBERS_OF_CHUNK // (num_pieces * SLOTS * topics))
    longest = max(longest, min(SHORT, SLOTS * num_pieces))
    return Blocks(longest, num_pieces, min(most_blocks, -(-of_part // num_pieces)), topics)


def _numbers(sizes: NDArray[np.integer], blocks: Blocks, demand: Demand) -> int:
    """Slots of so many documents, with a block of each batch at least, times their topics."""
    num_batches = -(-len(sizes) // demand.batch_size)
    slots = SLOTS * max(int(pieces_of(sizes).sum()), num_batches * blocks.num_pieces)
    return slots * (blocks.topics + demand.first_topics)


def _slots_of_block(num_topics: int) -> int:
    """What a cache holds of words seen through all topics, and through those that go on."""
    if jax.default_backend() == "cpu":
        return min(SLOTS_OF_BLOCK, NUMBERS_OF_BLOCK // num_topics)
    return min(SLOTS_ELSEWHERE, NUMBERS_ELSEWHERE // num_topics)


def _chunk(corpus: Corpus, blocks: list[NDArray[np.intp]], num_devices: int, kind: Blocks) -> Chunk:
    """Of these blocks, and of empty ones where devices would have none."""
    num_blocks = num_devices * -(-len(blocks) // num_devices)
    documents = np.concatenate(blocks)
    starts, sizes = corpus.offsets[:-1][documents], np.diff(corpus.offsets)[documents]
    ends = np.cumsum([len(block) for block in blocks])[:-1]
    pieces = np.split(pieces_of(sizes), ends)
    shape = num_blocks, kind.num_pieces, SLOTS
    words, counts = np.zeros((2, num_blocks * kind.num_pieces * SLOTS), np.int32)
    # Pieces that no document has belong to the last, which is then no document's.
    owners = np.full(shape[:2], kind.num_pieces - 1, np.int32)
    for row, own in zip(owners, pieces, strict=False):
        row[: own.sum()] = np.repeat(np.arange(len(own)), own)
    before = [np.cumsum(own) - own + b * kind.num_pieces for b, own in enumerate(pieces)]
    within = _ranges(sizes)
    slots = np.repeat(SLOTS * np.concatenate(before), sizes) + within
    sources = np.repeat(starts, sizes) + within
    words[slots], counts[slots] = corpus.words[sources], corpus.counts[sources]
    places = [b * kind.num_pieces + np.arange(len(own)) for b, own in enumerate(pieces)]
    arrays = words.reshape(shape), counts.reshape(shape), owners
    return Chunk(documents, np.concatenate(places), *arrays, kind.topics)


def pieces_of(sizes: int | np.integer | NDArray[np.integer]) -> NDArray[np.intp]:
    """Pieces that documents with so many words have, 1 at least."""
    return np.maximum(1, -(-np.asarray(sizes, np.intp) // SLOTS))


def _ranges(sizes: NDArray[np.integer]) -> NDArray[np.intp]:
    """Numbers from 0 of each, one after the other."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _first_of_blocks(pieces: NDArray[np.intp], size: int) -> list[int]:
    """The first document of each block; blocks are filled one after the other."""
    ends, firsts = np.cumsum(pieces), [0]
    while len(pieces) and ends[-1] - _before(ends, firsts[-1]) > size:
        full = _before(ends, firsts[-1]) + size
        firsts.append(int(np.searchsorted(ends, full, side="right")))
    return firsts


def _before(ends: NDArray[np.intp], document: int) -> int:
    return int(ends[document - 1]) if document else 0
