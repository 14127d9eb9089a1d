# SPDX-License-Identifier: Apache-2.0
"""Files of fits: arrays and a few plain values in one ``.npz``, without pickle."""

from __future__ import annotations

import errno
import json
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

ABOUT = "about"  # entry of the file that holds what is no array, as JSON
VERSION = 1  # of the format
DAMAGE = (  # what reading something else raises
    AttributeError,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)
USER_DEFINED = 2  # ``isbuiltin`` of types that NumPy itself does not know, such as bfloat16


def save_fit(
    path: str | PathLike[str], kind: str, values: dict[str, Any], dtype: DTypeLike
) -> None:
    """Write arrays and values that JSON can hold; a file that is there is replaced as a whole.

    Arrays of types that NumPy does not know, such as bfloat16, are in the file as float32, which
    holds them exactly, and have their type again when they are read.

    Args:
        path: The file.
        kind: Name of the class, by which ``load_fit`` knows the file.
        values: What to write; the part of a name before a dot is that of an attribute of the fit.
        dtype: Float type that the fit computes in.
    """
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    about = {
        "kind": kind,
        "version": VERSION,
        "dtype": str(np.dtype(dtype)),
        "arrays": {name: str(array.dtype) for name, array in arrays.items()},
        "plain": {name: value for name, value in values.items() if name not in arrays},
    }
    for name, array in arrays.items():
        if array.dtype.isbuiltin == USER_DEFINED:
            arrays[name] = array.astype(np.float32)
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:  # to a name, NumPy would add another ending
        np.savez(file, **({ABOUT: text} | arrays))  # type: ignore[arg-type]
    part.replace(path)


def load_fit(path: str | PathLike[str], kind: str, attributes: set[str]) -> dict[str, Any]:
    """Read what ``save_fit`` wrote, of a fit with these attributes.

    Raises:
        ValueError: If the file is something else, damaged, of another kind or format, if it lacks
            an attribute or has one more, or if its fit computes in 64 bits that are not enabled.
        OSError: If the file is not there, or cannot be opened.
    """
    with Path(path).open("rb") as raw, _told(path, kind):
        with np.load(raw, allow_pickle=False) as file:
            arrays = dict(file)
        about = json.loads(arrays.pop(ABOUT).tobytes())
        found, version = about["kind"], about["version"]
    if found != kind:
        raise ValueError(
            f"{path} must be a file that `{kind}.save` wrote; it holds a {found}. Load it with "
            f"`{found}.load`."
        )
    if version != VERSION:
        raise ValueError(
            f"{path} must have format {VERSION}, which this version of numpyro_largecat reads; it "
            f"has {version}. Load it with the version that wrote it."
        )
    with _told(path, kind):
        dtype, dtypes = np.dtype(about["dtype"]), about["arrays"]
        if dtypes.keys() != arrays.keys():
            raise KeyError(*dtypes.keys() ^ arrays.keys())
        arrays = {n: a.astype(np.dtype(dtypes[n]), copy=False) for n, a in arrays.items()}
        values = arrays | about["plain"]
        if differ := {name.partition(".")[0] for name in values} ^ attributes:
            raise KeyError(*differ)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{path} has a fit that computes in {dtype}, and JAX would give other numbers in 32 "
            'bits. Call `jax.config.update("jax_enable_x64", True)` before you load it.'
        )
    return values


@contextmanager
def _told(path: str | PathLike[str], kind: str) -> Iterator[None]:
    """Say of what is raised that the file is none of this kind."""
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise  # it says itself what is wrong; a place before the file's start is damage
        raise ValueError(
            f"{path} must be a file that `{kind}.save` wrote; it is another, or cut short. Save "
            "the fit again."
        ) from error
