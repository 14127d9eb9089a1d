# SPDX-License-Identifier: Apache-2.0
"""Logs of sums of exponentials that may have no terms, with derivatives in both modes.

Without terms the log is -inf. JAX's own functions have the derivative NaN there, in forward mode.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def log_sum_of_any(values: Array) -> Array:
    """Log of the sum of the exponentials over the last axis."""
    is_nothing = (values == -jnp.inf).all(axis=-1)
    found = jax.nn.logsumexp(jnp.where(is_nothing[..., None], 0, values), axis=-1)
    return jnp.where(is_nothing, -jnp.inf, found)


def log_add(one: Array, other: Array) -> Array:
    """Log of the sum of two exponentials."""
    is_nothing = (one == -jnp.inf) & (other == -jnp.inf)
    found = jnp.logaddexp(*(jnp.where(is_nothing, 0, x) for x in (one, other)))
    return jnp.where(is_nothing, -jnp.inf, found)
