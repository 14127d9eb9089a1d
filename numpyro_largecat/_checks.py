# SPDX-License-Identifier: Apache-2.0
"""Input checks shared by the package: shapes always, values where they are concrete."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_concrete(value: Any) -> bool:
    """Whether ``value`` holds numbers that can be looked at, rather than a tracer."""
    return not isinstance(value, jax.core.Tracer)


def check_count(name: str, value: Any, minimum: int) -> int:
    """Return ``value`` as a Python int of at least ``minimum``, or raise."""
    if isinstance(value, (bool, jax.Array)) or isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"`{name}` must be a Python int, since it fixes array shapes; "
            f"got {value!r} of type {type(value).__name__}."
        )
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(
            f"`{name}` must be a Python int; got {value!r} of type {type(value).__name__}."
        ) from None
    if count < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}; got {count}.")
    return count


def check_integers(name: str, values: Any) -> None:
    """Raise TypeError unless ``values`` has an integer dtype."""
    dtype = jnp.result_type(values)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"`{name}` must be integers; got dtype {dtype}. "
            "If they are whole numbers stored as floats, convert them with `.astype(int)`."
        )


def check_in_range(name: str, values: Any, size: int, meaning: str) -> None:
    """Raise ValueError at the first of ``values`` outside [0, size); tracers pass.

    Under ``jit`` values cannot be looked at; there a bad label makes the log probability NaN,
    which stops ``SubsampledSVI.run`` at that step.
    """
    if not is_concrete(values):
        return
    array = np.asarray(values)
    bad = (array < 0) | (array >= size)
    if bad.any():
        raise out_of_range(name, array, bad, size, meaning)


def out_of_range(
    name: str, values: np.ndarray, bad: np.ndarray, size: int, meaning: str
) -> ValueError:
    """Describe the first bad value of ``values``."""
    position = first_position(bad)
    return ValueError(
        f"`{name}` must be {meaning}, integers in [0, {size}); "
        f"got {values[position]} at position {position_text(position)} "
        f"({int(bad.sum())} of {bad.size} are out of range)."
    )


def first_position(mask: np.ndarray) -> tuple[int, ...]:
    """Index of the first True of ``mask`` in row-major order."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


def position_text(position: tuple[int, ...]) -> str:
    """Write (3,) as ``3``, () as ``()`` and (3, 4) as ``(3, 4)``."""
    return str(position[0]) if len(position) == 1 else str(position)


def check_finite(named_values: Iterable[tuple[str, Any]]) -> None:
    """Raise ValueError at the first NaN or infinite entry of any concrete float array."""
    for name, value in named_values:
        if not is_concrete(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            continue
        array = np.asarray(value)
        bad = ~np.isfinite(array)
        if bad.any():
            position = first_position(bad)
            raise ValueError(
                f"{name} must be finite; got {array[position]} at position "
                f"{position_text(position)} ({int(bad.sum())} of {bad.size} are not finite)."
            )
