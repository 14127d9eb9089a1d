# SPDX-License-Identifier: Apache-2.0
"""Priors as objects with a few numbers, which compiled functions take as they are."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_finite, check_shape, describe

T = TypeVar("T", bound="Hyperparameters")
OWN_MODULE = __name__.rpartition(".")[0]  # from which our families and priors are imported


class Hyperparameters:
    """A pytree of its attributes; Python ints, strings and None are static, the rest is data."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_node(cls, _flatten, partial(_make, cls))

    def __repr__(self) -> str:
        """Show numbers, and the shapes of arrays."""
        values = {k: v if np.ndim(v) == 0 else f"{np.shape(v)}" for k, v in vars(self).items()}
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in values.items())})"


def to_values(name: str, prior: Hyperparameters) -> dict[str, Any]:
    """The class and the attributes of a prior, by names that start with ``name``.

    Raises:
        TypeError: If an attribute is something that a file of arrays cannot hold.
    """
    own = {f"{name}.{k}": v for k, v in vars(prior).items()}
    return {name: _path(type(prior))} | {k: _storable(k, v) for k, v in own.items()}


def _storable(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (int, float, str)):
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # such as lists of different lengths
        array = np.asarray(None)
    if array.dtype != bool and not jnp.issubdtype(array.dtype, jnp.number):
        need = "a number, a string, None or an array of numbers, to be saved"
        raise TypeError(f"`{name}` must be {need}; got {describe(value)}.")
    return array


def from_values(name: str, base: type[T], values: dict[str, Any]) -> T:
    """The prior that ``to_values`` took apart, of a subclass of ``base`` that is defined now.

    Raises:
        ValueError: If there is no such class, or several.
    """
    found, start = _class_of(base, values[name]), f"{name}."
    own = {k.removeprefix(start): v for k, v in values.items() if k.startswith(start)}
    return _make(found, (tuple(own), ()), own.values())


def _class_of(base: type[T], path: str) -> type[T]:
    known = _subclasses(base)
    classes = [cls for cls in known if _path(cls) == path]
    if len(classes) > 1:
        classes = [cls for cls in classes if _is_current(cls)]
        if not classes:
            raise ValueError(
                f"the fit has a {path}, and several subclasses of {base.__name__} have that name. "
                "Define it once, at the top of a module."
            )
    if not classes:
        last = path.rpartition(".")[2]
        alike = [_path(cls) for cls in known if cls.__name__ == last]
        others = f"; it is not {' or '.join(alike)}" if alike else ""
        raise ValueError(
            f"the fit has a {path}, and no subclass of {base.__name__} has that name{others}. "
            "Define or import it first, from where the fit had it."
        )
    return classes[0]


def _path(cls: type[Hyperparameters]) -> str:
    """Module and name of a class; of ours the module without its file, which may move."""
    is_own = cls.__module__.startswith(f"{OWN_MODULE}.")
    return f"{OWN_MODULE if is_own else cls.__module__}.{cls.__qualname__}"


def _is_current(cls: type[Hyperparameters]) -> bool:
    """Whether its name stands for it, and not for what a cell that ran again has defined since."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls


def _subclasses(cls: type[T]) -> list[type[T]]:
    found = [below for sub in cls.__subclasses__() for below in (sub, *_subclasses(sub))]
    return list(dict.fromkeys(found))  # some by several bases


def vector(name: str, value: ArrayLike, size: int) -> np.ndarray:
    """Return a finite vector of ``size`` numbers in float64, or raise."""
    array = np.asarray(value, np.float64)
    check_finite([(f"`{name}`", array)])
    check_shape(f"`{name}`", array, (max(size, 1),), "a number for each column")
    return array


def positive_definite(name: str, value: ArrayLike) -> np.ndarray:
    """Return a positive definite matrix in float64, or raise."""
    matrix = np.asarray(value, np.float64)
    check_finite([(f"`{name}`", matrix)])
    check_shape(f"`{name}`", matrix, 2 * (max(len(np.atleast_1d(matrix)), 1),), "a square matrix")
    alike = np.isclose(matrix, matrix.T, rtol=1e-4, atol=1e-6 * np.abs(matrix).max())
    if not alike.all():
        i, j = np.argwhere(~alike)[0].tolist()
        got = f"{matrix[i, j]:.6g} at {(i, j)} and {matrix[j, i]:.6g} at {(j, i)}"
        raise ValueError(f"`{name}` must be symmetric; got {got}.")
    smallest = np.linalg.eigvalsh(matrix)[0]
    if smallest <= 0:
        raise ValueError(
            f"`{name}` must be positive definite; got a matrix with eigenvalue {smallest:.3g}. "
            "Add a small multiple of the identity."
        )
    return matrix


def _is_static(value: Any) -> bool:
    return value is None or isinstance(value, (int, str))


def _flatten(prior: Hyperparameters) -> tuple[list[Any], tuple[Any, ...]]:
    attributes = sorted(vars(prior).items())
    data = [(name, value) for name, value in attributes if not _is_static(value)]
    static = tuple((name, value) for name, value in attributes if _is_static(value))
    return [value for _, value in data], (tuple(name for name, _ in data), static)


def _make(cls: type[T], names: tuple[Any, ...], values: Any) -> T:
    prior = object.__new__(cls)
    vars(prior).update(zip(names[0], values, strict=True))
    vars(prior).update(names[1])
    return prior
