# SPDX-License-Identifier: Apache-2.0
"""Rules that move the local parameters of the rows in a minibatch, in place of the optimiser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat._checks import check_count, check_interval
from numpyro_largecat.ops.fixed_point import LONGEST_STEP, newton_step

MOST_FIRST_STEPS = 5  # Newton steps on the first visit of a row, at most
FIRST_TOLERANCE = 1e-3  # of the value after them
LEAST_U = 1e-37  # near the least positive float32, so that logarithms are finite
LEAST_PRECISION = 1e-4  # of q(error)
LEAST_NOISE = 1e-6  # variance of eta_hat / eta, below which all of it is taken
MOST_LOG_NOISE = 15.0

__all__ = ["EtaEstimate", "GaussianNaturalGradient", "NaturalGradient", "UpdateRule"]

Statistic = Callable[[Array, Array], Any]  # of the parameter, and of the distance of this step
AtDistance = Callable[[Array, Array], Array]  # of the parameter, and of a distance


class Followed(NamedTuple):
    """A quantity of the draw of the latent values that a parameter follows.

    In a step the parameter is ``at_distance(parameter, distance)``, with the distance of
    ``values[..., entry]`` from what it is with the rows of ``plate`` at the centre of the guide.
    With ``own`` values that is at their centre too, less how far ``slopes`` say that they move the
    other values.
    """

    plate: str  # class plate of the values
    values: Array  # (..., M)
    entry: Array  # (...), integers in [0, M)
    at_distance: AtDistance
    own: Own | None = None


class Own(NamedTuple):
    """Values of an observation's own that a parameter follows."""

    drawn: Array  # (..., D)
    slopes: Array  # (..., D)
    values_at: Callable[[Array], Array]  # ``Followed.values`` at others, (..., D)


class EtaEstimate(NamedTuple):
    """Statistic of a local variable u = log eta: what the classes of a step say about the best u.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> known = jnp.array([3.0]), jnp.array([0.7]), jnp.array([-jnp.inf])
        >>> estimate = lc.update_rules.EtaEstimate(*known)
        >>> estimate.log_least[0]
        Array(0.7, dtype=float32)
    """

    log_eta_hat: Array  # (...), log of the estimate of eta, which is unbiased
    log_least: Array  # (...), log of the sum over the classes at hand alone: best u is not below
    log_noise: Array | float = jnp.inf  # (...), log of its variance over draws of classes / eta^2


def best_u_at(u: Array, distance: Array) -> Array:
    r"""The best u, log eta, where the observed utility is ``distance`` higher than for ``u``.

    .. math:: \eta = 1 + r, \quad r = \sum_{k \ne y} e^{\psi_k - \psi_y}, \qquad
              u(\delta) = \log\big(1 + (e^u - 1) \, e^{-\delta}\big) ,

    and back with ``-distance``. That is exact for Gumbel errors, whose best u is never below 0; its
    derivative in the utility is p_y - 1. For logistic errors it is too steep, about twice with two
    or three classes. At a distance of 2 that costs .08 nats of the bound with a hundred classes and
    .13 with two, for this step alone: the bound is flat around its best u.
    """
    u = jnp.maximum(u, LEAST_U)
    log_rest = u + jnp.log(-jnp.expm1(-u))
    return jnp.logaddexp(0, log_rest - distance)


@runtime_checkable
class UpdateRule(Protocol):
    """What ``SubsampledSVI`` asks of the ``update_rule=`` of a ``numpyro.param`` site.

    Before each gradient step, the rule moves the rows of the minibatch; the loss and the gradient
    of everything else are then taken at the moved values. The site may give ``follow=``, a
    ``Followed``, which moves the parameter once more for this step alone. It gives ``statistic=``,
    a function of the parameter and of the distance of what it follows, 0 if it follows nothing.

    Example:
        >>> import numpyro_largecat as lc
        >>> class TakeTheNewest:
        ...     def init(self, value):
        ...         return ()
        ...     def update(self, value, state, statistic):
        ...         return statistic(value).log_eta_hat, state
        >>> isinstance(TakeTheNewest(), lc.update_rules.UpdateRule)
        True
    """

    def init(self, value: Array) -> Any:
        """Make the rule's state for all rows, arrays with the leading axes of ``value``."""

    def update(
        self, value: Array, state: Any, statistic: Callable[[Array], Any]
    ) -> tuple[Array, Any]:
        """Move ``value``, given the statistic of the site as a function of it, for some rows."""


class Averaged(NamedTuple):
    """What ``NaturalGradient`` keeps of each observation besides u."""

    visits: Array  # (...), integers
    noise: Array  # (...), variance of eta_hat / eta over draws of the classes, mean over visits


@dataclass(frozen=True)
class NaturalGradient:
    r"""Natural-gradient step on eta, for a local variable u = log eta.

    .. math:: \eta \leftarrow (1 - \alpha)\,\eta + \alpha\,\hat\eta, \qquad
              \alpha = \max\big((1 + \mathrm{visits})^{-\mathrm{exponent}}, \;
                                 \min(1, \mathrm{excess} / v)\big),

    with the estimate eta_hat of the ``statistic``, an ``EtaEstimate`` of the classes of this step:
    eta is the natural parameter of q(error) = Gumbel(log eta, 1). In u the step is
    ``u + log1p(alpha * g)``, g the derivative of the observation's own bound; it is computed as a
    log-sum, which does not overflow however far u is off. ``visits`` counts the earlier visits of
    *this observation*: the first visit takes eta_hat as it is, and later ones average, at the same
    pace for an observation of a small data set and of a huge one. The eta_hat of the softmax is the
    same at any u. That of logistic errors is not, and Newton steps on the first visit find the u
    that it leaves where it is.

    **It averages no more than the draw of the classes asks for.** With v the variance of eta_hat /
    eta over such draws, a u that has just taken eta_hat of the same classes makes the bound too
    high by :math:`v\,(\alpha - \alpha^2 / 2)` to first order. ``excess`` allows for so much, where
    the share of this visit is not more already. Where v is small, because many classes are drawn or
    all that count are labels, u is as good as new in each step: it leaves a bad start at once, is
    where weights have moved to, and follows the draw of all latent values, so that their standard
    deviations are those of the softmax. Where v is large the steps are those of Robbins and Monro,
    for which the sum of alpha must be infinite and that of its squares finite, exponents in (0.5,
    1]. After the step exp(-u) eta_hat is at most 1 / alpha, so gradients of the utilities stay
    bounded. Of v the mean over visits is kept, this one with them, each relative to the eta before
    it: a class that is seldom drawn, and then most of eta_hat, so shows when it is drawn first.

    Cost: O(1) per observation and visit and one evaluation of the statistic; ``newton_steps`` more,
    with their derivatives, if a row is new. Two floats and one int kept per observation.

    Args:
        exponent: Decay of the step size, in (0.5, 1].
        excess: Nats by which the bound of an observation may be too high on average where alpha is
            not (1 + visits)^-exponent, at least 0.
        newton_steps: Most Newton steps on the first visit of an observation, for a statistic that
            depends on u; 0 for one that does not.

    Raises:
        ValueError: If ``exponent`` is outside (0.5, 1], or ``excess`` or ``newton_steps`` is
            negative.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> rule = lc.update_rules.NaturalGradient()
        >>> known = jnp.array([3.0]), jnp.array([0.7]), jnp.array([-jnp.inf])
        >>> estimate = lc.update_rules.EtaEstimate(*known)
        >>> u, state = rule.update(jnp.zeros(1), rule.init(jnp.zeros(1)), lambda u: estimate)
        >>> u.tolist(), state.visits.tolist()
        ([3.0], [1])

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Algorithm 1 (local step, with
        excess 0).
    """

    exponent: float = 0.9
    excess: float = 0.002
    newton_steps: int = 0

    def __post_init__(self) -> None:
        check_interval("exponent", self.exponent, "(0.5, 1]", "to converge")
        check_interval("excess", self.excess, "[0, inf)", "nats")
        check_count("newton_steps", self.newton_steps, 0)

    def init(self, value: Array) -> Averaged:
        """No observation has been visited."""
        noise = jnp.zeros(value.shape, jnp.promote_types(value.dtype, jnp.float32))
        return Averaged(jnp.zeros(value.shape, jnp.int32), noise)

    def update(
        self, value: Array, state: Averaged, statistic: Callable[[Array], EtaEstimate]
    ) -> tuple[Array, Averaged]:
        """Move u = ``value`` towards log eta_hat; ``state`` counts visits."""
        if self.newton_steps:

            def newton(value: Array, number: Array) -> Array:
                def log_eta_hat(value: Array) -> Array:
                    return statistic(value).log_eta_hat

                return newton_step(log_eta_hat, value, LONGEST_STEP * 2.0**number)

            value = _on_new_rows(state.visits == 0, value, self.newton_steps, newton)
        estimate = statistic(value)
        log_noise = jnp.asarray(estimate.log_noise, state.noise.dtype)
        if not self.newton_steps:  # before the first visit there is no eta to compare with
            first = 2 * (value - estimate.log_eta_hat)
            log_noise = log_noise + jnp.where(state.visits == 0, first, 0)
        log_noise = jnp.where(log_noise < MOST_LOG_NOISE, log_noise, MOST_LOG_NOISE)  # not NaN
        share = _decaying(state.visits, self.exponent, state.noise.dtype)
        noise = state.noise + share * (jnp.exp(log_noise) - state.noise)
        state = Averaged(state.visits + 1, noise)
        log_kept, log_new = _log_step_sizes(self.step_sizes(state).astype(value.dtype))
        moved = jnp.logaddexp(log_kept + value, log_new + estimate.log_eta_hat)
        return moved.astype(value.dtype), state

    def step_sizes(self, state: Averaged) -> Array:
        """Alpha of the last visit of each observation."""
        allowed = self.excess / jnp.maximum(state.noise, LEAST_NOISE)
        decaying = _decaying(jnp.maximum(state.visits - 1, 0), self.exponent, allowed.dtype)
        return jnp.maximum(decaying, jnp.minimum(allowed, 1))


@dataclass(frozen=True)
class MeanOfVisits:
    r"""Mean of what a ``statistic`` was in the visits of a row, later ones with a little more.

    .. math:: x \leftarrow (1 - \alpha)\,x + \alpha\,\hat x, \qquad
              \alpha = (1 + \mathrm{visits})^{-\mathrm{exponent}}
    """

    exponent: float = 0.9

    def init(self, value: Array) -> Array:
        """No row has been visited."""
        return jnp.zeros(value.shape[:-1], jnp.int32)

    def update(
        self, value: Array, state: Array, statistic: Callable[[Array], Array]
    ) -> tuple[Array, Array]:
        """Move ``value`` (..., D) towards the statistic; ``state`` counts visits."""
        alpha = _decaying(state, self.exponent, value.dtype)
        moved = value + alpha[..., None] * (statistic(value) - value)
        return moved.astype(value.dtype), state + 1


def _on_new_rows(
    is_new: Array, value: Array, most_steps: int, step: Callable[[Array, Array], Array]
) -> Array:
    """Repeat a step of (value, its number) on new rows until it moves none; nothing if none is."""

    def goes_on(carry: tuple[Array, Array, Array]) -> Array:
        _, number, moves = carry
        return moves & (number < most_steps)

    def repeat(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        value, number, _ = carry
        moved = jnp.where(is_new, step(value, number).astype(value.dtype), value)
        moves = (jnp.abs(moved - value) > FIRST_TOLERANCE * jnp.maximum(1, jnp.abs(value))).any()
        return moved, number + 1, moves

    return lax.while_loop(goes_on, repeat, (value, jnp.array(0), is_new.any()))[0]


@dataclass(frozen=True)
class GaussianNaturalGradient:
    r"""Natural-gradient step on the Gaussian q(error) = Normal(loc, 1 / precision) of a row.

    .. math:: \mathrm{precision} &\leftarrow (1 - \alpha)\,\mathrm{precision}
              - \alpha\, E_q[f''(\varepsilon)], \\
              \mathrm{loc} &\leftarrow \mathrm{loc}
              + \alpha\, E_q[f'(\varepsilon)] / \mathrm{precision}, \qquad
              \alpha = (1 + \mathrm{visits})^{-\mathrm{exponent}},

    with the log joint f of the choice and its error, estimated without bias from the classes of
    this step; its two expected derivatives are the ``statistic``. f is concave, so the precision
    stays positive. ``visits`` counts the earlier visits of this observation. On the first, a few
    steps with alpha = 1, which are Newton's, find the best q for the classes of that step.

    The parameter holds ``loc`` and the logarithm of the precision on its last axis.

    Cost: one evaluation of the statistic; ``MOST_FIRST_STEPS`` more if a row is new.

    Args:
        exponent: Decay of the step size, in (0.5, 1].

    Raises:
        ValueError: If ``exponent`` is outside (0.5, 1].

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> rule = lc.update_rules.GaussianNaturalGradient()
        >>> def derivatives(value):  # of f(error) = -2 (error - 3)^2
        ...     return -4 * (value[..., 0] - 3), jnp.full(1, -4.0)
        >>> value, visits = rule.update(jnp.zeros((1, 2)), jnp.array([0]), derivatives)
        >>> value[0, 0].item(), round(jnp.exp(value[0, 1]).item(), 3), visits.tolist()
        (3.0, 4.0, [1])

    References:
        Khan and Rue, The Bayesian Learning Rule, JMLR 2023, section 1.3 (the step); Ruiz, Titsias,
        Dieng and Blei, Augment and Reduce, ICML 2018, Algorithm 2 (whose place it takes).
    """

    exponent: float = 0.9

    def __post_init__(self) -> None:
        check_interval("exponent", self.exponent, "(0.5, 1]", "to converge")

    def init(self, value: Array) -> Array:
        """No observation has been visited."""
        return jnp.zeros(value.shape[:-1], jnp.int32)

    def update(
        self, value: Array, state: Array, statistic: Callable[[Array], tuple[Array, Array]]
    ) -> tuple[Array, Array]:
        """Move location and log precision along the statistic; ``state`` counts visits."""

        def newton(value: Array, number: Array) -> Array:
            del number
            return _gaussian_step(value, -jnp.inf, 0.0, statistic(value))

        value = _on_new_rows((state == 0)[..., None], value, MOST_FIRST_STEPS, newton)
        log_kept, log_new = _log_step_sizes(_decaying(state, self.exponent, value.dtype))
        return _gaussian_step(value, log_kept, log_new, statistic(value)), state + 1


def _gaussian_step(
    value: Array, log_kept: Array | float, log_new: Array | float, derivatives: tuple[Array, Array]
) -> Array:
    slope, curvature = derivatives
    log_curvature = jnp.log(jnp.maximum(-curvature, LEAST_PRECISION))
    log_precision = jnp.logaddexp(log_kept + value[..., 1], log_new + log_curvature)
    step = jnp.exp(log_new) * slope * jnp.exp(-log_precision)
    # Where the log joint is nearly straight a Newton step is far too long, except upwards.
    moved = value[..., 0] + jnp.clip(step, -LONGEST_STEP, LONGEST_STEP)
    return jnp.stack([moved, log_precision], axis=-1).astype(value.dtype)


def _decaying(visits: Array, exponent: float, dtype: Any) -> Array:
    """Step sizes alpha = (1 + visits)^-exponent."""
    return (1.0 + visits.astype(dtype)) ** -exponent


def _log_step_sizes(alpha: Array) -> tuple[Array, Array]:
    """log(1 - alpha) and log(alpha)."""
    is_part = alpha < 1
    log_kept = jnp.where(is_part, jnp.log1p(-jnp.where(is_part, alpha, 0.0)), -jnp.inf)
    return log_kept, jnp.log(alpha)
