# SPDX-License-Identifier: Apache-2.0
"""Progress is readable in a terminal and in a file."""

from __future__ import annotations

import sys

from numpyro_largecat import _progress_bar
from numpyro_largecat._progress_bar import progress_bar


def advance(bar):
    for n in range(40):
        bar.set_postfix_str(f"loss {n}", refresh=False)
        bar.update()
    bar.close()


def test_a_file_gets_few_lines(capsys):
    """The start and the end of a fit that is over before a line is due."""
    advance(progress_bar(total=40, unit="step"))
    shown = capsys.readouterr().err
    assert "\r" not in shown
    lines = shown.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("0 of 40, ") and lines[1].startswith("40 of 40, ")
    assert lines[1].endswith("loss 39")


def test_a_file_gets_a_line_when_it_is_due(capsys, monkeypatch):
    monkeypatch.setattr(_progress_bar, "SECONDS_PER_LINE", 0.0)
    advance(progress_bar(total=40, unit="step"))
    assert len(capsys.readouterr().err.splitlines()) > 20


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    advance(progress_bar(total=40, unit="step"))
    shown = capsys.readouterr().err
    assert "\r" in shown and "100%|" in shown and "40/40" in shown


def test_nothing_is_shown_where_it_is_disabled(capsys):
    advance(progress_bar(total=40, disable=True))
    assert capsys.readouterr().err == ""
