# SPDX-License-Identifier: Apache-2.0
"""Fits of arrays and values: what comes back, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_largecat as lc
from numpyro_largecat.data.fit_values import load_fit, save_fit

VALUES: dict[str, Any] = {
    "size": 3,
    "name": None,
    "w": np.arange(6.0).reshape(2, 3),
    "part": "A",
    "part.x": 0.5,
}
NAMES = {"size", "name", "w", "part"}


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e5m2", "int4", "float16", ">f8", "complex64", "bool", "uint64"]
)
def test_arrays_keep_their_type(dtype: str, tmp_path: Path) -> None:
    """Also those that NumPy's files have no name for; bytes in another order are turned round."""
    array = np.array([[1, 0, 3], [-2, 2, 5]]).astype(jnp.dtype(dtype))
    save_fit(tmp_path, "Fit", {"w": array}, np.float32)
    found = load_fit(tmp_path, "Fit", {"w"})["w"]
    assert found.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, array)


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    save_fit(tmp_path, "Fit", VALUES, np.float32)
    found = load_fit(tmp_path, "Fit", NAMES)
    np.testing.assert_array_equal(found.pop("w"), VALUES["w"])
    assert found == {name: value for name, value in VALUES.items() if name != "w"}


@pytest.mark.parametrize("names", [NAMES - {"size"}, NAMES | {"u"}])
def test_fits_of_other_attributes_are_refused(tmp_path: Path, names: set[str]) -> None:
    save_fit(tmp_path, "Fit", VALUES, np.float32)
    with pytest.raises(ValueError, match=r"it differs in \['(size|u)'\]\. Load it with the"):
        load_fit(tmp_path, "Fit", names)


def small_fits() -> list[Any]:
    """One of each kind, of the float type that is enabled now."""
    key, x, options = jax.random.key(0), jnp.eye(3), {"progress_bar": False, "num_passes": 1}
    family = lc.mixtures.DiagonalGaussianFamily(np.zeros(3), np.ones(3))
    corpus = lc.data.Corpus.from_documents([["sea", "ship"], ["moon", "star"]] * 4)
    rule = lc.double_sum.ImplicitSGD(1.0)
    return [
        lc.fit_mixture(key, x, 2, family, **options),
        lc.fit_topics(key, corpus, 2, **options),
        lc.fit_double_sum(key, x, jnp.arange(3), 3, rule, **options),
    ]


@pytest.mark.slow
def test_fits_in_float64_need_64_bits(tmp_path: Path) -> None:
    """They would give other numbers without; those in float32 may be loaded with."""
    with jax.enable_x64(True):
        fits = small_fits()
    for found in fits:
        found.save(tmp_path / "fit")
        with pytest.raises(ValueError, match=r'in float64, .* `jax\.config\.update\("jax_enable_'):
            type(found).load(tmp_path / "fit")
        with jax.enable_x64(True):
            again = type(found).load(tmp_path / "fit")
        for name, value in vars(found).items():
            if isinstance(value, (np.ndarray, jax.Array)):
                assert getattr(again, name).dtype == value.dtype
                np.testing.assert_array_equal(getattr(again, name), value)


@pytest.mark.slow
def test_fits_in_float32_are_loaded_with_64_bits(tmp_path: Path) -> None:
    for found in small_fits():
        found.save(tmp_path / "fit")
        with jax.enable_x64(True):
            again = type(found).load(tmp_path / "fit")
        for name, value in vars(found).items():
            if isinstance(value, (np.ndarray, jax.Array)):
                assert getattr(again, name).dtype == value.dtype
