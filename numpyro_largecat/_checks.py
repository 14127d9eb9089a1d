# SPDX-License-Identifier: Apache-2.0
"""Input checks shared by the package: shapes always, values where they are concrete."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CHECKED_AT_ONCE = 2**20  # entries of an array
DEFAULT_ACTIVE = 8  # topics or components: next to dense for most data
MOST = 2**31 - 1  # largest int32: ids, and so the sizes of plates, are of this type


class BadDataError(ValueError):
    """Data or labels that no model could take, whatever it is: not finite, or out of range."""


def is_concrete(value: Any) -> bool:
    """Whether ``value`` holds numbers that can be looked at, rather than a tracer."""
    return not isinstance(value, jax.core.Tracer)


def describe(value: Any) -> str:
    """What a value is, for a message: short, and of an array its dtype and shape alone."""
    if hasattr(value, "dtype") and np.ndim(value):
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
    """Return ``value`` as a Python int in [minimum, 2**31), or raise."""
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
    if count > MOST:
        raise ValueError(
            f"`{name}` must be at most {MOST}, the largest integer of 32 bits, which ids and "
            f"counts have; got {count}."
        )
    return count


def check_num_active(num_active: Any, size: int, of_what: str) -> int:
    """Return the number L of active topics or components, in [1, K], or raise; K is ``size``.

    None is 8, or K if that is less.
    """
    if num_active is None:
        return min(DEFAULT_ACTIVE, size)
    count = check_count("num_active", num_active, 1)
    if count > size:
        raise ValueError(
            f"`num_active` must be at most {size}, the number of {of_what}; got {count}."
        )
    return count


def check_kind(name: str, value: Any, kind: type, form: str) -> None:
    """Raise TypeError unless ``value`` is of a kind; ``form`` is how users write it."""
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` must be {form}; got {describe(value)}.")


def check_one_of(name: str, value: Any, known: tuple[str, ...], *, or_else: str = "") -> None:
    """Raise ValueError unless ``value`` is one of some strings; ``or_else`` is what else may be."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, known))}{or_else}; got "
            f"{describe(value)}."
        )


def as_positive(
    name: str, values: Any, meaning: str, shape: tuple[int, ...] | None = ()
) -> np.ndarray:
    """Return positive finite numbers in float64, or raise.

    They are one number, of shape (), or of ``shape``; of any shape if that is None.
    """
    array = np.asarray(values, np.float64)
    if shape is not None and array.shape not in ((), shape):
        need = "one number" + f" or have shape {shape}" * (shape != ())
        raise ValueError(f"`{name}` must be {need}, {meaning}; got shape {array.shape}.")
    check_finite([(f"`{name}`", array)])
    if not (array > 0).all():
        raise ValueError(f"`{name}` must be positive, {meaning}; got {array.min()}.")
    return array


def check_integers(name: str, values: Any) -> None:
    """Raise TypeError unless ``values`` has an integer dtype."""
    dtype = values.dtype if isinstance(values, jax.Array) else np.asarray(values).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"`{name}` must be integers; got dtype {dtype}. "
            "If they are whole numbers stored as floats, convert them with `.astype(int)`."
        )


def as_jax_array(values: Any) -> jax.Array:
    """Make an array of a type that JAX has enabled now.

    JAX keeps what it has traced by NumPy's type: inside of ``jit``, ``jnp.asarray`` of a NumPy
    array of 64 bits, first in and then out of ``enable_x64``, is still one of 64.
    """
    if isinstance(values, (np.ndarray, np.generic)):
        values = values.astype(jnp.result_type(values), copy=False)
    return jnp.asarray(values)


def as_float_array(values: Any) -> jax.Array:
    """Make an array of floats, also of whole numbers."""
    array = as_jax_array(values)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(jnp.result_type(float))


def fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array of ``shape`` broadcasts to ``whole``, and has no more axes."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(size in (1, other) for size, other in pairs)


def as_ids(values: Any) -> jax.Array:
    """Integers of any type as int32; those that it cannot hold become -1, which is no id.

    What NumPy holds is looked at before JAX, without 64 bits, would cut off its upper half.
    """
    own: Any = jnp if isinstance(values, jax.Array) else np
    values = own.asarray(values)
    if values.dtype in (np.uint32, np.int64, np.uint64):
        values = own.where((values >= 0) & (values <= MOST), values.astype(np.int32), -1)
    return jnp.asarray(values, jnp.promote_types(values.dtype, jnp.int32))


def check_no_overflow(named_values: Iterable[tuple[str, Any]]) -> None:
    """Raise BadDataError at the first NumPy array of integers that JAX's would not hold.

    Cost: O(size) time, no copy.
    """
    for name, value in named_values:
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or not value.size:
            continue
        limits = np.iinfo(jax.dtypes.canonicalize_dtype(value.dtype))
        if value.max() > limits.max or value.min() < limits.min:
            raise BadDataError(
                f"{name} holds integers in [{value.min()}, {value.max()}], and {limits.dtype} "
                f"holds those in [{limits.min}, {limits.max}]. Enable 64 bits with "
                "`jax.config.update('jax_enable_x64', True)`; as ids of classes or rows such "
                "numbers are too large."
            )


def check_in_range(name: str, values: Any, size: int, meaning: str) -> None:
    """Raise BadDataError at the first of ``values`` outside [0, size); tracers pass.

    Under ``jit`` values cannot be looked at; there a bad label makes the log probability NaN,
    which stops ``SubsampledSVI.run`` at that step.
    """
    if not is_concrete(values):
        return
    array = np.asarray(values)
    bad = (array < 0) | (array >= size)
    if bad.any():
        raise out_of_range(name, array, size, meaning, num_bad=int(bad.sum()), num_all=bad.size)


def out_of_range(
    name: str, values: Any, size: int, meaning: str, *, num_bad: int, num_all: int, start: int = 0
) -> BadDataError:
    """The error for ids that are not in [0, size), of which ``values`` has the first.

    ``start`` is the place of ``values`` among all that were looked at.
    """
    array = np.asarray(values)
    first = _first(array, (array < 0) | (array >= size), start)
    return BadDataError(
        f"{name} must be {meaning}, integers in [0, {size}); got {first}, and {num_bad} of "
        f"{num_all} are out of range."
    )


def check_known(name: str, values: Any, known: Any) -> None:
    """Raise BadDataError at the first of ``values`` that is not in ``known``; tracers pass."""
    if not is_concrete(values) or not is_concrete(known):
        return
    array = np.asarray(values)
    bad = ~np.isin(array, np.asarray(known))
    if bad.any():
        raise BadDataError(
            f"{name} must be among the labels of the class plate; got class {_first(array, bad)}. "
            "Give the plate the same labels: `class_plate(..., labels=y)`."
        )


def _first(values: np.ndarray, bad: np.ndarray, start: int = 0) -> str:
    """Say where the first bad value is, in row-major order, and what it is.

    ``values`` and ``bad`` are the rows from ``start`` on of all that were looked at.
    """
    position = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
    value = values[position]
    position = (start + position[0], *position[1:]) if position else ()
    return f"{value} at position {position[0] if len(position) == 1 else position}"


def check_finite(named_values: Iterable[tuple[str, Any]]) -> None:
    """Raise BadDataError at the first NaN or infinite entry of any concrete float array.

    Cost: O(size) time; memory for a few rows, since data may fill most of it.
    """
    for name, value in named_values:
        if not is_concrete(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            continue
        array = value if isinstance(value, jax.Array) and value.ndim else np.atleast_1d(value)
        size = max(1, CHECKED_AT_ONCE * len(array) // max(array.size, 1))
        starts = range(0, len(array), size)
        parts = (array[i : i + size] if size < len(array) else array for i in starts)
        num_bad = [int((~np.isfinite(np.asarray(part))).sum()) for part in parts]
        if any(num_bad):
            start = next(i for i, num in zip(starts, num_bad, strict=True) if num)
            part = np.asarray(array[start : start + size])
            raise BadDataError(
                f"{name} must be finite; got {_first(part, ~np.isfinite(part), start)}, and "
                f"{sum(num_bad)} of {array.size} are not finite."
            )


def check_arguments(fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Refuse arrays among the arguments of a model that are not finite, or overflow, by name."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or one that the function itself will refuse
        bound = {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
    arrays = [
        (f"`{name}{jax.tree_util.keystr(path)}`", leaf)
        for name, value in bound.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
        if isinstance(leaf, (np.ndarray, jax.Array, float))
    ]
    check_finite(arrays)
    check_no_overflow(arrays)


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
