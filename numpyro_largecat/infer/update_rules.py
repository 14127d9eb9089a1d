# SPDX-License-Identifier: Apache-2.0
"""Rules that move the local parameters of the rows in a minibatch, in place of the optimiser."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array


@runtime_checkable
class UpdateRule(Protocol):
    """What ``SubsampledSVI`` asks of the ``update_rule=`` of a ``numpyro.param`` site.

    Before each gradient step, the rule moves the rows of the minibatch; the loss and the gradient
    of everything else are then taken at the moved values. The site gives ``statistic=``, one entry
    for each row. It may give ``follow=(quantity, slope)``, a quantity of the draw of the latent
    values and a function of the parameter: the value then moves with the quantity's distance from
    what it is at the centre of the guide, times the slope.
    """

    def init(self, value: Array) -> Any:
        """Make the rule's state for all rows, a pytree of arrays shaped like ``value``."""

    def update(self, value: Array, state: Any, statistic: Array) -> tuple[Array, Any]:
        """Move ``value``, given the ``statistic=`` of the site; all three hold the batch's rows."""


class NaturalGradient:
    r"""Natural-gradient step on eta, for a local variable u = log eta.

    .. math:: \eta \leftarrow (1 - \alpha)\,\eta + \alpha\,\hat\eta, \qquad
              \alpha = (1 + \mathrm{visits})^{-\mathrm{exponent}},

    with eta_hat, whose logarithm is the ``statistic``, the estimate from the classes of this step:
    eta is the natural parameter of q(error) = Gumbel(log eta, 1). In u the step is
    ``u + log1p(alpha * g)``, g the derivative of the observation's own bound; it is computed as a
    log-sum, which does not overflow however far u is off. ``visits`` counts the earlier visits of
    *this observation*: the first visit takes eta_hat as it is, and later ones average, at the same
    pace for an observation of a small data set and of a huge one.

    The steps satisfy the Robbins-Monro conditions, the sum of alpha infinite and that of its
    squares finite, for exponents in (0.5, 1]. Small exponents follow weights that still move, large
    ones average more. After the step exp(-u) eta_hat is at most 1 / alpha, so gradients of the
    utilities stay bounded.

    Cost: O(1) per observation and visit; one float and one int kept per observation.

    Args:
        exponent: Decay of the step size, in (0.5, 1].

    Raises:
        ValueError: If ``exponent`` is outside (0.5, 1].

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> rule = lc.NaturalGradient()
        >>> u, visits = rule.update(jnp.zeros(1), jnp.array([0]), jnp.array([3.0]))
        >>> u.tolist(), visits.tolist()
        ([3.0], [1])

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Algorithm 1 (local step).
    """

    def __init__(self, exponent: float = 0.9) -> None:
        if not 0.5 < exponent <= 1:
            raise ValueError(
                "`exponent` must be in (0.5, 1], for the step sizes to satisfy the Robbins-Monro "
                f"conditions; got {exponent}."
            )
        self.exponent = exponent

    def init(self, value: Array) -> Array:
        """No observation has been visited."""
        return jnp.zeros(value.shape, jnp.int32)

    def update(self, value: Array, state: Array, statistic: Array) -> tuple[Array, Array]:
        """Move u = ``value`` towards ``statistic`` = log eta_hat; ``state`` counts visits."""
        alpha = (1.0 + state.astype(value.dtype)) ** -self.exponent
        log_kept = jnp.where(state > 0, jnp.log1p(-jnp.where(state > 0, alpha, 0.0)), -jnp.inf)
        moved = jnp.logaddexp(log_kept + value, jnp.log(alpha) + statistic)
        return moved.astype(value.dtype), state + 1

    def __repr__(self) -> str:
        """Show the exponent."""
        return f"NaturalGradient(exponent={self.exponent})"
