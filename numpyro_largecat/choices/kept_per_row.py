# SPDX-License-Identifier: Apache-2.0
"""What ``sample_choice`` keeps for each observation: u, or a Gaussian for its error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat.choices.bounds.gaussian_error_bound import GaussianErrorBound
from numpyro_largecat.choices.bounds.gaussian_utility_bound import GaussianUtilityBound
from numpyro_largecat.choices.choice_distribution import ChoiceDistribution
from numpyro_largecat.choices.error_families import GUMBEL, LOGISTIC, ErrorFamily
from numpyro_largecat.choices.update_rules import (
    AtDistance,
    EtaEstimate,
    GaussianNaturalGradient,
    NaturalGradient,
    Statistic,
    UpdateRule,
    best_u_at,
)
from numpyro_largecat.choices.utility_categorical import UtilityCategorical
from numpyro_largecat.ops.logistic_bound import log_eta_hat_logistic, log_variance_logistic
from numpyro_largecat.ops.softmax_bound import log_variance_of_sum, take_row
from numpyro_largecat.plates.class_subset import ClassSubset

MOST_NEWTON_STEPS = 15  # Newton steps of u on the first visit, at most; most rows take three


class KeptPerRow(NamedTuple):
    """The local parameter of one family of errors, and the bound that it makes."""

    suffix: str  # of the parameter's name
    start: Array  # value before the first visit, shape (*event)
    update_rule: UpdateRule  # default
    statistic: Statistic
    at_distance: AtDistance
    bound: Callable[[Array], ChoiceDistribution]


def kept_per_row(
    utilities: Array,
    classes: ClassSubset,
    family: ErrorFamily,
    obs: ArrayLike,
    variances: ArrayLike | None = None,
) -> KeptPerRow:
    """Choose what is kept that suits ``family``, or ``variances`` of utilities.

    Statistics take the utilities as constants, since only what is kept is moved by them. The
    bounds of softmax and logistic errors take a u below 0, to which one that follows a draw may
    come, as 0, which is always better: eta is at least 1.
    """
    if variances is not None:
        return _gaussian_utilities(utilities, jnp.asarray(variances), classes, obs)
    forms = {GUMBEL: _softmax, LOGISTIC: _logistic}
    return forms.get(family, _gaussian)(utilities, classes, family, obs)


def _softmax(
    utilities: Array, classes: ClassSubset, family: ErrorFamily, obs: ArrayLike
) -> KeptPerRow:
    del family

    def log_eta_hat(u: Array, classes: ClassSubset) -> Array:
        del u
        return UtilityCategorical(lax.stop_gradient(utilities), classes).optimal_u(obs)

    def log_variance(u: Array) -> Array:
        del u
        distances, weights = _drawn(ChoiceDistribution(lax.stop_gradient(utilities), classes), obs)
        return log_variance_of_sum(-distances, weights)

    return KeptPerRow(
        suffix="u",
        start=jnp.full((), math.log(classes.num_categories), utilities.dtype),
        update_rule=NaturalGradient(),
        statistic=_eta_statistic(log_eta_hat, log_variance, classes),
        at_distance=best_u_at,
        bound=lambda u: UtilityCategorical(utilities, classes, u=jnp.maximum(u, 0)),
    )


def _logistic(
    utilities: Array, classes: ClassSubset, family: ErrorFamily, obs: ArrayLike
) -> KeptPerRow:
    def log_eta_hat(u: Array, classes: ClassSubset) -> Array:
        constant = ChoiceDistribution(lax.stop_gradient(utilities), classes)
        return log_eta_hat_logistic(*constant.competitors(obs), jnp.maximum(u, 0))

    def log_variance(u: Array) -> Array:
        constant = ChoiceDistribution(lax.stop_gradient(utilities), classes)
        return log_variance_logistic(*_drawn(constant, obs), jnp.maximum(u, 0))

    return KeptPerRow(
        suffix="u",
        start=jnp.full((), math.log(classes.num_categories), utilities.dtype),
        update_rule=NaturalGradient(newton_steps=MOST_NEWTON_STEPS),
        statistic=_eta_statistic(log_eta_hat, log_variance, classes),
        at_distance=best_u_at,
        bound=lambda u: UtilityCategorical(utilities, classes, family, u=jnp.maximum(u, 0)),
    )


def _gaussian_utilities(
    utilities: Array, variances: Array, classes: ClassSubset, obs: ArrayLike
) -> KeptPerRow:
    def bound(u: Array) -> GaussianUtilityBound:
        return GaussianUtilityBound(utilities, variances, classes, u=u, slope=_best_slope(u))

    def log_eta_hat(u: Array, classes: ClassSubset) -> Array:
        means, spread = lax.stop_gradient((utilities, variances))
        constant = GaussianUtilityBound(means, spread, classes, u=u, slope=_best_slope(u))
        return constant.optimal_u(obs)

    def log_variance(u: Array) -> Array:
        means, spread = lax.stop_gradient((utilities, variances))
        constant = ChoiceDistribution(means, classes)
        distances, weights = _drawn(constant, obs)
        spread = jnp.broadcast_to(spread, means.shape)
        own = take_row(spread, constant.label_entries(obs)[1])
        terms = 0.5 * spread[..., classes.first_drawn :] - distances
        return log_variance_of_sum(terms, weights) + (1 + _best_slope(u)) ** 2 * own

    return KeptPerRow(
        suffix="u",
        start=jnp.full((), math.log(classes.num_categories), utilities.dtype),
        update_rule=NaturalGradient(newton_steps=MOST_NEWTON_STEPS),
        statistic=_eta_statistic(log_eta_hat, log_variance, classes),
        at_distance=best_u_at,
        bound=bound,
    )


def _drawn(choice: ChoiceDistribution, obs: ArrayLike) -> tuple[Array, Array]:
    """Distances and weights as of ``competitors``, of the drawn classes alone."""
    assert choice.classes is not None
    distances, weights = choice.competitors(obs)
    first = choice.classes.first_drawn
    return distances[..., first:], weights[..., first:]


def _eta_statistic(
    log_eta_hat: Callable[[Array, ClassSubset], Array],
    log_variance: Callable[[Array], Array],
    classes: ClassSubset,
) -> Statistic:
    """Give a rule for u what it may ask of eta; XLA leaves out what the rule does not use."""
    at_hand = replace(classes, weights=jnp.minimum(classes.weights, 1))

    def statistic(u: Array, distance: Array) -> EtaEstimate:
        here = best_u_at(u, distance)
        return EtaEstimate(
            best_u_at(log_eta_hat(here, classes), -distance),
            best_u_at(log_eta_hat(here, at_hand), -distance),
            log_variance(here) - 2 * here,
        )

    return statistic


def on_all_classes(
    utilities: ArrayLike, variances: ArrayLike, classes: ClassSubset | None, obs: ArrayLike | None
) -> GaussianUtilityBound:
    """The bound for Gaussian utilities of all classes: at its best u, so that nothing is kept."""
    if obs is None:  # to be drawn
        return GaussianUtilityBound(utilities, variances, classes)
    flat = GaussianUtilityBound(*lax.stop_gradient((utilities, variances)), classes)
    slope = _best_slope(flat.optimal_u(obs))
    return GaussianUtilityBound(utilities, variances, classes, slope=slope)


def _best_slope(u: Array) -> Array:
    """Derivative of the best u in the utility of the observed class, a constant for gradients."""
    return jnp.expm1(-jnp.maximum(lax.stop_gradient(u), 0))


def _gaussian(
    utilities: Array, classes: ClassSubset, family: ErrorFamily, obs: ArrayLike
) -> KeptPerRow:
    def bound(value: Array, utilities: Array = utilities) -> GaussianErrorBound:
        loc, scale = value[..., 0], jnp.exp(-0.5 * value[..., 1])
        return GaussianErrorBound(utilities, classes, family, loc=loc, scale=scale)

    def statistic(value: Array, distance: Array) -> tuple[Array, Array]:
        moved = at_distance(value, distance)
        return bound(moved, lax.stop_gradient(utilities)).expected_derivatives(obs)

    def at_distance(value: Array, distance: Array) -> Array:
        loc, precision = value[..., 0], jnp.exp(value[..., 1])
        ones = jnp.ones_like(loc)

        def slope(error: Array) -> Array:
            return jax.jvp(family.log_prob, (error,), (ones,))[1]

        prior_precision = -jax.jvp(slope, (loc,), (ones,))[1]
        slope_of_best = jnp.clip(prior_precision / precision, 0.0, 1.0) - 1.0
        return jnp.stack([loc + slope_of_best * distance, value[..., 1]], axis=-1)

    quantile = upper_quantile(family, classes.num_categories)
    return KeptPerRow(
        suffix="error",
        start=jnp.array([quantile, 0.0], utilities.dtype),
        update_rule=GaussianNaturalGradient(),
        statistic=statistic,
        at_distance=at_distance,
        bound=bound,
    )


def upper_quantile(family: ErrorFamily, num_categories: int) -> float:
    """Error that one of K exceeds on average: a start for the error of the chosen class."""
    target = math.log1p(-1.0 / num_categories)
    with jax.ensure_compile_time_eval():
        low, high = jnp.array(-10.0), jnp.array(100.0)
        for _ in range(30):
            middle = (low + high) / 2
            below = family.log_cdf(middle) < target
            low, high = jnp.where(below, middle, low), jnp.where(below, high, middle)
        return float(low)
