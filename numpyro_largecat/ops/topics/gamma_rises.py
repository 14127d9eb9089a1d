# SPDX-License-Identifier: Apache-2.0
r"""How much log Gamma and digamma rise from a to a + n, to the precision of the rise.

A difference of the two values has few digits where a is large. With A = a + 6, B = A + n and g the
terms of Stirling's series that fall with x,

.. math:: \log \frac{\Gamma(A + n)}{\Gamma(A)} = (A - 1/2) \log(1 + n / A) + n \log B - n
          + g(B) - g(A), \qquad g(x) = \frac{1}{12 x} - \frac{1}{360 x^3} + \ldots

from which the logarithms of (a + n + i) / (a + i) for i = 0..5 lead to a.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

SHIFT = 6


def log_gamma_rise(a: Array, n: Array) -> Array:
    """log(Gamma(a + n) / Gamma(a)) for a > 0 and n >= 0; to 1e-10 in float64."""
    low, high = a + SHIFT, a + n + SHIFT
    above = (low - 0.5) * jnp.log1p(n / low) + n * (jnp.log(high) - 1)
    first = jnp.where(n > a, jnp.log(a + n) - jnp.log(a), jnp.log1p(n / a))  # n / a may overflow
    others = [1 + n / (a + i) for i in range(1, SHIFT)]
    first += jnp.log(others[0] * others[1]) + jnp.log(math.prod(others[2:]))  # all may overflow
    rise = above + _falling_terms(high) - _falling_terms(low) - first
    return jnp.where(n > 0, rise, 0)  # compilers may round the terms of equal numbers apart


def _falling_terms(x: Array) -> Array:
    y, z = 1 / x, 1 / x**2
    return y * (1 / 12 - z * (1 / 360 - z * (1 / 1260 - z * (1 / 1680 - z / 1188))))


def digamma_rise(a: Array, n: Array) -> Array:
    """digamma(a + n) - digamma(a), its derivative in a; to 1e-9 in float64."""
    low, high = a + SHIFT, a + n + SHIFT
    rise = jnp.log1p(n / low) + n / (2 * low * high) + _square_terms(low) - _square_terms(high)
    for i in range(SHIFT):
        rise += n / (a + i) / (a + n + i)
    return jnp.where(n > 0, rise, 0)


def _square_terms(x: Array) -> Array:
    z = 1 / x**2
    return z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z / 132))))
