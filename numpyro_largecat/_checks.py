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


def describe(value: Any) -> str:
    """What a value is, for a message: short, and of an array its dtype and shape alone."""
    if np.ndim(value) and hasattr(value, "dtype"):
        return f"an array of {value.dtype} of shape {np.shape(value)}"
    text = repr(value)
    return f"{text[:60]}{'...' * (len(text) > 60)}, of type {type(value).__name__}"


def check_key(name: str, key: Any) -> None:
    """Raise TypeError unless ``key`` is one JAX random key, of either kind, and no tracer."""
    if not is_concrete(key):
        raise TypeError(
            f"`{name}` must be a key outside of compiled code, since batches are read in a loop; "
            "got a tracer. Call it outside `jit`, `vmap` and `grad`."
        )
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and key.ndim == 0:
        return
    if dtype == np.uint32 and np.shape(key) == jnp.shape(jax.random.PRNGKey(0)):
        return
    raise TypeError(
        f"`{name}` must be one JAX random key; got {describe(key)}. Make one with "
        "`jax.random.key(0)`."
    )


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
    dtype = jnp.result_type(np.asarray(values) if isinstance(values, (list, tuple)) else values)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"`{name}` must be integers; got dtype {dtype}. "
            "If they are whole numbers stored as floats, convert them with `.astype(int)`."
        )


def as_array(values: Any) -> jax.Array:
    """Make an array of a type that JAX has enabled now.

    JAX keeps what it has traced by NumPy's type: inside of ``jit``, ``jnp.asarray`` of a NumPy
    array of 64 bits, first in and then out of ``enable_x64``, is still one of 64.
    """
    if isinstance(values, (np.ndarray, np.generic)):
        values = values.astype(jnp.result_type(values), copy=False)
    return jnp.asarray(values)


def widen(values: Any) -> jax.Array:
    """Cast integers of few bits to 32, so that they can be compared with a number of classes."""
    values = as_array(values)
    return values.astype(jnp.promote_types(values.dtype, jnp.int32))


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
        raise ValueError(
            f"{name} must be {meaning}, integers in [0, {size}); got {_first(array, bad)}, "
            f"and {int(bad.sum())} of {bad.size} are out of range."
        )


def check_known(name: str, values: Any, known: Any) -> None:
    """Raise ValueError at the first of ``values`` that is not in ``known``; tracers pass."""
    if not is_concrete(values) or not is_concrete(known):
        return
    array = np.asarray(values)
    bad = ~np.isin(array, np.asarray(known))
    if bad.any():
        raise ValueError(
            f"{name} must be among the labels of the class plate; got class {_first(array, bad)}. "
            "Give the plate the same labels: `class_plate(..., labels=y)`."
        )


def _first(values: np.ndarray, bad: np.ndarray) -> str:
    """Say where the first bad value is, in row-major order, and what it is."""
    position = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
    place = str(position[0]) if len(position) == 1 else str(position)
    return f"{values[position]} at position {place}"


def check_finite(named_values: Iterable[tuple[str, Any]]) -> None:
    """Raise ValueError at the first NaN or infinite entry of any concrete float array."""
    for name, value in named_values:
        if not is_concrete(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            continue
        array = np.asarray(value)
        bad = ~np.isfinite(array)
        if bad.any():
            raise ValueError(
                f"{name} must be finite; got {_first(array, bad)}, and {int(bad.sum())} of "
                f"{bad.size} are not finite."
            )


def check_distinct(name: str, values: Any) -> None:
    """Raise ValueError at the first of ``values`` that repeats on the last axis; tracers pass."""
    if not is_concrete(values):
        return
    array = np.asarray(values)
    order = np.argsort(array, axis=-1, kind="stable")
    in_order = np.take_along_axis(array, order, axis=-1)
    repeats = np.zeros(array.shape, bool)
    np.put_along_axis(repeats, order[..., 1:], in_order[..., 1:] == in_order[..., :-1], axis=-1)
    if repeats.any():
        raise ValueError(
            f"{name} must be distinct on the last axis; got {_first(array, repeats)} a second time."
        )


def check_weights(name: str, values: Any) -> None:
    """Raise ValueError at the first log weight that is NaN or +inf; tracers pass, and so does -inf.

    Raises:
        TypeError: If the weights are not floats.
    """
    if not jnp.issubdtype(jnp.result_type(values), jnp.floating):
        raise TypeError(f"{name} must be floats, log weights in nats; got {values.dtype}.")
    if not is_concrete(values):
        return
    array = np.asarray(values)
    bad = np.isnan(array) | (array == np.inf)
    if bad.any():
        raise ValueError(
            f"{name} must be below +inf, and not NaN; got {_first(array, bad)}, and "
            f"{int(bad.sum())} of {bad.size} are not."
        )
