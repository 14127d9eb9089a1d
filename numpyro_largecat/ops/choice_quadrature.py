# SPDX-License-Identifier: Apache-2.0
"""Exact choice probabilities of utility models, by quadrature over the chosen class's error."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.ops.concave_panels import Integral, Rule, find_mode, integrate
from numpyro_largecat.ops.gaussian_error import ElementWise

MAX_NODE_ENTRIES = 2**20  # classes times nodes times observations at once; XLA needs two


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
@partial(jax.jit, static_argnums=(2, 3))
def choice_log_prob(
    utilities: Array, labels: Array, log_density: ElementWise, log_cdf: ElementWise
) -> Array:
    r"""Log probability that the class in ``labels`` has the highest noisy utility.

    .. math:: \log p(y \mid \psi) = \log \int \exp f(\varepsilon) \, d\varepsilon, \qquad
              f(\varepsilon) = \log\phi(\varepsilon)
              + \sum_{k \ne y} \log\Phi(\varepsilon + \psi_y - \psi_k)

    f is concave. The integral runs from where f is about 20 (float64: 27) below its maximum to
    where it is again, with Gauss-Legendre nodes on each side of the mode. It is computed in logs,
    so tiny probabilities are as accurate as others. The gradient is that of the sum over nodes,

    .. math:: \frac{\partial \log p}{\partial \psi_k} = -\sum_j q_j \,
              \frac{\phi}{\Phi}(\varepsilon_j + \psi_y - \psi_k), \quad k \ne y, \qquad
              q_j \propto w_j \exp f(\varepsilon_j),

    and that in psi_y makes them sum to zero. Second derivatives, in which the q_j move too, need
    forward over reverse mode (``jax.hessian``). In float32 these lose digits where the choice is
    hundreds of scales of the errors from likely: their error is about 1e-7 of a squared distance.

    The relative error of the probability is below 1e-5 in float32 and 1e-8 in float64, and that of
    its logarithm some 1e-7 and 1e-15, whichever is larger, for smooth densities whose scale is
    about 1. A density with a kink costs accuracy: 1e-3 for Laplace errors.

    Cost: O(K) time for each observation, some 25 evaluations of log Phi (float64: 40) at every
    class and half as much to find the mode and the ends; the gradient takes the same nodes again.
    Memory for a few times ``MAX_NODE_ENTRIES`` entries beside the utilities and their gradient.

    Args:
        utilities: Utilities psi, below +inf, shape (..., K). -inf is a class that is not available.
        labels: Classes y, integers in [0, K), shape (...), which broadcasts with the utilities'.
        log_density: Element-wise log phi, concave.
        log_cdf: Element-wise log Phi, twice differentiable.

    Returns:
        Log probabilities, shape (...).

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Eq. 5.
    """
    return _integrate(_Choice.make(utilities, labels, log_density, log_cdf)).log_value


@choice_log_prob.defjvp
def _choice_log_prob_jvp(
    log_density: ElementWise,
    log_cdf: ElementWise,
    primals: tuple[Array, Array],
    tangents: tuple[Array, Any],
) -> tuple[Array, Array]:
    log_prob, gradient = _value_and_gradient(*primals, log_density, log_cdf)
    log_prob = _with_gradient(log_prob, gradient, primals[0])
    return log_prob, (gradient * tangents[0]).sum(axis=-1)


@jax.custom_jvp
def _with_gradient(value: Array, gradient: Array, utilities: Array) -> Array:
    """A value that was computed of constants, for derivatives of derivatives."""
    del gradient, utilities
    return value


@_with_gradient.defjvp
def _with_gradient_jvp(
    primals: tuple[Array, Array, Array], tangents: tuple[Any, Any, Array]
) -> tuple[Array, Array]:
    return _with_gradient(*primals), (primals[1] * tangents[2]).sum(axis=-1)


@partial(jax.jit, static_argnums=(2, 3))
def _value_and_gradient(
    utilities: Array, labels: Array, log_density: ElementWise, log_cdf: ElementWise
) -> tuple[Array, Array]:
    choice = _Choice.make(utilities, labels, log_density, log_cdf)
    integral = _integrate(choice)
    return integral.log_value, _gradient(choice, integral)


class _Choice(NamedTuple):
    utilities: Array  # (..., K)
    labels: Array  # (...), of the full batch shape
    own: Array  # (...), utility of the label, or 0 if it is not available
    available: Array  # (...), whether the label is
    log_density: ElementWise
    log_cdf: ElementWise

    @staticmethod
    def make(
        utilities: Array, labels: Array, log_density: ElementWise, log_cdf: ElementWise
    ) -> _Choice:
        leading, num_categories = utilities.shape[:-1], utilities.shape[-1]
        labels = jnp.broadcast_to(labels, jnp.broadcast_shapes(labels.shape, leading))
        labels = jnp.clip(labels, 0, num_categories - 1)
        axes = range(labels.ndim - len(leading), labels.ndim)
        place = [
            lax.broadcasted_iota(labels.dtype, labels.shape, axis) * (size > 1)
            for axis, size in zip(axes, leading, strict=True)
        ]
        own = utilities[(*place, labels)]
        available = own > -jnp.inf
        own = jnp.where(available, own, 0)
        same_type = (_in_type_of_argument(fn) for fn in (log_density, log_cdf))
        return _Choice(utilities, labels, own, available, *same_type)

    def slopes(self, points: Array) -> tuple[Array, Array]:
        """First and second derivative of f at ``points``, all (..., J)."""
        first, second = self._sum(points, lambda fn, x: _derivatives(fn, x)[1:])
        return first, second

    def all(self, points: Array) -> tuple[Array, Array, Array]:
        """The function f and its first and second derivative at ``points``, all (..., J)."""
        value, first, second = self._sum(points, _derivatives)
        return value, first, second

    def value(self, points: Array) -> Array:
        """The function f at ``points``, both (..., J)."""
        return self._sum(points, lambda fn, x: (fn(x),))[0]

    def _sum(self, points: Array, derive: Callable[..., tuple[Array, ...]]) -> tuple[Array, ...]:
        """Add what ``derive`` makes of log phi and of each other class's log Phi at ``points``."""

        def add(chunk: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            _, is_new, distances, counts = self.chunk(chunk, size)
            counts = (counts & is_new)[..., None, :]
            errors = jnp.where(counts, points[..., None] + distances[..., None, :], 0)
            terms = derive(self.log_cdf, errors)
            return tuple(
                total + jnp.where(counts, term, 0).sum(axis=-1)
                for total, term in zip(sums, terms, strict=True)
            )

        size, num_chunks = self.chunks(points.shape)
        return lax.fori_loop(0, num_chunks, add, derive(self.log_density, points))

    def chunks(self, points_shape: tuple[int, ...]) -> tuple[int, int]:
        """Number of classes in a chunk, and of chunks."""
        num_categories = self.utilities.shape[-1]
        size = min(num_categories, max(1, MAX_NODE_ENTRIES // max(1, math.prod(points_shape))))
        return size, -(-num_categories // size)

    def chunk(self, chunk: Array, size: int) -> tuple[Array, Array, Array, Array]:
        """Slice one chunk; the last one overlaps the one before.

        Returns its first class, which of its classes are new (size,), how far the label is above
        each (..., size), and which of them compete with it (..., size).
        """
        start = jnp.minimum(chunk * size, self.utilities.shape[-1] - size)
        classes = start + jnp.arange(size)
        utilities = lax.dynamic_slice_in_dim(self.utilities, start, size, axis=-1)
        counts = (utilities > -jnp.inf) & (classes != self.labels[..., None])
        distances = self.own[..., None] - jnp.where(utilities > -jnp.inf, utilities, 0)
        return start, classes >= chunk * size, distances, counts


# By measurement, over Normal, Gumbel and logistic errors and from 1 to 10**6 competing classes.
SINGLE = Rule(drop=17.0, num_nodes=12, tolerance=1e-6, max_panels=8, max_rounds=32)
DOUBLE = Rule(drop=24.0, num_nodes=20, tolerance=1e-9, max_panels=8, max_rounds=32)


def _integrate(choice: _Choice) -> Integral:
    constant = choice._replace(
        utilities=lax.stop_gradient(choice.utilities), own=lax.stop_gradient(choice.own)
    )
    single = jnp.finfo(choice.utilities.dtype).nmant <= 23
    integral = integrate(constant, _mode(constant), SINGLE if single else DOUBLE)
    log_value = jnp.where(choice.available, integral.log_value, -jnp.inf)
    return integral._replace(log_value=log_value)


def _mode(choice: _Choice) -> Array:
    """Where the error of the chosen class is most probable, roughly; (..., 1)."""
    zero = jnp.zeros(1, choice.utilities.dtype)
    alone = choice._replace(utilities=zero - jnp.inf, labels=zero.astype(int)[0], own=zero[0])
    low = find_mode(alone, zero, zero - jnp.inf)
    highest = choice.utilities.max(axis=-1) - choice.own
    return find_mode(choice, low + 1 + jnp.maximum(highest, 0)[..., None], low)


def _gradient(choice: _Choice, integral: Integral) -> Array:
    """Gradient in the utilities, shape (..., K): a mean over nodes, whose shares move with them."""
    nodes, log_weights, log_value = integral.nodes, integral.log_weights, integral.log_value
    size, num_chunks = choice.chunks(nodes.shape[1:])

    def add(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        panel, gradient, total = state
        values = _known_value(choice, nodes[panel], integral.values[panel])
        log_shares = values + log_weights[panel] - log_value[..., None]
        shares = jnp.where(choice.available[..., None], jnp.exp(log_shares), 0)

        def add_chunk(chunk: Array, gradient: Array) -> Array:
            start, is_new, distances, counts = choice.chunk(chunk, size)
            counts = counts & is_new
            errors = nodes[panel][..., None] + distances[..., None, :]
            slopes = _slope(choice.log_cdf, jnp.where(counts[..., None, :], errors, 0))
            mean = (shares[..., None] * slopes).sum(axis=-2)
            old = lax.dynamic_slice_in_dim(gradient, start, size, axis=-1)
            new = old - jnp.where(counts, mean, 0)
            return lax.dynamic_update_slice_in_dim(gradient, new, start, axis=-1)

        gradient = lax.fori_loop(0, num_chunks, add_chunk, gradient)
        return panel + 1, gradient, total + shares.sum(axis=-1)

    shape, dtype = (*choice.labels.shape, choice.utilities.shape[-1]), choice.utilities.dtype
    begin = jnp.zeros((), jnp.int32), jnp.zeros(shape, dtype), jnp.zeros(shape[:-1], dtype)
    _, gradient, total = lax.while_loop(partial(_is_used, log_weights), add, begin)
    gradient = gradient / jnp.where(choice.available, total, 1)[..., None]
    is_label = jnp.arange(shape[-1]) == choice.labels[..., None]
    return jnp.where(is_label, -gradient.sum(axis=-1, keepdims=True), gradient)


def _known_value(choice: _Choice, points: Array, values: Array) -> Array:
    """``choice.value(points)``, which is known; that takes a pass over the classes if it moves."""
    *arrays, log_density, log_cdf = choice
    return _value_that_moves((log_density, log_cdf), *arrays, points, values)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _value_that_moves(
    functions: tuple[ElementWise, ElementWise],
    utilities: Array,
    labels: Array,
    own: Array,
    available: Array,
    points: Array,
    values: Array,
) -> Array:
    del functions, utilities, labels, own, available, points
    return values


@_value_that_moves.defjvp
def _value_that_moves_jvp(
    functions: tuple[ElementWise, ElementWise],
    primals: tuple[Array, Array, Array, Array, Array, Array],
    tangents: tuple[Array, Any, Array, Any, Any, Any],
) -> tuple[Array, Array]:
    """In the utilities; the points are those of a rule, and stay."""
    utilities, labels, own, available, points, _ = primals

    def value(utilities: Array, own: Array) -> Array:
        return _Choice(utilities, labels, own, available, *functions).value(points)

    moved = jax.jvp(value, (utilities, own), (tangents[0], tangents[2]))[1]
    return _value_that_moves(functions, *primals), moved


def _is_used(log_weights: Array, state: tuple[Array, Array, Array]) -> Array:
    """Whether any observation has a panel of this number; those of length zero come last."""
    num_panels = log_weights.shape[0]
    return (state[0] < num_panels) & (log_weights[state[0]] > -jnp.inf).any()


def _in_type_of_argument(fn: ElementWise) -> ElementWise:
    """Undo promotion: NumPyro's distributions have parameters of the widest type."""
    return lambda x: fn(x).astype(x.dtype)


def _slope(fn: ElementWise, x: Array) -> Array:
    return jax.jvp(fn, (x,), (jnp.ones_like(x),))[1]


def _derivatives(fn: ElementWise, x: Array) -> tuple[Array, Array, Array]:
    """Value, first and second derivative."""
    one = jnp.ones_like(x)
    (value, first), (_, second) = jax.jvp(lambda x: jax.jvp(fn, (x,), (one,)), (x,), (one,))
    return value, first, second
