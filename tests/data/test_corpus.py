# SPDX-License-Identifier: Apache-2.0
"""Corpora: what they hold, their files, and what is refused."""

from __future__ import annotations

import gzip
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse import coo_array, csc_array, csr_array

from numpyro_largecat.data import Corpus, read_lda_c, read_uci_bag_of_words, read_vocabulary

COUNTS = np.array([[2, 0, 1, 0], [0, 0, 0, 0], [0, 3, 1, 1]])
WORDS = ("a", "b", "c", "d")


def dense(corpus: Corpus) -> np.ndarray:
    table = np.zeros((corpus.num_documents, corpus.num_words), int)
    for d in range(corpus.num_documents):
        words, counts = corpus[d]
        table[d, words] = counts
    return table


def test_formats_have_the_same_documents(tmp_path) -> None:
    """LDA-C, UCI, scipy and lists of tokens; gzip too; and what was saved is opened again."""
    lda_c, uci, packed = tmp_path / "a.dat", tmp_path / "a.txt", tmp_path / "a.dat.gz"
    lda_c.write_text("2 0:2 2:1\n0\n3 1:3 2:1 3:1\n")
    packed.write_bytes(gzip.compress(lda_c.read_bytes()))
    uci.write_text("3\n4\n5\n1 1 2\n1 3 1\n3 2 3\n3 3 1\n3 4 1\n")
    (tmp_path / "vocab.txt").write_text("a\nb\nc\nd\n")
    corpora = [
        read_lda_c(lda_c, WORDS),
        read_lda_c(packed, tmp_path / "vocab.txt"),
        read_uci_bag_of_words(uci, tmp_path / "vocab.txt"),
        Corpus.from_csr(csr_array(COUNTS), list(WORDS)),
        Corpus.from_documents([list("aac"), [], list("bbbcd")]),
    ]
    corpora[0].save(tmp_path / "saved")
    opened = Corpus.open(tmp_path / "saved")
    assert isinstance(opened.words, np.memmap)
    for corpus in (*corpora, opened):
        assert dense(corpus).tolist() == COUNTS.tolist()
        assert corpus.vocabulary == WORDS and corpus.num_tokens == 8
    assert dense(opened[[2, 0]]).tolist() == COUNTS[[2, 0]].tolist()


def test_padded_documents_have_empty_slots() -> None:
    corpus = Corpus.from_csr(csr_array(COUNTS))
    assert corpus.values([0, 1]).tolist() == [[[0, 2], [2, 1]], [[0, 0], [0, 0]]]
    assert corpus.padded([2], width=5)[1].tolist() == [[3, 1, 1, 0, 0]]
    with pytest.raises(ValueError, match="`width` must be at least 3; got 2"):
        corpus.padded([2], width=2)


def test_a_corpus_is_indexed_like_an_array() -> None:
    """One document, those of a slice, of numbers and of booleans; and a loop over all."""
    corpus = Corpus.from_csr(csr_array(COUNTS), WORDS)
    assert len(corpus) == 3
    assert [dict(zip(*map(list, d), strict=True)) for d in corpus] == [
        {0: 2, 2: 1},
        {},
        {1: 3, 2: 1, 3: 1},
    ]
    assert corpus[-1][0].tolist() == corpus[np.int64(2)][0].tolist() == [1, 2, 3]
    for which in (
        slice(None, 2),
        slice(None, None, -1),
        slice(2, 1),
        [2, 0, 2],
        [-1],
        np.array([True, False, True]),
    ):
        part = corpus[which]
        assert dense(part).tolist() == COUNTS[which].tolist()
        assert part.vocabulary == WORDS


def test_a_slice_of_a_corpus_on_disk_stays_there(tmp_path) -> None:
    Corpus.from_csr(csr_array(COUNTS)).save(tmp_path / "saved")
    opened = Corpus.open(tmp_path / "saved")
    assert np.shares_memory(opened[1:].words, opened.words)


def test_numbers_of_documents_may_be_small_integers() -> None:
    """There are more documents than the type can count."""
    corpus = Corpus.from_rows([([0], [1])] * 300, 1, ("a",))
    part = corpus[np.array([0, -1], np.int8)]
    assert len(part) == 2 and part.vocabulary is corpus.vocabulary


@pytest.mark.parametrize(
    ("which", "error", "message"),
    [
        (3, IndexError, "document 3 is not in the corpus, which has 3"),
        ([0, -4], IndexError, "document -4 is not in the corpus"),
        ([0, 3], IndexError, "document 3 is not in the corpus"),
        ([True, False], TypeError, "one boolean for each of 3 documents"),
        ([0.5], TypeError, "integers"),
        ("a", TypeError, "a number, a slice, integers"),
        (True, TypeError, "a number, a slice, integers"),
        ([[0]], TypeError, "integers"),
    ],
)
def test_an_index_that_is_none_is_refused(which, error, message) -> None:
    with pytest.raises(error, match=message):
        Corpus.from_csr(csr_array(COUNTS))[which]


def test_csr_and_gensim_go_in_and_out() -> None:
    corpus = Corpus.from_csr(csr_array(COUNTS), WORDS)
    assert corpus.to_csr().toarray().tolist() == COUNTS.tolist()
    pairs = corpus.to_gensim()
    assert pairs[:2] == [[(0, 2), (2, 1)], []]
    back = Corpus.from_gensim(iter(pairs), dict(enumerate(WORDS)))
    assert dense(back).tolist() == COUNTS.tolist() and back.vocabulary == WORDS


def test_entries_of_one_word_are_added_up() -> None:
    """So that a split of words puts none in both parts."""
    gensim = Corpus.from_gensim([[(1, 2), (0, 1), (1, 3)]], {0: "a", 1: "b"})
    assert gensim[0][0].tolist() == [0, 1] and gensim[0][1].tolist() == [1, 5]
    sequences = [[2, 0, 2, 2], [], [3, 1], [0, 0]]
    corpus = Corpus.from_rows([(ids, np.ones(len(ids), int)) for ids in sequences], 4)
    assert [[own.tolist() for own in document] for document in corpus] == [
        [[0, 2], [1, 3]],
        [[], []],
        [[1, 3], [1, 1]],
        [[0], [2]],
    ]
    assert corpus.words.dtype == corpus.counts.dtype == np.int32


def test_the_order_of_entries_changes_nothing() -> None:
    """Not what is drawn either, and other numbers of the words do not."""
    rng = np.random.default_rng(0)
    table = rng.poisson(0.7, (30, 12))
    names = [f"w{i:02d}" for i in range(12)]
    corpus = Corpus.from_csr(csr_array(table), names)
    reversed_rows = [(words[::-1], counts[::-1]) for words, counts in corpus]
    columns = rng.permutation(12)
    renamed = Corpus.from_csr(csr_array(table[:, columns]), [names[i] for i in columns])
    for other in (
        Corpus.from_rows(reversed_rows, 12, tuple(names)),
        renamed.with_vocabulary(names),
    ):
        for part, same in zip(corpus.split_words(), other.split_words(), strict=True):
            assert (part.words == same.words).all() and (part.counts == same.counts).all()


def test_counts_of_zero_are_no_words_of_a_row() -> None:
    corpus = Corpus.from_rows([([3, 1, 0], [0, 2, 1]), ([2], [0]), ([1], [4])], 4)
    assert [words.tolist() for words, _ in corpus] == [[0, 1], [], [1]]
    assert corpus.counts.tolist() == [1, 2, 4]


def test_a_word_in_two_entries_of_a_document_is_refused() -> None:
    """Two documents may have it, also where an empty one is between them."""
    Corpus([3, 1, 1, 3], [1, 1, 1, 1], [0, 0, 2, 2, 4, 4], 4)
    message = r"`Corpus\.from_rows` adds several up; got word 3 with count 7 in document 2"
    with pytest.raises(ValueError, match=message):
        Corpus([3, 3, 1, 3], [1, 2, 1, 7], [0, 1, 1, 4], 4)


def test_bad_entries_are_not_added_up() -> None:
    """Their sums would be good."""
    for counts in ([-1, 2], [0.5, 0.5]):
        with pytest.raises(ValueError, match=r"whole numbers .* in document 1"):
            Corpus.from_rows([([0], [1]), ([1, 1], counts)], 2)
    with pytest.raises(ValueError, match=f"whole numbers in .* with count {2**31} "):
        Corpus.from_rows([([1, 1], [2**31 - 1, 1])], 2)


def test_counts_of_zero_are_no_words_of_a_gensim_document() -> None:
    corpus = Corpus.from_gensim([[(0, 0), (1, 2)], [(0, 0)]], {0: "a", 1: "b"})
    assert dense(corpus).tolist() == [[0, 2], [0, 0]]


def test_complex_counts_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`counts` must be whole numbers; got .*complex128"):
        Corpus.from_csr(csr_array(COUNTS.astype(complex)))
    for counts in ([1j], np.ones(1, complex)):
        with pytest.raises(TypeError, match=r"`counts` must be whole numbers; got .*complex128"):
            Corpus([0], counts, [0, 1], 1)


@pytest.mark.parametrize("counts", [[2, -1], [0.5, 0.5]])
@pytest.mark.parametrize("form", [coo_array, csr_array, csc_array])
def test_entries_that_add_up_to_a_count_are_refused(form, counts) -> None:
    at_one = {coo_array: ([0, 0], [0, 0]), csr_array: ([0, 0], [0, 2]), csc_array: ([0, 0], [0, 2])}
    data = np.array(counts)
    given = (data, at_one[form]) if form is coo_array else (data, *at_one[form])
    with pytest.raises(ValueError, match="whole numbers"):
        Corpus.from_csr(form(given, shape=(1, 1)))
    doubled = (abs(data).astype(int) + 1, *given[1:])
    assert Corpus.from_csr(form(doubled, shape=(1, 1))).counts.tolist() == [sum(doubled[0])]


def test_counts_of_one_document_are_told_from_a_corpus() -> None:
    with pytest.raises(ValueError, match=r"shape \(N, V\).*shape \(4,\).*reshape\(1, -1\)"):
        Corpus.from_csr(coo_array(COUNTS[0]))


@pytest.mark.parametrize("missing", [float("nan"), None])
def test_a_missing_text_is_named(missing) -> None:
    """As pandas has it in a column of texts."""
    with pytest.raises(TypeError, match=r"document 1 is .* missing, .*fillna"):
        Corpus.from_documents([["a"], missing])


def test_ids_that_a_gensim_dictionary_no_longer_has_are_explained() -> None:
    with pytest.raises(ValueError, match=r"integers in \[0, 1\); got word 1") as raised:
        Corpus.from_gensim([[(1, 1)]], {0: "a"})
    assert "by its `doc2bow`" in raised.value.__notes__[-1]


def test_a_gensim_dictionary_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="must have the ids 0 to 1"):
        Corpus.from_gensim([[(0, 1)]], {0: "a", 2: "c"})
    with pytest.raises(TypeError, match="gensim `Dictionary`"):
        Corpus.from_gensim([[(0, 1)]], ["a"])


def test_corpora_are_joined_over_all_their_words() -> None:
    first = Corpus.from_documents([["b", "a"], []])
    second = Corpus.from_documents([["c", "b", "c"]])
    both = Corpus.concatenate([first, second])
    assert both.vocabulary == ("a", "b", "c")
    assert dense(both).tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 2]]
    unknown = Corpus.from_csr(csr_array(COUNTS))
    assert dense(Corpus.concatenate([unknown, unknown[:1]])).tolist() == [
        *COUNTS.tolist(),
        [2, 0, 1, 0],
    ]
    for wrong in ([], [first, unknown], [unknown, Corpus.from_rows([], 3)]):
        with pytest.raises(ValueError, match="`corpora` must"):
            Corpus.concatenate(wrong)
    for wrong in ((first, second), (first,)):
        with pytest.raises(TypeError, match=r"one list: `Corpus\.concatenate\(\[first, second\]\)"):
            Corpus.concatenate(*wrong)


def test_words_that_another_vocabulary_lacks_are_dropped() -> None:
    corpus = Corpus.from_csr(csr_array(COUNTS), WORDS)
    other = corpus.with_vocabulary(["d", "z", "a"])
    assert other.vocabulary == ("d", "z", "a")
    assert dense(other).tolist() == [[0, 0, 2], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"min_df": 2}, "c"),
        ({"max_df": 1}, "abd"),
        ({"max_df": 0.5}, "abd"),
        ({"min_df": 0.5}, "c"),
        ({"max_df": 1.0}, "abcd"),
        ({}, "abcd"),
    ],
)
def test_pruning_counts_documents_as_scikit_learn_does(limits, left) -> None:
    """Of three documents; a whole number is a number of them, another a share."""
    from sklearn.feature_extraction.text import CountVectorizer

    texts = ["a a c", "", "b b b c d"]
    corpus = Corpus.from_documents([text.split() for text in texts]).prune(**limits)
    vectorizer = CountVectorizer(token_pattern="[a-z]", **limits)
    assert "".join(vectorizer.fit(texts).get_feature_names_out()) == left
    assert corpus.vocabulary == tuple(left)
    assert dense(corpus).tolist() == vectorizer.transform(texts).toarray().tolist()


def test_pruning_needs_words_and_leaves_some() -> None:
    corpus = Corpus.from_csr(csr_array(COUNTS), WORDS)
    with pytest.raises(ValueError, match="leave none of 4 words"):
        corpus.prune(min_df=3)
    with pytest.raises(ValueError, match="`min_df` must be in"):
        corpus.prune(min_df=-1)
    with pytest.raises(ValueError, match="`max_df` must be in"):
        corpus.prune(max_df=1.5)
    with pytest.raises(ValueError, match="its `vocabulary` is None"):
        Corpus.from_csr(csr_array(COUNTS)).prune(min_df=2)


def test_split_divides_the_words_of_each_document() -> None:
    """Both parts together are the corpus, and no word is in both parts of a document."""
    counts = np.random.default_rng(0).integers(0, 3, size=(30, 40))
    corpus = Corpus.from_csr(csr_array(counts))
    seen, unseen = corpus.split_words(seed=1)
    assert (dense(seen) + dense(unseen)).tolist() == counts.tolist()
    assert not (dense(seen) * dense(unseen)).any()
    sizes = (counts > 0).sum(axis=1)
    assert (np.diff(unseen.offsets) == np.round(0.2 * sizes)).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2 0:1 4:1\n", r"line 1: need words in \[0, 3\], of the vocabulary; got 4"),
        ("1 0:1\n1 2:0\n", r"line 2: need counts in \[1, 2147483647\]; got 0"),
        ("1 0:3000000000\n", "line 1: need counts in .*; got 3000000000"),
        ("1 0:1.5\n", "line 1: need `M word:count"),
        ("3 0:1 1:1\n", "line 1: need the number of words first, 2; got 3"),
        ("2 1:1 1:1\n", "line 1: need each word of a document once; got word 1 a second time"),
        ("x 1:1\n", "line 1: need `M word:count"),
        ("\n1 0:1\n", "line 1: need `M word:count"),
        ("1 0:1_0\n", "line 1: need `M word:count"),
    ],
)
def test_bad_lda_c_files_are_refused(tmp_path, text, message) -> None:
    (tmp_path / "a.dat").write_text(text)
    with pytest.raises(ValueError, match=r"a\.dat, " + message):
        read_lda_c(tmp_path / "a.dat", WORDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2\n4\n1\n3 1 1\n", r"line 4: need documents that ascend, in \[1, 2\]"),
        ("2\n4\n2\n2 1 1\n1 1 1\n", "line 5: need documents that ascend"),
        ("2\n4\n1\n1 5 1\n", r"line 4: need words in \[1, 4\], of the vocabulary; got 5"),
        ("2\n4\n1\n1 0 1\n", r"line 4: need words in \[1, 4\], of the vocabulary; got 0"),
        ("2\n4\n1\n1 1 -1\n", r"line 4: need counts in \[1, \d+\]; got -1"),
        ("2\n4\n3\n1 3 1\n2 3 1\n2 3 1\n", "line 6: need each word of a document once; got word 3"),
        ("2\n4\n2\n1 1 1\n", "line 4: need 2 entries, as the header says, but it has 1"),
        ("2\n4\n", "line 3: need one whole number, of the header"),
        ("-2\n4\n0\n", "line 1: need one whole number, of the header"),
        ("2\n3\n1\n1 1 1\n", "line 2: need as many words as in the vocabulary, 4; got 3"),
        ("2\n4\n1\n1 1\n", "line 4: need `document word count`"),
        ("x\n", "line 1: need one whole number"),
        ("2\n4\n1\n1 1_0 1\n", "line 4: need `document word count`"),
        ("9999999999\n4\n0\n", r"line 1: need one whole number, .* in \[0, 2147483647\]"),
        ("2000000000\n4\n0\n", r"line 1: need at most 1048576 documents more than entries, 0"),
    ],
)
def test_bad_uci_files_are_refused(tmp_path, text, message) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ValueError, match=r"a\.txt, " + message):
        read_uci_bag_of_words(tmp_path / "a.txt", WORDS)


def test_a_uci_file_may_have_no_vocabulary(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("3\n4\n5\n1 1 2\n1 3 1\n3 2 3\n3 3 1\n3 4 1\n")
    corpus = read_uci_bag_of_words(tmp_path / "a.txt")
    assert corpus.vocabulary is None and dense(corpus).tolist() == COUNTS.tolist()
    assert read_uci_bag_of_words(tmp_path / "a.txt", list(WORDS)).vocabulary == WORDS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\nb\r\na\n", "line 3: need another word than that of line 1; got 'a'"),
        (b"a\n\nb\n", "line 2: need one word; got ''"),
        (b"a\n\xff\n", "line 2: need UTF-8 text"),
    ],
)
def test_bad_vocabularies_are_refused(tmp_path, content, message) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"vocab\.txt, " + message):
        read_vocabulary(tmp_path / "vocab.txt")


def test_a_vocabulary_may_end_with_blank_lines(tmp_path) -> None:
    """A word may be a space: n-grams of characters have such."""
    (tmp_path / "vocab.txt").write_bytes(b"a\r\nb\n \n\n\r\n")
    assert read_vocabulary(tmp_path / "vocab.txt") == ("a", "b", " ")
    (tmp_path / "vocab.txt").write_bytes(b"\xef\xbb\xbfcat\r\ndog\n")
    assert read_vocabulary(tmp_path / "vocab.txt") == ("cat", "dog")


def test_documents_without_words_need_no_lines(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("1000000\n4\n1\n700000 1 1\n")
    corpus = read_uci_bag_of_words(tmp_path / "a.txt")
    assert corpus.num_documents == 1_000_000 and corpus[699_999][0].tolist() == [0]


def test_files_may_end_with_blank_lines(tmp_path) -> None:
    """A blank line in the middle is no document, and would move those after it."""
    path = tmp_path / "a.txt"
    path.write_text("1\n4\n1\n1 2 3\n\n\n")
    assert dense(read_uci_bag_of_words(path)).tolist() == [[0, 3, 0, 0]]
    path.write_text("1 1:3\n\n")
    assert dense(read_lda_c(path, WORDS)).tolist() == [[0, 3, 0, 0]]
    path.write_text("1 1:3\n\n1 2:1\n")
    with pytest.raises(ValueError, match="line 2"):
        read_lda_c(path, WORDS)


GENSIM = [[(0, 2), (2, 1)], [], [(1, 3), (2, 1), (3, 1)]]


@pytest.mark.parametrize(
    "rows", [GENSIM, GENSIM[:1], [tuple(GENSIM[0])], [np.array(GENSIM[0])], [[[0, 2], [2, 1]]]]
)
def test_pairs_of_word_and_count_are_refused(rows) -> None:
    """They would be other documents: the first pair as words, the second as counts."""
    with pytest.raises(TypeError, match=r"tuple \(words, counts\).*document 0 is .*from_gensim\("):
        Corpus.from_rows(rows, 4)
    if rows is GENSIM:
        with pytest.raises(
            TypeError, match=r"lists of words; got \(0, 2\), of type tuple in document 0"
        ):
            Corpus.from_documents(rows)


def test_counts_of_words_are_no_list_of_words() -> None:
    """Their keys alone would be the words."""
    with pytest.raises(TypeError, match=r"got a Counter as document 1\. `list\(Counter"):
        Corpus.from_documents([["sea"], Counter({"sea": 5, "ship": 2})])


def test_lists_are_made_into_arrays() -> None:
    corpus = Corpus([0, 2, 2], [2, 1, 3], [0, 2, 2, 3], 4)
    assert dense(corpus).tolist() == [[2, 0, 1, 0], [0, 0, 0, 0], [0, 0, 3, 0]]
    with pytest.raises(ValueError, match=r"whole numbers .* word 0 with count 0\.5"):
        Corpus([0], [0.5], [0, 1], 1)


def test_bad_arrays_are_refused() -> None:
    """The message says which document and which word."""
    with pytest.raises(ValueError, match=r"in \[0, 3\); got word 3 with count 1 in document 2"):
        Corpus.from_rows([([0], [1]), ([], []), ([1, 3], [2, 1])], 3)
    with pytest.raises(ValueError, match=r"in \[1, \d+\]; got word 0 with count -2 in document 0"):
        Corpus.from_rows([([0], [-2])], 3)
    with pytest.raises(ValueError, match=r"whole numbers.*word 1 with count 0\.5 in document 1"):
        Corpus.from_csr(csr_array(np.array([[1, 0], [0, 0.5]])))
    with pytest.raises(ValueError, match="4 different words; got 4, 3 of them different"):
        Corpus.from_csr(csr_array(COUNTS), ["a", "b", "c", "c"])
    with pytest.raises(ValueError, match=r"`words` .* last of `offsets` says; got shape \(3,\)"):
        Corpus(np.zeros(3, int), np.ones(3, int), np.array([0, 2]), 4)
    with pytest.raises(ValueError, match="`offsets` must ascend"):
        Corpus(np.zeros(3, int), np.ones(3, int), np.array([0, 4, 3]), 4)
    with pytest.raises(ValueError, match=r"whole numbers .* word 1 with count 1\.5 in document 1"):
        Corpus.from_rows([([], []), ([0, 1], [2, 1.5])], 3)
    with pytest.raises(ValueError, match=r"integers in \[0, 3\); got word 0\.5 .* document 0"):
        Corpus(np.array([0.5]), np.array([1]), np.array([0, 1]), 3)
    with pytest.raises(ValueError, match=r"counts of document 0 .* shape \(1,\).*got shape \(2,\)"):
        Corpus.from_rows([([0], [1, 2]), ([1, 2], [1])], 3)


@pytest.mark.parametrize("kind", [jnp.array, np.uint8, np.uint64, np.float64, list])
def test_arrays_of_any_kind_make_the_same_corpus(kind) -> None:
    parts = [np.array(part) for part in ([1, 0, 1, 2], [2, 1, 1, 3], [0, 2, 2, 4])]
    corpus, same = Corpus(*map(kind, parts), 3), Corpus(*parts, 3)
    for name in ("words", "counts", "offsets"):
        found = getattr(corpus, name)
        assert type(found) is np.ndarray and found.dtype.kind in "iu"
        np.testing.assert_array_equal(found, getattr(same, name))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (np.array([0, 5, 3, 6], np.uint16), "must ascend from 0"),
        (np.array([0, 1.5, 4, 6]), "must be whole numbers"),
        (np.array([], int), r"N \+ 1 at least 1"),
        (np.array([[0, 6]]), r"shape \(N \+ 1,\)"),
    ],
)
def test_offsets_that_are_none_are_refused(offsets, message) -> None:
    with pytest.raises(ValueError, match=message):
        Corpus(np.arange(6), np.ones(6, int), offsets, 6)


@pytest.mark.parametrize("num_words", [2.0, -3])
def test_a_number_of_words_that_is_none_is_refused(num_words) -> None:
    with pytest.raises((TypeError, ValueError), match="`num_words` must be"):
        Corpus([0], [1], [0, 1], num_words)


def test_large_numbers_do_not_wrap() -> None:
    with pytest.raises(ValueError, match=f"integers in .*got word {2**32 + 1} "):
        Corpus.from_rows([([2**32 + 1], [1])], 3)
    with pytest.raises(ValueError, match=f"whole numbers in .* with count {2**32 + 5} "):
        Corpus.from_rows([([0], [2**32 + 5])], 3)
    with pytest.raises(ValueError, match=r"numbers in .*got word 0 with count inf in document 0"):
        Corpus.from_csr(csr_array(np.array([[np.inf, 1]])))
    for hidden in ([3, -2], [2, -2], [0.5, 0.5]):
        csr = csr_array((np.array(hidden), np.array([1, 1]), np.array([0, 0, 2])), shape=(2, 3))
        with pytest.raises(ValueError, match=r"whole numbers in .*got word 1 .* in document 1"):
            Corpus.from_csr(csr)
    twice = coo_array((np.array([200, 100], np.uint8), ([0, 0], [1, 1])), shape=(1, 2))
    assert Corpus.from_csr(twice).counts.tolist() == [300]


def test_strings_are_no_lists_of_words() -> None:
    """They would be documents of characters."""
    lines = ["the sea is blue", "a moon at night"]
    with pytest.raises(TypeError, match=r"document 1: 'a moon.*d\.split\(\).*CountVectorizer"):
        Corpus.from_documents([["the", "sea"], lines[1]])
    with pytest.raises(TypeError, match="got one string"):
        Corpus.from_documents(lines[0])


def test_documents_may_be_read_once() -> None:
    """Generators of generators give what lists give."""
    lists = [list("aac"), [], list("bbbcd")]
    corpus = Corpus.from_documents(iter(document) for document in lists)
    assert dense(corpus).tolist() == COUNTS.tolist() and corpus.vocabulary == WORDS


def test_a_vocabulary_without_order_is_refused() -> None:
    """CountVectorizer's ``vocabulary_`` is a dict in the order of first sight."""
    numbers = {"b": 1, "a": 0, "d": 3, "c": 2}
    for vocabulary in (numbers, set(WORDS)):
        with pytest.raises(TypeError, match=r"order of their numbers.*get_feature_names_out"):
            Corpus.from_csr(csr_array(COUNTS), vocabulary)
    with pytest.raises(TypeError, match="got a dict"):
        Corpus.from_documents([["a"]], numbers)


@pytest.mark.parametrize("word", [None, b"moon", 3, float("nan")])
def test_words_that_are_no_strings_are_refused(word):
    """As text, they would be other words than those that a vectorizer finds."""
    counts = csr_array(np.eye(2, dtype=int))
    with pytest.raises(TypeError, match=r"`vocabulary` must be strings.*at position 1"):
        Corpus.from_csr(counts, ["sea", word])


def test_words_of_an_array_are_plain_strings() -> None:
    """NumPy's print as np.str_('a')."""
    names = np.array(WORDS)
    corpora = [
        Corpus.from_csr(csr_array(COUNTS), names),
        Corpus.from_documents([names[:2], names], list(names)),
        Corpus.from_documents([names[:2], names]),
        Corpus(*np.zeros((2, 0), int), np.zeros(1, int), 4, tuple(names)),
    ]
    for corpus in corpora:
        assert corpus.vocabulary == WORDS and {type(w) for w in corpus.vocabulary} == {str}


def test_padded_documents_are_chosen_as_by_numpy() -> None:
    """By numbers, from the end too, or by a boolean for each; all else is refused."""
    corpus = Corpus.from_csr(csr_array(COUNTS))
    mask = np.array([True, False, True])
    assert corpus.values(mask).tolist() == corpus.values([-3, 2]).tolist()
    assert len(corpus[[]]) == 0
    for wrong in (mask[:2], [0.7], [[0, 1]], 0):
        with pytest.raises(TypeError, match="integers, or one boolean for each of 3 documents"):
            corpus.padded(wrong)
    with pytest.raises(ValueError, match=r"`fraction` must be in \[0, 1\]; got 1\.5"):
        corpus.split_words(fraction=1.5)


def test_a_corpus_prints_its_size() -> None:
    corpus = Corpus.from_csr(csr_array(COUNTS))
    assert repr(corpus) == "Corpus(3 documents, 8 tokens, 4 words)"


def test_a_dense_array_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`matrix` must be a scipy sparse.*got an array of int64"):
        Corpus.from_csr(COUNTS)
