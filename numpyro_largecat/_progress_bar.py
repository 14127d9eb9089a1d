# SPDX-License-Identifier: Apache-2.0
"""How far a fit is: a bar in a terminal or a notebook, and lines now and then elsewhere."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from tqdm.auto import tqdm

SECONDS_PER_LINE = 30.0
BAR_FORMAT = "{n_fmt} of {total_fmt}, {rate_fmt}, {elapsed} gone, {remaining} left{postfix}"


def progress_bar(iterable: Any = None, **options: Any) -> Any:
    """A bar of tqdm with its arguments; in a file or pipe a line every 30 seconds, and the last.

    A bar draws itself again and again over the same line, which only a terminal can show.
    """
    if _is_terminal(sys.stderr) or "ipykernel" in sys.modules:
        return tqdm(iterable, **options)
    if sys.stderr is None:  # as in a program without a console
        options["disable"] = True
    lines = {"file": _Lines(sys.stderr), "mininterval": SECONDS_PER_LINE, "bar_format": BAR_FORMAT}
    return tqdm(iterable, **(lines | options))


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


class _Lines:
    """A file that makes each drawing of a bar a line of its own."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write a line without what moves the cursor; nothing for what is empty then."""
        line = text.strip()
        if line and self._stream is not None:
            self._stream.write(f"{line}\n")

    def flush(self) -> None:
        """Flush the file."""
        if self._stream is not None:
            self._stream.flush()
