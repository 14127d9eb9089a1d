# SPDX-License-Identifier: Apache-2.0
"""The Wright omega function of a real number: Lambert's W without its overflow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

NUM_STEPS = 2  # of fourth order, from a start that is off by a third at most
LOWEST = {2: -10.0, 4: -20.0, 8: -40.0}  # below, e^z is omega(z) up to rounding; by bytes of z


@jax.jit
def wright_omega(z: Array) -> Array:
    r"""Solve w + log w = z for w > 0.

    .. math:: \omega(z) = W(e^z)

    with Lambert's W on its principal branch. The relative error is below 2 eps max(1, -z), which is
    what the rounding of z leaves. At z = -inf it is 0.

    Cost: a few logarithms and exponentials for each entry.

    Args:
        z: Any floats but +inf, of any shape.

    Returns:
        omega(z), of the shape of ``z``.

    Example:
        >>> float(wright_omega(jnp.array(1.0)))
        1.0

    References:
        Fritsch, Shafer and Crowley, Algorithm 443: Solution of the transcendental equation
        w e^w = x, Communications of the ACM 16, 1973.
    """
    lowest = LOWEST[z.dtype.itemsize]
    inner = jnp.maximum(z, lowest)
    exponential, above = jnp.exp(jnp.minimum(inner, 1)), jnp.maximum(inner, 1)
    w = jnp.where(inner > 1, above - jnp.log(above), exponential / (1 + exponential))
    for _ in range(NUM_STEPS):
        rest = inner - w - jnp.log(w)
        weight = (1 + w) * (1 + w + 2 * rest / 3)
        w = w * (1 + rest / (1 + w) * (weight - rest / 2) / (weight - rest))
    return jnp.where(z < lowest, jnp.exp(z), w)
