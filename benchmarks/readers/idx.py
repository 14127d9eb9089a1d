# SPDX-License-Identifier: Apache-2.0
"""The idx format of unsigned bytes, in which MNIST is published."""

from __future__ import annotations

import math
import sys
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.data.files import open_binary

_IDX_UNSIGNED_BYTE = 0x08
_MOST_AXES = 64  # of a NumPy array


def read_idx(path: str | PathLike[str]) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, the format of MNIST.

    Shapes: whatever the file says, (60000, 28, 28) for the MNIST training images.

    Args:
        path: The file, plain or compressed with gzip.

    Returns:
        The array in the file, a read-only view of its bytes.

    Raises:
        ValueError: If the file is not an idx file of unsigned bytes or has the wrong length.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "labels-idx1-ubyte"
        >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
        >>> read_idx(path).tolist()
        [7, 2, 1]
    """
    with open_binary(path) as file:
        content = file.read()
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _IDX_UNSIGNED_BYTE:
        raise ValueError(
            f"{path} must be an idx file of unsigned bytes, which starts with the bytes 00 00 08; "
            f"got a file that starts with {content[:3].hex(' ') or 'nothing'}."
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError(
            f"{path} must have a header of {start} bytes for its {content[3]} axes; "
            f"got {len(content)} bytes in all. The file may be cut short."
        )
    shape = tuple(np.frombuffer(content[4:start], ">u4").tolist())
    size = math.prod(shape)
    if len(shape) > _MOST_AXES or math.prod(filter(None, shape)) > sys.maxsize:
        raise ValueError(
            f"{path} must have at most {_MOST_AXES} axes, with {sys.maxsize} entries; got shape "
            f"{shape}. The file may be damaged."
        )
    if len(content) - start != size:
        raise ValueError(
            f"{path} must have {size} bytes after its header, for its shape {shape}; "
            f"got {len(content) - start}. The file may be cut short."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
