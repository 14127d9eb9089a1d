# SPDX-License-Identifier: Apache-2.0
"""Bouchard's bound of the softmax, a product of sigmoids with one variable per observation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat.choices.choice_distribution import ChoiceDistribution
from numpyro_largecat.ops.softmax_bound import take_row
from numpyro_largecat.plates.class_subset import ClassSubset

NEWTON_STEPS = 4  # to rounding, in float64, in the worst of a million random cases


class Bouchard(ChoiceDistribution):
    r"""Bound on a softmax by a product of sigmoids, with a variable alpha for each observation.

    Since :math:`\sum_k e^{\psi_k - \alpha} \le \prod_k (1 + e^{\psi_k - \alpha})`,

    .. math:: \log p(y \mid \psi) \ge
              \psi_y - \alpha - \sum_k w_k \log(1 + e^{\psi_k - \alpha}),

    the chosen class included in the sum. At alpha = psi_y this is the one-vs-each bound less
    log 2, so at the best alpha it is at most that much below. It is never exact: with K = 2 and
    equal utilities it is -2 log 2 for -log 2.

    With all classes and no ``alpha`` the best one is found; see ``best_alpha``. On a weighted
    subset of classes the sum is estimated without bias, given alpha. It must be given, since the
    best one of an estimate would make the value biased upwards, and no bound. Keep it as a
    parameter in the data plate; log(K - 1) is the best alpha of utilities that are all 0::

        with lc.data_plate("data", N, rows):
            alpha = numpyro.param("alpha", jnp.full(N, jnp.log(K - 1)), event_dim=0)

    Shapes: ``batch_shape`` is the broadcast of ``utilities.shape[:-1]`` and ``alpha``'s shape;
    ``event_shape`` is ().

    Cost: O(K) time and memory per observation with all classes, O(M) with a subset; about three
    times the time without ``alpha``.

    Args:
        utilities: Mean utilities psi in nats, shape (..., K), or (..., M) for ``classes``.
        classes: What ``with class_plate(...) as classes`` gives. None for all classes.
        alpha: Local variable in nats, any real number, shape (...). None for the best, only with
            all classes.
        validate_args: Also check values, outside ``jit``. Shapes are always checked.

    Raises:
        ValueError: If ``alpha`` is missing with a subset of classes, or has not one entry for each
            observation; otherwise as ``UtilityCategorical``.
        TypeError: As ``UtilityCategorical``.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> d = lc.bounds.Bouchard(jnp.array([0.0, 2.0]))
        >>> d.best_alpha().round(3).item()  # the mean, with two classes
        1.0
        >>> d.log_prob(1).round(3).item()  # log p = -0.127
        -0.627

    References:
        Bouchard, Efficient Bounds for the Softmax Function and Applications to Inference in Hybrid
        Models, 2007; Titsias, One-vs-Each Approximation to Softmax, NIPS 2016, Eq. 12.
    """

    pytree_data_fields = ("utilities", "classes", "alpha")
    alpha: Array | None

    def __init__(
        self,
        utilities: ArrayLike,
        classes: ClassSubset | None = None,
        *,
        alpha: ArrayLike | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(utilities, classes, local={"alpha": alpha}, validate_args=validate_args)
        if alpha is None and self.classes is not None and self.classes.kind == "sample":
            raise ValueError(
                "`alpha` must be given with a subset of classes, as the best is that of all. "
                "Keep it in the data plate: "
                '`numpyro.param("alpha", jnp.full(N, jnp.log(K - 1)), event_dim=0)`.'
            )

    def best_alpha(self) -> Array:
        r"""Return the alpha that makes the bound tightest; it is the same for every class chosen.

        It solves :math:`\sum_k \sigma(\psi_k - \alpha) = 1`, so that its derivatives are the
        shares of the classes in the sum of :math:`\sigma'`.

        Shapes: ``utilities.shape[:-1]``.

        Cost: O(K) per observation, for each of four Newton steps.
        """
        if self.classes is not None:
            raise self._needs_all("The best alpha")
        return _best_alpha(self.utilities)

    def _log_prob(self, value: Array) -> Array:
        utilities, rows = self.label_entries(value)
        alpha = self.best_alpha() if self.alpha is None else self.alpha
        above = utilities - alpha[..., None]
        weights = jnp.asarray(1.0) if self.classes is None else self.classes.weights
        is_own = jnp.arange(utilities.shape[-1]) == rows[..., None]
        others = jnp.where(is_own, 0, weights.astype(above.dtype) * jax.nn.softplus(above))
        # psi_y - alpha - log(1 + exp(psi_y - alpha)), without the difference of large numbers
        return jax.nn.log_sigmoid(take_row(above, rows)) - others.sum(axis=-1)


@jax.custom_jvp
@jax.jit
def _best_alpha(utilities: Array) -> Array:
    """Solve sum_k sigmoid(psi_k - alpha) = 1.

    With ``top`` the highest utility the equation reads, free of cancellation,

        sum_{k != top} sigmoid(psi_k - alpha) = sigmoid(alpha - top).

    The difference of the logarithms of both sides has a slope in [-2, -1] everywhere, so that
    Newton's method cannot run away, and the start is near the root whatever the utilities (exact
    for two classes). With ``second`` the next highest utility and r = exp(second - alpha), at most
    1 at the root, a term is r e_k / (1 + r e_k), so that exponentials e_k are taken once.
    """
    top = utilities.max(axis=-1)
    is_top = jnp.arange(utilities.shape[-1]) == utilities.argmax(axis=-1, keepdims=True)
    others = jnp.where(is_top, -jnp.inf, utilities)
    second = others.max(axis=-1)
    alone = second == -jnp.inf
    exponentials = jnp.exp(others - jnp.where(alone, 0, second)[..., None])

    def newton(_: int, alpha: Array) -> Array:
        r = jnp.exp(second - alpha)
        terms = exponentials / (1 + r[..., None] * exponentials)
        total = terms.sum(axis=-1)
        gap = second - alpha + jnp.log(total) - jax.nn.log_sigmoid(alpha - top)
        slope = r * (terms**2).sum(axis=-1) / total - 1 - jax.nn.sigmoid(top - alpha)
        return alpha - gap / slope

    log_sum = second + jnp.log(exponentials.sum(axis=-1))
    start = jnp.maximum(log_sum, (top + log_sum) / 2)
    alpha = lax.fori_loop(0, NEWTON_STEPS, newton, start)
    # Of one class alone the best alpha is -inf; from here on the bound is 0 up to rounding.
    return jnp.where(alone, jnp.where(top > -jnp.inf, top, 0) - 40, alpha)


@_best_alpha.defjvp
def _best_alpha_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (utilities,), (moves,) = primals, tangents
    alpha = _best_alpha(utilities)
    is_there = utilities > -jnp.inf
    above = jnp.where(is_there, utilities - alpha[..., None], 0)
    slopes = jnp.where(is_there, jax.nn.sigmoid(above) * jax.nn.sigmoid(-above), 0)
    total = slopes.sum(axis=-1)
    moved = (slopes * jnp.where(is_there, moves, 0)).sum(axis=-1)
    return alpha, jnp.where(total > 0, moved / jnp.where(total > 0, total, 1), 0)
