# SPDX-License-Identifier: Apache-2.0
"""Readers give what slow, obvious ones do on damaged files, or a ValueError with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.readers import ChoiceData, read_modecanada, read_swissmetro
from benchmarks.readers.idx import read_idx
from benchmarks.readers.interactions import read_interactions
from benchmarks.readers.python_names import read_names
from benchmarks.readers.tokens import read_tokens
from tests import reference_files
from tests.benchmarks.readers.test_choice_data import CANADA, SWISSMETRO
from tests.fuzzing import (
    Format,
    changed,
    check,
    check_bomb,
    damaged_files,
    many_files,
)


def plain_choices(data: ChoiceData) -> Any:
    columns = (data.features, data.available, data.choice, data.covariates, data.person)
    return [tuple(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def in_float32(choices: Any) -> Any:
    """What the reader gives of the reference's numbers."""
    return [
        (*(np.float32(x).tolist() if i in (0, 3) else x for i, x in enumerate(row)),)
        for row in choices
    ]


def plain_pairs(path: Path) -> Any:
    users, items = read_interactions(path)
    return list(zip(users.tolist(), items.tolist(), strict=True))


def plain_idx(path: Path) -> Any:
    array = read_idx(path)
    return list(array.shape), array.tobytes()


def swissmetro(*changes: dict[str, int], separator: str) -> bytes:
    rows = [SWISSMETRO, *((SWISSMETRO | change).values() for change in changes)]
    return "\n".join(separator.join(map(str, row)) for row in rows).encode()


FORMATS = {
    "tokens": Format(read_tokens, reference_files.tokens, (b" no it was n't \n but N \r\n\n", b"")),
    "interactions": Format(
        plain_pairs, reference_files.interactions, (b"0 5 3\n1\n\n2 7 999999999\r\n", b"")
    ),
    "idx": Format(
        plain_idx,
        reference_files.idx,
        (
            bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]),
            bytes([0, 0, 8, 3, *(0, 0, 0, 2) * 3, *range(8)]),
            bytes([0, 0, 8, 5, *(0, 0, 0, 0), *(255, 255, 255, 255) * 4]),
        ),
        is_text=False,
    ),
    "swissmetro": Format(
        lambda path: plain_choices(read_swissmetro(path)),
        lambda content: in_float32(reference_files.swissmetro(content)),
        (
            swissmetro({}, {"CHOICE": 0}, {"GA": 1, "ID": 7}, separator=","),
            swissmetro({"CHOICE": 3}, {"PURPOSE": 4}, separator="\t"),
        ),
    ),
    "modecanada": Format(
        lambda path: plain_choices(read_modecanada(path)),
        lambda content: in_float32(reference_files.modecanada(content, all_cases=False)),
        (CANADA.encode(), CANADA.replace(",", "\t").replace("\n", "\r\n").encode()),
    ),
    "modecanada, all cases": Format(
        lambda path: plain_choices(read_modecanada(path, all_cases=True)),
        lambda content: in_float32(reference_files.modecanada(content, all_cases=True)),
        (CANADA.encode(), CANADA.replace("car", '"car"').encode()),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@many_files
@given(data=st.data())
@pytest.mark.some_cases(3)
def test_damaged_files(name: str, data: st.DataObject, tmp_path: Path) -> None:
    case = FORMATS[name]
    check(case, tmp_path / "file", data.draw(damaged_files(case)))


@pytest.mark.parametrize("part", [b"\0", b"\n", b"1 ", b"0\n", b",,\n"])
@pytest.mark.parametrize("name", ["tokens", "interactions", "swissmetro", "modecanada", "idx"])
def test_small_files_that_unpack_to_much_are_refused(
    name: str, part: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bomb(FORMATS[name], tmp_path / "file", part, monkeypatch)


@many_files
@given(data=st.data())
def test_damaged_python_files_are_read_or_skipped(data: st.DataObject, tmp_path: Path) -> None:
    source = b'# coding: utf-8\nimport os\n\ndef f(x):\n    return f\'{x!r}\' + """\n"""\n'
    (tmp_path / "a.py").write_bytes(data.draw(changed(source)))
    files = read_names(tmp_path)
    assert (*files.paths, *files.skipped) == ("a.py",)
