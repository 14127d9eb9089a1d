# SPDX-License-Identifier: Apache-2.0
"""Readers of the two usual file formats of corpora."""

from __future__ import annotations

from array import array
from os import PathLike

import numpy as np

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.data.files import malformed, open_binary


def read_vocabulary(path: str | PathLike[str]) -> tuple[str, ...]:
    r"""Read one word a line, UTF-8, plain or compressed with gzip.

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
                words.append(line.decode().rstrip("\r\n"))
            except UnicodeDecodeError as error:
                raise malformed(path, line_number, "UTF-8 text", line) from error
    return tuple(words)


def read_lda_c(
    path: str | PathLike[str], vocabulary: tuple[str, ...] | str | PathLike[str]
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
        >>> read_lda_c(path, ("a", "b", "c")).document(0)
        (array([0, 2], dtype=int32), array([3, 1], dtype=int32))
    """
    names = vocabulary if isinstance(vocabulary, tuple) else read_vocabulary(vocabulary)
    words, counts, offsets = array("i"), array("i"), array("q", [0])
    need = "`M word:count word:count ...`, with M different words that count from 0"
    with open_binary(path) as file:
        for line_number, line in enumerate(file, start=1):
            try:
                size, *entries = line.split()
                pairs = [(int(w), int(c)) for w, c in (e.split(b":") for e in entries)]
            except ValueError as error:
                raise malformed(path, line_number, need, line) from error
            if int(size) != len({word for word, _ in pairs}) or len(entries) != int(size):
                raise malformed(path, line_number, need, line)
            _check(path, line_number, pairs, len(names))
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
    path: str | PathLike[str], vocabulary: tuple[str, ...] | str | PathLike[str]
) -> Corpus:
    r"""Read a corpus in the format of the UCI bags of words.

    Three lines have the numbers of documents, words and entries; each further line is
    ``document word count``. Documents and words count from 1, and documents ascend; one that
    has no line is empty. Cost: O(entries).

    Args:
        path: The file, plain or compressed with gzip.
        vocabulary: The words, or the file that has one a line.

    Raises:
        ValueError: If a line does not follow the format. The message has file and line number.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "docword.txt"
        >>> _ = path.write_text("2\n3\n2\n1 1 3\n1 3 1\n")
        >>> corpus = read_uci_bag_of_words(path, ("a", "b", "c"))
        >>> corpus.num_documents, corpus.document(0)[0].tolist()
        (2, [0, 2])
    """
    names = vocabulary if isinstance(vocabulary, tuple) else read_vocabulary(vocabulary)
    words, counts = array("i"), array("i")
    header: list[int] = []
    line_number = 0
    with open_binary(path) as file:
        for line_number, line in enumerate(file, start=1):
            try:
                numbers = [int(word) for word in line.split()]
            except ValueError as error:
                raise malformed(path, line_number, "whole numbers", line) from error
            if line_number <= 3:
                if len(numbers) != 1:
                    raise malformed(path, line_number, "one number, of the header", line)
                header += numbers
                sizes = np.zeros(header[0], np.int64)
                last = 0
                continue
            if len(numbers) != 3:
                raise malformed(path, line_number, "`document word count`", line)
            document, word, count = numbers
            if not max(last, 1) <= document <= header[0]:
                need = f"documents that ascend, in [1, {header[0]}]"
                raise malformed(path, line_number, need, line)
            last = document
            _check(path, line_number, [(word - 1, count)], len(names))
            words.append(word - 1)
            counts.append(count)
            sizes[document - 1] += 1
    if len(header) < 3 or header[1:] != [len(names), len(words)]:
        raise malformed(
            path,
            line_number,
            f"as many words as in the vocabulary, {len(names)}, and as many entries as the header "
            f"says; the header is {header}, and {len(words)} entries were read",
        )
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Corpus(np.asarray(words), np.asarray(counts), offsets, len(names), names)


def _check(
    path: str | PathLike[str], line_number: int, pairs: list[tuple[int, int]], num_words: int
) -> None:
    for word, count in pairs:
        if not 0 <= word < num_words:
            raise malformed(
                path, line_number, f"words of the {num_words} in the vocabulary; got number {word}"
            )
        if count < 1:
            raise malformed(path, line_number, f"counts of at least 1; got {count}")
