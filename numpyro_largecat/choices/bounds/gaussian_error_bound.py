# SPDX-License-Identifier: Apache-2.0
"""The Augment & Reduce bound with a Gaussian for the error of the chosen class."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_largecat._checks import check_count
from numpyro_largecat.choices.choice_distribution import ChoiceDistribution, utility_vector
from numpyro_largecat.choices.error_families import ErrorFamily, error_family
from numpyro_largecat.ops.gaussian_error import (
    ElementWise,
    expected_derivatives,
    gaussian_error_bound,
    log_joint,
)
from numpyro_largecat.plates.class_subset import ClassSubset


class GaussianErrorBound(ChoiceDistribution):
    r"""Bound on a utility model of any error family, with a Gaussian for the chosen class's error.

    .. math:: \log p(y \mid \psi) \ge E_q\Big[\log\phi(\varepsilon)
              + \sum_{k \ne y} \log\Phi(\varepsilon + \psi_y - \psi_k)\Big]
              + \log \mathrm{scale} + \tfrac12 \log 2 \pi e,
              \qquad q = N(\mathrm{loc}, \mathrm{scale}^2).

    On a weighted subset of classes the sum over k is estimated without bias, given q. The
    expectation is taken at Gauss-Hermite nodes, which has no variance; ``sample_choice`` keeps
    ``loc`` and ``scale`` for each observation and moves them by natural gradients.

    Three nodes are exact where the log joint is a polynomial of degree five over the width of q,
    which is below one for Normal errors. At the best q they were above log p by up to 0.0013 nats
    for Normal errors and 0.017 for logistic ones; for a bound to many digits take 20.

    Shapes: ``batch_shape`` is the broadcast of ``utilities.shape[:-1]``, ``loc`` and ``scale``.

    Cost: O(M ``num_nodes``) time per observation, O(M) memory.

    Args:
        utilities: Mean utilities psi in nats, shape (..., K), or (..., M) for ``classes``.
        classes: What ``with class_plate(...) as classes`` gives. None for all classes.
        noise: Distribution of the errors, as in ``UtilityCategorical``.
        loc: Location of q, shape (...).
        scale: Standard deviation of q, positive, shape (...).
        num_nodes: Number of Gauss-Hermite nodes, at least 2.
        validate_args: Also check values, outside ``jit``. Shapes are always checked.

    Raises:
        ValueError, TypeError: As ``UtilityCategorical``.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> d = lc.bounds.GaussianErrorBound(jnp.zeros(2), noise="normal", loc=0.56, scale=0.83)
        >>> d.log_prob(0).round(3).item()  # at most log(1/2) = -0.693
        -0.694

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Eq. 7.
    """

    arg_constraints = {
        "utilities": utility_vector,
        "loc": constraints.real,
        "scale": constraints.positive,
    }
    pytree_data_fields = ("utilities", "classes", "loc", "scale")
    pytree_aux_fields = ("noise", "num_nodes")

    def __init__(
        self,
        utilities: ArrayLike,
        classes: ClassSubset | None = None,
        noise: str | ErrorFamily = "normal",
        *,
        loc: ArrayLike,
        scale: ArrayLike,
        num_nodes: int = 3,
        validate_args: bool | None = None,
    ) -> None:
        self.noise = error_family(noise)
        self.num_nodes = check_count("num_nodes", num_nodes, 2)
        super().__init__(
            utilities, classes, local={"loc": loc, "scale": scale}, validate_args=validate_args
        )

    def _log_prob(self, value: Array) -> Array:
        return gaussian_error_bound(self.loc, self.scale, self._joint(value), self.num_nodes)

    def expected_derivatives(self, value: ArrayLike) -> tuple[Array, Array]:
        """Expectations under q of the first two derivatives of the log joint in the error.

        Shapes: two of the broadcast of ``value``'s shape and ``batch_shape``.
        """
        shape = jnp.broadcast_shapes(jnp.shape(value), self.batch_shape)
        loc = jnp.broadcast_to(self.loc, shape)
        scale = jnp.broadcast_to(self.scale, shape)
        return expected_derivatives(loc, scale, self._joint(value), self.num_nodes)

    def _joint(self, value: ArrayLike) -> ElementWise:
        distances, weights = self.competitors(value)
        return partial(
            log_joint,
            distances=distances,
            weights=weights,
            log_density=self.noise.log_prob,
            log_cdf=self.noise.log_cdf,
        )
