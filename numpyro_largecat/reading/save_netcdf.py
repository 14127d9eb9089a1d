# SPDX-License-Identifier: Apache-2.0
"""ArviZ objects in files that are replaced as a whole."""

from __future__ import annotations

from os import PathLike
from typing import Any

from numpyro_largecat._checks import describe
from numpyro_largecat.data.replace_file import replace_file


def save_netcdf(data: Any, path: str | PathLike[str]) -> None:
    """Write what ``to_arviz`` returns to a file, which ``arviz.from_netcdf`` reads.

    Unlike the object's own ``to_netcdf``, this leaves a file that is there as it is until the new
    one is whole, so neither a full disk nor the end of the process loses both. A full disk is an
    exception; HDF5 would end the process. A file from which another object still reads may be
    replaced, and that object goes on reading the old one.

    Cost: the size of the file in memory, and twice on disk.

    Args:
        data: ``arviz.InferenceData`` with ArviZ 0.23, ``xarray.DataTree`` with ArviZ 1.
        path: The file. If it is there, the new one has its permissions.

    Raises:
        TypeError: If ``data`` is something else.
        OSError: If the file cannot be written. What was there before is there still.

    Example:
        >>> import pathlib, tempfile, xarray
        >>> import numpyro_largecat as lc
        >>> data = xarray.DataTree.from_dict({"posterior": xarray.Dataset({"w": ("draw", [1, 2])})})
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "fit.nc"
        >>> lc.save_netcdf(data, path)
        >>> xarray.load_dataset(path, group="posterior")["w"].values.tolist()
        [1, 2]
    """
    tree = data.to_datatree() if hasattr(data, "to_datatree") else data
    if not hasattr(tree, "to_netcdf"):
        raise TypeError(f"`data` must be what `to_arviz` returns; got {describe(data)}.")
    replace_file(path, tree.to_netcdf(engine="h5netcdf"))
