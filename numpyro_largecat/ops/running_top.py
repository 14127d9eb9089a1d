# SPDX-License-Identifier: Apache-2.0
"""The largest values of rows that come in chunks, and which they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 32  # entries of which the largest is found first


class RunningTop(NamedTuple):
    """The largest values so far, best first."""

    values: Array  # (..., n)
    classes: Array  # (..., n), int32

    @staticmethod
    def start(batch_shape: tuple[int, ...], num_top: int, dtype: Any) -> RunningTop:
        """Nothing yet: values of -inf."""
        values = jnp.full((*batch_shape, num_top), -jnp.inf, dtype)
        return RunningTop(values, jnp.zeros(values.shape, jnp.int32))

    def include(self, values: Array, classes: Array) -> RunningTop:
        """Take in ``values``, shape (..., M), of ``classes``, shape (M,).

        The n largest of M values are in the n blocks of ``BLOCK`` with the largest maxima, so that
        only these blocks are sorted.

        Cost: O(M + n (BLOCK + log n)) for each row.
        """
        num_top, num_values = self.values.shape[-1], values.shape[-1]
        num_blocks = -(-num_values // BLOCK)
        if num_blocks <= 2 * num_top:
            found, places = lax.top_k(values, min(num_top, num_values))
        else:
            if num_values % BLOCK:
                blank = [(0, 0)] * (values.ndim - 1) + [(0, num_blocks * BLOCK - num_values)]
                values = jnp.pad(values, blank, constant_values=-jnp.inf)
            blocks = values.reshape((*values.shape[:-1], num_blocks, BLOCK))
            _, best = lax.top_k(blocks.max(axis=-1), num_top)
            inside = jnp.take_along_axis(blocks, best[..., None], axis=-2)
            found, place = lax.top_k(inside.reshape((*values.shape[:-1], -1)), num_top)
            block = jnp.take_along_axis(best, place // BLOCK, axis=-1)
            places = jnp.minimum(block * BLOCK + place % BLOCK, num_values - 1)
        ids = jnp.asarray(classes, jnp.int32)[places]
        values, place = lax.top_k(jnp.concatenate([self.values, found], axis=-1), num_top)
        ids = jnp.concatenate([self.classes, ids], axis=-1)
        return RunningTop(values, jnp.take_along_axis(ids, place, axis=-1))
