# SPDX-License-Identifier: Apache-2.0
"""Objects with a few numbers, passed to compiled functions as they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_finite


class Parameters:
    """A pytree of its attributes; Python ints, strings and None are static, the rest is data."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_node(cls, _flatten, partial(_unflatten, cls))

    def __repr__(self) -> str:
        """Show numbers, and the shapes of arrays."""
        values = {k: v if np.ndim(v) == 0 else f"{np.shape(v)}" for k, v in vars(self).items()}
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in values.items())})"


def positive(name: str, value: ArrayLike, meaning: str) -> np.ndarray:
    """Return positive finite numbers in float64, or raise."""
    array = np.asarray(value, np.float64)
    check_finite([(f"`{name}`", array)])
    if not (array > 0).all():
        raise ValueError(f"`{name}` must be positive, {meaning}; got {array.min()}.")
    return array


def positive_number(name: str, value: ArrayLike, meaning: str) -> np.ndarray:
    """Return one positive finite number in float64, shape (), or raise."""
    array = positive(name, value, meaning)
    if array.size != 1:
        raise ValueError(f"`{name}` must be one number, {meaning}; got shape {array.shape}.")
    return array.reshape(())


def _is_static(value: Any) -> bool:
    return value is None or isinstance(value, (int, str))


def _flatten(parameters: Parameters) -> tuple[list[Any], tuple[Any, ...]]:
    attributes = sorted(vars(parameters).items())
    data = [(name, value) for name, value in attributes if not _is_static(value)]
    static = tuple((name, value) for name, value in attributes if _is_static(value))
    return [value for _, value in data], (tuple(name for name, _ in data), static)


def _unflatten(cls: type[Any], names: tuple[Any, ...], values: Any) -> Any:
    parameters = object.__new__(cls)
    vars(parameters).update(zip(names[0], values, strict=True))
    vars(parameters).update(names[1])
    return parameters
