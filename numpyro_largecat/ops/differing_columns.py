# SPDX-License-Identifier: Apache-2.0
"""Which columns of a matrix are others when it starts one column later."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


@jax.jit
def differing_columns(first: Array, later: Array, again: Array) -> Array:
    """Whether each column but the first differs from the one it has in a later start.

    Columns are compared up to rounding, which follows the largest entry of a row. What has noise,
    and so differs from itself, is not compared.

    Cost: O(entries).

    Args:
        first: Columns 0, 1, ..., shape (..., M); NaN is equal to NaN.
        later: The columns 1, 2, ... of the same matrix, shape (..., M).
        again: Those of ``first`` with other noise, shape (..., M).

    Returns:
        Booleans of shape (M - 1,), for columns 1 to M - 1.

    Example:
        >>> import jax.numpy as jnp
        >>> a = jnp.array([[4.0, 5.0, 6.0]])
        >>> differing_columns(a, jnp.array([[5.0, 6.5, 7.0]]), a).tolist()
        [False, True]
    """
    is_fixed = ((first == again) | (jnp.isnan(first) & jnp.isnan(again))).all()
    a, b = first[..., 1:], later[..., :-1]
    size = jnp.where(jnp.isfinite(a), jnp.abs(a), 0)
    near = jnp.abs(a - b) <= 200 * jnp.finfo(a.dtype).eps * size.max(axis=-1, keepdims=True)
    same = near | (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    return ~same.reshape(-1, a.shape[-1]).all(axis=0) & is_fixed
