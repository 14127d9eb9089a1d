# SPDX-License-Identifier: Apache-2.0
"""Which columns of two matrices differ by more than rounding."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

NUM_EPS = 200  # of the largest entry of a row


def differing_columns(a: Array, b: Array) -> Array:
    """Whether each column of ``a`` differs from that of ``b``, both (..., M), shape (M,).

    Rounding follows the largest finite entry of a row, whose offset may be large. NaN is equal to
    NaN.

    Cost: O(entries).

    Example:
        >>> import jax.numpy as jnp
        >>> differing_columns(jnp.array([[5.0, 6.0]]), jnp.array([[5.0, 6.5]])).tolist()
        [False, True]
    """
    size = jnp.where(jnp.isfinite(a), jnp.abs(a), 0).max(axis=-1, keepdims=True)
    near = jnp.abs(a - b) <= NUM_EPS * jnp.finfo(a.dtype).eps * size
    same = near | (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    return ~same.reshape(-1, a.shape[-1]).all(axis=0)
