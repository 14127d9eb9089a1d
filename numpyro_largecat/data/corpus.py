# SPDX-License-Identifier: Apache-2.0
"""A corpus: the words of many documents and how often each occurs, in memory or on disk."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array, sparray, spmatrix

from numpyro_largecat._checks import (
    check_count,
    check_interval,
    check_kind,
    check_shape,
    describe,
)
from numpyro_largecat.data.corpus_entries import (
    LARGEST_COUNT,
    as_integers,
    ascending,
    check_numbers,
    check_row,
    checked_offsets,
    checked_tokens,
    checked_vocabulary,
    entries_again,
    entry_array,
    has_fraction,
    in_order,
    joined,
    summed,
)
from numpyro_largecat.data.corpus_folder import read_corpus, write_corpus

_ARRAYS = ("words", "counts", "offsets")
Document = tuple[NDArray[np.integer], NDArray[np.integer]]  # words and counts


@dataclass(frozen=True, repr=False, eq=False)
class Corpus:
    r"""Documents as words and counts, one after the other.

    Document d has the words ``words[offsets[d]:offsets[d + 1]]`` with the same part of ``counts``.
    The arrays may be memory maps, so that a corpus need not fit in memory: see ``save`` and
    ``open``. A document may be empty, and has each of its words in one entry; its words ascend,
    whatever order they are given in, so that what is drawn from it depends on what it holds alone.
    It is checked when it is made: O(entries), and a sort of them where words do not ascend.

    ``corpus[d]`` has the words and counts of one document, -1 being the last, and a loop gives
    those of each in turn. ``corpus[:100]``, ``corpus[numbers]`` and ``corpus[booleans]`` have some
    documents, in that order, with the same vocabulary; a slice copies nothing.

    Args:
        words: Word of each entry, integers in [0, ``num_words``), shape (entries,).
        counts: Tokens of each entry, integers of at least 1, shape (entries,).
        offsets: Where documents start and end, ascending from 0, shape (N + 1,).
        num_words: Size V of the vocabulary.
        vocabulary: The V words themselves, all different; None where they are not known.

    Raises:
        ValueError: If a word is out of range or twice in a document, a count is below 1 or not
            whole, offsets do not fit, or the vocabulary does not have V different words. The
            message says which document.

    Example:
        >>> corpus = Corpus.from_documents([["a", "b", "a"], [], ["c"]])
        >>> corpus.vocabulary, corpus.num_documents, corpus.num_tokens
        (('a', 'b', 'c'), 3, 4)
        >>> corpus.padded([0, 1])[1].tolist()
        [[2, 1], [0, 0]]
        >>> [words.tolist() for words, counts in corpus], corpus[[2, 0]].num_tokens
        ([[0, 1], [], [2]], 4)
    """

    words: NDArray[np.integer]
    counts: NDArray[np.integer]
    offsets: NDArray[np.integer]
    num_words: int
    vocabulary: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_words", check_count("num_words", self.num_words, 0))
        object.__setattr__(self, "offsets", checked_offsets(self.offsets))
        for name in ("words", "counts"):
            object.__setattr__(self, name, entry_array(name, getattr(self, name)))
            need = "one for each word of a document, as the last of `offsets` says"
            check_shape(f"`{name}`", getattr(self, name), (int(self.offsets[-1]),), need)
        if self.vocabulary is not None:
            words = checked_vocabulary(self.vocabulary, self.num_words)
            object.__setattr__(self, "vocabulary", words)
        self._refuse(
            (self.words < 0) | (self.words >= self.num_words) | has_fraction(self.words),
            f"words must be integers in [0, {self.num_words})",
        )
        bad = ~((self.counts >= 1) & (self.counts <= LARGEST_COUNT)) | has_fraction(self.counts)
        self._refuse(bad, f"counts, unlike weights, must be whole numbers in [1, {LARGEST_COUNT}]")
        self._refuse(
            entries_again(self.words, self.offsets),
            "a document must have each word in one entry; `Corpus.from_rows` adds several up",
        )
        in_order_of_words = ascending(self.words, self.counts, self.offsets)
        for name, entries in zip(("words", "counts"), in_order_of_words, strict=True):
            object.__setattr__(self, name, entries)

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
        fix = "Of one document it is `matrix.reshape(1, -1)`."
        check_shape("counts", matrix, ("N", "V"), "documents and words", fix)
        check_numbers("counts", matrix)
        names = None if vocabulary is None else in_order(vocabulary)
        wide = np.int64 if matrix.dtype.kind in "iub" else np.float64
        matrix = matrix.astype(wide)  # so that no sum of duplicates wraps
        if matrix.format == "coo":
            matrix.has_canonical_format = True  # so that none are summed yet
        matrix = matrix.tocsr().copy()
        matrix.eliminate_zeros()
        if ((matrix.data >= 0) & ~has_fraction(matrix.data)).all():  # else they may hide others
            matrix.sum_duplicates()
        return cls(
            matrix.indices.astype(np.int32),
            as_integers(matrix.data),
            matrix.indptr.astype(np.int64),
            matrix.shape[1],
            names,
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
        documents = [checked_tokens(document, d) for d, document in enumerate(documents)]
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
    def from_gensim(
        cls, documents: Iterable[Sequence[tuple[int, int]]], dictionary: Mapping[int, str]
    ) -> Corpus:
        """From gensim's documents, each a list of (id, count), and its dictionary.

        Args:
            documents: Also what gensim streams from a file. Counts of 0 are dropped.
            dictionary: A gensim ``Dictionary``, or another mapping of the ids 0, 1, ... to words.

        Raises:
            ValueError: If ids are missing in the dictionary; gensim's ``compactify`` closes gaps.

        Example:
            >>> Corpus.from_gensim([[(0, 2), (1, 1)], [(1, 1)]], {0: "sea", 1: "ship"}).num_tokens
            4
        """
        form = "a gensim `Dictionary`, or a dict of id to word"
        check_kind("dictionary", dictionary, Mapping, form)
        ids = set(dictionary)
        if ids != set(range(len(ids))):
            raise ValueError(
                f"`dictionary` must have the ids 0 to {len(ids) - 1}, one for each word; got "
                f"{sorted(ids)[:5]} .... Call its `compactify()` before documents are counted."
            )
        rows = [([w for w, n in pairs if n], [n for _, n in pairs if n]) for pairs in documents]
        words = tuple(dictionary[i] for i in range(len(ids)))
        try:
            return cls.from_rows(rows, len(words), words)
        except ValueError as error:
            error.add_note(
                "`filter_extremes`, `filter_tokens` and `compactify` give the words of a "
                "dictionary new ids: after them count documents again, by its `doc2bow`."
            )
            raise

    @classmethod
    def concatenate(cls, corpora: Iterable[Corpus], *others: object) -> Corpus:
        """The documents of several corpora, one after the other.

        The vocabulary has the words of the first, then those of the second that are new, and so on.
        Where no vocabulary is known, all must have as many words.

        Raises:
            ValueError: If there are none, or words are known for some only, or are not as many.
            TypeError: If they are not in one list.
        """
        if others or isinstance(corpora, Corpus):
            raise TypeError("`corpora` must be one list: `Corpus.concatenate([first, second])`.")
        corpora = list(corpora)
        if not corpora:
            raise ValueError("`corpora` must have a corpus at least; it is empty.")
        sizes, known = {c.num_words for c in corpora}, {c.vocabulary is not None for c in corpora}
        if known == {False, True} or (known == {False} and len(sizes) > 1):
            got = [f"{c.num_words} {'words' if c.vocabulary else 'without'}" for c in corpora]
            raise ValueError(
                "`corpora` must all have a `vocabulary`, or all none and as many words; got "
                f"{', '.join(got)}."
            )
        names = None
        if known == {True}:
            names = tuple(dict.fromkeys(w for c in corpora for w in c.vocabulary or ()))
            corpora = [c.with_vocabulary(names) for c in corpora]
        sizes_of_all = np.concatenate([np.diff(c.offsets) for c in corpora])
        return cls(
            joined([np.asarray(c.words) for c in corpora]),
            joined([np.asarray(c.counts) for c in corpora]),
            np.concatenate([[0], np.cumsum(sizes_of_all, dtype=np.int64)]),
            corpora[0].num_words,
            names,
        )

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[tuple[ArrayLike, ArrayLike]],
        num_words: int,
        vocabulary: tuple[str, ...] | None = None,
    ) -> Corpus:
        """From the words and counts of each document, a tuple of two lists or arrays.

        Counts of 0 are dropped, and those of a word that a document has in several entries are
        added up, so sequences of tokens are ``[(ids, np.ones(len(ids), int)) for ids in
        sequences]``.

        Raises:
            TypeError: If a document is something else, such as gensim's list of (word, count).
            ValueError: If a document does not have a count for each word.
        """
        for d, row in enumerate(rows):
            check_row(row, d)
        words, counts = (joined([np.asarray(row[i]) for row in rows]) for i in (0, 1))
        offsets = np.concatenate(
            [[0], np.cumsum([np.size(row[0]) for row in rows], dtype=np.int64)]
        )
        if (counts == 0).any():
            kept = counts != 0
            offsets = np.concatenate([[0], np.cumsum(kept)])[offsets]
            words, counts = words[kept], counts[kept]
        return cls(*summed(words, counts, offsets), num_words, vocabulary)

    @property
    def num_documents(self) -> int:
        """N."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Sum of all counts."""
        return int(np.sum(self.counts, dtype=np.int64))

    def __len__(self) -> int:
        """Number of documents."""
        return self.num_documents

    def __iter__(self) -> Iterator[Document]:
        """Words and counts of each document."""
        return (self[d] for d in range(len(self)))

    @overload
    def __getitem__(self, which: int) -> Document: ...
    @overload
    def __getitem__(self, which: slice | Sequence[Any] | NDArray[Any]) -> Corpus: ...

    def __getitem__(self, which: Any) -> Any:
        """One document, or a corpus of some."""
        if isinstance(which, slice):
            first, last, step = which.indices(len(self))
            if step == 1:
                return self._part(first, max(first, last))
            return self._some(np.arange(first, last, step))
        if np.ndim(which) > 0:
            return self._some(self._numbers(which))
        if not hasattr(which, "__index__") or isinstance(which, bool):
            self._numbers(which)  # says what is needed
        return self._document(operator.index(which))

    def _document(self, index: int) -> Document:
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"document {index} is not in the corpus, which has {size}.")
        index %= size
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.words[part], self.counts[part]

    def _part(self, first: int, last: int) -> Corpus:
        ends = self.offsets[first : last + 1]
        part = slice(ends[0], ends[-1])
        return self._of_these(self.words[part], self.counts[part], ends - ends[0])

    def _some(self, documents: NDArray[np.integer]) -> Corpus:
        size = len(self)
        if documents.size and not (-size <= documents.min() and documents.max() < size):
            wrong = documents.min() if documents.min() < -size else documents.max()
            raise IndexError(f"document {wrong} is not in the corpus, which has {size}.")
        documents = documents.astype(np.int64) % max(size, 1)
        sizes = np.diff(self.offsets)[documents]
        ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        entries = np.repeat(self.offsets[documents] - ends[:-1], sizes) + np.arange(ends[-1])
        return self._of_these(self.words[entries], self.counts[entries], ends)

    def _of_these(self, words: NDArray[Any], counts: NDArray[Any], offsets: NDArray[Any]) -> Corpus:
        """Entries of this corpus, which were checked when it was made."""
        return _without_checks(words, counts, offsets, self.num_words, self.vocabulary)

    def _numbers(self, indices: Any) -> NDArray[np.integer]:
        """Numbers of documents, which booleans may choose."""
        array = np.asarray(indices)
        if array.dtype == bool and array.shape == (len(self),):
            return np.flatnonzero(array)
        if array.ndim == 1 and array.size == 0:
            return np.zeros(0, np.intp)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            need = f"a number, a slice, integers, or one boolean for each of {len(self)} documents"
            raise TypeError(f"a corpus is indexed by {need}; got {describe(array)}.")
        return array

    def with_vocabulary(self, vocabulary: Sequence[str]) -> Corpus:
        """The same documents by the numbers of another vocabulary; words not in it are dropped.

        So documents of a corpus of its own get the numbers of a fit, ``fit.vocabulary``.

        Raises:
            ValueError: If the words of this corpus are not known.
        """
        names = in_order(vocabulary)
        if names == self.vocabulary:
            return self
        places = {word: i for i, word in enumerate(names)}
        own = self._known("with_vocabulary")
        numbers = np.array([places.get(word, -1) for word in own], np.int32)
        return self._renumbered(numbers, names)

    def prune(self, min_df: float = 1, max_df: float = 1.0) -> Corpus:
        """The corpus without the words of few and of many documents, as in scikit-learn.

        Args:
            min_df: Fewest documents of a word: a number of them, or as float in [0, 1] their share.
            max_df: Most documents of a word, in the same form.

        Raises:
            ValueError: If no word is left, or the words of this corpus are not known.

        Example:
            >>> corpus = Corpus.from_documents([["a", "b"], ["a", "c"], ["a", "c"]])
            >>> corpus.prune(min_df=2, max_df=0.9).vocabulary
            ('c',)
        """
        own = self._known("prune")
        least = self._number_of_documents("min_df", min_df)
        most = self._number_of_documents("max_df", max_df)
        frequencies = np.bincount(self.words, minlength=self.num_words)
        is_kept = (frequencies >= least) & (frequencies <= most)
        if not is_kept.any():
            raise ValueError(
                f"`min_df={min_df}` and `max_df={max_df}` leave none of {self.num_words} words."
            )
        numbers = np.where(is_kept, np.cumsum(is_kept) - 1, -1)
        names = tuple(word for word, kept in zip(own, is_kept, strict=True) if kept)
        return self._renumbered(numbers.astype(np.int32), names)

    def _number_of_documents(self, name: str, value: Any) -> float:
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 0:
            return int(value)
        check_interval(name, value, "[0, 1]", "a share of documents, or a whole number of them")
        return float(value) * len(self)

    def _known(self, method: str) -> tuple[str, ...]:
        if self.vocabulary is None:
            raise ValueError(
                f"`{method}` needs the words of the corpus; its `vocabulary` is None. Give it one, "
                "if need be `tuple(map(str, range(corpus.num_words)))`."
            )
        return self.vocabulary

    def _renumbered(self, numbers: NDArray[np.integer], names: tuple[str, ...]) -> Corpus:
        """With the number of each word in another vocabulary, or -1 for one that is dropped."""
        words = numbers[self.words]
        kept = words >= 0
        ends = np.concatenate([[0], np.cumsum(kept)])[self.offsets]
        return Corpus(words[kept], self.counts[kept], ends, len(names), names)

    def to_csr(self) -> csr_array:
        """Counts (N, V), a scipy sparse array."""
        entries = (self.counts, self.words, self.offsets)
        found = csr_array(entries, (len(self), self.num_words), copy=True)
        found.sort_indices()
        return found

    def to_gensim(self) -> list[list[tuple[int, int]]]:
        """A list of (id, count) for each document, with ``dict(enumerate(vocabulary))`` for ids."""
        return [list(zip(w.tolist(), c.tolist(), strict=True)) for w, c in self]

    def padded(
        self, indices: ArrayLike | None = None, width: int | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Words and counts of documents, each (n, width); empty slots have word 0 and count 0.

        ``width`` is at least the number of different words of each, and by default that of the
        longest.
        """
        indices = np.arange(self.num_documents) if indices is None else indices
        rows = [self._document(int(i)) for i in self._numbers(indices)]
        least = max([1, *(len(words) for words, _ in rows)])
        width = least if width is None else check_count("width", width, least)
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
        for words, counts in self:
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
            ValueError: If the folder holds anything but a corpus.

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

        Cost: reads the entries once, for their checksums: they were checked before they were saved.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If a file is cut short or changed, or not of the same corpus as the others.
        """
        arrays, values = read_corpus(Path(directory))
        names = values["vocabulary"]
        names = None if names is None else tuple(names)
        return _without_checks(*(arrays[name] for name in _ARRAYS), values["num_words"], names)


def _without_checks(*values: Any) -> Corpus:
    """From values that a corpus had or was made of, in the order of its fields."""
    found = object.__new__(Corpus)
    for field, value in zip(dataclasses.fields(Corpus), values, strict=True):
        object.__setattr__(found, field.name, value)
    return found
