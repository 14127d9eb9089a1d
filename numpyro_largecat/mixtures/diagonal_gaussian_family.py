# SPDX-License-Identifier: Apache-2.0
"""Gaussian components with independent columns and conjugate priors."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import gammaln
from jax.typing import ArrayLike

from numpyro_largecat._checks import as_positive
from numpyro_largecat.mixtures.conjugate_family import ConjugateFamily
from numpyro_largecat.mixtures.gaussian_families import about_zero, check_columns, max_gaussian
from numpyro_largecat.mixtures.hyperparameters import vector


class NormalGamma(NamedTuple):
    """Posterior of means and precisions, column by column, with Gamma(concentration, rate)."""

    loc: Array  # (K, D)
    loc_strength: Array  # (K,), kappa
    concentration: Array  # (K,)
    rate: Array  # (K, D)


class DiagonalGaussianFamily(ConjugateFamily):
    r"""Gaussians with independent columns of unknown mean and variance; normal-gamma prior.

    For each column, with precision :math:`\tau`,

    .. math:: \mu \mid \tau \sim N(\mathrm{loc}, (\kappa \tau)^{-1}),\quad
              \tau \sim \mathrm{Gamma}(1 + s / 2, \mathrm{rate} = \mathrm{variance} \cdot s / 2),

    with s = ``strength`` and :math:`\kappa` = ``loc_strength``, so that ``variance`` is the prior
    mean of the variance. Estimates and the accuracy of float32 are as for ``GaussianFamily``.

    Features are of x - loc: a 1, the columns and their squares, P = 1 + 2 D.

    Args:
        loc: Prior mean of the means, shape (D,).
        variance: Prior mean of the variances, positive, shape (D,).
        strength: Weight of ``variance`` in observations, positive.
        loc_strength: Weight of ``loc`` in observations, positive.

    Raises:
        ValueError: If ``loc`` and ``variance`` are not vectors of one size, or a variance or a
            strength is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> family = lc.mixtures.DiagonalGaussianFamily(jnp.zeros(1), jnp.ones(1), loc_strength=1.0)
        >>> natural = family.prior() + family.features(jnp.array([[4.0]]))
        >>> family.components(natural).variance.tolist()
        [[4.5]]

    References:
        Bishop, Pattern Recognition and Machine Learning, 2006, Eqs. 2.149 to 2.154 and B.26.
    """

    failure = (
        "one of its variances is no longer positive. Give the prior more `strength` or a larger "
        "variance, subtract a common offset from the data, or use float64"
    )

    def __init__(
        self,
        loc: ArrayLike,
        variance: ArrayLike,
        strength: float = 1.0,
        loc_strength: float = 0.01,
    ) -> None:
        self.variance = vector("variance", variance, np.size(variance))
        as_positive("variance", self.variance, "the prior mean of the variances", None)
        self.loc = vector("loc", loc, len(self.variance))
        self.strength = as_positive("strength", strength, "a number of observations")
        self.loc_strength = as_positive("loc_strength", loc_strength, "a number of observations")

    def prior(self) -> Array:
        """Weight of the mean, sums and sums of squares of pseudo-observations about ``loc``."""
        count = jnp.asarray(self.loc_strength)[None]
        sums = jnp.zeros_like(jnp.asarray(self.loc))
        return jnp.concatenate([count, sums, jnp.asarray(self.strength * self.variance)])

    def features(self, x: Array) -> Array:
        """Constant 1, columns about ``loc``, and their squares."""
        y = x - jnp.asarray(self.loc, x.dtype)
        return jnp.concatenate([jnp.ones_like(y[:, :1]), y, jnp.square(y)], axis=1)

    def log_base(self, x: Array) -> Array:
        """Log of (2 pi)^(-D / 2)."""
        return jnp.full(x.shape[0], -0.5 * x.shape[1] * math.log(2 * math.pi), x.dtype)

    def log_normalizer(self, natural: Array) -> Array:
        """Log normaliser of the normal-gamma densities, less D / 2 log(2 pi)."""
        _, count, concentration, rate = self.posterior(natural)
        gammas = gammaln(concentration) - concentration * jnp.log(rate)
        return (gammas - 0.5 * jnp.log(count)).sum()

    def max_log_density(self, natural: Array) -> Array:
        """Penalised log likelihood at the best means and variances."""
        rate = self.posterior(natural).rate
        return max_gaussian(self._variance_count(natural), jnp.log(2 * rate).sum(), len(rate))

    def posterior(self, natural: Array) -> NormalGamma:
        """Usual parameters, from natural parameters (..., P)."""
        size = len(self.loc)
        count, total, square = natural[..., 0], natural[..., 1 : 1 + size], natural[..., 1 + size :]
        mean = total / count[..., None]
        loc = jnp.asarray(self.loc, natural.dtype) + mean
        rate = 0.5 * (square - total * mean)
        return NormalGamma(loc, count, 1 + 0.5 * self._variance_count(natural), rate)

    def components(self, natural: Array) -> dist.Distribution:
        """Gaussians with the posterior means of means and variances."""
        posterior = self.posterior(natural)
        variance = 2 * posterior.rate / self._variance_count(natural)[..., None]
        return dist.Normal(posterior.loc, jnp.sqrt(variance)).to_event(1)

    def share_left(self, natural: Array) -> Array:
        """The variance of a column over its mean square about ``loc``."""
        squares = natural[..., 1 + len(self.loc) :]
        return (2 * self.posterior(natural).rate / squares).min(axis=-1)

    def check_rows(self, x: np.ndarray) -> None:
        """Rows must have D columns."""
        check_columns(x, len(self.loc))

    def without_offset(self) -> tuple[ConjugateFamily, np.ndarray | None]:
        """The same about 0, and ``loc``; a subclass may have features of x as it is."""
        return about_zero(self) if type(self) is DiagonalGaussianFamily else (self, None)

    def _variance_count(self, natural: Array) -> Array:
        return natural[..., 0] - self.loc_strength + self.strength
