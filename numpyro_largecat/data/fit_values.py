# SPDX-License-Identifier: Apache-2.0
"""Fits that are some arrays and plain values, such as topics, in folders of their own."""

from __future__ import annotations

from os import PathLike
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from numpyro_largecat.data.fit_folders import FitFolder


def save_fit(
    path: str | PathLike[str], kind: str, values: dict[str, Any], dtype: DTypeLike
) -> None:
    """Write arrays and values that JSON can hold; a fit that is there is replaced as a whole.

    Args:
        path: The folder.
        kind: Name of the class, by which ``load_fit`` knows the fit.
        values: What to write; the part of a name before a dot is that of an attribute of the fit.
        dtype: Float type that the fit computes in.

    Raises:
        OSError: If it cannot be written. What was there before is there still.
        ValueError: If the folder holds anything but fits.
    """
    folder = FitFolder(path, kind)
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in values.items() if name not in arrays}
    number = max([0, *(n + 1 for n in folder.numbers())])
    folder.write(number, arrays, {"dtype": str(np.dtype(dtype)), "plain": plain})


def load_fit(path: str | PathLike[str], kind: str, attributes: set[str]) -> dict[str, Any]:
    """Read what ``save_fit`` wrote, of a fit with these attributes.

    Raises:
        ValueError: If the folder has something else, or a fit that is damaged, of another kind or
            format, that lacks an attribute or has one more, or that computes in 64 bits where these
            are not enabled.
        FileNotFoundError: If there is no fit.
        OSError: If it cannot be read.
    """
    saved = FitFolder(path, kind).read()
    values = saved.arrays | saved.about["plain"]
    if differ := {name.partition(".")[0] for name in values} ^ attributes:
        raise ValueError(
            f"{path} must hold a {kind} of this version of numpyro_largecat; it differs in "
            f"{sorted(differ)}. Load it with the version that wrote it."
        )
    dtype = np.dtype(saved.about["dtype"])
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{path} has a fit that computes in {dtype}, and JAX would give other numbers in 32 "
            'bits. Call `jax.config.update("jax_enable_x64", True)` before you load it.'
        )
    return values
