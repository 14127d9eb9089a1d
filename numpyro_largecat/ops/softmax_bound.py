# SPDX-License-Identifier: Apache-2.0
"""The Augment & Reduce bound of the softmax on a weighted subset of classes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.ops.log_cdf import gumbel_log_cdf


@jax.jit
def log_eta_hat(utilities: Array, label_rows: Array, weights: Array) -> Array:
    r"""Estimate log eta* = log(1 + sum_{k != y} exp(psi_k - psi_y)) from a subset of classes.

    .. math:: \log \hat\eta = \log \sum_m w_m \exp(\psi_m) - \psi_y

    The label's own term, with weight 1, is the 1 of eta*. The sum is an unbiased estimate of eta*;
    its logarithm is not one of log eta*.

    Where psi_y = -inf the result means nothing, but is finite.

    Cost: O(B M).

    Args:
        utilities: Utilities psi of the subset, shape (..., M).
        label_rows: Row of the label in the subset, integers in [0, M), shape (...).
        weights: Weights of the rows, shape (M,), zero for padding, one for labels.

    Returns:
        log eta_hat >= 0, shape (...).

    References:
        Ruiz et al., Augment and Reduce, ICML 2018, section 3.1.
    """
    highest = _highest(jnp.where(weights > 0, utilities, -jnp.inf))[..., None]
    below = utilities - lax.stop_gradient(jnp.where(jnp.isfinite(highest), highest, 0))
    # A row of weight 0 may be far above the others: its exponential must not overflow.
    exponentials = jnp.exp(jnp.where(weights > 0, below, -jnp.inf))
    own = take_row(below, label_rows)
    total = exponentials @ weights.astype(utilities.dtype)
    log_total = jnp.log(jnp.where(total > 0, total, 1))  # 0 where no class is available
    return log_total - jnp.where(own > -jnp.inf, own, 0)


def _highest(values: Array) -> Array:
    """Highest entry of the last axis.

    JAX 0.10 takes several times longer for an entry of a reduction where a row has more than 512.
    """
    while values.shape[-1] > 512:
        half = (values.shape[-1] + 1) // 2
        values = jnp.maximum(values[..., :half], values[..., -half:])
    return values.max(axis=-1)


@jax.jit
def log_variance_of_sum(log_terms: Array, weights: Array) -> Array:
    r"""Estimate log Var[sum_m w_m exp(x_m)] over draws of the classes.

    .. math:: \sum_m w_m (w_m - 1) \, e^{2 x_m}

    Its mean is the variance if each class is drawn with probability 1 / w, whatever others are. Of
    classes drawn without replacement or in layers it is more than that: of S terms that are alike
    1 / S of the square of their sum, where the variance is 0.

    Cost: O(B M).

    Args:
        log_terms: x, shape (..., M).
        weights: Weights of the terms, shape (..., M) or (M,); those of at most 1 are in each draw.

    Returns:
        The logarithm, -inf where no term is drawn, shape (...).

    References:
        Horvitz and Thompson, A Generalization of Sampling Without Replacement From a Finite
        Universe, JASA 1952 (for draws that are independent of each other).
    """
    weights = weights.astype(log_terms.dtype)
    return jax.nn.logsumexp(2 * log_terms, b=jnp.maximum(weights * (weights - 1), 0), axis=-1)


@jax.jit
def softmax_bound(log_eta_hat: Array, u: Array) -> Array:
    r"""Bound log p(y | psi) from below with one local variable u per observation.

    .. math:: \log p(y \mid \psi) \ge 1 - u - \exp(-u)\,\eta^*, \qquad u = \log\eta,

    with equality at u = log eta*. Given u it is linear in eta*, so an unbiased estimate of eta*
    gives an unbiased estimate of the bound.

    References:
        Ruiz et al., Augment and Reduce, ICML 2018, Eq. 8, with u = log eta.
    """
    # -exp(log_eta_hat - u), which goes on as a straight line where it would overflow
    return 1.0 - u + gumbel_log_cdf(u - log_eta_hat)


@jax.custom_jvp
def take_row(utilities: Array, rows: Array) -> Array:
    """Entry ``rows`` of the last axis, with no scatter in its gradient."""
    return jnp.take_along_axis(utilities, rows[..., None], axis=-1)[..., 0]


@take_row.defjvp
def _take_row_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    utilities, rows = primals
    is_row = jnp.arange(utilities.shape[-1]) == rows[..., None]
    return take_row(utilities, rows), jnp.where(is_row, tangents[0], 0).sum(axis=-1)
