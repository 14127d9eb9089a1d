# SPDX-License-Identifier: Apache-2.0
"""Readers of the two usual file formats of corpora."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from os import PathLike

import numpy as np

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.data.corpus_entries import LARGEST_COUNT, in_order
from numpyro_largecat.data.files import (
    malformed,
    numbered_lines,
    open_binary,
    without_underscores,
)

MOST_WITHOUT_LINES = 2**20  # documents; each costs memory, and a header is a few bytes


def read_vocabulary(path: str | PathLike[str]) -> tuple[str, ...]:
    r"""Read one word a line, UTF-8, plain or compressed with gzip.

    Words are all different. The file may end with blank lines.

    Raises:
        ValueError: If a line is not UTF-8 or blank, or a word is there twice. The message has file
            and line number.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "vocab.txt"
        >>> _ = path.write_text("cat\ndog\n")
        >>> read_vocabulary(path)
        ('cat', 'dog')
    """
    words = []
    with open_binary(path) as file:
        for line_number, line in enumerate(file, start=1):
            try:
                form = "utf-8-sig" if line_number == 1 else "utf-8"  # a mark may come first
                words.append(line.decode(form).rstrip("\r\n"))
            except UnicodeDecodeError as error:
                raise malformed(path, line_number, "UTF-8 text", line) from error
    while words and not words[-1]:
        words.pop()
    first: dict[str, int] = {}
    for line_number, word in enumerate(words, start=1):
        if not word:
            raise malformed(path, line_number, "one word", word)
        if first.setdefault(word, line_number) != line_number:
            need = f"another word than that of line {first[word]}"
            raise malformed(path, line_number, need, word)
    return tuple(words)


def read_lda_c(
    path: str | PathLike[str], vocabulary: Sequence[str] | str | PathLike[str]
) -> Corpus:
    r"""Read a corpus in the format of LDA-C: ``M word:count word:count ...``, one document a line.

    Words count from 0; M is the number of distinct words. Cost: O(entries).

    Args:
        path: The file, plain or compressed with gzip.
        vocabulary: The words, or the file that has one a line.

    Raises:
        ValueError: If a line does not follow the format. The message has file and line number.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "corpus.dat"
        >>> _ = path.write_text("2 0:3 2:1\n0\n")
        >>> read_lda_c(path, ("a", "b", "c"))[0]
        (array([0, 2], dtype=int32), array([3, 1], dtype=int32))
    """
    names = _names(vocabulary)
    words, counts, offsets = array("i"), array("i"), array("q", [0])
    need = "`M word:count word:count ...`, whole numbers"
    with open_binary(path) as file:
        for line_number, line in numbered_lines(file):
            try:
                first, *entries = without_underscores(line).split()
                size = int(first)
                pairs = [(int(w), int(c)) for w, c in (e.split(b":") for e in entries)]
            except ValueError as error:
                raise malformed(path, line_number, need, line) from error
            seen: set[int] = set()
            for word, count in pairs:
                _check_entry((path, line_number), word, count, range(len(names)), seen)
            if size != len(pairs):
                need_size = f"the number of words first, {len(pairs)}; got {size}"
                raise malformed(path, line_number, need_size)
            words.extend(word for word, _ in pairs)
            counts.extend(count for _, count in pairs)
            offsets.append(len(words))
    return Corpus(
        np.asarray(words),
        np.asarray(counts),
        np.asarray(offsets),
        num_words=len(names),
        vocabulary=names,
    )


def read_uci_bag_of_words(
    path: str | PathLike[str], vocabulary: Sequence[str] | str | PathLike[str] | None = None
) -> Corpus:
    r"""Read a corpus in the format of the UCI bags of words.

    Three lines have the numbers of documents, words and entries; each further line is
    ``document word count``. Documents and words count from 1, and documents ascend; one that
    has no line is empty. A word has one line at most in each document. There are at most a million
    documents more than entries. Cost: O(entries).

    Args:
        path: The file, plain or compressed with gzip.
        vocabulary: The words, or the file that has one a line. None where there is none.

    Raises:
        ValueError: If a line does not follow the format. The message has file and line number.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "docword.txt"
        >>> _ = path.write_text("2\n3\n2\n1 1 3\n1 3 1\n")
        >>> corpus = read_uci_bag_of_words(path, ("a", "b", "c"))
        >>> corpus.num_documents, corpus[0][0].tolist()
        (2, [0, 2])
    """
    names = None if vocabulary is None else _names(vocabulary)
    documents, words, counts = array("i"), array("i"), array("i")
    with open_binary(path) as file:
        num_documents, num_words, num_entries = (
            _uci_size(path, i, file.readline()) for i in (1, 2, 3)
        )
        if names is not None and num_words != len(names):
            need = f"as many words as in the vocabulary, {len(names)}; got {num_words}"
            raise malformed(path, 2, need)
        last, seen, line_number = 1, set[int](), 3
        for line_number, line in numbered_lines(file, start=4):
            try:
                document, word, count = (
                    int(number) for number in without_underscores(line).split()
                )
            except ValueError as error:
                need = "`document word count`, whole numbers"
                raise malformed(path, line_number, need, line) from error
            if not last <= document <= num_documents:
                need = f"documents that ascend, in [1, {num_documents}]"
                raise malformed(path, line_number, need, line)
            if document > last:
                last, seen = document, set()
            _check_entry((path, line_number), word, count, range(1, num_words + 1), seen)
            documents.append(document - 1)
            words.append(word - 1)
            counts.append(count)
    if len(words) != num_entries:
        need = f"{num_entries} entries, as the header says, but it has {len(words)}"
        raise malformed(path, line_number, need)
    if num_documents - num_entries > MOST_WITHOUT_LINES:
        need = f"at most {MOST_WITHOUT_LINES} documents more than entries, {num_entries}"
        raise malformed(path, 1, f"{need}; got {num_documents}")
    sizes = np.bincount(documents, minlength=num_documents)
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    return Corpus(np.asarray(words), np.asarray(counts), offsets, num_words, names)


def _uci_size(path: str | PathLike[str], line_number: int, line: bytes) -> int:
    try:
        (size,) = (int(number) for number in without_underscores(line).split())
    except ValueError:
        size = -1
    if not 0 <= size <= LARGEST_COUNT:
        need = f"one whole number, of the header, in [0, {LARGEST_COUNT}]"
        raise malformed(path, line_number, need, line)
    return size


def _names(vocabulary: Sequence[str] | str | PathLike[str]) -> tuple[str, ...]:
    if isinstance(vocabulary, (str, PathLike)):
        return read_vocabulary(vocabulary)
    return in_order(vocabulary)


def _check_entry(
    line: tuple[str | PathLike[str], int], word: int, count: int, known: range, seen: set[int]
) -> None:
    """Refuse an entry whose word is unknown or in ``seen``, to which it is added."""
    if word not in known:
        need = f"words in [{known.start}, {known.stop - 1}], of the vocabulary; got {word}"
        raise malformed(*line, need)
    if word in seen:
        raise malformed(*line, f"each word of a document once; got word {word} a second time")
    seen.add(word)
    if not 1 <= count <= LARGEST_COUNT:
        raise malformed(*line, f"counts in [1, {LARGEST_COUNT}]; got {count}")
