# SPDX-License-Identifier: Apache-2.0
"""NumPy's random numbers from a JAX key."""

from __future__ import annotations

import jax
import numpy as np
from jax import Array


def numpy_generator(rng_key: Array) -> np.random.Generator:
    """A generator for what is drawn on the host, such as the order of batches."""
    return np.random.default_rng(np.asarray(jax.random.key_data(rng_key)))
