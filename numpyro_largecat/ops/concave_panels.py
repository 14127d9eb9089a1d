# SPDX-License-Identifier: Apache-2.0
"""Where the mass of exp(f) lies for a concave f: its mode, its ends, and panels between them.

Everything is decided by slopes: they keep their relative accuracy far out, where f is so large that
rounding hides how it changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

NOISE = 2
MAX_STEPS = 200  # only broken functions need as many


class Curve(Protocol):
    """A concave function of points of shape (..., J)."""

    def slopes(self, points: Array) -> tuple[Array, Array]:
        """First and second derivative."""

    def value(self, points: Array) -> Array:
        """Value alone."""

    def all(self, points: Array) -> tuple[Array, Array, Array]:
        """Value, first and second derivative."""


class _Search(NamedTuple):
    """Search for the mode; all (..., 1)."""

    point: Array
    slope: Array
    curvature: Array
    low: Array  # the mode is above
    high: Array  # and below
    going: Array


def find_mode(curve: Curve, start: Array, low: Array) -> Array:
    """Find a point at which f is within about 0.2 of its maximum above ``low``.

    From where f rises steeply, Newton's method takes the logarithm of the slope, which is closer to
    a straight line. A step that leaves the bracket is replaced by bisection.

    Shapes: ``start`` and the result (..., 1), ``low`` broadcasts with them.
    """

    def look(point: Array, low: Array, high: Array) -> _Search:
        slope, curvature = curve.slopes(point)
        low = jnp.where(slope > 0, point, low)
        high = jnp.where(slope > 0, high, point)
        near = jnp.isfinite(slope) & (slope * slope <= 0.2 * jnp.abs(curvature))
        enclosed = jnp.abs(slope) * (high - low) <= 0.2
        going = ~(near | enclosed | (slope == 0) | jnp.isnan(slope))
        return _Search(point, slope, curvature, low, high, going)

    def step(state: tuple[_Search, Array]) -> tuple[_Search, Array]:
        old, count = state
        newton = old.slope / jnp.abs(old.curvature)
        steep = jnp.arcsinh(old.slope) * jnp.hypot(1, old.slope) / jnp.abs(old.curvature)
        beyond = old.point + jnp.sign(old.slope) * jnp.exp2(count.astype(old.point.dtype))
        enclosed = jnp.isfinite(old.low) & jnp.isfinite(old.high)
        point = jnp.where(enclosed, 0.5 * (old.low + old.high), beyond)
        for candidate in (old.point + newton, old.point + steep):
            inside = (candidate > old.low) & (candidate < old.high)
            point = jnp.where(inside, candidate, point)
        new = look(jnp.where(old.going, point, old.point), old.low, old.high)
        return _keep(old.going, new, old), count + 1

    begin = look(start, jnp.broadcast_to(low, start.shape), jnp.full_like(start, jnp.inf))
    return lax.while_loop(_goes_on, step, (begin, jnp.zeros((), jnp.int32)))[0].point


class _Ends(NamedTuple):
    """Search for both ends; all (..., 2), first the left one. Distances are from the mode."""

    distance: Array
    slope: Array  # of the descent, not negative
    curvature: Array
    drop: Array  # how far f has fallen
    inner: Array  # the longest distance known to be too short
    outer: Array  # the shortest distance known to be long enough
    inner_slope: Array
    inner_drops: Array  # (..., 2, 2), bounds on the drop at ``inner``
    going: Array


def find_ends(curve: Curve, mode: Array, drop: float) -> tuple[Array, Array, Array]:
    """Find how far to the left and right of the mode f falls by between 1 and 1.4 times ``drop``.

    Slopes at the points that were looked at bound the fall from below and above, as f is concave.

    Shapes: ``mode`` (..., 1). Returns distances and falls, (..., 2), and f at the mode, (..., 1).
    """
    sides = jnp.array([-1, 1], mode.dtype)
    top, top_slope, top_curvature = curve.all(mode)
    resolution = 4 * jnp.finfo(mode.dtype).eps * jnp.abs(mode)

    def look(distance: Array, old: _Ends) -> _Ends:
        value, slope, curvature = curve.all(mode + sides * distance)
        slope = jnp.maximum(-sides * slope, 0)
        length = distance - old.inner
        least = old.inner_drops[..., 0] + old.inner_slope * length
        most = old.inner_drops[..., 1] + slope * length
        fall = jnp.clip(top - value, least, most)
        short = fall < drop
        inner = jnp.where(short, distance, old.inner)
        outer = jnp.where(short, old.outer, distance)
        going = (short | (fall > 1.4 * drop)) & (outer - inner > resolution)
        drops = jnp.where(short[..., None], jnp.stack([least, most], -1), old.inner_drops)
        inner_slope = jnp.where(short, slope, old.inner_slope)
        curvature = jnp.abs(curvature)
        return _Ends(distance, slope, curvature, fall, inner, outer, inner_slope, drops, going)

    def step(state: tuple[_Ends, Array]) -> tuple[_Ends, Array]:
        old, count = state
        guess = _next_distance(old, drop, count)
        new = look(jnp.where(old.going, guess, old.distance), old)
        return _keep(old.going, new, old), count + 1

    zero = jnp.zeros((*mode.shape[:-1], 2), mode.dtype)
    slope = jnp.maximum(-sides * top_slope, 0)
    begin = _Ends(
        distance=zero,
        slope=slope,
        curvature=jnp.abs(top_curvature) + zero,
        drop=zero,
        inner=zero,
        outer=zero + jnp.inf,
        inner_slope=slope,
        inner_drops=jnp.zeros((*zero.shape, 2), mode.dtype),
        going=jnp.ones(zero.shape, bool) & ~jnp.isnan(top_slope),
    )
    found = lax.while_loop(_goes_on, step, (begin, jnp.zeros((), jnp.int32)))[0]
    return found.distance, found.drop, top


def _next_distance(old: _Ends, drop: float, count: Array) -> Array:
    """Where the parabola through this point has fallen by 1.2 times ``drop``, if in the bracket."""
    rest = 1.2 * drop - old.drop
    root = jnp.sqrt(jnp.maximum(old.slope**2 + 2 * old.curvature * rest, 0))
    guess = old.distance + 2 * rest / (old.slope + root)
    guess = jnp.minimum(guess, 8 * (1 + old.distance))  # the slope may vanish here
    middle = jnp.where(
        old.outer < jnp.inf,
        0.5 * (old.inner + old.outer),
        2 * old.inner + jnp.exp2(count.astype(guess.dtype)),
    )
    return jnp.where((guess > old.inner) & (guess < old.outer), guess, middle)


class Rule(NamedTuple):
    """What fixes cost and accuracy of an integral."""

    drop: float  # f falls by at least this much from its mode to the ends
    num_nodes: int  # in each panel
    tolerance: float  # for the relative error of the integral
    max_panels: int  # on each side
    max_rounds: int  # of panels that are tried


class Integral(NamedTuple):
    """Nodes in panels: P panels, and J nodes of which half are on each side of the mode."""

    nodes: Array  # (P, ..., J)
    log_weights: Array  # (P, ..., J), -inf where the node is not used
    values: Array  # (P, ..., J), f at the nodes
    log_value: Array  # (...), log of the sum of weights times exp(values)


class _Panels(NamedTuple):
    """Panels so far, from the outside inwards; distances are from the mode; all (..., 2, ...)."""

    nodes: Array  # (..., 2, P, J / 2)
    log_weights: Array
    values: Array
    num_done: Array  # (..., 2), panels that are accepted
    outer: Array  # where the panel to try ends
    inner: Array  # and where it begins
    outer_drop: Array  # how far f has fallen there
    inner_drop: Array
    going: Array


class _Tried(NamedTuple):
    """The panel that is tried on each side; all (..., 2, J / 2)."""

    distances: Array  # of its nodes, from the mode
    nodes: Array
    weights: Array  # for a panel of length 1
    values: Array
    falls: Array  # of f, from the mode; without derivatives


def integrate(curve: Curve, mode: Array, rule: Rule) -> Integral:
    """Integrate exp(f) over where it matters, in as few panels as keep it smooth on each.

    One panel on each side of the mode is most often enough. But f may be flat over a length L and
    then fall within a length of 1, for instance between the utilities of the two best other classes
    with logistic errors. A panel on which the integrand is not resolved, by its last two Legendre
    coefficients, is cut and its outer part tried.

    Nodes are constants for derivatives.
    """
    ends, drops, top = find_ends(curve, mode, rule.drop)
    # The integrand is above the chord of f: this bounds the integral from below.
    least = (ends / drops).sum(axis=-1, keepdims=True)
    noise = NOISE * jnp.finfo(mode.dtype).eps * jnp.abs(top)

    def step(state: tuple[_Panels, Array]) -> tuple[_Panels, Array]:
        old, count = state
        tried = _try_panel(curve, mode, top, old)
        fine = _is_resolved(tried, old, rule.tolerance * least, noise)
        fine |= (old.num_done + 1 == rule.max_panels) | (count + 1 >= rule.max_rounds)
        new = _accept_or_cut(old, tried, fine & old.going)
        return _keep(old.going, new, old), count + 1

    begin = _first_panels(mode, ends, drops, rule)
    found = lax.while_loop(_goes_on, step, (begin, jnp.zeros((), jnp.int32)))[0]
    nodes, log_weights, values = map(_panels_first, found[:3])
    log_value = jax.nn.logsumexp(values + log_weights, axis=(0, -1))
    return Integral(nodes, log_weights, values, log_value)


def _first_panels(mode: Array, ends: Array, drops: Array, rule: Rule) -> _Panels:
    zero = jnp.zeros_like(ends)
    nothing = jnp.zeros((*ends.shape, rule.max_panels, rule.num_nodes), mode.dtype)
    return _Panels(
        nodes=nothing + mode[..., None, None],
        log_weights=nothing - jnp.inf,
        values=nothing,
        num_done=jnp.zeros(ends.shape, jnp.int32),
        outer=ends,
        inner=zero,
        outer_drop=drops,
        inner_drop=zero,
        going=jnp.ones(ends.shape, bool),
    )


def _try_panel(curve: Curve, mode: Array, top: Array, old: _Panels) -> _Tried:
    """Evaluate f, which is ``top`` at the mode, on the panel between ``inner`` and ``outer``."""
    sides = jnp.array([-1, 1], mode.dtype)
    first, inner = (jnp.asarray(a, mode.dtype) for a in _panel_rules(old.nodes.shape[-1]))
    is_first = (old.num_done == 0)[..., None, None]
    places, weights = jnp.moveaxis(jnp.where(is_first, first, inner), -2, 0)
    distances = old.inner[..., None] + (old.outer - old.inner)[..., None] * places
    nodes = mode[..., None] + sides[:, None] * distances
    values = curve.value(nodes.reshape((*nodes.shape[:-2], -1))).reshape(nodes.shape)
    falls = top[..., None] - lax.stop_gradient(values)
    return _Tried(distances, nodes, weights, values, falls)


def _is_resolved(tried: _Tried, old: _Panels, tolerance: Array, noise: Array) -> Array:
    """Whether the error of a panel is below ``tolerance``, or what is missing below ``noise``."""
    terms = jnp.exp(-tried.falls) * tried.weights
    middle, end = _unresolved(
        terms, jnp.where(old.num_done == 0, 2.2, 0) * jnp.exp(-old.outer_drop)
    )
    error = (old.outer - old.inner) * end * jnp.minimum(end / middle, 1) ** 2
    return (error <= tolerance) | (end <= noise * terms.max(axis=-1))


def _accept_or_cut(old: _Panels, tried: _Tried, done: Array) -> _Panels:
    """Write the panel and go on inside of it where it is ``done``; else try its outer part."""
    max_panels, num_nodes = old.nodes.shape[-2:]
    least_fall = tried.falls.min(axis=-1)
    limit = least_fall + 0.02 * (old.outer_drop - least_fall)
    flat = (tried.falls < limit[..., None]).sum(axis=-1) - 1
    cut = jnp.maximum(flat, num_nodes // 2)[..., None]
    cut_place = jnp.take_along_axis(tried.distances, cut, axis=-1)[..., 0]
    cut_drop = jnp.take_along_axis(tried.falls, cut, axis=-1)[..., 0]
    slot = (jnp.arange(max_panels) == old.num_done[..., None]) & done[..., None]
    log_weights = jnp.log(old.outer - old.inner)[..., None] + jnp.log(tried.weights)

    def put(new: Array, old: Array) -> Array:
        return jnp.where(slot[..., None], new[..., None, :], old)

    return _Panels(
        nodes=put(tried.nodes, old.nodes),
        log_weights=put(log_weights, old.log_weights),
        values=put(tried.values, old.values),
        num_done=old.num_done + done,
        outer=jnp.where(done, old.inner, old.outer),
        inner=jnp.where(done, 0, cut_place),
        outer_drop=jnp.where(done, old.inner_drop, old.outer_drop),
        inner_drop=jnp.where(done, 0, cut_drop),
        going=~(done & (old.inner == 0)),
    )


def _panels_first(array: Array) -> Array:
    """Move (..., 2, P, J / 2) to (P, ..., J)."""
    array = jnp.moveaxis(array, -2, 0)
    return array.reshape((*array.shape[:-2], -1))


def _panel_rules(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes in (0, 1) and weights, (2, J), for panels at the ends and for those further in.

    Gauss-Legendre rules in t, with nodes where the integrand may change fast: at
    (t + 1.5 t^3) / 2.5, dense on the side of the mode, and at t^2 (3 - 2 t), dense on both sides.
    """
    x, weights = np.polynomial.legendre.leggauss(num_nodes)
    t, weights = (x + 1) / 2, weights / 2
    return (
        np.stack([(t + 1.5 * t**3) / 2.5, weights * (1 + 4.5 * t**2) / 2.5]),
        np.stack([t**2 * (3 - 2 * t), weights * 6 * t * (1 - t)]),
    )


def _unresolved(terms: Array, last: Array) -> tuple[Array, Array]:
    """How large Legendre coefficients of the integrand are at middle and at the highest degrees.

    If the polynomial misses the integrand at the outer end, that counts as a coefficient too.

    Args:
        terms: Integrand times weights at the nodes of a panel, shape (..., J).
        last: Integrand at its outer end, shape (...).
    """
    num_nodes = terms.shape[-1]
    x, _ = np.polynomial.legendre.leggauss(num_nodes)
    basis = np.polynomial.legendre.legvander(x, num_nodes - 1) * (2 * np.arange(num_nodes) + 1)
    coefficients = (terms[..., None] * jnp.asarray(basis, terms.dtype)).sum(axis=-2)
    missed = jnp.abs(coefficients.sum(axis=-1) - last)
    size = jnp.abs(coefficients)
    half = num_nodes // 2
    return (
        size[..., half - 1 : half + 1].max(axis=-1),
        jnp.maximum(size[..., -2:].max(axis=-1), missed),
    )


def _goes_on(state: tuple[_Search | _Ends | _Panels, Array]) -> Array:
    return state[0].going.any() & (state[1] < MAX_STEPS)


def _keep(going: Array, new: Any, old: Any) -> Any:
    """Take the new state where the search goes on, the old one where it is over."""

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(going.reshape(going.shape + (1,) * (new.ndim - going.ndim)), new, old)

    return jax.tree.map(choose, new, old)
