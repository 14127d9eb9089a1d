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

from numpyro_largecat._conversions import LARGEST_ID, NO_ID

CHECKED_AT_ONCE = 2**20  # entries of an array
DEFAULT_ACTIVE = 8  # topics or components: next to dense for most data


class BadDataError(ValueError):
    """Data or labels that no model could take, whatever it is: not finite, or out of range."""


class UnsuitedModelError(ValueError):
    """A model, guide or minibatch that a loss is not for, as its numbers show."""


def is_concrete(value: Any) -> bool:
    """Whether ``value`` holds numbers that can be looked at, rather than a tracer."""
    return not isinstance(value, jax.core.Tracer)


def is_traced(tree: Any) -> bool:
    """Whether an array of a pytree is under a transformation such as ``jit`` or ``vmap``."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def describe(value: Any) -> str:
    """What a value is, for a message: short, and of an array its dtype and shape alone."""
    if hasattr(value, "dtype") and np.ndim(value):
        kind = f"a {type(value).__name__}" if hasattr(value, "tocsr") else "an array"  # sparse
        return f"{kind} of {value.dtype} of shape {np.shape(value)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    if text.startswith("<"):  # an address says nothing
        return f"a {type(value).__name__}"
    return f"{text[:60]}{'...' * (len(text) > 60)}, of type {type(value).__name__}"


def check_key(key: Any) -> None:
    """Raise TypeError unless ``rng_key`` is one JAX random key, of either kind, and no tracer."""
    if not is_concrete(key):
        raise TypeError(
            "`rng_key` must be a key outside of compiled code, since batches are read in a loop; "
            "got a tracer. Call it outside `jit`, `vmap` and `grad`."
        )
    check_random_key(key)


def check_random_key(key: Any) -> None:
    """Raise TypeError unless ``rng_key`` is one JAX random key, or a tracer of one."""
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and key.ndim == 0:
        return
    if dtype == np.uint32 and np.shape(key) == jnp.shape(jax.random.PRNGKey(0)):
        return
    raise TypeError(
        f"`rng_key` must be one JAX random key; got {describe(key)}. Make one with "
        "`jax.random.key(0)`."
    )


def check_count(
    name: str, value: Any, minimum: int, maximum: int = LARGEST_ID, of_what: str = "largest int32"
) -> int:
    """Return ``value`` as a Python int in [minimum, maximum], or raise."""
    try:
        count = None if isinstance(value, (bool, jax.Array)) else operator.index(value)
    except TypeError:
        count = None
    if count is None:
        need = "a Python int, since it fixes array shapes"
        raise TypeError(f"`{name}` must be {need}; got {describe(value)}.")
    if count < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}; got {count}.")
    if count > maximum:
        raise ValueError(f"`{name}` must be at most {maximum}, the {of_what}; got {count}.")
    return count


def check_num_active(num_active: Any, size: int, of_what: str) -> int:
    """Return the number L of active topics or components, in [1, K], or raise; K is ``size``.

    None is 8, or K if that is less.
    """
    if num_active is None:
        return min(DEFAULT_ACTIVE, size)
    return check_count("num_active", num_active, 1, size, f"number of {of_what}")


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], form: str) -> None:
    """Raise TypeError unless ``value`` is of a kind; ``form`` is how users write it."""
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` must be {form}; got {describe(value)}.")


def check_interval(name: str, value: float, interval: str, meaning: str = "") -> None:
    """Raise ValueError unless a number is in ``interval``, such as ``"[0, 1)"``; NaN is in none."""
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    if not (above and below):
        need = f"{interval}, {meaning}" if meaning else interval
        raise ValueError(f"`{name}` must be in {need}; got {value}.")


def check_shape(
    name: str, values: Any, need: tuple[Any, ...], meaning: str, fix: str = "", *, least: int = 0
) -> None:
    """Raise ValueError unless an array has the shape ``need``.

    In ``need`` a letter is an axis of any size from ``least`` on, and ``...`` in front any axes.
    """
    shape = np.shape(values)
    sizes = need[1:] if need[:1] == (...,) else need
    axes = shape[max(len(shape) - len(sizes), 0) :] if sizes is not need else shape
    if len(axes) == len(sizes) and all(
        own >= least if isinstance(size, str) else own == size
        for own, size in zip(axes, sizes, strict=True)
    ):
        return
    text = ", ".join("..." if size is ... else str(size) for size in need)
    text = f"({text}{',' * (len(need) == 1)})"
    if least:
        letters = " and ".join(size for size in sizes if isinstance(size, str))
        text += f" with {letters} at least {least}"
    fix = f" {fix}" if fix else ""
    raise ValueError(f"{name} must have shape {text}, {meaning}; got shape {shape}.{fix}")


def check_broadcasts(
    name: str, values: Any, whole: tuple[int, ...], meaning: str, fix: str = ""
) -> None:
    """Raise ValueError unless an array broadcasts to ``whole``, and has no more axes."""
    if not fits(np.shape(values), whole):
        fix = f" {fix}" if fix else ""
        need = f"must broadcast to shape {whole}, {meaning}"
        raise ValueError(f"{name} {need}; got shape {np.shape(values)}.{fix}")


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
    refuse_entries(f"`{name}`", array, array <= 0, f"positive, {meaning}")
    return array


def check_integers(name: str, values: Any) -> None:
    """Raise TypeError unless ``values`` has an integer dtype."""
    try:
        dtype = values.dtype if isinstance(values, jax.Array) else np.asarray(values).dtype
    except ValueError as error:  # from NumPy, of lists of different lengths
        raise ValueError(
            f"`{name}` must be an array, of rows of one length; got {describe(values)}. Pad "
            "shorter rows where -1 stands for none, see `lc.data.padded_lists`."
        ) from error
    if not jnp.issubdtype(dtype, jnp.integer):
        fix = "If they are whole numbers stored as floats, convert them with `.astype(int)`."
        if np.dtype(dtype).kind == "b":
            fix = "Of two classes make 0 and 1, `array.astype(int)`."
        if np.dtype(dtype).kind in "OUS":
            fix = "Of names make ids, `names, ids = np.unique(array, return_inverse=True)`."
        raise TypeError(f"`{name}` must be integers; got dtype {dtype}. {fix}")


def fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array of ``shape`` broadcasts to ``whole``, and has no more axes."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(size in (1, other) for size, other in pairs)


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
    bad, need = (array < 0) | (array >= size), f"{meaning}, integers in [0, {size})"
    refuse_entries(name, array, bad, need, error=BadDataError)


def check_ids_or_none(name: str, values: Any, size: int, meaning: str) -> None:
    """Raise BadDataError at the first of ``values`` outside [0, size) but -1; tracers pass."""
    if is_concrete(values):
        array = np.asarray(values)
        need = f"{meaning}, integers in [0, {size}), or -1 for none"
        refuse_entries(name, array, (array < NO_ID) | (array >= size), need, error=BadDataError)


def refuse_entries(
    name: str,
    values: Any,
    bad: Any,
    need: str,
    fix: str = "",
    *,
    error: type[ValueError] = ValueError,
) -> None:
    """Raise at the first entry of ``values`` that is ``bad``, if there is one."""
    num_bad = int(np.sum(bad))
    if num_bad:
        raise error(describe_bad(name, values, bad, need, num_bad, np.size(bad), fix=fix))


def describe_bad(
    name: str,
    values: Any,
    bad: Any,
    need: str,
    num_bad: int,
    num_all: int,
    *,
    start: int = 0,
    fix: str = "",
) -> str:
    """The message for bad entries, of which ``values`` has the first, in row-major order.

    ``start`` is the row of all that were looked at where ``values`` begins.
    """
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), np.shape(bad)))
    got = f"{np.asarray(values)[place]}"
    if place:
        place = (start + place[0], *place[1:])
        got += f" at position {place[0] if len(place) == 1 else place}"
        got += f", and {num_bad} of {num_all} are not"
    return f"{name} must be {need}; got {got}.{fix and ' ' + fix}"


def check_finite(named_values: Iterable[tuple[str, Any]]) -> None:
    """Raise BadDataError at the first NaN or infinite entry of any concrete float array.

    A float64 that float32 does not hold is infinite where 64 bits are not enabled.

    Cost: O(size) time; memory for a few rows, since data may fill most of it.
    """
    for name, value in named_values:
        if not is_concrete(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            continue
        array = value if isinstance(value, jax.Array) and value.ndim else np.atleast_1d(value)
        size = max(1, CHECKED_AT_ONCE * len(array) // max(array.size, 1))
        starts = range(0, len(array), size)
        parts = (array[i : i + size] if size < len(array) else array for i in starts)
        num_bad = [int(not_finite(part).sum()) for part in parts]
        if any(num_bad):
            start = next(i for i, num in zip(starts, num_bad, strict=True) if num)
            part = np.asarray(array[start : start + size])
            need = "finite"
            if np.isfinite(part).all():
                need = "at most 3.4e38 in float32 (or enable 64 bits)"
            bad, how_many = not_finite(part), (sum(num_bad), array.size)
            raise BadDataError(describe_bad(name, part, bad, need, *how_many, start=start))


def not_finite(values: Any) -> np.ndarray:
    """Which entries are NaN, or infinite on a device."""
    with np.errstate(over="ignore"):
        array = np.asarray(values)
        found: np.ndarray = ~np.isfinite(array.astype(jax.dtypes.canonicalize_dtype(array.dtype)))
    return found


def why_not_taken(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> TypeError | None:
    """What the signature of ``fn`` says against these arguments; None if nothing."""
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except ValueError:  # it has no signature
        return None
    except TypeError as error:
        return error
    return None


def check_arguments(fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Refuse arrays among the arguments of a model that are not finite, or overflow, by name.

    Raises:
        ValueError: With the argument, the position and the value.
        TypeError: If an array holds text or objects, such as names in place of ids.
    """
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
    for name, array in arrays:
        if isinstance(array, np.ndarray) and array.dtype.kind in "OUS":
            raise TypeError(
                f"{name} must be an array of numbers; got one of dtype {array.dtype}. Give ids, "
                "`names, ids = np.unique(array, return_inverse=True)`."
            )
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
    refuse_entries(name, array, repeats, "distinct on the last axis")


def check_log_weights(name: str, values: Any) -> None:
    """Raise ValueError at the first log weight that is NaN or +inf; tracers pass, and so does -inf.

    Raises:
        TypeError: If the weights are not floats.
    """
    if not jnp.issubdtype(jnp.result_type(values), jnp.floating):
        raise TypeError(f"{name} must be floats, log weights in nats; got {values.dtype}.")
    if is_concrete(values):
        array = np.asarray(values)
        refuse_entries(name, array, np.isnan(array) | (array == np.inf), "below +inf, and not NaN")
