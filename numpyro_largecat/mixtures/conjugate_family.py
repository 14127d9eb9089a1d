# SPDX-License-Identifier: Apache-2.0
"""What conjugate learning asks of an exponential family and its prior."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from numpyro_largecat.mixtures.hyperparameters import Hyperparameters


class ConjugateFamily(Hyperparameters):
    r"""An exponential family with a conjugate prior; the components of a mixture.

    With features f of an observation, the density of a component with parameter :math:`\theta` is

    .. math:: \log F(x \mid \theta) = f(x)^\top t(\theta) + \log h(x),

    and the conjugate density with natural parameter :math:`\eta` is
    :math:`\exp(\eta^\top t(\theta) - A(\eta))`. So the posterior after observations with weights r
    is :math:`\eta = \mathrm{prior} + \sum_n r_n f(x_n)`, and :math:`E[t(\theta)] = \nabla A(\eta)`:
    automatic differentiation finds all expectations, and the expected log densities of N rows under
    K components are one product of matrices, (N, P) with (P, K). Point estimates maximise

    .. math:: G(\eta) = \max_\theta \eta^\top t(\theta), \qquad \nabla G(\eta) = t(\hat\theta).

    A family of your own is a subclass with the six functions below; P is the number of features.

    - ``prior()``: natural parameter of the prior, shape (P,).
    - ``features(x)``: f, from rows (B, ...) to (B, P).
    - ``log_base(x)``: log h, shape (B,).
    - ``log_normalizer(natural)``: A, from one natural parameter (P,) to a scalar, up to a constant.
    - ``max_log_density(natural)``: G, from (P,) to a scalar; its maximum must be at the posterior
      mean that ``components`` uses.
    - ``components(natural)``: NumPyro distribution of batch shape (K,) at the posterior means of
      the mean parameters, from (K, P).

    Attributes that are numbers with a fraction or arrays are data of a pytree; Python ints, strings
    and None are static. ``MixtureFit.save`` can write these, and nothing else.

    Example:
        Poisson counts with a Gamma prior, which has E[log F] = x E[log rate] - E[rate] - log x!.

        >>> import jax, jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> class PoissonFamily(lc.mixtures.ConjugateFamily):
        ...     def __init__(self, concentration, rate):
        ...         self.concentration, self.rate = float(concentration), float(rate)
        ...
        ...     def prior(self):
        ...         return jnp.stack([self.rate, self.concentration])
        ...
        ...     def features(self, x):
        ...         return jnp.stack([jnp.ones_like(x), x], axis=-1)  # of -rate and log rate
        ...
        ...     def log_base(self, x):
        ...         return -jax.scipy.special.gammaln(x + 1)
        ...
        ...     def log_normalizer(self, natural):
        ...         b, a = natural
        ...         return jax.scipy.special.gammaln(a) - a * jnp.log(b)
        ...
        ...     def max_log_density(self, natural):
        ...         b, a = natural
        ...         return a * jnp.log(a / b) - a
        ...
        ...     def components(self, natural):
        ...         return dist.Poisson(natural[:, 1] / natural[:, 0])
        >>> x = dist.Poisson(jnp.array([2.0, 40.0])).sample(jax.random.key(0), (500,)).reshape(-1)
        >>> fit = lc.fit_mixture(jax.random.key(1), x, 2, PoissonFamily(1, 0.1), progress_bar=False)
        >>> sorted(round(float(r)) for r in fit.components().rate)
        [2, 40]

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        arXiv:1609.07521, Eq. 1 and Appendix B.
    """

    failure = "its natural parameter is outside the family"  # why A or G may not be finite

    def prior(self) -> Array:
        """Natural parameter of the prior, shape (P,)."""
        raise NotImplementedError

    def features(self, x: Array) -> Array:
        """Features of rows, (B, ...) to (B, P)."""
        raise NotImplementedError

    def log_base(self, x: Array) -> Array:
        """Part of the log density of rows that no parameter changes, shape (B,)."""
        raise NotImplementedError

    def log_normalizer(self, natural: Array) -> Array:
        """A, the log normaliser of the conjugate density, from (P,) to a scalar."""
        raise NotImplementedError

    def max_log_density(self, natural: Array) -> Array:
        """G, the largest penalised log density, from (P,) to a scalar."""
        raise NotImplementedError

    def components(self, natural: Array) -> dist.Distribution:
        """Components at the posterior means, batch shape (K,), from (K, P)."""
        raise NotImplementedError

    def posterior(self, natural: Array) -> Any:
        """Usual parameters, from (..., P), where a family has any: here the natural ones."""
        return natural

    def share_left(self, natural: Array) -> Array:
        """Least share of its statistics that makes a component, from (K, P) to (K,).

        Of Gaussians it is the variance over the mean square about ``loc``: what rounding takes is a
        share of the statistics. 1 where nothing is subtracted.
        """
        return jnp.ones(natural.shape[:-1])

    def weighted_sum(self, x: Array, weights: Array) -> Array:
        """Sum of ``weights[n] * features(x)[n]``, shape (P,); a family may know a cheaper way."""
        return jnp.matmul(weights, self.features(x), precision="highest")

    def check_rows(self, x: np.ndarray) -> None:
        """Raise ValueError if rows cannot be of this family; they are known to be finite."""

    def without_offset(self) -> tuple[ConjugateFamily, np.ndarray | None]:
        """This family for rows less an offset, with the same features; and the offset, if any.

        Rows lose it before they are rounded to the float type of the fit.
        """
        return self, None
