# SPDX-License-Identifier: Apache-2.0
"""Which rows a minibatch holds: a function of a seed and the number of the step alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_largecat._checks import check_count
from numpyro_largecat.ops.shuffle import shuffled

IMPLEMENTATION = "threefry2x32"  # of keys, whatever JAX's setting


def orders_of(seed: int) -> Array:
    """Data of the key from which the order of each pass follows."""
    return jax.random.key_data(jax.random.key(check_count("seed", seed, 0), impl=IMPLEMENTATION))


def rows_of_step(orders: Array, step: Array | int, size: int, batch_size: int) -> Array:
    """Rows of the batch of a step, which counts from 0; distinct, shape (batch_size,).

    A pass is a new random order of all rows, cut into batches. The last batch of a pass, if fewer
    rows are left for it, also holds some of the batch before.

    Cost: O(batch); no order is made whole.
    """
    step = jnp.asarray(step).astype(jnp.uint32)
    num_passes, place = jnp.divmod(step, -(-size // batch_size))
    start = jnp.minimum(place * batch_size, size - batch_size)
    places = start + jnp.arange(batch_size, dtype=jnp.uint32)
    key = jax.random.fold_in(jax.random.wrap_key_data(orders, impl=IMPLEMENTATION), num_passes)
    return shuffled(key, places, size)
