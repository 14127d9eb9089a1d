# SPDX-License-Identifier: Apache-2.0
"""Expectations of the augmented log joint under a Gaussian for the error of the chosen class."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

ElementWise = Callable[[Array], Array]  # of errors


def log_joint(
    error: Array, distances: Array, weights: Array, log_density: ElementWise, log_cdf: ElementWise
) -> Array:
    r"""Log joint of the choice and its error, on a weighted subset of the other classes.

    .. math:: f(\varepsilon) = \log\phi(\varepsilon)
              + \sum_m w_m \log\Phi(\varepsilon + \psi_y - \psi_m)

    Shapes: ``error`` (...); ``distances`` psi_y - psi_m and ``weights`` (..., M); the result (...).

    References:
        Ruiz et al., Augment and Reduce, ICML 2018, Eq. 6.
    """
    # Phi(inf) = 1 leaves out what has no weight, in value and in gradient.
    below = jnp.where(weights != 0, error[..., None] + distances, jnp.inf)
    return log_density(error) + (weights * log_cdf(below)).sum(axis=-1)


def gaussian_nodes(num_nodes: int) -> tuple[list[float], list[float]]:
    """Nodes and weights with which sums are expectations under a standard Normal distribution.

    Exact for polynomials up to degree ``2 * num_nodes - 1`` (Gauss-Hermite).
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    return nodes.tolist(), (weights / weights.sum()).tolist()


def gaussian_error_bound(loc: Array, scale: Array, joint: ElementWise, num_nodes: int) -> Array:
    r"""Bound log p(y | psi) from below with q = Normal(loc, scale) for the error.

    .. math:: E_q[f(\varepsilon)] + \log \mathrm{scale} + \tfrac12 \log(2 \pi e)

    Cost: ``num_nodes`` evaluations of ``joint``, one at a time.

    References:
        Ruiz et al., Augment and Reduce, ICML 2018, Eq. 7, with nodes in place of draws.
    """
    nodes, weights = gaussian_nodes(num_nodes)
    pairs = zip(nodes, weights, strict=True)
    expected = sum(weight * joint(loc + scale * node) for node, weight in pairs)
    return expected + jnp.log(scale) + 0.5 * math.log(2 * math.pi * math.e)


def expected_derivatives(
    loc: Array, scale: Array, joint: ElementWise, num_nodes: int
) -> tuple[Array, Array]:
    r"""Expectations of the first two derivatives of ``joint`` under Normal(loc, scale).

    They are the derivatives of E_q[joint] in the location and, doubled, in the variance. The second
    is taken from the first (Stein's identity), which makes both exact derivatives of the sum over
    nodes in ``gaussian_error_bound``, at one derivative for each node:

    .. math:: E_q[f''(\varepsilon)] = E_q[f'(\varepsilon) (\varepsilon - \mathrm{loc})]
              / \mathrm{scale}^2

    Cost: ``num_nodes`` evaluations of the derivative of ``joint``; at least two nodes.
    """
    nodes, weights = gaussian_nodes(num_nodes)
    slope, curvature = jnp.zeros_like(loc), jnp.zeros_like(loc)
    for node, weight in zip(nodes, weights, strict=True):
        _, at_node = jax.jvp(joint, (loc + scale * node,), (jnp.ones_like(loc),))
        slope, curvature = slope + weight * at_node, curvature + weight * node * at_node
    return slope, curvature / scale
