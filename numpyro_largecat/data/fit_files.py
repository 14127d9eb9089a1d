# SPDX-License-Identifier: Apache-2.0
"""Files of fits: arrays and a few plain values in one ``.npz``, without pickle."""

from __future__ import annotations

import json
import zipfile
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

ABOUT = "about"  # entry of the file that holds what is no array, as JSON


def save_fit(path: str | PathLike[str], kind: str, values: dict[str, Any]) -> None:
    """Write arrays and values that JSON can hold; a file that is there is replaced as a whole.

    ``kind`` is the name of the class, by which ``load_fit`` knows the file.
    """
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    about = {"kind": kind} | {n: value for n, value in values.items() if n not in arrays}
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:  # to a name, NumPy would add another ending
        np.savez(file, **({ABOUT: text} | arrays))  # type: ignore[arg-type]
    part.replace(path)


def load_fit(path: str | PathLike[str], kind: str) -> dict[str, Any]:
    """Read what ``save_fit`` wrote.

    Raises:
        ValueError: If the file is something else, damaged, or of another kind.
    """
    try:
        with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            values = dict(file)
        about = json.loads(values.pop(ABOUT).tobytes())
        found = about.pop("kind")
    except FileNotFoundError:
        raise
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} must be a file that `{kind}.save` wrote; it is another, or cut short. Save "
            "the fit again."
        ) from error
    if found != kind:
        raise ValueError(
            f"{path} must be a file that `{kind}.save` wrote; it holds a {found}. Load it with "
            f"`{found}.load`."
        )
    return values | about
