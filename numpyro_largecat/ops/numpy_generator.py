# SPDX-License-Identifier: Apache-2.0
"""NumPy's random numbers from a JAX key."""

from __future__ import annotations

import jax
import numpy as np
from jax import Array


def numpy_generator(rng_key: Array, *numbers: int) -> np.random.Generator:
    """A generator for what is drawn on the host, such as the order of batches.

    With other ``numbers`` it is an independent one, as with ``jax.random.fold_in``; no code is
    compiled for them.
    """
    entropy = np.asarray(jax.random.key_data(rng_key)).ravel().tolist()
    return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=numbers))
