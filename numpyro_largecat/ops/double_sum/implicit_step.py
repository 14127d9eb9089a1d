# SPDX-License-Identifier: Apache-2.0
"""The implicit (proximal) step of the double sum, for one observation and one other class."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.ops.wright_omega import wright_omega

MOST_STEPS = 12  # in 400,000 extreme states; a small step size takes two or three


class BestU(NamedTuple):
    """The u that is best for an observation with a given eta, and its force on log eta."""

    u: Array  # minimiser
    force: Array  # rate * eta * exp(-u), derivative of the minimum in log eta
    log_force: Array


def best_u(log_eta: Array, u: Array, rate: Array) -> BestU:
    r"""Integrate out u: find the minimiser of its part of an implicit step.

    .. math:: \min_v\; \mathrm{rate}\,(v + \eta\, e^{-v}) + \tfrac12 (v - u)^2

    With ``force = rate * eta * exp(-v)`` the minimiser is ``v = u - rate + force``, so that
    ``force + log(force) = log(rate) + log_eta + rate - u``: a Wright omega, which grows only
    linearly in log eta. The minimum is convex in log eta, and its derivative is ``force``.

    Shapes: all alike. Cost: O(1) for each entry.

    Args:
        log_eta: Logarithm of eta, the sum over the classes, at least 0.
        u: Value before the step.
        rate: Step size times the weight of the observation, at least 0.

    References:
        Unbiased scalable softmax optimization, Appendix F.3.2 (with Lambert's W).
    """
    distance = u - rate  # first: both may be large, and close
    z = log_eta + jnp.log(rate) - distance
    force = wright_omega(z)
    is_strong = force > 1
    strong = jnp.where(is_strong, force, 1)
    log_force = jnp.where(is_strong, jnp.log(strong), z - force)
    new_u = jnp.where(is_strong, log_eta - jnp.log(strong / rate), distance + force)
    return BestU(new_u, force, log_force)


class _AtGap(NamedTuple):
    """What the classes of a step feel at a gap between their utilities."""

    u: Array  # best u there
    force: Array  # that drives the two classes apart
    log_force: Array
    slope: Array  # derivative of log_force in the gap, in (0, 1]


def _at_gap(gap: Array, u: Array, rate: Array, log_others: Array) -> _AtGap:
    log_odds = log_others + gap
    log_eta = jnp.logaddexp(0, log_odds)
    log_share = -jnp.logaddexp(0, -log_odds)  # of the other classes in eta
    best = best_u(log_eta, u, rate)
    slope = (1 + jnp.exp(-log_eta) * best.force) / (1 + best.force)
    return _AtGap(best.u, best.force * jnp.exp(log_share), best.log_force + log_share, slope)


@jax.jit
def implicit_step(
    u: Array, gap: Array, curvature: Array, rate: Array, log_others: Array
) -> tuple[Array, Array]:
    r"""Take an implicit step for one observation i with label y and one other class k.

    It is the minimiser of

    .. math:: \mathrm{rate}\,(v + e^{-v} + e^{\mathrm{log\_others} + g - v})
              + \tfrac12 (v - u)^2 + \frac{(g - \mathrm{gap})^2}{2\,\mathrm{curvature}}

    in v, the new u, and in g, the new gap :math:`x_i^\top (w_k - w_y)`. That is the step
    :math:`\min_\theta \eta f_{ik}(\theta) + \tfrac12 \|\theta - \tilde\theta\|^2` of the double sum
    with rate :math:`\eta N`, log_others :math:`\log(K - 1)` and curvature :math:`2 \|x_i\|^2`: the
    two rows move along x alone. Where a ridge multiplies :math:`\tfrac12\|w_k\|^2` by a penalty
    :math:`\eta\mu\beta_k`, give the gap of the rows :math:`w / (1 + \mathrm{penalty})` and the
    curvature :math:`\sum_{j \in \{k, y\}} \|x_i\|^2 / (1 + \mathrm{penalty}_j)`. The new rows are

    .. math:: w_k \leftarrow \frac{w_k - \mathrm{force}\, x_i}{1 + \mathrm{penalty}_k}, \qquad
              w_y \leftarrow \frac{w_y + \mathrm{force}\, x_i}{1 + \mathrm{penalty}_y}.

    With u integrated out, the fall ``a = gap - g`` solves ``log a = log(curvature * force(a))``,
    whose right side is decreasing and concave in a. Each step puts a tangent in its place, which a
    Wright omega solves: the steps come down to the solution from above, and never cross it. Nothing
    is exponentiated that could overflow, at any u, gap and number of classes.

    Shapes: all alike. Cost: O(1) for each entry, two Wright omegas in each of at most
    ``MOST_STEPS`` steps.

    Args:
        u: Local variable of the observation before the step.
        gap: Utility of class k less that of the label, in nats, before the step.
        curvature: Fall of the gap for a force of 1, at least 0.
        rate: Step size times the number of observations, at least 0.
        log_others: Logarithm of the number of classes that k stands for.

    Returns:
        The new u, and the force on the two classes.

    Example:
        >>> u, force = implicit_step(*jnp.array([2.0, 1e4, 2.0, 10.0, 16.0]))
        >>> round(float(u)), round(float(force))
        (3331, 3339)

    References:
        Unbiased scalable softmax optimization, Appendix F.1, Eq. 12, and Proposition 4 (by
        bisection).
    """
    log_curvature = jnp.log(curvature)
    alone = best_u(jnp.zeros_like(gap), u, rate)  # the tangent at a fall without end
    most = wright_omega(log_curvature + alone.log_force + log_others + gap)

    def tighten(state: tuple[int, Array, Array]) -> tuple[int, Array, Array]:
        num_steps, _, fall = state
        at = _at_gap(gap - fall, u, rate, log_others)
        height = jnp.log(at.slope) + log_curvature + at.log_force + at.slope * fall
        return num_steps + 1, fall, jnp.minimum(wright_omega(height) / at.slope, most)

    def still_falls(state: tuple[int, Array, Array]) -> Array:
        num_steps, before, fall = state
        is_far = jnp.abs(before - fall) > tolerance * jnp.minimum(fall, 1)
        return is_far.any() & (num_steps < MOST_STEPS)

    tolerance = 2 * float(jnp.finfo(gap.dtype).eps) ** 0.5  # the steps converge quadratically
    _, _, fall = lax.while_loop(
        still_falls, tighten, (0, jnp.full_like(gap, -1), jnp.zeros_like(gap))
    )
    # In a large fall rounding is worth much of the gap, so the last step is Newton's in the gap.
    new_gap = gap - fall
    at = _at_gap(new_gap, u, rate, log_others)
    fall = curvature * at.force
    new_gap += (gap - new_gap - fall) / (1 + at.slope * fall)
    at = _at_gap(new_gap, u, rate, log_others)
    # The force follows from the gap in two ways; take the one that its rounding harms less.
    fall = gap - new_gap
    return at.u, jnp.where(at.slope * fall > 1, fall / curvature, at.force)
