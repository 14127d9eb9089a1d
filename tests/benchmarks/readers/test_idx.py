# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import re

import numpy as np
import pytest

from benchmarks.readers.idx import read_idx
from tests.data_files import real_data


def idx_bytes(array, kind=8):
    header = bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize("shape", [(5,), (0,), (2, 3, 4)])
def test_idx_round_trip(write, shape):
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    result = read_idx(write(idx_bytes(array)))
    assert result.dtype == np.uint8
    np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize(
    ("content", "need"),
    [
        (b"", "starts with nothing"),
        (b"\x01\x02\x08\x01", "00 00 08; got a file that starts with 01 02 08"),
        (idx_bytes(np.zeros(3), kind=13), "got a file that starts with 00 00 0d"),
        (idx_bytes(np.zeros((3, 2)))[:10], "a header of 12 bytes for its 2 axes; got 10"),
        (idx_bytes(np.zeros((3, 2)))[:-1], "6 bytes after its header, for its shape (3, 2); got 5"),
        (idx_bytes(np.zeros((3, 2))) + b"\0", "6 bytes after its header"),
        (b"\0\0\x08\x04" + b"\0\0\0\x01" * 3 + b"\0\0\0\0" + b"\0", "0 bytes after its header"),
        (b"\0\0\x08\x03" + b"\x80\0\0\0" * 2 + b"\0\0\0\x04", "at most 64 axes, with"),
        (b"\0\0\x08\x41" + b"\0\0\0\x01" * 65 + b"\0", "at most 64 axes, with"),
    ],
)
def test_malformed_idx_names_file_and_need(write, content, need):
    path = write(content)
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        read_idx(path)
    assert need in str(error.value)


def test_a_file_cut_short_by_gzip_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(b"1 2 2\n0 0:1\n")[:-6])
    with pytest.raises(ValueError, match=r"file\.gz must be a complete gzip file"):
        read_idx(path)


def test_real_mnist_class_counts():
    counts = np.bincount(read_idx(real_data("mnist/train-labels-idx1-ubyte.gz"))).tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
