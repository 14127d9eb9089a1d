# SPDX-License-Identifier: Apache-2.0
"""Gaussian components with full covariances and conjugate priors."""

from __future__ import annotations

import math
from copy import copy
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import multigammaln
from jax.typing import ArrayLike

from numpyro_largecat._checks import as_positive, check_shape
from numpyro_largecat.mixtures.conjugate_family import ConjugateFamily
from numpyro_largecat.mixtures.hyperparameters import positive_definite, vector
from numpyro_largecat.ops.symmetric import log_det, pack, packed_products, unpack

T = TypeVar("T", bound=Any)
NOT_POSITIVE = (
    "its covariance is no longer positive definite. Give the prior more `strength` or a larger "
    "covariance, subtract a common offset from the data, or use float64"
)


class Wishart(NamedTuple):
    """Posterior of precision matrices: Wishart(dof, inverse_scale ** -1)."""

    dof: Array  # (K,), degrees of freedom nu
    inverse_scale: Array  # (K, D, D), B; the mean of the precision is nu B^-1


class NormalWishart(NamedTuple):
    """Posterior of means and precisions: Normal(loc, (loc_strength precision)^-1) and Wishart."""

    loc: Array  # (K, D)
    loc_strength: Array  # (K,), kappa
    dof: Array  # (K,), degrees of freedom nu
    inverse_scale: Array  # (K, D, D), B


class ZeroMeanGaussianFamily(ConjugateFamily):
    r"""Gaussians with mean zero and an unknown covariance; Wishart prior on the precision.

    The prior is worth ``strength`` observations whose mean square is ``covariance``:

    .. math:: \Phi \sim \mathrm{Wishart}(\nu, B^{-1}),\quad \nu = \mathrm{strength} + D + 1,
              \quad B = \mathrm{strength} \cdot \mathrm{covariance},

    so that ``covariance`` is the prior mean of the covariance. After N_k observations with sum of
    squares S_k the posterior has :math:`\nu + N_k` and :math:`B + S_k`, and the posterior mean of
    the covariance is :math:`(B + S_k) / (\mathrm{strength} + N_k)`; it is also the mode of the
    posterior of the precision, the MAP estimate.

    Features are the products x_i x_j, i <= j, and a 1: P = 1 + D (D + 1) / 2.

    Args:
        covariance: Prior mean of the covariance, positive definite, shape (D, D).
        strength: Weight of the prior in observations, positive. A tiny one gives maximum likelihood
            under ``objective="map"``.

    Raises:
        ValueError: If ``covariance`` is not a positive definite matrix, or ``strength`` not
            positive.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> family = lc.mixtures.ZeroMeanGaussianFamily(jnp.eye(2), strength=2.0)
        >>> natural = family.prior() + family.features(jnp.array([[0.0, 2.0]]))
        >>> family.components(natural).covariance_matrix[0].round(3).tolist()
        [[0.667, 0.0], [0.0, 2.0]]

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        arXiv:1609.07521, Appendix B.1, whose Eq. 31 lacks a factor -1/2 and has the scale matrices
        in place of their inverses.
    """

    failure = NOT_POSITIVE

    def __init__(self, covariance: ArrayLike, strength: float = 1.0) -> None:
        self.covariance = positive_definite("covariance", covariance)
        self.strength = as_positive("strength", strength, "a number of observations")

    def prior(self) -> Array:
        """Pseudo-observations and their sum of squares, packed."""
        count = jnp.asarray(self.strength)[None]
        return jnp.concatenate([count, self.strength * pack(self.covariance)])

    def features(self, x: Array) -> Array:
        """Constant 1 and packed products of the columns."""
        return jnp.concatenate([jnp.ones_like(x[:, :1]), packed_products(x)], axis=1)

    def log_base(self, x: Array) -> Array:
        """Log of (2 pi)^(-D / 2)."""
        return jnp.full(x.shape[0], -0.5 * x.shape[1] * math.log(2 * math.pi), x.dtype)

    def log_normalizer(self, natural: Array) -> Array:
        """Log normaliser of the Wishart density, Eq. 28 with the sign of a normaliser."""
        dof, inverse_scale = self.posterior(natural)
        return _log_wishart(dof, log_det(inverse_scale), inverse_scale.shape[-1])

    def max_log_density(self, natural: Array) -> Array:
        """Penalised log likelihood at the best covariance, B / n."""
        count, square = natural[0], unpack(natural[1:])
        return max_gaussian(count, log_det(square), square.shape[-1])

    def posterior(self, natural: Array) -> Wishart:
        """Degrees of freedom and inverse scale, from natural parameters (..., P)."""
        inverse_scale = unpack(natural[..., 1:])
        return Wishart(natural[..., 0] + inverse_scale.shape[-1] + 1, inverse_scale)

    def components(self, natural: Array) -> dist.Distribution:
        """Gaussians with the posterior mean of the covariance."""
        covariance = unpack(natural[..., 1:]) / natural[..., :1, None]
        loc = jnp.zeros_like(covariance[..., 0])
        return dist.MultivariateNormal(loc, covariance_matrix=covariance)

    def weighted_sum(self, x: Array, weights: Array) -> Array:
        """Sum of weighted features by one product of matrices."""
        return jnp.concatenate([weights.sum()[None], _weighted_squares(x, weights)])

    def check_rows(self, x: np.ndarray) -> None:
        """Rows must have D columns."""
        check_columns(x, len(self.covariance))


class GaussianFamily(ConjugateFamily):
    r"""Gaussians with unknown mean and covariance; normal-Wishart prior.

    .. math:: \mu \mid \Phi \sim N(\mathrm{loc}, (\kappa \Phi)^{-1}),\quad
              \Phi \sim \mathrm{Wishart}(\nu, B^{-1}),

    with :math:`\kappa` = ``loc_strength``, :math:`\nu = \mathrm{strength} + D + 1` and :math:`B =
    \mathrm{strength} \cdot \mathrm{covariance}`, so that ``covariance`` is the prior mean of the
    covariance. Estimates are the posterior means; as MAP estimates they maximise the likelihood
    with ``loc_strength`` pseudo-observations of the mean and ``strength`` of the covariance.

    Features are of x - loc: a 1, the columns, and their products, P = 1 + D + D (D + 1) / 2. In
    float32 a distance of c standard deviations between a component and ``loc`` makes an error of
    about 1e-7 c^2 in log densities and covariances, and more in those of few rows: put ``loc``
    among the data, and use float64 from c = 500 on, where ``fit_mixture`` warns. Rows of float64 or
    integers, such as times in seconds since 1970, lose ``loc`` before they are rounded to float32;
    ``components()`` and ``posterior()`` have it again,
    with the 7 digits of float32.

    Args:
        loc: Prior mean of the means, shape (D,).
        covariance: Prior mean of the covariance, positive definite, shape (D, D).
        strength: Weight of ``covariance`` in observations, positive.
        loc_strength: Weight of ``loc`` in observations, positive.

    Raises:
        ValueError: If ``covariance`` is not a positive definite matrix, ``loc`` is not of its size,
            or a strength is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> family = lc.mixtures.GaussianFamily(jnp.zeros(2), jnp.eye(2), loc_strength=1.0)
        >>> natural = family.prior() + family.features(jnp.array([[4.0, 0.0]]))
        >>> family.components(natural).mean.tolist()
        [[2.0, 0.0]]

    References:
        Bishop, Pattern Recognition and Machine Learning, 2006, Eqs. 10.59 to 10.63 and B.79.
    """

    failure = NOT_POSITIVE

    def __init__(
        self,
        loc: ArrayLike,
        covariance: ArrayLike,
        strength: float = 1.0,
        loc_strength: float = 0.01,
    ) -> None:
        self.covariance = positive_definite("covariance", covariance)
        self.loc = vector("loc", loc, len(self.covariance))
        self.strength = as_positive("strength", strength, "a number of observations")
        self.loc_strength = as_positive("loc_strength", loc_strength, "a number of observations")

    def prior(self) -> Array:
        """Weight of the mean, sum and sum of squares of pseudo-observations about ``loc``."""
        count = jnp.asarray(self.loc_strength)[None]
        sums = jnp.zeros_like(jnp.asarray(self.loc))
        return jnp.concatenate([count, sums, self.strength * pack(self.covariance)])

    def features(self, x: Array) -> Array:
        """Constant 1, columns about ``loc``, and their packed products."""
        y = x - self._loc_of(x)
        return jnp.concatenate([jnp.ones_like(y[:, :1]), y, packed_products(y)], axis=1)

    def log_base(self, x: Array) -> Array:
        """Log of (2 pi)^(-D / 2)."""
        return jnp.full(x.shape[0], -0.5 * x.shape[1] * math.log(2 * math.pi), x.dtype)

    def log_normalizer(self, natural: Array) -> Array:
        """Log normaliser of the normal-Wishart density, less D / 2 log(2 pi)."""
        _, count, dof, inverse_scale = self.posterior(natural)
        size = inverse_scale.shape[-1]
        return _log_wishart(dof, log_det(inverse_scale), size) - 0.5 * size * jnp.log(count)

    def max_log_density(self, natural: Array) -> Array:
        """Penalised log likelihood at the best mean and covariance."""
        inverse_scale = self.posterior(natural).inverse_scale
        count = self._covariance_count(natural)
        return max_gaussian(count, log_det(inverse_scale), inverse_scale.shape[-1])

    def posterior(self, natural: Array) -> NormalWishart:
        """Usual parameters, from natural parameters (..., P)."""
        size = len(self.covariance)
        count, total, square = natural[..., 0], natural[..., 1 : 1 + size], natural[..., 1 + size :]
        mean = total / count[..., None]
        inverse_scale = unpack(square) - total[..., :, None] * mean[..., None, :]
        dof = self._covariance_count(natural) + size + 1
        return NormalWishart(self._loc_of(mean) + mean, count, dof, inverse_scale)

    def components(self, natural: Array) -> dist.Distribution:
        """Gaussians with the posterior means of mean and covariance."""
        posterior = self.posterior(natural)
        count = self._covariance_count(natural)[..., None, None]
        return dist.MultivariateNormal(
            posterior.loc, covariance_matrix=posterior.inverse_scale / count
        )

    def share_left(self, natural: Array) -> Array:
        """The variance of a column over its mean square about ``loc``."""
        squares = unpack(natural[..., 1 + len(self.covariance) :])
        left = self.posterior(natural).inverse_scale
        return jnp.min(
            jnp.diagonal(left, axis1=-2, axis2=-1) / jnp.diagonal(squares, axis1=-2, axis2=-1), -1
        )

    def weighted_sum(self, x: Array, weights: Array) -> Array:
        """Sum of weighted features by products of matrices."""
        y = x - self._loc_of(x)
        total = jnp.matmul(weights, y, precision="highest")
        return jnp.concatenate([weights.sum()[None], total, _weighted_squares(y, weights)])

    def check_rows(self, x: np.ndarray) -> None:
        """Rows must have D columns."""
        check_columns(x, len(self.loc))

    def without_offset(self) -> tuple[ConjugateFamily, np.ndarray | None]:
        """The same about 0, and ``loc``; a subclass may have features of x as it is."""
        return about_zero(self) if type(self) is GaussianFamily else (self, None)

    def _covariance_count(self, natural: Array) -> Array:
        """Observations behind the covariance: those behind the mean, with another prior."""
        return natural[..., 0] - self.loc_strength + self.strength

    def _loc_of(self, x: Array) -> Array:
        return jnp.asarray(self.loc, x.dtype)


def _log_wishart(dof: Array, log_det_inverse_scale: Array, size: int) -> Array:
    """Log of the integral of |Phi|^((dof - D - 1) / 2) exp(-tr(B Phi) / 2)."""
    constant = 0.5 * dof * size * math.log(2) + multigammaln(0.5 * dof, size)
    return constant - 0.5 * dof * log_det_inverse_scale


def max_gaussian(count: Array, log_det_square: Array, size: int) -> Array:
    """Maximum over Phi of n / 2 log|Phi| - tr(B Phi) / 2, at Phi^-1 = B / n."""
    return -0.5 * count * (log_det_square - size * jnp.log(count) + size)


def _weighted_squares(x: Array, weights: Array) -> Array:
    """Packed sum of w x x^T."""
    return pack(jnp.matmul((x * weights[:, None]).T, x, precision="highest"))


def about_zero(family: T) -> tuple[T, np.ndarray]:
    """The same family with ``loc`` 0, for rows less ``loc``; and ``loc``."""
    moved = copy(family)
    moved.loc = np.zeros_like(family.loc)
    return moved, np.asarray(family.loc)


def check_columns(x: np.ndarray, size: int) -> None:
    """Raise unless ``x`` is rows of ``size`` columns."""
    check_shape("rows", x, ("N", size), "the columns of the family's prior")
