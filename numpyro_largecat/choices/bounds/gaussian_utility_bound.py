# SPDX-License-Identifier: Apache-2.0
"""The Augment & Reduce bound of the softmax, averaged over Gaussian utilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_largecat._checks import check_broadcasts, check_shape
from numpyro_largecat._conversions import as_float_array, as_ids
from numpyro_largecat.choices.choice_distribution import ChoiceDistribution, utility_vector
from numpyro_largecat.ops.log_cdf import gumbel_log_cdf
from numpyro_largecat.ops.noisy_max import noisy_max
from numpyro_largecat.ops.softmax_bound import take_row
from numpyro_largecat.plates.class_subset import ClassSubset


class GaussianUtilityBound(ChoiceDistribution):
    r"""Bound on the expected log softmax of utilities that are Gaussian, with no draw of them.

    Under a posterior q the utilities of the classes are independent, as linear ones are when the
    weights of the classes are: psi_k ~ N(m_k, v_k). The Augment & Reduce bound averages the
    exponential of a Gaussian, which is a moment generating function, so that

    .. math:: E_q[\log p(y \mid \psi)] \ge 1 - u - e^{-u} \hat\eta, \qquad
              \hat\eta = 1 + \sum_{k \ne y} w_k
              \exp\big((m_k + \tfrac12 v_k) - (m_y - \tfrac12 v_y)\big).

    That has one u for all draws. The bound holds for any u, also for one that follows the draw as
    :math:`u + \mathrm{slope}\,(\psi_y - m_y)`, and stays in closed form:

    .. math:: \hat\eta = e^{\mathrm{slope}^2 v_y / 2} + \sum_{k \ne y} w_k
              \exp\big(m_k - m_y + \tfrac12 v_k + \tfrac12 (1 + \mathrm{slope})^2 v_y\big).

    The best slope is close to ``expm1(-u)``, the derivative of the best u in psi_y. It makes the
    bound as tight as the mean over draws of ``sample_choice`` on drawn weights. What is lost is
    v_y (1 - p)^2 / 2 with slope 0, p the probability of y, and the sum over the other classes of
    v_k p_k^2 / 2 with any slope, to first order in the variances.

    On a weighted subset of classes the bound is estimated without bias, given u and the slope.
    **With** ``u=None`` it is the best one, log eta_hat. With all classes that is the tightest bound
    for this slope. With a subset it is *biased upwards, and no bound* (Jensen's inequality), as in
    the stateless form of ``UtilityCategorical``.

    Shapes: ``batch_shape`` is the broadcast of ``utilities.shape[:-1]``, ``u`` and ``slope``;
    ``event_shape`` is ().

    Cost: O(M) time and memory per observation; ``sample`` O(K) per draw, which draws utilities,
    independently for each observation, and then the choice.

    Args:
        utilities: Means m of the utilities in nats, shape (..., K), or (..., M) for ``classes``;
            -inf for a class that is not available.
        variances: Variances v of the utilities, at least 0, of the shape of ``utilities`` or one
            that broadcasts to it with the same last axis.
        classes: What ``with class_plate(...) as classes`` gives. None for all classes.
        u: Local variable log eta in nats, shape (...). None for the best.
        slope: Derivative of u in the utility of the chosen class, in [-1, 0], shape (...).
        validate_args: Also check values, outside ``jit``. Shapes are always checked.

    Raises:
        ValueError: If ``variances`` has another shape; otherwise as ``UtilityCategorical``.
        TypeError: As ``UtilityCategorical``.
        NotImplementedError: On ``sample`` with a subset or a chunk of the classes.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> means, variances = jnp.zeros(9), jnp.full(9, 0.5)
        >>> d = lc.bounds.GaussianUtilityBound(means, variances, slope=-0.9)
        >>> d.log_prob(0).round(2).item()  # E[log p] = -2.41, by draws of the utilities
        -2.44
        >>> lc.bounds.GaussianUtilityBound(means, variances).log_prob(0).round(2).item()
        -2.65

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Eq. 8 and the end of section
        3.1 (slope 0); Knowles and Minka, Non-conjugate Variational Message Passing for Multinomial
        and Binary Regression, NIPS 2011 (the tilted bound, of which the slope is a part).
    """

    arg_constraints = {
        "utilities": utility_vector,
        "variances": constraints.independent(constraints.nonnegative, 1),
        "slope": constraints.interval(-1.0, 0.0),
    }
    pytree_data_fields = ("utilities", "classes", "variances", "u", "slope")
    u: Array | None
    slope: Array

    def __init__(
        self,
        utilities: ArrayLike,
        variances: ArrayLike,
        classes: ClassSubset | None = None,
        *,
        u: ArrayLike | None = None,
        slope: ArrayLike = 0.0,
        validate_args: bool | None = None,
    ) -> None:
        self.variances = _checked_variances(variances, jnp.shape(utilities))
        local = {"u": u, "slope": slope}
        super().__init__(utilities, classes, local=local, validate_args=validate_args)

    def _log_prob(self, value: Array) -> Array:
        log_eta = _optimal_u(self, value)
        if self.u is None:
            return -log_eta
        available = log_eta < jnp.inf
        # -exp(log_eta - u), which goes on as a straight line where it would overflow
        last = gumbel_log_cdf(jnp.where(available, self.u - log_eta, 0))
        return jnp.where(available, 1 - self.u + last, -jnp.inf)

    def optimal_u(self, value: ArrayLike) -> Array:
        r"""Return log eta_hat of ``value``, the u that is best for this subset and this slope.

        Shapes: the broadcast of ``value``'s shape and ``batch_shape``. It is +inf where the class
        in ``value`` is not available.

        Cost: O(M) per observation.
        """
        return _optimal_u(self, as_ids(value))

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw utilities, then classes as the arg max of noisy ones."""
        if self.classes is not None:
            raise self._needs_all("sample")
        normal_key, gumbel_key = random.split(key)
        shape = (*sample_shape, *self.batch_shape, self.num_categories)
        noise = random.normal(normal_key, shape, self.utilities.dtype)
        return noisy_max(gumbel_key, self.utilities + jnp.sqrt(self.variances) * noise)


@jax.jit
def _optimal_u(choice: GaussianUtilityBound, value: Array) -> Array:
    means, rows = choice.label_entries(value)
    variances = jnp.broadcast_to(choice.variances, means.shape).astype(means.dtype)
    own_mean, own_variance = take_row(means, rows), take_row(variances, rows)
    available = own_mean > -jnp.inf
    # The sum does not depend on u, so that a step evaluates it once, before and after u moves.
    log_others = _log_sum_of_others(choice, means + 0.5 * variances, rows)
    log_others -= jnp.where(available, own_mean, 0)
    own = 0.5 * choice.slope**2 * own_variance
    others = 0.5 * (1 + choice.slope) ** 2 * own_variance + log_others
    return jnp.where(available, jnp.logaddexp(own, others), jnp.inf)


def _log_sum_of_others(choice: GaussianUtilityBound, terms: Array, rows: Array) -> Array:
    """Return log sum_{k != y} w_k exp(terms_k), which may be -inf, with a gradient of 0 there."""
    weights = jnp.asarray(1.0) if choice.classes is None else choice.classes.weights
    weights = jnp.broadcast_to(weights, terms.shape[-1:]).astype(terms.dtype)
    is_own = jnp.arange(terms.shape[-1]) == rows[..., None]
    terms = jnp.where(is_own | (weights == 0), -jnp.inf, terms)
    highest = lax.stop_gradient(terms.max(axis=-1, keepdims=True))
    highest = jnp.where(jnp.isfinite(highest), highest, 0)
    total = jnp.exp(terms - highest) @ weights
    log_total = jnp.log(jnp.where(total > 0, total, 1)) + highest[..., 0]
    return jnp.where(total > 0, log_total, -jnp.inf)


def _checked_variances(variances: ArrayLike, shape: tuple[int, ...]) -> Array:
    variances = as_float_array(variances)
    fix = "For utilities x @ w.loc.T give x**2 @ w.variance.T."
    check_shape("`variances`", variances, (..., *shape[-1:]), "classes as in `utilities`", fix)
    check_broadcasts("`variances`", variances, shape, "that of `utilities`", fix)
    return variances
