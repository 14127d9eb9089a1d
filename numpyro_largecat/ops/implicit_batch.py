# SPDX-License-Identifier: Apache-2.0
"""The implicit (proximal) step of the double sum, for several observations and classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.ops.implicit_step import best_u, finfo

MOST_STEPS = 100  # Newton; few are needed unless utilities are extreme
MOST_PRODUCTS = 60  # of conjugate gradients, within each Newton step
MOST_HALVINGS = 20
LEAST_SLOPE_LEFT = 0.5  # a step may not end where the objective rises more than this share


class BatchStep(NamedTuple):
    """An implicit step on a minibatch."""

    u: Array  # (B,), new local variables
    forces: Array  # (B, M), row m becomes keep[m] * (w[m] - forces[:, m] @ x)
    residual: Array  # (), largest error of a force relative to the largest force
    num_steps: Array  # ()


class _State(NamedTuple):
    """The forces, the utilities that they lead to, and what those ask for."""

    forces: Array  # (B, M)
    u: Array  # (B,)
    shares: Array  # (B, M), of the classes in eta
    pulls: Array  # (B,)
    asked: Array  # (B, M), gradient of the integrated objective in the utilities


@jax.jit
def implicit_batch_step(
    u: Array,
    utilities: Array,
    gram: Array,
    label_rows: Array,
    weights: Array,
    keep: Array,
    rates: Array,
) -> BatchStep:
    r"""Take an implicit step for B observations and a weighted subset of M classes.

    With u integrated out, it minimises over the rows w, convexly,

    .. math:: \sum_i \min_v \Big\{\mathrm{rate}_i\,(v + \eta_i\,e^{-v}) + \tfrac12 (v - u_i)^2\Big\}
              + \sum_m \frac{1}{2\,\mathrm{keep}_m} \|w_m - \tilde w_m\|^2,
              \qquad \eta_i = \sum_m \mathrm{weight}_m\, e^{x_i^\top (w_m - w_{y_i})},

    where keep is ``1 / (1 + penalty)``, and w-tilde the old row times keep: completing the square
    takes the ridge, and the part of the rows that is perpendicular to x, out of the problem. The
    best rows are ``w[m] = w_tilde[m] - keep[m] * forces[:, m] @ x``, with the forces equal to the
    derivatives of the first sum in the utilities; those move by ``- gram @ forces * keep``. So the
    unknowns are the forces, and x enters by its Gram matrix alone, of any rank.

    Newton steps with conjugate gradients in the inner product of the Gram matrix find them; a step
    is halved until the slope along it has all but gone. The first sum grows only quadratically, so
    nothing overflows. It ends where no force is off by more than 64 eps of the largest, or by
    8 sqrt(eps) before the last step; or after ``MOST_STEPS``. With a rate above 1e5 times the norms
    of x, float32 does not resolve the utilities that large forces leave: see ``residual``.

    Cost: O(B^2 M) for each product with the Gram matrix, mostly two or three in each of two or
    three steps.

    Args:
        u: Local variables before the step, shape (B,).
        utilities: ``x @ w_tilde.T``, shape (B, M).
        gram: ``x @ x.T``, shape (B, B).
        label_rows: Row of each observation's label, in [0, M), shape (B,).
        weights: Weights of the rows, 1 for labels and 0 for padding, shape (M,).
        keep: Shape (M,), in (0, 1].
        rates: Step size times the weight of each observation, 0 for padding, shape (B,).

    Returns:
        A ``BatchStep``.

    References:
        Unbiased scalable softmax optimization, Appendix F.3, with another basis and optimiser.
    """
    is_label = jnp.arange(utilities.shape[1]) == label_rows[:, None]
    log_weights = jnp.where(weights > 0, jnp.log(jnp.where(weights > 0, weights, 1)), -jnp.inf)

    def spread(forces: Array) -> Array:
        return gram @ forces * keep

    def at(forces: Array) -> _State:
        moved = utilities - spread(forces)
        own = jnp.where(is_label, moved, 0).sum(1)  # finite for padding too, whose rate is 0
        heights = moved + log_weights
        log_eta = jax.nn.logsumexp(heights, axis=1) - own
        best = best_u(log_eta, u, rates)
        shares = jnp.exp(heights - own[:, None] - log_eta[:, None])
        return _State(forces, best.u, shares, best.force, best.force[:, None] * (shares - is_label))

    def curve(state: _State, change: Array) -> Array:
        """Hessian of the first sum in the utilities, times ``change``."""
        mean = (state.shares * change).sum(1, keepdims=True)
        pull = state.pulls[:, None]
        rise = mean - jnp.where(is_label, change, 0).sum(1, keepdims=True)
        among = state.shares * (change - mean)
        return pull * (among + (state.shares - is_label) * rise / (1 + pull))

    def newton(carry: tuple[Array, _State, Array]) -> tuple[Array, _State, Array]:
        num_steps, state, _ = carry
        step = _solve(spread, partial(curve, state), state.asked - state.forces)
        along = spread(step)
        start = jnp.vdot(state.asked - state.forces, along)

        def is_too_long(trial: tuple[Array, Array, _State]) -> Array:
            halvings, _, new = trial
            rises = -jnp.vdot(new.asked - new.forces, along)
            return (rises > LEAST_SLOPE_LEFT * start) & (halvings < MOST_HALVINGS)

        def halve(trial: tuple[Array, Array, _State]) -> tuple[Array, Array, _State]:
            halvings, size, _ = trial
            return halvings + 1, size / 2, at(state.forces + size / 2 * step)

        first = (jnp.array(0), jnp.ones_like(start), at(state.forces + step))
        _, _, new = lax.while_loop(is_too_long, halve, first)
        return num_steps + 1, new, _residual(state)

    def is_far(carry: tuple[Array, _State, Array]) -> Array:
        num_steps, state, before = carry
        is_rough = (before > 8 * eps**0.5) & (_residual(state) > 64 * eps)
        return is_rough & (num_steps < MOST_STEPS)

    eps = float(finfo(u.dtype).eps)
    start = at(jnp.zeros_like(utilities))
    num_steps, state, _ = lax.while_loop(
        is_far, newton, (jnp.array(0), start, jnp.full_like(u[0], jnp.inf))
    )
    return BatchStep(state.u, state.forces, _residual(state), num_steps)


def _residual(state: _State) -> Array:
    largest = jnp.maximum(jnp.abs(state.asked).max(), finfo(state.asked.dtype).tiny)
    return jnp.abs(state.asked - state.forces).max() / largest


class _Search(NamedTuple):
    """Conjugate gradients: what is solved, what rests, and where to go."""

    num: Array
    solution: Array  # (B, M)
    rest: Array  # (B, M)
    direction: Array  # (B, M)
    spread: Array  # (B, M), of the direction
    size: Array  # squared length of the rest


def _solve(
    spread: Callable[[Array], Array], curve: Callable[[Array], Array], target: Array
) -> Array:
    """Solve ``p + curve(spread(p)) = target`` in the inner product of ``spread``."""
    tolerance = float(finfo(target.dtype).eps)
    along = spread(target)
    first = jnp.vdot(target, along)

    def is_far(search: _Search) -> Array:
        return (search.size > tolerance * first) & (search.num < MOST_PRODUCTS)

    def improve(search: _Search) -> _Search:
        applied = search.direction + curve(search.spread)
        curvature = jnp.vdot(search.spread, applied)
        # Rounding is all that is left where the Gram matrix vanishes, and it moves no utility.
        is_void = ~(curvature > 0.5 * search.size)
        length = jnp.where(is_void, 0, search.size / jnp.where(is_void, 1, curvature))
        rest = search.rest - length * applied
        along = spread(rest)
        size = jnp.where(is_void, 0, jnp.vdot(rest, along))
        turn = size / search.size
        return _Search(
            search.num + 1,
            search.solution + length * search.direction,
            rest,
            rest + turn * search.direction,
            along + turn * search.spread,
            size,
        )

    start = _Search(jnp.array(0), jnp.zeros_like(target), target, target, along, first)
    return lax.while_loop(is_far, improve, start).solution
