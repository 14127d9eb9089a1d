# SPDX-License-Identifier: Apache-2.0
r"""Standard deviations of parts of a guide, beside those that the curvature of the model asks for.

Let a part a of the latent values, in free values, be drawn from a Gaussian q by the guide, and let
g(a) be the expected log density of the model over the rest. The best Gaussian for a has the
precision :math:`-E_q \nabla^2 g(a)` at its own q. With u the draws of q, standardised,

.. math:: \log w(a) + \log q(a) = g(a) = c + b^T u - \tfrac12 u^T P u + \dots,

and least squares on draws of u gives :math:`P = -E_q \nabla_u^2 g`, since the rest of g is
orthogonal to polynomials of second degree under a Gaussian q. The same for log q gives its own
precision Q, exactly if it is Gaussian. P = Q where q is right; where its values are independent
the diagonals agree at best.

References:
    Opper and Archambeau, The Variational Gaussian Approximation Revisited, Neural Computation 2009.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DRAWS_PER_NUMBER = 2  # that least squares needs at least


def draws_needed(size: int) -> int:
    """Draws that the curvature in so many values needs at least."""
    return DRAWS_PER_NUMBER * (1 + size + size * (size + 1) // 2)


def sd_shares(
    values: NDArray[np.float64], log_guide: NDArray[np.float64], log_ratios: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Standard deviations of values (S, d) over those of the best Gaussian, shape (d,).

    NaN where draws are too few for all products of two values, or a curvature has no maximum.

    Args:
        values: The free values that were drawn.
        log_guide: Their log density in the guide, up to a constant, shape (S,).
        log_ratios: Log of model over guide at each draw, up to a constant, shape (S,).
    """
    num_draws, size = values.shape
    unknown = np.full(size, np.nan)
    if num_draws < draws_needed(size):
        return unknown
    first, second = np.triu_indices(size)
    scale = values.std(axis=0)
    if not size or not scale.all():  # points
        return unknown
    u = (values - values.mean(axis=0)) / scale
    terms = np.column_stack([np.ones(num_draws), u, u[:, first] * u[:, second]])
    both = np.stack([log_guide, log_guide + log_ratios], axis=1)
    found = np.linalg.lstsq(terms, both, rcond=None)[0][1 + size :]
    precisions = np.zeros((2, size, size))
    precisions[:, first, second] -= found.T  # a square counts once, a product of two twice
    precisions[:, second, first] -= found.T
    if np.linalg.eigvalsh(precisions).min() <= 0:
        return unknown
    guide, best = np.diagonal(np.linalg.inv(precisions), axis1=1, axis2=2)
    return np.asarray(np.sqrt(guide / best))
