# SPDX-License-Identifier: Apache-2.0
"""Priors of mixing weights, as functions of the components' counts."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import gammaln

from numpyro_largecat._checks import as_positive
from numpyro_largecat.mixtures.hyperparameters import Hyperparameters


class MixingPrior(Hyperparameters):
    r"""What conjugate learning asks of a prior of the mixing weights.

    With :math:`N_k` observations in component k its two functions are, each up to a constant,

    .. math:: A(N) = \log \int p(\pi) \prod_k \pi_k^{N_k} d\pi, \qquad \nabla A(N) = E[\log \pi],

    and G, whose gradient is the logarithm of the posterior mean of each weight.

    Example:
        >>> import numpyro_largecat as lc
        >>> isinstance(lc.mixtures.StickBreaking(), lc.mixtures.MixingPrior)
        True
    """

    def log_normalizer(self, counts: Array) -> Array:
        """A, from counts (K,) to a scalar."""
        raise NotImplementedError

    def max_log_density(self, counts: Array) -> Array:
        """G, from counts (K,) to a scalar."""
        raise NotImplementedError


class DirichletMixing(MixingPrior):
    r"""Mixing weights with the prior Dirichlet(concentration / K, ..., concentration / K).

    The posterior is Dirichlet(concentration / K + N_k). As MAP estimates the weights
    :math:`\hat\pi_k \propto N_k + \mathrm{concentration} / K` maximise the likelihood times
    :math:`\prod_k \pi_k^{\mathrm{concentration} / K}`, which has a maximum for any concentration.

    Args:
        concentration: Sum of the Dirichlet's parameters, in observations, positive. Below about K
            it favours few components.

    Raises:
        ValueError: If ``concentration`` is not positive.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> mixing = lc.mixtures.DirichletMixing(3.0)
        >>> jnp.exp(jax.grad(mixing.max_log_density)(jnp.array([6.0, 0, 1]))).round(2).tolist()
        [0.7, 0.1, 0.2]

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        arXiv:1609.07521, Eqs. 11 and 22.
    """

    def __init__(self, concentration: float = 1.0) -> None:
        self.concentration = as_positive(
            "concentration", concentration, "the sum of the Dirichlet's parameters"
        )

    def log_normalizer(self, counts: Array) -> Array:
        """Log normaliser of the Dirichlet density, minus Eq. 23."""
        theta = self._posterior(counts)
        return gammaln(theta).sum() - gammaln(theta.sum())

    def max_log_density(self, counts: Array) -> Array:
        """Penalised log probability of the counts at the best weights."""
        theta = self._posterior(counts)
        return (theta * jnp.log(theta / theta.sum())).sum()

    def _posterior(self, counts: Array) -> Array:
        return counts + self.concentration / counts.shape[0]


class StickBreaking(MixingPrior):
    r"""Mixing weights of a Dirichlet process, with a posterior truncated at K components.

    .. math:: \pi_k = v_k \prod_{j < k} (1 - v_j), \qquad v_k \sim \mathrm{Beta}(1, \gamma).

    The posterior uses the first K sticks and leaves the others to the prior; the model itself is
    not truncated, so bounds at different K compare. :math:`q(v_k) = \mathrm{Beta}(1 + N_k, \gamma +
    \sum_{j > k} N_j)`. The prior favours large components first, and both functions take the
    components by size, which is the best order: with a larger component before its smaller
    neighbour A and G are never lower. So labels of components mean nothing, as in a Dirichlet
    prior.

    What the posterior leaves to components beyond K, at most :math:`\gamma / (N + \gamma)`, is
    divided among the K in proportion where weights must sum to one.

    Args:
        concentration: Concentration gamma of the process, positive. N observations come from about
            gamma log(1 + N / gamma) components.

    Raises:
        ValueError: If ``concentration`` is not positive.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> mixing = lc.mixtures.StickBreaking(1.0)
        >>> jnp.exp(jax.grad(mixing.max_log_density)(jnp.array([0.0, 6, 1]))).round(2).tolist()
        [0.04, 0.78, 0.15]

    References:
        Blei and Jordan, Variational inference for Dirichlet process mixtures, Bayesian Analysis 1,
        2006. Hughes and Sudderth, Memoized online variational inference for Dirichlet process
        mixture models, NeurIPS 2013.
    """

    def __init__(self, concentration: float = 1.0) -> None:
        self.concentration = as_positive(
            "concentration", concentration, "as of a Dirichlet process"
        )

    def log_normalizer(self, counts: Array) -> Array:
        """Log normalisers of the sticks' Beta densities."""
        taken, left = self._posterior(counts)
        return (gammaln(taken) + gammaln(left) - gammaln(taken + left)).sum()

    def max_log_density(self, counts: Array) -> Array:
        """Penalised log probability of the counts at the best sticks."""
        taken, left = self._posterior(counts)
        both = taken + left
        return (taken * jnp.log(taken / both) + left * jnp.log(left / both)).sum()

    def _posterior(self, counts: Array) -> tuple[Array, Array]:
        downward = -jnp.sort(-counts)  # of equal counts the first comes first
        smaller = jnp.cumsum(downward[:0:-1])[::-1]  # sums of those after each but the last
        smaller = jnp.concatenate([smaller, jnp.zeros_like(counts[:1])])
        return 1 + downward, jnp.asarray(self.concentration) + smaller
