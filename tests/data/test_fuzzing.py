# SPDX-License-Identifier: Apache-2.0
"""Readers give what slow, obvious ones do on damaged files, or a ValueError with file and line."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numpyro_largecat.data import (
    Corpus,
    files,
    read_lda_c,
    read_uci_bag_of_words,
    read_vocabulary,
    read_xml_classification,
)
from tests import reference_files
from tests.fuzzing import Format, changed, check, check_bomb, damaged_files, many_files

WORDS = tuple("abcdefghijkl")


def plain_corpus(corpus: Corpus) -> Any:
    documents = {}
    for d in np.flatnonzero(np.diff(corpus.offsets)).tolist():
        words, counts = corpus[d]
        documents[d] = (words.tolist(), counts.tolist())
    return corpus.num_documents, corpus.num_words, documents


def plain_xml(path: Path) -> Any:
    features, labels = read_xml_classification(path)
    assert features.shape[0] == labels.shape[0] and (labels.data == 1).all()
    points = []
    for i in range(features.shape[0]):
        own = slice(*labels.indptr[i : i + 2].tolist())
        part = slice(*features.indptr[i : i + 2].tolist())
        values = features.data[part].tolist()
        points.append((labels.indices[own].tolist(), features.indices[part].tolist(), values))
    return [*features.shape, labels.shape[1]], points


FORMATS = {
    "vocabulary": Format(
        lambda path: list(read_vocabulary(path)),
        reference_files.vocabulary,
        (b"cat\ndog\nfish\n", "sea\r\nmöwe\r\n\r\n".encode(), b""),
    ),
    "lda_c": Format(
        lambda path: plain_corpus(read_lda_c(path, WORDS)),
        lambda content: reference_files.lda_c(content, len(WORDS)),
        (b"2 0:2 2:1\n0\n3 1:3 11:1 3:1\n", b"1 10:35\r\n0\r\n\r\n", b"2 1:1 2:2147483647"),
    ),
    "uci": Format(
        lambda path: plain_corpus(read_uci_bag_of_words(path)),
        reference_files.uci,
        (b"3\n4\n5\n1 1 2\n1 3 1\n3 2 3\n3 3 1\n3 4 1\n", b"2\r\n12\r\n1\r\n2 11 35\r\n\r\n"),
    ),
    "xml": Format(
        plain_xml,
        reference_files.xml,
        (b"4 3 5\n4,0 0:1 2:-0.25\n 1:1e-3\n2 \n \n", b"1 22 12\r\n11,3 0:2 21:+.5\r\n\r\n"),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@many_files
@given(data=st.data())
def test_damaged_files(name: str, data: st.DataObject, tmp_path: Path) -> None:
    case = FORMATS[name]
    check(case, tmp_path / "file", data.draw(damaged_files(case)))


@pytest.mark.parametrize("part", [b"\0", b"\n", b" ", b"0\n", b"1 "])
@pytest.mark.parametrize("name", FORMATS)
def test_small_files_that_unpack_to_much_are_refused(
    name: str, part: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bomb(FORMATS[name], tmp_path / "file", part, monkeypatch)


def test_what_unpacks_to_much_is_read_as_a_plain_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_ALWAYS", 2**14)
    content = b"1 0:1\n" * 21_000
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "packed").write_bytes(gzip.compress(content))
    assert read_lda_c(tmp_path / "plain", WORDS).num_documents == 21_000
    with pytest.raises(ValueError, match=r"packed must unpack to at most \d+ bytes"):
        read_lda_c(tmp_path / "packed", WORDS)


@pytest.mark.parametrize("name", ["corpus.json", "words.npy", "counts.npy", "offsets.npy"])
@many_files
@given(data=st.data())
def test_damaged_corpora(name: str, data: st.DataObject, tmp_path: Path) -> None:
    """They are refused, unless the change means nothing, such as a space in JSON."""
    folder = tmp_path / "corpus"
    if not folder.exists():
        Corpus.from_documents([["a", "b", "a"], [], ["c"]]).save(folder)
        (tmp_path / "good").write_bytes(next(folder.rglob(name)).read_bytes())
    path = next(folder.rglob(name))
    path.write_bytes(data.draw(changed((tmp_path / "good").read_bytes())))
    try:
        corpus = Corpus.open(folder)
    except ValueError as error:
        assert type(error) is ValueError and str(error).startswith(f"{path} must be what `Corpus.")
    else:
        assert plain_corpus(corpus) == (3, 3, {0: ([0, 1], [2, 1]), 2: ([2], [1])})
        assert corpus.vocabulary == ("a", "b", "c")
