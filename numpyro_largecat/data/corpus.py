# SPDX-License-Identifier: Apache-2.0
"""A corpus: the words of many documents and how often each occurs, in memory or on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import sparray, spmatrix

from numpyro_largecat._checks import check_interval, check_kind, check_shape, describe
from numpyro_largecat.data.corpus_folder import read_corpus, write_corpus

_ARRAYS = ("words", "counts", "offsets")
MOST = 2**31 - 1  # count of a word in a document


@dataclass(frozen=True, repr=False)
class Corpus:
    r"""Documents as words and counts, one after the other.

    Document d has the words ``words[offsets[d]:offsets[d + 1]]`` with the same part of ``counts``.
    The arrays may be memory maps, so that a corpus need not fit in memory: see ``save`` and
    ``open``. A document may be empty. It is checked when it is made: O(entries).

    Args:
        words: Word of each entry, integers in [0, ``num_words``), shape (entries,).
        counts: Tokens of each entry, integers of at least 1, shape (entries,).
        offsets: Where documents start and end, ascending from 0, shape (N + 1,).
        num_words: Size V of the vocabulary.
        vocabulary: The V words themselves, all different; None where they are not known.

    Raises:
        ValueError: If a word is out of range, a count is below 1 or not whole, offsets do not fit,
            or the vocabulary does not have V different words. The message says which document.

    Example:
        >>> corpus = Corpus.from_documents([["a", "b", "a"], [], ["c"]])
        >>> corpus.vocabulary, corpus.num_documents, corpus.num_tokens
        (('a', 'b', 'c'), 3, 4)
        >>> corpus.padded([0, 1])[1].tolist()
        [[2, 1], [0, 0]]
    """

    words: NDArray[np.integer]
    counts: NDArray[np.integer]
    offsets: NDArray[np.integer]
    num_words: int
    vocabulary: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        ends = np.asarray(self.offsets)
        for name in ("words", "counts"):
            need = "one for each word of a document, as the last of `offsets` says"
            check_shape(f"`{name}`", getattr(self, name), (int(ends[-1]),), need)
        if ends[0] != 0 or (np.diff(ends) < 0).any():
            raise ValueError(f"`offsets` must ascend from 0; got {describe(ends)} from {ends[0]}.")
        if self.vocabulary is not None:
            plain = tuple(str(w) if isinstance(w, np.str_) else w for w in self.vocabulary)
            object.__setattr__(self, "vocabulary", plain)  # NumPy's show their type
            size = len(set(self.vocabulary))
            if not len(self.vocabulary) == size == self.num_words:
                got = f"{len(self.vocabulary)}, of which {size} differ"
                raise ValueError(
                    f"`vocabulary` must have {self.num_words} different words; got {got}."
                )
        self._refuse(
            (self.words < 0) | (self.words >= self.num_words) | _has_fraction(self.words),
            f"words must be integers in [0, {self.num_words})",
        )
        bad = ~((self.counts >= 1) & (self.counts <= MOST)) | _has_fraction(self.counts)
        self._refuse(bad, f"counts, unlike weights, must be whole numbers in [1, {MOST}]")

    def __repr__(self) -> str:
        """How large it is."""
        return (
            f"Corpus({self.num_documents} documents, {self.num_tokens} tokens, "
            f"{self.num_words} words)"
        )

    def _refuse(self, bad: NDArray[np.bool_], need: str) -> None:
        if bad.any():
            entry = int(np.argmax(bad))
            document = int(np.searchsorted(self.offsets, entry, side="right")) - 1
            raise ValueError(
                f"{need}; got word {self.words[entry]} with count {self.counts[entry]} in document "
                f"{document}, and {int(bad.sum())} entries like it."
            )

    @classmethod
    def from_csr(cls, matrix: Any, vocabulary: Sequence[str] | None = None) -> Corpus:
        """From a scipy sparse matrix of counts (N, V), as ``CountVectorizer`` makes.

        Args:
            matrix: Sparse, with whole numbers of at least 0; zeros are dropped.
            vocabulary: What ``CountVectorizer.get_feature_names_out`` gives.
        """
        form = "a scipy sparse matrix, such as `scipy.sparse.csr_array(array)`"
        check_kind("matrix", matrix, (sparray, spmatrix), form)
        names = None if vocabulary is None else in_order(vocabulary)
        wide = np.int64 if matrix.dtype.kind in "iub" else np.float64
        matrix = matrix.astype(wide).tocsr().copy()  # so that no sum of duplicates wraps
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        return cls(
            matrix.indices.astype(np.int32),
            _as_integers(matrix.data),
            matrix.indptr.astype(np.int64),
            matrix.shape[1],
            None if names is None else tuple(map(str, names)),
        )

    @classmethod
    def from_documents(
        cls, documents: Sequence[Sequence[str]], vocabulary: Sequence[str] | None = None
    ) -> Corpus:
        """From lists of tokens; words that are not in a given vocabulary are dropped.

        Raises:
            TypeError: If a document is a string, which would be a list of its characters, or the
                vocabulary has no order.
        """
        if isinstance(documents, (str, bytes)):
            raise TypeError("`documents` must be a list of lists of words; got one string.")
        documents = [_tokens(document, d) for d, document in enumerate(documents)]
        if vocabulary is None:
            vocabulary = sorted({token for document in documents for token in document})
        names = in_order(vocabulary)
        position = {word: i for i, word in enumerate(names)}
        rows = [
            np.unique([position[t] for t in document if t in position], return_counts=True)
            for document in documents
        ]
        return cls.from_rows(rows, len(names), names)

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[tuple[ArrayLike, ArrayLike]],
        num_words: int,
        vocabulary: tuple[str, ...] | None = None,
    ) -> Corpus:
        """From the words and counts of each document, a tuple of two lists or arrays.

        Raises:
            TypeError: If a document is something else, such as gensim's list of (word, count).
            ValueError: If a document does not have a count for each word.
        """
        for d, row in enumerate(rows):
            _check_row(row, d)
        words, counts = ([np.asarray(row[i]) for row in rows] for i in (0, 1))
        offsets = np.concatenate([[0], np.cumsum([len(own) for own in words], dtype=np.int64)])
        return cls(_joined(words), _joined(counts), offsets.astype(np.int64), num_words, vocabulary)

    @property
    def num_documents(self) -> int:
        """N."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Sum of all counts."""
        return int(np.sum(self.counts, dtype=np.int64))

    def document(self, index: int) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """Words and counts of one document; -1 is the last."""
        size = self.num_documents
        if not -size <= index < size:
            raise IndexError(f"`index` must be in the corpus, which has {size}; got {index}.")
        index %= self.num_documents
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.words[part], self.counts[part]

    def _numbers(self, indices: ArrayLike) -> list[int]:
        """Numbers of documents, which booleans may choose."""
        array = np.asarray(indices)
        if array.dtype == bool and array.shape == (self.num_documents,):
            return np.flatnonzero(array).tolist()
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            need = f"integers, or one boolean for each of {self.num_documents} documents"
            raise TypeError(f"`indices` must be {need}; got {describe(array)}.")
        return array.tolist()

    def select(self, indices: ArrayLike) -> Corpus:
        """The corpus of some documents, in that order, with the same vocabulary.

        Args:
            indices: Numbers of documents, or a boolean for each document.
        """
        rows = [self.document(i) for i in self._numbers(indices)]
        return Corpus.from_rows(rows, self.num_words, self.vocabulary)

    def padded(
        self, indices: ArrayLike | None = None, width: int | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Words and counts of documents, each (n, width); empty slots have word 0 and count 0."""
        indices = np.arange(self.num_documents) if indices is None else indices
        rows = [self.document(i) for i in self._numbers(indices)]
        width = max([1, *(len(words) for words, _ in rows)]) if width is None else width
        words, counts = np.zeros((2, len(rows), width), np.int32)
        for i, (own, own_counts) in enumerate(rows):
            words[i, : len(own)], counts[i, : len(own)] = own, own_counts
        return words, counts

    def values(self, indices: ArrayLike | None = None) -> NDArray[np.int32]:
        """Documents as values of ``TopicDocument``, shape (n, U, 2)."""
        return np.stack(self.padded(indices), axis=-1)

    def split_words(self, seed: int = 0, fraction: float = 0.2) -> tuple[Corpus, Corpus]:
        """Divide the distinct words of each document at random in two parts.

        Returns:
            The larger part of each document, and the rest, about ``fraction`` of the words, for
            scores by document completion.

        Raises:
            ValueError: If ``fraction`` is not in [0, 1].
        """
        check_interval("fraction", fraction, "[0, 1]")
        rng = np.random.default_rng(seed)
        parts: tuple[list[Any], list[Any]] = ([], [])
        for d in range(self.num_documents):
            words, counts = self.document(d)
            order = rng.permutation(len(words))
            cut = len(words) - round(fraction * len(words))
            for part, chosen in zip(parts, (order[:cut], order[cut:]), strict=True):
                chosen = np.sort(chosen)
                part.append((words[chosen], counts[chosen]))
        seen, unseen = (Corpus.from_rows(p, self.num_words, self.vocabulary) for p in parts)
        return seen, unseen

    def save(self, directory: str | PathLike[str]) -> None:
        """Write the corpus to a folder, which ``open`` reads without loading it.

        A corpus that is there is replaced as a whole: whatever ends the process meanwhile, the
        folder holds either the old one or the new one. Corpora that are open on the old files stay
        as they are. Until it is replaced, there must be room for both. One process at a time may
        write to a folder.

        Raises:
            OSError: If it cannot be written, such as on a full disk. The old corpus is there still.

        Example:
            >>> import tempfile
            >>> folder = tempfile.mkdtemp()
            >>> Corpus.from_documents([["a", "b", "a"], ["c"]]).save(folder)
            >>> Corpus.open(folder)
            Corpus(2 documents, 4 tokens, 3 words)
        """
        arrays = {name: np.asarray(getattr(self, name)) for name in _ARRAYS}
        values = {"num_words": int(self.num_words), "vocabulary": self.vocabulary}
        write_corpus(Path(directory), arrays, values)

    @classmethod
    def open(cls, directory: str | PathLike[str]) -> Corpus:
        """Open a corpus that ``save`` wrote; its entries stay on disk until they are used.

        Cost: reads the entries once.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If a file is cut short or changed, or not of the same corpus as the others.
        """
        arrays, values = read_corpus(Path(directory))
        names = values["vocabulary"]
        return cls(
            **arrays,
            num_words=values["num_words"],
            vocabulary=None if names is None else tuple(names),
        )


def _check_row(row: Any, place: int) -> None:
    """Raise unless it is (words, counts); pairs of a word and its count are tuples too."""
    if not isinstance(row, tuple) or len(row) != 2 or any(isinstance(x, tuple) for x in row):
        raise TypeError(
            "`rows` must have a tuple (words, counts) of two arrays for each document; document "
            f"{place} is {describe(row)}. From gensim's (id, count) pairs: "
            "`Corpus.from_csr(gensim.matutils.corpus2csc(documents, num_terms=V).T, vocabulary)`."
        )
    words, counts = row
    check_shape(f"words of document {place} in `rows`", words, ("U",), "the distinct ones")
    check_shape(f"counts of document {place} in `rows`", counts, np.shape(words), "one a word")


def _tokens(document: Any, place: int) -> list[str]:
    if isinstance(document, (str, bytes)):
        raise TypeError(
            f"documents must be lists of words; got a string as document {place}: "
            f"{document[:40]!r}. Split them, `[d.split() for d in documents]`, or count words with "
            "scikit-learn's CountVectorizer for `Corpus.from_csr(counts, names)`."
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


def _has_fraction(values: NDArray[Any]) -> NDArray[np.bool_]:
    return values != np.floor(values)


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return _as_integers(np.concatenate([np.zeros(0, np.int32), *parts]))


def _as_integers(values: NDArray[Any]) -> NDArray[Any]:
    """Make int32 of whole numbers; others are left for ``Corpus`` to say where they are."""
    is_good = (np.abs(values) <= MOST) & ~_has_fraction(values)
    return values.astype(np.int32) if is_good.all() else values
