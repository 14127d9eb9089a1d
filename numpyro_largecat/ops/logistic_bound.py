# SPDX-License-Identifier: Apache-2.0
"""The Augment & Reduce bound for logistic errors, with the largest of several errors as q."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_largecat.ops.fixed_point import LEAST_SLOPE, newton_step
from numpyro_largecat.ops.log_cdf import logistic_log_cdf
from numpyro_largecat.ops.softmax_bound import log_variance_of_sum

BIGGEST = 80.0  # argument of an exponential in float32
U_TOLERANCE = 1e-6  # what a step of length one would change in it
MOST_U_STEPS = 60  # the search ends where all are within the tolerance
NODES, NODE_WEIGHTS = (a.tolist() for a in np.polynomial.laguerre.laggauss(3))  # Exp(1)


@jax.jit
def logistic_bound(distances: Array, weights: Array, u: Array) -> Array:
    r"""Bound log p(y | psi) under logistic errors from below, with one local variable u = log a.

    q(error) is the distribution of the largest of a errors, for any real a >= 1, which has the CDF
    Phi^a. Under it log Phi(error) = -E / a with E standard exponential, and densities and entropy
    cancel:

    .. math:: \log p(y \mid \psi) \ge 1 - e^{-u} - u
              + \sum_{k \ne y} w_k \, E\big[\log\Phi(\varepsilon + \psi_y - \psi_k)\big], \qquad
              \varepsilon = \Phi^{-1}(e^{-E / a}) = -\log(e^{E / a} - 1).

    For Gumbel errors the same q is Gumbel(log a, 1), and this is the softmax bound. Here it is
    exact for equal utilities (a = K) and where the choice is certain (a = 1). The expectation is
    taken at three Gauss-Laguerre nodes, most often a little low, by up to 0.2 nats for a class far
    above y; no case is known in which the result exceeds log p by 1e-4 nats at the best u.

    Given u it is linear in the weights, so unbiased weights give an unbiased estimate.

    Cost: O(M), three logistic functions for each class.

    Args:
        distances: psi_y - psi_m, shape (..., M).
        weights: Weights of the classes, 0 for y itself, shape (..., M).
        u: Local variable, at least 0, shape (...).

    Returns:
        The bound, shape (...).

    References:
        Ruiz et al., Augment and Reduce, ICML 2018, Eq. 7, with another q than in the paper.
    """
    dtype = jnp.result_type(distances, weights, u)
    distances, weights, u = _at_least_float32(distances, weights, u)
    bound = 1 - jnp.exp(-u) - u
    for node, node_weight in zip(NODES, NODE_WEIGHTS, strict=True):
        error, _ = _error_and_speed(u, node)
        log_cdf = logistic_log_cdf(error[..., None] + distances)
        bound = bound + node_weight * _weighed(log_cdf, weights)
    return bound.astype(dtype)


@jax.jit
def log_eta_hat_logistic(distances: Array, weights: Array, u: Array) -> Array:
    r"""Logarithm of the a that a natural-gradient step of length one takes u = log a to.

    .. math:: \hat a(u) = 1 + \sum_{k \ne y} w_k \,
              E\Big[ E \, \frac{m(\varepsilon + \psi_y - \psi_k)}{m(\varepsilon)} \Big]

    with :math:`m = \phi / \Phi = 1 - \Phi` counts the competitors, as eta* of the softmax does: the
    ratio is exp(psi_k - psi_y) for errors in the upper tail, and 1 in the lower. q is an
    exponential family with the natural parameter a, and the derivative of the bound in u is
    :math:`\hat a(u)\, e^{-u} - 1`. So a_hat is unbiased where the weights are, and u is best where
    ``log_eta_hat_logistic`` is u.

    Shapes and cost: as ``logistic_bound``; float32 at least.
    """
    distances, weights, u = _at_least_float32(distances, weights, u)
    log_total = -u
    for node, node_weight in zip(NODES, NODE_WEIGHTS, strict=True):
        error, speed = _error_and_speed(u, node)
        log_sum = _log_sum_of_sigmoids(-error[..., None] - distances, weights)
        log_total = jnp.logaddexp(log_total, log_sum + jnp.log(node_weight * speed))
    return u + log_total


@jax.jit
def log_variance_logistic(distances: Array, weights: Array, u: Array) -> Array:
    """Log of the variance of a_hat of ``log_eta_hat_logistic``, as ``log_variance_of_sum`` says.

    Shapes and cost: as ``logistic_bound``.
    """
    distances, weights, u = _at_least_float32(distances, weights, u)
    terms = jnp.zeros(())
    shift = None
    for node, node_weight in zip(NODES[::-1], NODE_WEIGHTS[::-1], strict=True):
        error, speed = _error_and_speed(u, node)
        x = -error[..., None] - distances
        shift = _shift(x, weights) if shift is None else shift  # greatest at the first of them
        terms = terms + (node_weight * speed)[..., None] * _shifted_sigmoids(x, shift)
    assert shift is not None
    return log_variance_of_sum(jnp.log(terms), weights) + 2 * (u + shift[..., 0])


@jax.jit
def best_u_logistic(distances: Array, weights: Array) -> Array:
    r"""Best u for these classes, by Newton steps down from a u that is too high.

    With :math:`F` = ``log_eta_hat_logistic`` it solves u = F(distances, u), so that

    .. math:: \frac{d u}{d x} = \frac{\partial F / \partial x}{1 - \partial F / \partial u} .

    Where it is best the bound has no slope in it, and its second derivatives need how u moves.

    Shapes: as ``logistic_bound``. Cost: O(M) for each step, usually three to eight, and two more
    for derivatives.
    """
    dtype = jnp.result_type(distances, weights)
    return _best_u(*_at_least_float32(distances, weights)).astype(dtype)


@jax.custom_jvp
def _best_u(distances: Array, weights: Array) -> Array:
    most = jnp.where(weights != 0, jnp.maximum(-distances, 0), -jnp.inf)  # log ratios at most
    own = jnp.zeros((*most.shape[:-1], 1), most.dtype)
    start = jax.nn.logsumexp(
        jnp.append(most, own, axis=-1), b=jnp.append(weights, own + 1, axis=-1), axis=-1
    )

    def function(u: Array) -> Array:
        return log_eta_hat_logistic(distances, weights, u)

    def goes_on(carry: tuple[Array, Array]) -> Array:
        u, count = carry
        is_off = jnp.abs(function(u) - u) > U_TOLERANCE * jnp.maximum(1, jnp.abs(u))
        return is_off.any() & (count < MOST_U_STEPS)

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return newton_step(function, carry[0]), carry[1] + 1

    return lax.while_loop(goes_on, step, (start, jnp.array(0)))[0]


@_best_u.defjvp
def _best_u_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    u = _best_u(*primals)
    _, moves = jax.jvp(lambda *args: log_eta_hat_logistic(*args, u), primals, tangents)
    slope = jax.jvp(lambda u: log_eta_hat_logistic(*primals, u), (u,), (jnp.ones_like(u),))[1]
    return u, moves / jnp.maximum(1 - slope, LEAST_SLOPE)


def _at_least_float32(*arrays: Array) -> tuple[Array, ...]:
    """Narrow types round more than the differences that Newton steps divide by."""
    return tuple(a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in arrays)


def _error_and_speed(u: Array, node: float) -> tuple[Array, Array]:
    """Quantile of q where log Phi is -node / a, and its derivative in u."""
    ratio = node * jnp.exp(-u)
    is_small = ratio < 1e-3
    large = jnp.where(is_small, 1, ratio)
    share = -jnp.expm1(-large)
    error = jnp.where(is_small, u - math.log(node) - ratio / 2, -large - jnp.log(share))
    return error, jnp.where(is_small, 1 + ratio / 2, large / share)


def _log_sum_of_sigmoids(x: Array, weights: Array) -> Array:
    """Return log sum_m w_m / (1 + exp(-x_m)), also where all x are far below 0."""
    shift = _shift(x, weights)
    total = _weighed(_shifted_sigmoids(x, shift), weights)
    log_total = jnp.log(jnp.where(total > 0, total, 1)) + shift[..., 0]
    return jnp.where(total > 0, log_total, -jnp.inf)


def _shift(x: Array, weights: Array) -> Array:
    """Return the highest x of a weight, at most 0, shape (..., 1)."""
    counted = jnp.where(weights != 0, x, -jnp.inf)
    highest = counted.max(axis=-1, keepdims=True, initial=-jnp.inf)
    return lax.stop_gradient(jnp.where(jnp.isfinite(highest), jnp.minimum(highest, 0), 0))


def _shifted_sigmoids(x: Array, shift: Array) -> Array:
    """exp(-shift) / (1 + exp(-x))."""
    below = jnp.minimum(shift - x, BIGGEST)  # so far below that it adds nothing
    return 1 / (jnp.exp(shift) + jnp.exp(below))


def _weighed(terms: Array, weights: Array) -> Array:
    return (weights * jnp.where(weights != 0, terms, 0)).sum(axis=-1)
