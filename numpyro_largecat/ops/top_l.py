# SPDX-License-Identifier: Apache-2.0
"""The L largest log weights of each row."""

from __future__ import annotations

import jax
from jax import Array, lax


def top_l(log_weights: Array, num_active: int) -> tuple[Array, Array]:
    """Indices and values of the L largest entries of the last axis, largest first.

    Of equal entries the one with the lower index counts as larger. Gradients flow to the L entries
    alone. Cost: O(K) per row, and no scratch memory beside a copy of ``log_weights``.

    Args:
        log_weights: Log weights, shape (..., K).
        num_active: Number of entries L, a Python int in [1, K].

    Returns:
        Indices, int32 of shape (..., L), and values, shape (..., L).

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        arXiv:1609.07521, Algorithm 1 and Eq. 8.
    """
    values, indices = lax.top_k(log_weights, num_active)
    return indices.astype(jax.numpy.int32), values
