# SPDX-License-Identifier: Apache-2.0
"""Draw the classes of a plate many times, and compare means with what they should be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from scipy.stats import norm

import numpyro_largecat as lc

# How often a correct program fails a random check; a check compares about 400 means, with the
# standard errors of many draws, which are close to Normal.
FALSE_ALARM = 1e-5
STANDARD_ERRORS = norm.isf(FALSE_ALARM / 2 / 400)

K = 9
LABELS = {
    "all equal": [3, 3, 3, 3],
    "all distinct": [0, 8, 2, 5],
    "repeated": [0, 6, 6, 0],
    "rare and frequent": [0, 3, 3, 3],
}


def draw_classes(rng_key, labels, num_sampled, **options):
    num_categories = options.pop("num_categories", K)
    with handlers.seed(rng_seed=rng_key):
        return lc.class_plate("classes", num_categories, labels, num_sampled, **options).classes


def draw_often(labels, num_sampled, repeats, **options):
    """Subsets for each row of ``labels``, leading axes (len(labels), repeats)."""

    @jax.jit
    def draw(labels):
        def of_labels(labels):
            return jax.vmap(lambda key: draw_classes(key, labels, num_sampled, **options))(keys)

        keys = jax.random.split(jax.random.key(0), repeats)
        return jax.vmap(of_labels)(labels)

    return draw(np.array(labels))


def draw_once(rng_key, labels, num_sampled, **options):
    """As ``draw_classes``, but in one program, where nothing is asked of its arguments."""
    return jax.jit(lambda: draw_classes(rng_key, labels, num_sampled, **options))()


def weight_of_each_class(indices, weights, num_categories=K):
    """Total weight of each class: the weighted sum of f is its product with f, whatever f."""
    return jnp.zeros(num_categories).at[indices].add(weights)


def assert_means(samples, expected, axis=0):
    """Compare means over the draws with what they should be, by their standard errors."""
    samples = np.asarray(samples, np.float64)
    assert np.isfinite(samples).all()
    error = samples.std(axis=axis, ddof=1) / np.sqrt(samples.shape[axis])
    gap = np.abs(samples.mean(axis=axis) - expected)
    assert (gap <= STANDARD_ERRORS * error + 1e-5 * (1 + np.abs(expected))).all()
