# SPDX-License-Identifier: Apache-2.0
"""Logarithms of CDFs that keep their relative accuracy in both tails, value and derivatives.

They are evaluated for every class of every observation, so they are written for speed: on one CPU
core a float32 value takes 2.5 ns (Normal) and 0.6 ns (logistic), with its derivative 3.1 and 1.0
ns, which is 0.65 and 0.3 of what the functions of ``jax.scipy`` and ``jax.nn`` take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from numpy.polynomial.chebyshev import cheb2poly


@jax.custom_jvp
@jax.jit
def gumbel_log_cdf(error: Array) -> Array:
    r"""Log CDF of the standard Gumbel distribution.

    .. math:: \log\Phi(\varepsilon) = -\exp(-\varepsilon)

    This overflows for errors below -88 in float32 and -709 in float64. From 0.7 times that (-62 and
    -497), where it is about -1e27 and -1e215, it goes on as a straight line: values and
    gradients stay finite, and no probability changes.
    """
    lowest = _lowest_gumbel(error)
    return _gumbel_slope(error) * (jnp.minimum(error - lowest, 0) - 1)


@gumbel_log_cdf.defjvp
def _gumbel_jvp(primals: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Array]:
    (error,) = primals
    return gumbel_log_cdf(error), _gumbel_slope(error) * tangents[0]


def _gumbel_slope(error: Array) -> Array:
    return jnp.exp(-jnp.maximum(error, _lowest_gumbel(error)))


def _lowest_gumbel(error: Array) -> float:
    return -0.7 * math.log(float(jnp.finfo(error.dtype).max))


@jax.custom_jvp
@jax.jit
def logistic_log_cdf(error: Array) -> Array:
    r"""Log CDF of the standard logistic distribution.

    .. math:: \log\Phi(\varepsilon) = -\log(1 + \exp(-\varepsilon))

    Its relative error is below 3e-7 in float32 and 1e-15 in float64.
    """
    return jnp.minimum(error, 0) - _log1p(jnp.exp(-jnp.abs(error)))


@logistic_log_cdf.defjvp
def _logistic_jvp(primals: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Array]:
    (error,) = primals
    return logistic_log_cdf(error), jax.nn.sigmoid(-error) * tangents[0]


@jax.custom_jvp
@jax.jit
def normal_log_cdf(error: Array) -> Array:
    r"""Log CDF of the standard Normal distribution.

    With the scaled tail :math:`Q(x) = \exp(x^2/2)\,\Phi(-x)`, a polynomial in 4 / (4 + x),

    .. math:: \log\Phi(\varepsilon) = \begin{cases}
              \log Q(-\varepsilon) - \varepsilon^2/2 & \varepsilon < 0 \\
              \log(1 - \exp(-\varepsilon^2/2)\,Q(\varepsilon)) & \varepsilon \ge 0. \end{cases}

    Its relative error is below 7e-7 in float32 and 2e-15 in float64 wherever the result is a normal
    number, and that of its first two derivatives below 1e-6 and 2e-15.
    """
    bell, tail = _bell_and_tail(error)
    return jnp.where(error < 0, jnp.log(tail) - 0.5 * error * error, _log1p(-bell * tail))


@jax.custom_jvp
@jax.jit
def _normal_slope(error: Array) -> Array:
    """Derivative phi / Phi of ``normal_log_cdf``."""
    bell, tail = _bell_and_tail(error)
    return jnp.where(error < 0, 1 / tail, bell / (1 - bell * tail)) / math.sqrt(2 * math.pi)


@jax.jit
def _normal_curvature(error: Array) -> Array:
    """Second derivative of ``normal_log_cdf``, which is -slope (slope + error).

    For negative errors the sum cancels, so there it is a polynomial of its own.
    """
    error = jnp.minimum(error, _FAR)
    slope = _normal_slope(error)
    share = 4 / (4 + jnp.abs(error))
    below = _polynomial(2 * share - 1, _coefficients(_CURVATURE, error.dtype, 13))
    return -jnp.where(error < 0, below, slope * (slope + error))


@normal_log_cdf.defjvp
def _normal_jvp(primals: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Array]:
    (error,) = primals
    return normal_log_cdf(error), _normal_slope(error) * tangents[0]


@_normal_slope.defjvp
def _normal_slope_jvp(primals: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Array]:
    (error,) = primals
    return _normal_slope(error), _normal_curvature(error) * tangents[0]


_FAR = 40.0  # from here on Phi is 1 and phi is 0, also in float64


def _bell_and_tail(error: Array) -> tuple[Array, Array]:
    """Return exp(-error^2 / 2), or 1 for negative errors, and the scaled tail Q(abs(error))."""
    error = jnp.minimum(error, _FAR)
    share = 4 / (4 + jnp.abs(error))
    tail = share * _polynomial(2 * share - 1, _coefficients(_TAIL, error.dtype, 10))
    above = jnp.maximum(error, 0)
    square = above * above
    # What rounding took from the square, by splitting it into exact products: the exponential
    # turns an absolute error of its argument into a relative one.
    limits = jnp.finfo(error.dtype)
    high = lax.reduce_precision(above, limits.nexp, limits.nmant // 2)
    low = above - high
    lost = ((high * high - square) + 2 * high * low) + low * low
    return jnp.exp(-0.5 * square) * (1 - 0.5 * lost), tail


def _log1p(x: Array) -> Array:
    """Return log(1 + x) for x in [-1/2, 1], as 2 artanh(x / (2 + x)); several times faster."""
    ratio = 2 * x / (2 + x)
    num_terms = 7 if jnp.finfo(x.dtype).nmant <= 23 else 16
    return ratio * _polynomial(0.25 * ratio * ratio, [1 / (2 * k + 1) for k in range(num_terms)])


def _polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    result = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = result * x + coefficient
    return result


def _coefficients(chebyshev: Sequence[float], dtype: Any, num_single: int) -> list[float]:
    """Coefficients of powers, from as much of the Chebyshev series as ``dtype`` can resolve."""
    single = jnp.finfo(dtype).nmant <= 23
    return cheb2poly(chebyshev[:num_single] if single else chebyshev).tolist()


# Chebyshev series in s = 2t - 1, t = 4 / (4 + x), for x in [0, inf]: coefficients by the discrete
# orthogonality relation on 100 nodes, from values computed with 50 digits. Cut where the terms are
# below 1e-16; the first 10 and 13 leave out terms below 6e-9 and 3e-8.
# Q(x) / t, with Q(x) = exp(x^2 / 2) Phi(-x):
_TAIL = (
    0.24261280114151914,
    0.18792720420989263,
    0.055548388918812759,
    0.012129438315111522,
    0.0017314801240606201,
    8.0149618599537488e-5,
    -2.5136847908026696e-5,
    -4.7258422549267409e-6,
    2.5258922136865776e-7,
    1.536333687349456e-7,
    -8.4525503001729391e-10,
    -5.1716270154357085e-9,
    -2.8206509081173766e-11,
    1.9435038070971736e-10,
    -2.4853560478511769e-12,
    -7.936207374645757e-12,
    4.6062017111762351e-13,
    3.2821541166777414e-13,
    -4.3538406631637034e-14,
    -1.226818507926106e-14,
    3.2328460815413941e-15,
    3.0451658804315853e-16,
    -2.0130368431552333e-16,
)
# g (g - x), with g = phi(x) / Phi(-x):
_CURVATURE = (
    0.88249020245091753,
    -0.17491385940706136,
    -0.067492972599193751,
    -0.0080534684849709358,
    0.0033466487307576577,
    0.0013929538740934723,
    -1.8279731812584771e-5,
    -0.00012330686345955615,
    -1.8072882261033347e-5,
    7.903386302647324e-6,
    2.5943122153315393e-6,
    -3.3826069797192809e-7,
    -2.5301423378495471e-7,
    2.952355593460921e-10,
    2.0227832960460881e-8,
    1.8796305595308474e-9,
    -1.3881745339514983e-9,
    -2.5836065400445621e-10,
    8.1463398368402714e-11,
    2.4952688949394517e-11,
    -3.8271252817747765e-12,
    -2.0059021666883746e-12,
    1.0247924568358473e-13,
    1.4026172924230317e-13,
    5.1797996174474809e-15,
    -8.557837138634143e-15,
    -1.1713513485278655e-15,
)
