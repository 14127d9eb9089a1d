# SPDX-License-Identifier: Apache-2.0
"""Text as numbered words: one sentence per line, words between spaces, plain or ``.gz``."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

END, UNKNOWN = 0, 1  # ids of the two marks
MARKS = ("<eos>", "<unk>")
HELD_OUT_SHARE = 0.1


class Text(NamedTuple):
    """Training and held-out words in order, each sentence with its end."""

    words: list[str]  # (K,), the two marks, then the words from the most frequent to the rarest
    train: np.ndarray  # (N,), ids
    held_out: np.ndarray  # ids


def read_text(path: Path, held_out: Path | None = None, least_count: int = 1) -> Text:
    """Read the text; without another to hold out, its last tenth of sentences is held out.

    Words that the training text has fewer than ``least_count`` times are unknown, there and in the
    held-out text. What is written ``<unk>`` in a text is unknown too.

    Raises:
        ValueError: If a text has no words, or holds the mark ``<eos>``.
    """
    num_train = None
    if held_out is None:
        num_train = round((1 - HELD_OUT_SHARE) * sum(1 for _ in sentences(path)))
    counts = Counter(word for line in sentences(path, 0, num_train) for word in line)
    if MARKS[END] in counts:
        raise ValueError(f"{path} must not hold {MARKS[END]}, which is set after each line.")
    kept = (word for word, n in counts.most_common() if n >= least_count and word not in MARKS)
    words = [*MARKS, *kept]
    ids = {word: i for i, word in enumerate(words)}
    train = numbered(sentences(path, 0, num_train), ids)
    others = sentences(path, num_train) if held_out is None else sentences(held_out)
    text = Text(words, train, numbered(others, ids))
    if not (len(text.train) and len(text.held_out)):
        raise ValueError(f"{path} must have words to train on, and others that are held out.")
    return text


def sentences(path: Path, start: int | None = 0, stop: int | None = None) -> Iterator[list[str]]:
    """The words of each line that has any, from one such line to another."""
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rt", encoding="utf-8") as file:
        full = (words for line in file if (words := line.split()))
        for number, words in enumerate(full):
            if stop is not None and number >= stop:
                return
            if number >= (start or 0):
                yield words


def numbered(lines: Iterable[Sequence[str]], ids: dict[str, int]) -> np.ndarray:
    """Ids of the words of all lines, each line with its end."""
    flat = (ids.get(word, UNKNOWN) for line in lines for word in (*line, MARKS[END]))
    return np.fromiter(flat, np.int32)
