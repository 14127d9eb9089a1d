# SPDX-License-Identifier: Apache-2.0
"""Checks of what a corpus is made from, and its entries as integers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat._checks import check_shape, describe

LARGEST_COUNT = 2**31 - 1  # count of a word in a document
REAL = "biuf"  # kinds of types of NumPy


def check_row(row: Any, place: int) -> None:
    """Raise unless it is (words, counts); pairs of a word and its count are tuples too."""
    if not isinstance(row, tuple) or len(row) != 2 or any(isinstance(x, tuple) for x in row):
        raise TypeError(
            "`rows` must have a tuple (words, counts) of two arrays for each document; document "
            f"{place} is {describe(row)}. Lists of (id, count), as gensim has them, are for "
            "`Corpus.from_gensim(documents, dictionary)`."
        )
    words, counts = row
    check_shape(f"words of document {place} in `rows`", words, ("U",), "one an entry")
    check_shape(f"counts of document {place} in `rows`", counts, np.shape(words), "one a word")


def checked_tokens(document: Any, place: int) -> list[str]:
    """The words of a document, or TypeError if they are none."""
    if isinstance(document, (str, bytes)):
        raise TypeError(
            f"documents must be lists of words; got a string as document {place}: "
            f"{document[:40]!r}. Split them, `[d.split() for d in documents]`, or count words with "
            "scikit-learn's CountVectorizer for `Corpus.from_csr(counts, names)`."
        )
    if isinstance(document, Mapping):
        raise TypeError(
            "documents must be lists of words, one for each token; got a "
            f"{type(document).__name__} as document {place}. `list(Counter(...).elements())` has "
            "each as often as it was counted; counts of words are for `Corpus.from_rows`."
        )
    if not isinstance(document, Iterable):
        raise TypeError(
            f"documents must be lists of words; document {place} is {describe(document)}. If its "
            'text is missing, give it no words: `df["text"].fillna("").str.split()`.'
        )
    tokens = list(document)
    wrong = [token for token in tokens if not isinstance(token, str)]
    if wrong:
        raise TypeError(
            f"documents must be lists of words; got {describe(wrong[0])} in document {place}. "
            "Numbers of words are for `Corpus.from_rows`."
        )
    return tokens


def in_order(vocabulary: Any) -> tuple[Any, ...]:
    """The words as a tuple, or TypeError if they have no order."""
    if isinstance(vocabulary, (Mapping, Set, str)):
        raise TypeError(
            "`vocabulary` must be a list of words in the order of their numbers, such as "
            f"`get_feature_names_out()`; got a {type(vocabulary).__name__}."
        )
    return tuple(vocabulary)


def checked_vocabulary(vocabulary: Sequence[Any], num_words: int) -> tuple[str, ...]:
    """The words as plain strings, or an error if they are not V different ones."""
    words = tuple(str(w) if isinstance(w, np.str_) else w for w in vocabulary)  # shows its type
    for place, word in enumerate(words):
        if not isinstance(word, str):
            form = "strings, as `CountVectorizer.get_feature_names_out` gives"
            got = f"{describe(word)}, at position {place}"
            raise TypeError(f"`vocabulary` must be {form}; got {got}.")
    size = len(set(words))
    if not len(words) == size == num_words:
        got = f"{len(words)}, {size} of them different"
        raise ValueError(f"`vocabulary` must have {num_words} different words; got {got}.")
    return words


def has_fraction(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each is no whole number."""
    return values != np.floor(values)


def entries_again(words: NDArray[np.integer], offsets: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Whether the document of each entry has its word in an earlier one too.

    Cost: O(entries), and a sort where the words of some document do not ascend.
    """
    keys = _keys(words, offsets)
    again = np.zeros(len(keys), bool)
    if (np.diff(keys) <= 0).any():
        order = np.argsort(keys, kind="stable")
        again[order[1:]] = np.diff(keys[order]) == 0
    return again


def ascending(
    words: NDArray[np.integer], counts: NDArray[np.integer], offsets: NDArray[np.integer]
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Entries with the words of each document in order: copies, where they are not."""
    keys = _keys(words, offsets)
    if (np.diff(keys) >= 0).all():
        return words, counts
    order = np.argsort(keys, kind="stable")
    return words[order], counts[order]


def summed(
    words: NDArray[Any], counts: NDArray[Any], offsets: NDArray[np.integer]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.integer]]:
    """Entries in which each document has each of its words once, with the tokens of all.

    They are as given where no word repeats, and where ``Corpus`` is to say which is bad.
    """
    are_good = words.dtype == counts.dtype == np.int32 and (counts >= 1).all()
    if not are_good or not entries_again(words, offsets).any():
        return words, counts, offsets
    keys, first, place = np.unique(_keys(words, offsets), return_index=True, return_inverse=True)
    totals = np.zeros(len(keys), np.int64)
    np.add.at(totals, place, counts)
    return words[first], as_integers(totals), np.searchsorted(np.sort(first), offsets)


def _keys(words: NDArray[np.integer], offsets: NDArray[np.integer]) -> NDArray[np.int64]:
    """One number for each document and word, which ascends with the document."""
    documents = np.repeat(np.arange(len(offsets) - 1, dtype=np.int64), np.diff(offsets))
    return (documents << 32) + words.astype(np.int64)


def joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """All in one array, int32 where they fit."""
    return as_integers(np.concatenate([np.zeros(0, np.int32), *parts]))


def check_numbers(name: str, values: Any) -> None:
    """Raise TypeError unless an array, dense or sparse, is of real numbers."""
    if getattr(values, "dtype", np.dtype(object)).kind not in REAL:
        raise TypeError(f"`{name}` must be whole numbers; got {describe(values)}.")


def entry_array(name: str, values: Any) -> NDArray[Any]:
    """An array of numbers of NumPy's, integers where they are whole; memory maps stay on disk."""
    is_array = isinstance(values, np.ndarray)
    values = values if is_array else np.asarray(values)
    check_numbers(name, values)
    return values if is_array and values.dtype.kind in "iu" else as_integers(values)


def checked_offsets(values: Any) -> NDArray[np.int64]:
    """Offsets of documents as int64.

    Raises:
        ValueError: If they are no whole numbers on one axis that ascend from 0.
    """
    ends = entry_array("offsets", values)
    check_shape("`offsets`", ends, ("N + 1",), "where documents start and end", least=1)
    if (has_fraction(ends) | ~np.isfinite(ends)).any():
        raise ValueError(f"`offsets` must be whole numbers; got {describe(ends)}.")
    ends = ends.astype(np.int64, copy=False)
    if ends[0] != 0 or (np.diff(ends) < 0).any():
        raise ValueError(f"`offsets` must ascend from 0; got {describe(ends)} from {ends[0]}.")
    return ends


def as_integers(values: NDArray[Any]) -> NDArray[Any]:
    """Make int32 of whole numbers; others are left for ``Corpus`` to say where they are."""
    if values.dtype.kind not in REAL:
        return values
    is_good = (np.abs(values) <= LARGEST_COUNT) & ~has_fraction(values)
    return values.astype(np.int32) if is_good.all() else values
