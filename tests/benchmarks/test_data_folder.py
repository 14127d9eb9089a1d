# SPDX-License-Identifier: Apache-2.0
"""Where benchmarks and examples find the data sets."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.data_folder import add_data_argument


@pytest.mark.parametrize(
    ("variable", "arguments", "expected"),
    [
        (None, [], None),
        ("", [], None),
        ("sets", [], Path("sets")),
        ("sets", ["--data", "mine"], Path("mine")),
    ],
)
def test_the_folder_is_the_one_given_or_that_of_the_variable(
    variable: str | None,
    arguments: list[str],
    expected: Path | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LARGECAT_DATA", raising=False)
    if variable is not None:
        monkeypatch.setenv("LARGECAT_DATA", variable)
    parser = argparse.ArgumentParser()
    add_data_argument(parser, "text/")
    assert parser.parse_args(arguments).data == expected
