# SPDX-License-Identifier: Apache-2.0
"""The L largest of K log weights, and the log of their sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_count, check_log_weights, check_shape


def top_l(log_weights: ArrayLike, num_active: int) -> tuple[Array, Array]:
    r"""Find the L largest log weights on the last axis, in descending order.

    For any log weights W, the distribution q with at most L outcomes that maximises

    .. math:: \sum_k q_k W_k - q_k \log q_k

    is the softmax of the L largest, and the maximum is the log of the sum of their exponentials,
    ``log_sum(values)``. Of equal weights those with the smallest index are taken.

    Neither result is differentiated: take the values again at the indices where gradients are
    needed, and only the L that count are.

    Cost: O(K) for each row in float32 on a CPU; other widths are sorted there, O(K log K).

    Args:
        log_weights: Log weights W in nats, shape (..., K). -inf is a weight of zero.
        num_active: Number of weights to keep L, a Python int in [1, K].

    Returns:
        The indices, int32, and the values, both of shape (..., L).

    Raises:
        ValueError: If ``num_active`` is outside [1, K]; or if a weight is NaN or +inf, with its
            position, outside ``jit``. Under ``jit`` NaN and +inf come first.
        TypeError: If ``num_active`` is no Python int, or the weights are not floats.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_largecat.ops.top_l import top_l
        >>> indices, values = top_l(jnp.array([0.0, 3.0, -1.0, 2.0]), 2)
        >>> indices.tolist(), values.tolist()
        ([1, 3], [3.0, 2.0])

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        Eq. 8 and Alg. 1.
    """
    weights = lax.stop_gradient(jnp.asarray(log_weights))
    check_shape("`log_weights`", weights, (..., "K"), "outcomes last", least=1)
    check_count("num_active", num_active, 1, weights.shape[-1], "number of outcomes")
    check_log_weights("`log_weights`", weights)
    indices = largest(weights, num_active)
    return indices, take_last(weights, indices)


def largest(weights: Array, num_active: int) -> Array:
    """Indices of the largest weights on the last axis, those that are NaN first.

    XLA does not say where its ``top_k`` puts NaN; lost there, it would not show in any result.
    """
    return lax.top_k(jnp.where(jnp.isnan(weights), jnp.inf, weights), num_active)[1]


def log_sum(log_weights: Array) -> Array:
    """Log of the sum of exp(W) over the last axis, with zero slope in weights that are -inf."""
    # A `where` that changes no value keeps what made them -inf out of the gradient.
    safe = jnp.where(jnp.isneginf(log_weights), -jnp.inf, log_weights)
    return jax.nn.logsumexp(safe, axis=-1)


def take_last(table: ArrayLike, indices: Array) -> Array:
    """Entries of ``table`` (..., K) at ``indices`` (..., L), where what is before them broadcasts.

    Cost: O(L) for each row, whatever K; no row of ``table`` is copied.
    """
    table = jnp.asarray(table)
    ndim = max(table.ndim, indices.ndim)
    table = table.reshape((1,) * (ndim - table.ndim) + table.shape)
    indices = indices.reshape((1,) * (ndim - indices.ndim) + indices.shape)
    return jnp.take_along_axis(table, indices, axis=-1)
