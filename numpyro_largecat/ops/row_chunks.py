# SPDX-License-Identifier: Apache-2.0
"""A function of many rows, evaluated for some of them at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def map_rows(fn: Callable[[Array], Any], num_rows: int, chunk_size: int) -> Any:
    """Evaluate ``fn(rows)`` for all rows, ``chunk_size`` of them at most in memory at once.

    What a chunk computes on the way is computed again for its gradient, not kept.

    Cost: that of ``fn`` on all rows, and again for the gradient if there is more than one chunk;
    memory of one chunk, and of the results.

    Args:
        fn: Function of row numbers, int32, shape (C,), whose results have these rows in front. It
            must take each row by itself.
        num_rows: Number of rows, a Python int.
        chunk_size: Most rows in a chunk, a Python int of at least 1.

    Returns:
        Results of ``fn`` with ``num_rows`` rows.
    """
    if num_rows <= chunk_size:
        return fn(jnp.arange(num_rows, dtype=jnp.int32))
    num_chunks = -(-num_rows // chunk_size)
    size = -(-num_rows // num_chunks)
    rows = jnp.arange(num_chunks * size, dtype=jnp.int32)
    rows = jnp.minimum(rows, num_rows - 1).reshape(num_chunks, size)  # the last chunk is padded
    by_chunk = lax.map(jax.checkpoint(fn), rows)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_rows], by_chunk)
