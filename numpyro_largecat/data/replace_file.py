# SPDX-License-Identifier: Apache-2.0
"""Replacing a file as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import IO


def replace_file(
    path: str | PathLike[str], content: bytes | memoryview | Callable[[IO[bytes]], object]
) -> None:
    """Write a file beside the one that is there, and give it that one's name and permissions.

    So whoever opens it finds the whole old file or the whole new one, whatever ends the process. A
    link is followed: the file that it points to is replaced.

    Args:
        path: The file.
        content: What it will hold, or a function that writes it into the open file.

    Raises:
        OSError: If it cannot be written, or is not a file. What was there before is there still.
    """
    target = Path(os.path.realpath(path))
    part = target.with_name(f"{target.name}.part")
    try:
        if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
            raise PermissionError("it is not a file that may be written")
        try:
            with part.open("wb") as file:
                if target.exists():
                    shutil.copymode(target, part)
                content(file) if callable(content) else file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or the new name may outlive a power failure alone
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(
            f"{path} could not be written: {error}. If it was there before, it is there still."
        ) from error
