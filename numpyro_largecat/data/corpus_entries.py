# SPDX-License-Identifier: Apache-2.0
"""Checks of what a corpus is made from, and its entries as integers."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat._checks import check_shape, describe

LARGEST_COUNT = 2**31 - 1  # count of a word in a document


def check_row(row: Any, place: int) -> None:
    """Raise unless it is (words, counts); pairs of a word and its count are tuples too."""
    if not isinstance(row, tuple) or len(row) != 2 or any(isinstance(x, tuple) for x in row):
        raise TypeError(
            "`rows` must have a tuple (words, counts) of two arrays for each document; document "
            f"{place} is {describe(row)}. Lists of (id, count), as gensim has them, are for "
            "`Corpus.from_gensim(documents, dictionary)`."
        )
    words, counts = row
    check_shape(f"words of document {place} in `rows`", words, ("U",), "the distinct ones")
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


def has_fraction(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each is no whole number."""
    return values != np.floor(values)


def joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """All in one array, int32 where they fit."""
    return as_integers(np.concatenate([np.zeros(0, np.int32), *parts]))


def as_integers(values: NDArray[Any]) -> NDArray[Any]:
    """Make int32 of whole numbers; others are left for ``Corpus`` to say where they are."""
    is_good = (np.abs(values) <= LARGEST_COUNT) & ~has_fraction(values)
    return values.astype(np.int32) if is_good.all() else values
