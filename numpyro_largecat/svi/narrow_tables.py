# SPDX-License-Identifier: Apache-2.0
"""Tables that are stored in bfloat16, and computed with in the type that they were made in.

They are stored as the bits of bfloat16, 16-bit integers: with JAX 0.10, writing a few rows of
bfloat16 itself makes a float32 copy of the whole table on a CPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_largecat.ops.random_rounding import round_to_bfloat16

ROUNDING_STREAM = 0x726F756E  # keeps the bits of rounding apart from keys that `split` makes


def check_table_dtype(dtype: Any) -> None:
    """Refuse a type for tables other than bfloat16, or None for that which they are made in."""
    try:
        is_known = dtype is None or jnp.dtype(dtype) == jnp.bfloat16
    except TypeError:
        is_known = False
    if not is_known:
        raise ValueError(
            "`table_dtype` must be jnp.bfloat16, or None to store tables in the type that they "
            f"are made in; got {dtype!r}."
        )


def narrow_tables(state: Any, owners: list[str | None]) -> Any:
    """Store the leaves of an optimiser's state that are tables as bits of bfloat16.

    Args:
        state: The state as it was made.
        owners: For each leaf the parameter whose rows it has, None for others.
    """
    leaves, tree = jax.tree.flatten(state)
    for i, owner in enumerate(owners):
        if owner is not None and jnp.issubdtype(leaves[i].dtype, jnp.floating):
            leaves[i] = _bits(leaves[i].astype(jnp.bfloat16))
    return jax.tree.unflatten(tree, leaves)


def widen(values: Any, computed: Any) -> Any:
    """Values of a state in the types that are computed with: O(size), and nothing if they are.

    Args:
        values: A state, or the rows of one.
        computed: A tree of the same structure with those types.
    """

    def to_type_of(x: Any, like: Any) -> Any:
        if not _is_narrow(x, like):
            return x
        return lax.bitcast_convert_type(x, jnp.bfloat16).astype(like.dtype)

    return jax.tree.map(to_type_of, values, computed)


def narrow(values: Any, stored: Any, rng_key: Array) -> Any:
    """Values of a state as they are stored, rounded at random; the inverse of ``widen``.

    Args:
        values: A state, or the rows of one, as computed.
        stored: A tree of the same structure with the types that are stored.
        rng_key: Key of the step.
    """
    leaves, tree = jax.tree.flatten(values)
    pairs = list(zip(leaves, jax.tree.leaves(stored), strict=True))
    if not any(_is_narrow(like, x) for x, like in pairs):
        return values
    salts = random.bits(random.fold_in(rng_key, ROUNDING_STREAM), (len(pairs),), jnp.uint32)
    for i, (x, like) in enumerate(pairs):
        if _is_narrow(like, x):
            leaves[i] = _bits(round_to_bfloat16(x, salts[i]))
    return jax.tree.unflatten(tree, leaves)


def _is_narrow(stored: Any, computed: Any) -> bool:
    """Whether an array is stored as bits of floating point numbers that are computed with."""
    return bool(stored.dtype == jnp.uint16 and jnp.issubdtype(computed.dtype, jnp.floating))


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint16)
