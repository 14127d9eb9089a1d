# SPDX-License-Identifier: Apache-2.0
"""ArviZ objects in files, whichever ArviZ there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pytest

import numpyro_largecat as lc
from numpyro_largecat.reading.to_arviz import arviz_from_groups
from tests.full_disk import full_disk


def make(value: float) -> Any:
    """An object of the installed ArviZ."""
    groups = {
        "posterior": {"w": np.full((1, 50, 3), value), "b": np.full((1, 50), value > 0)},
        "observed_data": {"y": np.arange(4)},
    }
    coords = {"classes": ["a", "b", "c"]}
    return arviz_from_groups(groups, coords, {"w": ["classes"], "y": ["data"]})


def check(path: Path, value: float) -> None:
    """The file holds the whole object."""
    data = az.from_netcdf(str(path))
    w = data["posterior"]["w"]
    np.testing.assert_array_equal(w, np.full((1, 50, 3), value))
    assert w.dims == ("chain", "draw", "classes") and w["classes"].values.tolist() == [*"abc"]
    assert data["posterior"]["b"].dtype == bool
    np.testing.assert_array_equal(data["observed_data"]["y"], np.arange(4))
    assert "created_at" in {**data.attrs, **data["posterior"].attrs}


def test_the_whole_object_is_read_again(tmp_path: Path) -> None:
    for value in (1.5, -2.5):
        lc.save_netcdf(make(value), tmp_path / f"{value}.nc")
        check(tmp_path / f"{value}.nc", value)


def test_a_file_from_which_an_object_reads_is_replaced(tmp_path: Path) -> None:
    """The object keeps its values, and may itself be the one that is written."""
    path = tmp_path / "fit.nc"
    lc.save_netcdf(make(1.5), path)
    opened = az.from_netcdf(str(path))
    lc.save_netcdf(opened, path)
    check(path, 1.5)
    lc.save_netcdf(make(2.5), path)
    np.testing.assert_array_equal(opened["posterior"]["w"], np.full((1, 50, 3), 1.5))


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, size: int) -> None:
    """And the process: HDF5 itself would end it."""
    path = tmp_path / "fit.nc"
    lc.save_netcdf(make(1.5), path)
    new = make(2.5)
    with full_disk(size), pytest.raises(OSError, match=r"fit\.nc could not be .*too large"):
        lc.save_netcdf(new, path)
    assert [p.name for p in tmp_path.iterdir()] == ["fit.nc"]
    check(path, 1.5)
    lc.save_netcdf(new, path)


def test_what_is_no_arviz_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"`data` must be what `to_arviz` returns; got 3, of type"):
        lc.save_netcdf(3, tmp_path / "fit.nc")
