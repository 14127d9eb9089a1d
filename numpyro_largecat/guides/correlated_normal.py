# SPDX-License-Identifier: Apache-2.0
"""A normal with a covariance, given by scales and by how each entry follows those before it."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, random
from jax.scipy.linalg import solve_triangular
from numpyro.distributions import constraints
from numpyro.distributions.distribution import ExpandedDistribution, Independent
from numpyro.distributions.kl import kl_divergence
from numpyro.distributions.util import sum_rightmost

from numpyro_largecat.handlers.sites import without_axes
from numpyro_largecat.ops.lower_triangle import FullTriangle, LowRankTriangle


class CorrelatedNormal(dist.Distribution):
    r"""Normal of the D entries of a value, which are correlated.

    .. math:: x = \mathrm{loc} + \mathrm{scale} \cdot (I + \mathrm{lower}) \, \epsilon, \qquad
              \epsilon \sim N(0, I)

    over the last ``joint_dim`` axes of the value, as one. If these are more than its event, log
    densities have one number for each entry of the others, that of the entry given those before
    it: they sum to the log density of all.

    Shapes: values as ``loc``; ``event_shape`` has its last ``event_dim`` axes.

    Cost: O(D^2) for a draw and for its log density. Where ``lower`` has rank R, O(D^2 R) and for a
    variance O(D^2 R^2), in products with one matrix for all rows, and memory of O(D R^2) for each.
    A value from elsewhere takes a triangular solve.

    Args:
        loc: Means, shape (..., D axes).
        scale: Standard deviations, of each entry given those before it, shape as ``loc``.
        lower: Strictly lower triangular matrices, (..., D, D), full or of low rank.
        event_dim: Number of axes of an event, at most ``joint_dim``.
        joint_dim: Number of the last axes of ``loc`` that have D entries together.
    """

    arg_constraints = {
        "loc": constraints.real,
        "scale": constraints.positive,
    }
    reparametrized_params = ["loc", "scale"]
    pytree_data_fields = ("loc", "scale", "lower")
    pytree_aux_fields = ("joint_dim",)

    def __init__(
        self,
        loc: Array,
        scale: Array,
        lower: FullTriangle | LowRankTriangle,
        *,
        event_dim: int,
        joint_dim: int,
    ) -> None:
        self.loc, self.scale, self.lower = loc, scale, lower
        self.joint_dim = joint_dim
        split = loc.ndim - event_dim
        super().__init__(loc.shape[:split], loc.shape[split:], validate_args=False)

    @property
    def support(self) -> Any:
        """All real values of the shape of an event."""
        return constraints.independent(constraints.real, self.event_dim)

    @property
    def mean(self) -> Array:
        """The mean, ``loc``."""
        return self.loc

    @property
    def variance(self) -> Array:
        """Variance of each entry."""
        follows = self.lower.squared_norms().reshape(self.loc.shape)
        return self.scale**2 * (1 + follows)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw values, shape ``sample_shape + loc.shape``."""
        return self.sample_with_intermediates(key, sample_shape)[0]

    def sample_with_intermediates(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> tuple[Array, list[Array]]:
        """Draw values, and give the noise that they are made of, which their log density needs."""
        noise = random.normal(key, (*sample_shape, *self.lower.shape), self.loc.dtype)
        standard = noise + self.lower.apply(noise)
        value = self.loc + self.scale * standard.reshape(*sample_shape, *self.loc.shape)
        return value, [noise]

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        """Log density; of each entry given those before it, where the batch has some of them."""
        noise = intermediates[0] if intermediates else self._noise(value)
        noise = noise.reshape(*jnp.shape(value))
        log_prob = -0.5 * noise**2 - jnp.log(self.scale) - 0.5 * math.log(2 * math.pi)
        return sum_rightmost(log_prob, self.event_dim)

    def _noise(self, value: Array) -> Array:
        joint, matrix = self.lower.shape[-1], self.lower.matrix
        standard = (value - self.loc) / self.scale
        rows = standard.shape[: standard.ndim - self.joint_dim]
        lower = jnp.broadcast_to(matrix, (*rows, joint, joint))
        own = jnp.eye(joint, dtype=matrix.dtype)
        standard = standard.reshape(*rows, joint, 1)
        return solve_triangular(lower + own, standard, lower=True, unit_diagonal=True)


def _divergence(p: CorrelatedNormal, q: Any) -> Array:
    r"""KL divergence to a product of normals, in closed form.

    .. math:: \sum_d \log \frac{\sigma_d}{\mathrm{scale}_d} - \tfrac12
        + \frac{\mathrm{Var}\, x_d + (\mathrm{loc}_d - \mu_d)^2}{2 \sigma_d^2}

    Raises:
        NotImplementedError: If ``q`` is no product of normals; losses then take the draw.
    """
    base, shape = without_axes(q), q.batch_shape + q.event_shape
    if type(base) is not dist.Normal or shape != p.loc.shape:
        raise NotImplementedError
    ratio = p.scale / base.scale
    square = (p.variance + (p.loc - base.loc) ** 2) / base.scale**2
    return sum_rightmost(0.5 * (square - 1) - jnp.log(ratio), p.event_dim)


for _kind in (dist.Normal, Independent, ExpandedDistribution):
    kl_divergence.register(CorrelatedNormal, _kind)(_divergence)
