# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import re

import numpy as np
import pytest

from numpyro_largecat.data import read_xml_classification
from tests.data_files import real_data


def test_xml_features_and_labels(write):
    path = write(b"4 3 5\n4,0 0:1 2:-0.25\n 1:1e-3\n2 \n \n")
    features, labels = read_xml_classification(path)
    np.testing.assert_array_equal(
        features.toarray(), np.array([[1, 0, -0.25], [0, 1e-3, 0], [0, 0, 0], [0, 0, 0]], "f4")
    )
    np.testing.assert_array_equal(
        labels.toarray(), [[1, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]
    )
    assert features.format == labels.format == "csr"
    assert features.dtype == np.float32


def test_xml_labels_keep_the_order_of_the_file(write):
    _, labels = read_xml_classification(write(b"2 1 9\n7,3,5 0:1\n4,8 0:1\n"))
    assert labels.indices[labels.indptr[:-1]].tolist() == [7, 4]


def test_xml_windows_line_ends_and_a_blank_last_line(write):
    features, labels = read_xml_classification(write(b"1 2 2\r\n1 0:2\r\n\r\n"))
    assert features.toarray().tolist() == [[2.0, 0.0]]
    assert labels.toarray().tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("content", "line", "need"),
    [
        (b"", 1, "the header"),
        (b"1 2\n0 0:1\n", 1, "the header"),
        (b"1 2 x\n0 0:1\n", 1, "the header"),
        (b"-1 2 3\n", 1, "the header"),
        (b"1 2 9999999999\n0 0:1\n", 1, "three whole numbers in [0, 2147483647]"),
        (b"1 2 1_0\n0 0:1\n", 1, "the header"),
        (b"1 2 2\n0 0:1_0\n", 2, "idx:value"),
        (b"2 2 2\n0 0:1\n0:1 1:1\n", 3, "a space first for a point without labels"),
        (b"1 2 2\n0 0:one\n", 2, "idx:value"),
        (b"1 2 2\n0 0\n", 2, "idx:value"),
        (b"1 2 2\n0 0:1:1\n", 2, "idx:value"),
        (b"2 2 2\n0 0:1\n0 0:nan\n", 3, "finite in float32; got nan"),
        (b"1 2 2\n0 0:1 1:-inf\n", 2, "finite in float32; got -inf"),
        (b"1 2 2\n0 0:1e39\n", 2, "finite in float32; got 1e+39"),
        (b"1 2 2\n0, 0:1\n", 2, "l1,l2"),
        (b"1 2 2\n2 0:1\n", 2, "labels in [0, 2), as the header says; got 2 to 2"),
        (b"1 2 2\n0 -1:1 1:1\n", 2, "feature indices in [0, 2), as the header says; got -1 to 1"),
        (b"1 2 2\n0 1:1 1:1\n", 2, "different feature indices; got 1 more than once"),
        (b"1 2 2\n1,1 1:1\n", 2, "different labels; got 1 more than once"),
        (b"1 2 2\n0 0:1\n1 0:1\n", 3, "no line after the 1 points of the header"),
        (b"2 2 2\n0 0:1\n", 2, "2 points, as the header says, but it ends after 1"),
    ],
)
def test_malformed_xml_names_file_line_and_need(write, content, line, need):
    path = write(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}, line {line}: ")) as error:
        read_xml_classification(path)
    assert need in str(error.value)


def test_a_long_line_that_repeats_an_id_takes_no_longer_than_others(write):
    """A hundred thousand different ids come first."""
    ids = b",".join(b"%d" % i for i in [*range(100_000), 99_999])
    path = write(b"1 1 100000\n" + ids + b" 0:1\n")
    with pytest.raises(ValueError, match="line 2: need different labels; got 99999 more than once"):
        read_xml_classification(path)


def test_a_file_cut_short_by_gzip_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(b"1 2 2\n0 0:1\n")[:-6])
    with pytest.raises(ValueError, match=r"file\.gz must be a complete gzip file"):
        read_xml_classification(path)


@pytest.mark.parametrize(
    ("name", "shape", "num_labels", "num_label_entries"),
    [
        ("bibtex_train", (4880, 1836), 159, 11_684),
        ("bibtex_test", (2515, 1836), 159, 6_078),
        ("delicious_train", (12_920, 500), 983, 246_088),
        ("delicious_test", (3_185, 500), 983, 60_229),
    ],
)
def test_real_xml_sizes(name, shape, num_labels, num_label_entries):
    features, labels = read_xml_classification(real_data(f"xml/{name}.txt.gz"))
    assert features.shape == shape
    assert labels.shape == (shape[0], num_labels)
    assert labels.sum() == labels.nnz == num_label_entries
