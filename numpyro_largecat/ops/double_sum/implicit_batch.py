# SPDX-License-Identifier: Apache-2.0
"""The implicit (proximal) step of the double sum, for several observations and classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.ops.double_sum.implicit_step import best_u

# Products in the first Newton steps. Most minibatches need these steps, which are written out: on a
# CPU a loop costs as much as the few small products in it.
FIRST_PRODUCTS = (2, 3)
# Observations up to which sums are quicker than XLA's product of matrices on a CPU.
FEW_ROWS = 12
MOST_STEPS = 100  # Newton; few are needed unless utilities are extreme
MOST_PRODUCTS = 60  # of conjugate gradients, within each Newton step
MOST_HALVINGS = 20
LEAST_SLOPE_LEFT = 0.5  # a step may not end where the objective rises more than this share
LEAST_DECREASE = 1e-4  # share of what the slope at a step's start promises


class BatchStep(NamedTuple):
    """An implicit step on a minibatch."""

    u: Array  # (B,), new local variables
    forces: Array  # (B, M), row m becomes keep[m] * (w[m] - forces[:, m] @ x)
    residual: Array  # (), error of x.T @ forces relative to its length, rows weighted by keep
    num_steps: Array  # ()


class _State(NamedTuple):
    """The forces, the utilities that they lead to, and what those ask for."""

    forces: Array  # (B, M)
    fall: Array  # (B, M), of the utilities, spread of the forces
    u: Array  # (B,)
    shares: Array  # (B, M), of the classes in eta
    tilts: Array  # (B, M), the shares less 1 for the label, without the loss of digits
    pulls: Array  # (B, 1)
    objective: Array  # (), less what does not depend on the forces
    rounding: Array  # (), of the objective
    rest: Array  # (B, M), what is asked for (gradient in the utilities) less the forces
    spread: Array  # (B, M), of the rest
    error: Array  # (), the squared residual; rounding may leave it below 0


class _Problem(NamedTuple):
    """What a step is given, and the functions of the forces that Newton's steps need."""

    u: Array  # (B,)
    utilities: Array  # (B, M)
    gram: Array  # (B, B)
    keep: Array  # (M,)
    rates: Array  # (B,)
    log_weights: Array  # (M,)
    is_label: Array  # (B, M)

    def spread(self, forces: Array) -> Array:
        """Fall of the utilities under forces: their product with the Gram matrix, times keep."""
        if len(self.gram) <= FEW_ROWS:
            return (self.gram[:, :, None] * forces).sum(1) * self.keep
        return jnp.matmul(self.gram, forces, precision=lax.Precision.HIGHEST) * self.keep

    def at(self, forces: Array, fall: Array) -> _State:
        """All that follows from forces and the fall that they spread to."""
        is_label, eps = self.is_label, float(jnp.finfo(self.u.dtype).eps)
        moved = self.utilities - fall
        own = jnp.where(is_label, moved, 0).sum(1, keepdims=True)  # finite for padding too
        heights = moved + self.log_weights - own
        highest = heights.max(1, keepdims=True)
        parts = jnp.exp(heights - highest)
        total = parts.sum(1, keepdims=True)
        best = best_u((highest + jnp.log(total))[:, 0], self.u, self.rates)
        shares, pulls = parts / total, best.force[:, None]
        others = jnp.where(is_label, 0, shares)
        tilts = jnp.where(is_label, -others.sum(1, keepdims=True), others)
        asked = pulls * tilts
        rest = asked - forces
        along = self.spread(rest)
        whole = _dot(asked, along + fall)  # squared length of x.T @ asked
        error = _dot(rest, along) / jnp.where(whole > 0, whole, 1)
        rise, distance = best.u - self.u, _dot(forces, fall) / 2
        objective = (best.force + rise * (self.rates + rise / 2)).sum() + distance
        digits = best.force * (1 + jnp.abs(own) + jnp.abs(own + highest))[:, 0]
        rounding = 8 * eps * ((digits + self.rates * jnp.abs(rise)).sum() + distance)
        variables = forces, fall, best.u, shares, tilts, pulls
        return _State(*variables, objective, rounding, rest, along, error)

    def curve(self, state: _State, change: Array) -> Array:
        """Hessian of the first sum in the utilities, times ``change``."""
        change = change - jnp.where(self.is_label, change, 0).sum(1, keepdims=True)
        rise = (state.tilts * change).sum(1, keepdims=True)
        among = state.shares * (change - rise)
        return state.pulls * (among + state.tilts * (rise / (1 + state.pulls)))

    def newton(self, state: _State, num_products: int | None) -> _State:
        """One of Newton's steps, halved until it is short enough."""
        step, along = _solve(self.spread, partial(self.curve, state), state, num_products)
        start = _dot(state.rest, along)

        def is_too_long(trial: tuple[Array, Array, _State]) -> Array:
            halvings, size, new = trial
            rises = -_dot(new.rest, along) > LEAST_SLOPE_LEFT * start
            fallen = state.objective - new.objective
            is_short_of = fallen < LEAST_DECREASE * size * start - state.rounding
            return (rises | is_short_of) & (halvings < MOST_HALVINGS)

        def halve(trial: tuple[Array, Array, _State]) -> tuple[Array, Array, _State]:
            halvings, size, _ = trial
            half = size / 2
            new = self.at(state.forces + half * step, state.fall + half * along)
            return halvings + 1, half, new

        whole = self.at(state.forces + step, state.fall + along)
        first = (jnp.array(0), jnp.ones_like(start), whole)
        return lax.while_loop(is_too_long, halve, first)[2]


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
    is halved until the objective has fallen, and the slope along it is nearly 0. The first
    sum grows only quadratically, so nothing overflows. It ends where the residual is at most 8 eps,
    or 8 sqrt(eps) before the last step; or after ``MOST_STEPS``, as in float32 where long steps
    meet long rows x that are nearly alike: see ``residual``.

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
    problem = _Problem(u, utilities, gram, keep, rates, log_weights, is_label)
    eps = float(jnp.finfo(u.dtype).eps)

    def is_far(carry: tuple[Array, _State, Array]) -> Array:
        num_steps, state, before = carry
        is_rough = (before > 64 * eps) & (state.error > 64 * eps**2)
        return is_rough & (num_steps < MOST_STEPS)

    def improve(carry: tuple[Array, _State, Array]) -> tuple[Array, _State, Array]:
        num_steps, state, _ = carry
        return num_steps + 1, problem.newton(state, None), state.error

    state = problem.at(jnp.zeros_like(utilities), jnp.zeros_like(utilities))
    before = state.error
    for num_products in FIRST_PRODUCTS:
        before, state = state.error, problem.newton(state, num_products)
    start = (jnp.array(len(FIRST_PRODUCTS)), state, before)
    num_steps, state, _ = lax.while_loop(is_far, improve, start)
    return BatchStep(state.u, state.forces, jnp.sqrt(jnp.abs(state.error)), num_steps)


def _dot(a: Array, b: Array) -> Array:
    return (a * b).sum(0).sum()  # faster than jnp.vdot where they are small


class _Search(NamedTuple):
    """Conjugate gradients: what is solved, what rests, and where to go."""

    num: Array
    solution: Array  # (B, M)
    along: Array  # (B, M), spread of the solution
    rest: Array  # (B, M)
    direction: Array  # (B, M)
    spread: Array  # (B, M), of the direction
    size: Array  # squared length of the rest


def _solve(
    spread: Callable[[Array], Array],
    curve: Callable[[Array], Array],
    state: _State,
    num_products: int | None,
) -> tuple[Array, Array]:
    """Solve ``p + curve(spread(p)) = rest`` in the inner product of ``spread``; also p's spread.

    It takes so many products if they are given, and otherwise as many as it needs.
    """
    tolerance = float(jnp.finfo(state.rest.dtype).eps)
    first = _dot(state.rest, state.spread)

    def is_far(search: _Search) -> Array:
        return (search.size > tolerance * first) & (search.num < MOST_PRODUCTS)

    def improve(search: _Search) -> _Search:
        applied = search.direction + curve(search.spread)
        curvature = _dot(search.spread, applied)
        # Rounding is all that is left where the Gram matrix vanishes, and it moves no utility.
        is_void = ~((curvature > 0.5 * search.size) & (search.size > 0))
        length = jnp.where(is_void, 0, search.size / jnp.where(is_void, 1, curvature))
        rest = search.rest - length * applied
        along = spread(rest)
        size = jnp.where(is_void, 0, _dot(rest, along))
        turn = size / jnp.where(is_void, 1, search.size)
        return _Search(
            search.num + 1,
            search.solution + length * search.direction,
            search.along + length * search.spread,
            rest,
            rest + turn * search.direction,
            along + turn * search.spread,
            size,
        )

    none = jnp.zeros_like(state.rest)
    search = _Search(jnp.array(0), none, none, state.rest, state.rest, state.spread, first)
    if num_products is None:
        search = lax.while_loop(is_far, improve, search)
    else:
        for _ in range(num_products):
            search = improve(search)
    return search.solution, search.along
