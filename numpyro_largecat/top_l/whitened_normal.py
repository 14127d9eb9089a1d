# SPDX-License-Identifier: Apache-2.0
"""A multivariate normal given by the matrix that whitens it, for many values of few normals."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.linalg import solve_triangular
from numpyro.distributions import constraints

from numpyro_largecat.handlers.sites import without_expand


class WhitenedNormal(dist.Distribution):
    r"""Multivariate normal with ``whitening``, the inverse of a Cholesky factor of its covariance.

    .. math:: \log p(x) = \log |P| - \tfrac{1}{2} \| P (x - \mathrm{loc}) \|^2
              - \tfrac{D}{2} \log 2 \pi

    Values cost a matrix product in place of a triangular solve, which XLA does an order of
    magnitude slower on a CPU.

    Args:
        loc: Means, shape (A, B, D), where A and B may be 1 or missing, as in the others.
        whitening: Lower triangular matrices P, shape (A, B, D, D).
        log_det: Log determinants of ``whitening``, shape (A, B).
        batch_shape: (A, B), or any shape as long as no value is evaluated.
    """

    arg_constraints = {
        "loc": constraints.real_vector,
        "whitening": constraints.real_matrix,
        "log_det": constraints.real,
    }
    support = constraints.real_vector

    def __init__(
        self, loc: Array, whitening: Array, log_det: Array, batch_shape: tuple[int, ...]
    ) -> None:
        self.loc = loc
        self.whitening = whitening
        self.log_det = log_det
        super().__init__(batch_shape, whitening.shape[-1:], validate_args=False)

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        """Log density, for values of shape (A, B, D), where A and B may be 1."""
        del intermediates
        matrix, loc = _with_axes(self.whitening, 4), _with_axes(self.loc, 3)
        if matrix.shape[0] == 1:  # the same for all A, which become the columns of a product
            centred = value.transpose(1, 2, 0) - loc.transpose(1, 2, 0)  # (B, D, A)
            distance = ((matrix[0] @ centred) ** 2).sum(axis=1).T
        elif matrix.shape[1] == 1:  # the same for all B
            centred = value.transpose(0, 2, 1) - loc.transpose(0, 2, 1)  # (A, D, B)
            distance = ((matrix[:, 0] @ centred) ** 2).sum(axis=1)
        else:
            centred = value - loc
            distance = ((matrix @ centred[..., None]) ** 2).sum(axis=(-2, -1))
        # A select, which changes no value, ends a fusion of XLA's CPU compiler that would make the
        # product four times as slow.
        distance = jnp.where(jnp.isnan(distance), jnp.nan, distance)
        log_volume = 0.5 * self.event_shape[0] * math.log(2 * math.pi)
        return self.log_det - 0.5 * distance - log_volume


def _with_axes(array: Array, ndim: int) -> Array:
    return array.reshape((1,) * (ndim - array.ndim) + array.shape)


def whiten(distribution: dist.Distribution, num_values: int) -> dist.Distribution:
    """Turn a batch of normals into that form, and leave other distributions as they are.

    Normals that differ between observations stay too, unless they have many values each.

    Cost: O(D^3) for each covariance.

    Args:
        distribution: Distribution with the components on the last axis of its batch shape.
        num_values: Number of log densities that are needed.
    """
    normal = without_expand(distribution)
    if type(normal) is not dist.MultivariateNormal:
        return distribution
    factor = normal.scale_tril
    num_factors, size = math.prod(factor.shape[:-2]), factor.shape[-1]
    if num_factors > max(distribution.batch_shape[-1], num_values // size):
        return distribution
    identity = jnp.broadcast_to(jnp.eye(size, dtype=factor.dtype), factor.shape)
    whitening = solve_triangular(factor, identity, lower=True)
    log_det = -jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)
    return WhitenedNormal(normal.loc, whitening, log_det, distribution.batch_shape)
