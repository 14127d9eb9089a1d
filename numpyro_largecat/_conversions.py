# SPDX-License-Identifier: Apache-2.0
"""Arrays of the types that the package computes with, made of what users give."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LARGEST_ID = 2**31 - 1  # of int32, the type of ids, and so of the sizes of plates
NO_ID = -1  # in arrays of ids, where a row has fewer than others


def as_array(values: Any) -> Any:
    """An array as it is, and what NumPy makes of a frame, a series, a tensor or a list."""
    return values if isinstance(values, (jax.Array, np.ndarray)) else np.asarray(values)


def with_arrays(arguments: Any) -> Any:
    """Turn what has ``__array__`` in a pytree, such as frames and tensors, into NumPy arrays."""
    return jax.tree.map(lambda x: as_array(x) if _is_like_array(x) else x, arguments)


def list_as_array(values: Any) -> Any:
    """Make an array of a list of numbers, or of such lists; anything else is left as it is."""
    return np.asarray(values) if _is_list_of_numbers(values) else values


def _is_like_array(value: Any) -> bool:
    return hasattr(value, "__array__") and not isinstance(value, (type, np.generic))


def _is_list_of_numbers(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(x, (int, float, np.number)) or _is_list_of_numbers(x) for x in values)
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


def as_ids(values: Any) -> jax.Array:
    """Integers of any type as int32; those that it cannot hold become -1, which is no id.

    What NumPy holds is looked at before JAX, without 64 bits, would cut off its upper half.
    """
    own: Any = jnp if isinstance(values, jax.Array) else np
    values = own.asarray(values)
    if values.dtype in (np.uint32, np.int64, np.uint64):
        values = own.where((values >= 0) & (values <= LARGEST_ID), values.astype(np.int32), -1)
    return jnp.asarray(values, jnp.promote_types(values.dtype, jnp.int32))


def as_ids_or_none(values: Any) -> jax.Array:
    """Ids as int32, where -1 stands for none; what int32 cannot hold becomes -2."""
    own, given = as_ids(values), jnp.asarray(values)
    may_be_none = not jnp.issubdtype(given.dtype, jnp.unsignedinteger)
    is_none = (given == NO_ID) if may_be_none else jnp.zeros(given.shape, bool)
    return jnp.where((own == NO_ID) & ~is_none, NO_ID - 1, own)
