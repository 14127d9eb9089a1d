# SPDX-License-Identifier: Apache-2.0
"""Files of fits: what comes back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_largecat as lc
from numpyro_largecat.data.fit_files import ABOUT, load_fit, save_fit

VALUES: dict[str, Any] = {
    "size": 3,
    "name": None,
    "w": np.arange(6.0).reshape(2, 3),
    "part": "A",
    "part.x": 0.5,
}
NAMES = {"size", "name", "w", "part"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_fit(tmp_path / "fit", "Fit", VALUES, np.float32)
    return tmp_path / "fit"


def rewrite(path: Path, change: dict[str, Any], drop: str = "", **arrays: np.ndarray) -> None:
    """Change what a file says about itself, and its arrays."""
    with np.load(path) as file:
        content = dict(file)
    about = json.loads(content.pop(ABOUT).tobytes()) | change
    kept = {name: value for name, value in (content | arrays).items() if name != drop}
    about.pop(drop, None)
    with path.open("wb") as file:
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        np.savez(file, **{ABOUT: text}, **kept)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e5m2", "int4", "float16", ">f8", "complex64", "bool", "uint64"]
)
def test_arrays_keep_their_type(dtype: str, tmp_path: Path) -> None:
    """Also those that NumPy's files have no name for."""
    array = np.array([[1, 0, 3], [-2, 2, 5]]).astype(jnp.dtype(dtype))
    save_fit(tmp_path / "fit", "Fit", {"w": array}, np.float32)
    found = load_fit(tmp_path / "fit", "Fit", {"w"})["w"]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_files_cut_short_or_changed_are_refused(path: Path) -> None:
    """At each length, and wherever a byte of an array is another."""
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"`Fit\.save` wrote; it is another, or cut short"):
            load_fit(path, "Fit", NAMES)
    array = VALUES["w"].tobytes()
    directory = content.rindex(b"PK\1\2")
    changed = [content.replace(array, array[::-1])]
    for place in (10, 16, 42):  # of the last entry: its compression, checksum and start
        at = directory + place
        changed.append(content[:at] + b"\xff" * 2 + content[at + 2 :])
    for other in changed:
        path.write_bytes(other)
        with pytest.raises(ValueError, match=r"`Fit\.save` wrote; it is another, or cut short"):
            load_fit(path, "Fit", NAMES)


@pytest.mark.parametrize("drop", ["kind", "version", "dtype", "arrays", "plain", "w"])
def test_files_that_lack_something_are_refused(path: Path, drop: str) -> None:
    rewrite(path, {}, drop)
    with pytest.raises(ValueError, match=r"`Fit\.save` wrote; it is another, or cut short"):
        load_fit(path, "Fit", NAMES)


@pytest.mark.parametrize("names", [NAMES - {"size"}, NAMES | {"u"}])
def test_files_of_other_attributes_are_refused(path: Path, names: set[str]) -> None:
    with pytest.raises(ValueError, match=r"`Fit\.save` wrote; it is another, or cut short"):
        load_fit(path, "Fit", names)


def test_an_array_that_is_not_listed_is_refused(path: Path) -> None:
    rewrite(path, {}, x=np.zeros(2))
    with pytest.raises(ValueError, match=r"`Fit\.save` wrote; it is another, or cut short"):
        load_fit(path, "Fit", NAMES)


def test_files_of_a_later_format_are_refused(path: Path) -> None:
    """Whatever else they hold."""
    rewrite(path, {"version": 2, "arrays": None})
    with pytest.raises(ValueError, match=r"must have format 1, .*; it has 2\. Load it with the"):
        load_fit(path, "Fit", NAMES)


def test_a_file_that_cannot_be_opened_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IsADirectoryError):
        load_fit(tmp_path, "Fit", NAMES)
    with pytest.raises(FileNotFoundError):
        load_fit(tmp_path / "none", "Fit", NAMES)

    def refused(*arguments: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)  # root may read any file
    with pytest.raises(PermissionError):
        load_fit(tmp_path / "fit", "Fit", NAMES)


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


def test_fits_in_float32_are_loaded_with_64_bits(tmp_path: Path) -> None:
    for found in small_fits():
        found.save(tmp_path / "fit")
        with jax.enable_x64(True):
            again = type(found).load(tmp_path / "fit")
        for name, value in vars(found).items():
            if isinstance(value, (np.ndarray, jax.Array)):
                assert getattr(again, name).dtype == value.dtype
