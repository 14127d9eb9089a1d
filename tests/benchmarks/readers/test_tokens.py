# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import re

import pytest

from benchmarks.readers.tokens import read_tokens
from tests.data_files import real_data


def test_tokens_end_each_line(write):
    tokens = read_tokens(write(" a <unk> \n\nN café".encode()))
    assert tokens == ["a", "<unk>", "<eos>", "<eos>", "N", "café", "<eos>"]


@pytest.mark.parametrize(
    ("content", "need"), [(b"a\n\xff\n", "UTF-8 text"), (b"a\nb <eos>\n", "no `<eos>`")]
)
def test_malformed_text_names_file_line_and_need(write, content, need):
    path = write(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 2: need {need}")):
        read_tokens(path)


def test_a_file_cut_short_by_gzip_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(b"1 2 2\n0 0:1\n")[:-6])
    with pytest.raises(ValueError, match=r"file\.gz must be a complete gzip file"):
        read_tokens(path)


@pytest.mark.parametrize(("part", "size"), [("train", 929_589), ("test", 82_430)])
def test_real_ptb_sizes(part, size):
    tokens = read_tokens(real_data(f"lm/ptb.{part}.txt.gz"))
    assert len(tokens) == size
    assert part == "test" or len(set(tokens)) == 10_000
