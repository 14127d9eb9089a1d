# SPDX-License-Identifier: Apache-2.0
"""A subset and a chunk of 50 classes, six rows each, on which several tests evaluate."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import numpyro_largecat as lc

# Labels 7 and 30, one padded row, and three classes that stand for the 48 others.
LABELS = np.array([7, 30, 50])
INDICES = np.array([7, 30, 49, 2, 49, 11])
WEIGHTS = np.array([1.0, 1.0, 0.0, 16.0, 16.0, 16.0])
SUBSET = lc.plates.ClassSubset(
    jnp.array(INDICES), jnp.array(WEIGHTS), jnp.array(LABELS), num_categories=50, kind="sample"
)
CHUNK = lc.plates.ClassSubset(
    jnp.array(np.arange(6)), jnp.array(np.ones(6)), None, num_categories=50, kind="chunk"
)
