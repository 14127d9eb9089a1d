# SPDX-License-Identifier: Apache-2.0
"""Finding the files of a data set in a folder."""

from __future__ import annotations

from pathlib import Path


def find_file(directory: Path, file_name: str) -> Path:
    """The path of a file or of its compressed form, in a directory or a folder inside it."""
    for name in (file_name, f"{file_name}.gz"):
        for path in (directory / name, *sorted(directory.glob(f"*/{name}"))):
            if path.is_file():
                return path
    raise FileNotFoundError(
        f"Found neither {directory / file_name} nor the same with .gz at the end, nor either in a "
        "folder of that directory. Pass the folder that holds the file as `directory`, as in "
        "load(name, directory)."
    )
