# SPDX-License-Identifier: Apache-2.0
"""Search for the point that a function leaves where it is."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

LONGEST_STEP = 5.0
LEAST_SLOPE = 1e-6


def newton_step(
    function: Callable[[Array], Array], x: Array, longest: float | Array = LONGEST_STEP
) -> Array:
    """Take a Newton step towards ``function(x) = x``, for each entry on its own.

    For functions whose derivative is at most 1, so that one point at most is left where it is. No
    step is longer than ``longest``, where the function nearly follows x.

    Cost: one evaluation of ``function`` and of its derivative.
    """
    excess, slope = jax.jvp(lambda x: function(x) - x, (x,), (jnp.ones_like(x),))
    step = excess / jnp.minimum(slope, -LEAST_SLOPE)
    return x - jnp.clip(step, -longest, longest)
