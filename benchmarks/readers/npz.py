# SPDX-License-Identifier: Apache-2.0
"""Files of NumPy arrays that others have written."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.data.files import most_unpacked, unpacks_to_more

_DAMAGE = (  # what reading something else raises
    EOFError,
    NotImplementedError,
    OverflowError,
    RecursionError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npz(path: str | PathLike[str], names: tuple[str, ...]) -> list[NDArray[Any]]:
    """Read the arrays of these names from an npz file, as read-only views.

    Unlike ``np.load`` it takes no more memory than the arrays have in the file, whatever its
    headers say.

    Raises:
        ValueError: If one is not there, or the file is cut short or another, or if it unpacks to
            more than 100 times its size and 1 MiB.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.npz"
        >>> np.savez(path, x=np.arange(3), y=np.ones(2))
        >>> [array.tolist() for array in read_npz(path, ("y", "x"))]
        [[1.0, 1.0], [0, 1, 2]]
    """
    content = Path(path).read_bytes()
    most = most_unpacked(len(content))
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            files = [archive.getinfo(f"{name}.npy") for name in names]
            too_long = sum(file.file_size for file in files) > most
            arrays = [] if too_long else [_array(archive.read(file)) for file in files]
    except KeyError as error:
        need = f"must be an npz file with arrays {', '.join(names)}"
        raise ValueError(f"{path} {need}; got {error}.") from error
    except _DAMAGE:  # what NumPy says of it is no help
        need = f"must be a complete npz file with arrays {', '.join(names)}"
        raise ValueError(f"{path} {need}. The file may be cut short.") from None
    if too_long:
        raise unpacks_to_more(path, most, "Save its arrays with `np.savez`")
    return arrays


def _array(content: bytes) -> NDArray[Any]:
    """The array of an npy file, whose header is made to fit its length."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"format {version}")
    shape, is_fortran, dtype = _HEADERS[version](file)
    if min(shape, default=0) < 0:  # which NumPy would take for all there is
        raise ValueError(f"shape {shape}")
    array = np.frombuffer(content, dtype, math.prod(shape), file.tell())
    return array.reshape(shape, order="F" if is_fortran else "C")
