# SPDX-License-Identifier: Apache-2.0
"""Multinomial components with a Dirichlet prior."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import gammaln
from jax.typing import ArrayLike

from numpyro_largecat._checks import as_positive, check_count, check_shape, refuse_entries
from numpyro_largecat.mixtures.conjugate_family import ConjugateFamily


class MultinomialFamily(ConjugateFamily):
    r"""Counts of V outcomes, drawn with unknown probabilities; Dirichlet prior.

    A row x of counts with total M has :math:`\log F(x \mid \phi) = \sum_v x_v \log \phi_v + \log
    M! - \sum_v \log x_v!`. Rows may have different totals. After rows with sum S_k the posterior is
    Dirichlet(concentration + S_k), with mean :math:`\hat\phi \propto \mathrm{concentration} + S_k`.
    As a MAP estimate this mean maximises :math:`\sum \log F + \sum_v \mathrm{concentration}_v \log
    \phi_v`: the mode under Dirichlet(concentration + 1), which exists for every concentration.

    Features are the counts themselves, P = V.

    Args:
        concentration: Parameters of the prior, positive, shape (V,).
        total_count: Total M of every row, for ``components()``, which NumPyro's distribution needs;
            rows with another total are refused. None if totals differ.

    Raises:
        ValueError: If a concentration is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> family = lc.mixtures.MultinomialFamily(0.5 * jnp.ones(3), total_count=2)
        >>> natural = family.prior() + family.features(jnp.array([[2.0, 0.0, 0.0]]))
        >>> family.components(natural).probs.round(3).tolist()
        [[0.714, 0.143, 0.143]]

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        arXiv:1609.07521, Appendix B.2, where a row is one word.
    """

    def __init__(self, concentration: ArrayLike, total_count: int | None = None) -> None:
        self.concentration = as_positive(
            "concentration", concentration, "Dirichlet parameters", None
        )
        need, fix = "one for each outcome", "For a symmetric prior pass `jnp.full(V, value)`."
        check_shape("`concentration`", self.concentration, ("V",), need, fix, least=1)
        self.total_count = (
            None if total_count is None else check_count("total_count", total_count, 1)
        )

    def prior(self) -> Array:
        """Concentration of the prior."""
        return jnp.asarray(self.concentration)

    def features(self, x: Array) -> Array:
        """Counts."""
        return x

    def log_base(self, x: Array) -> Array:
        """Log multinomial coefficient."""
        return gammaln(x.sum(-1) + 1) - gammaln(x + 1).sum(-1)

    def log_normalizer(self, natural: Array) -> Array:
        """Log normaliser of the Dirichlet density, minus Eq. 23."""
        return gammaln(natural).sum() - gammaln(natural.sum())

    def max_log_density(self, natural: Array) -> Array:
        """Penalised log likelihood at the best probabilities."""
        return (natural * jnp.log(natural / natural.sum())).sum()

    def components(self, natural: Array) -> dist.Distribution:
        """Multinomials with the posterior means of the probabilities."""
        if self.total_count is None:
            raise ValueError(
                "a Multinomial needs a total count. Make the family with `total_count`, or use "
                "`log_likelihood`, where totals may differ."
            )
        probs = natural / natural.sum(-1, keepdims=True)
        # Counts with another total have a log_prob of -inf, and a warning, not one of no density.
        return dist.Multinomial(self.total_count, probs, validate_args=True)

    def check_rows(self, x: np.ndarray) -> None:
        """Rows must hold V whole counts of at least 0, of sum ``total_count`` if it is given."""
        check_shape("rows", x, ("N", len(self.concentration)), "a count for each outcome")
        refuse_entries("counts", x, (x < 0) | (x != np.floor(x)), "whole numbers of at least 0")
        if self.total_count is not None:
            totals, need = x.sum(axis=1, dtype=float), f"`total_count`, {self.total_count}"
            fix = "If totals differ, leave out `total_count`, which only `components()` needs."
            refuse_entries("sums of rows", totals, totals != self.total_count, need, fix)
