# SPDX-License-Identifier: Apache-2.0
"""Models and data that several tests fit."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_largecat as lc

NUM_ROWS, NUM_CATEGORIES, NUM_FEATURES = 40, 12, 3


class Frame:
    """What a data frame is to NumPy: an object that it makes into an array."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)


@partial(jax.jit, static_argnames=("num_rows", "num_categories", "num_features"))
def make_data(num_rows=NUM_ROWS, num_categories=NUM_CATEGORIES, num_features=NUM_FEATURES):
    x = jax.random.normal(jax.random.key(10), (num_rows, num_features))
    w = jax.random.normal(jax.random.key(11), (num_categories, num_features))
    y = jax.random.categorical(jax.random.key(12), x @ w.T)
    return x, y


def hierarchical(num_sampled=None, num_categories=NUM_CATEGORIES, num_rows=NUM_ROWS):
    """Softmax regression whose prior scale is learned; exact if ``num_sampled`` is None."""

    def model(x, y=None, rows=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with lc.class_plate("classes", num_categories, y, num_sampled) as classes:
            w = numpyro.sample("w", dist.Normal(0, scale).expand([x.shape[1]]).to_event(1))
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", num_rows, rows) as rows:
            lc.sample_choice("y", x @ w.T + b, classes=classes, rows=rows, obs=y)

    return model


def explicit_u(num_sampled, num_categories=NUM_CATEGORIES, num_rows=NUM_ROWS):
    """Softmax regression whose u is an ordinary parameter, moved by the optimiser."""

    def model(x, y=None, rows=None):
        with lc.class_plate("classes", num_categories, y, num_sampled) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", num_rows, rows):
            u = numpyro.param("u", jnp.full(num_rows, 2.5), event_dim=0)
            psi = x @ w.T + b
            numpyro.sample("y", lc.UtilityCategorical(psi, classes, u=u), obs=y)

    return model


def class_points(*args, **kwargs):
    """A guide of ``w`` and ``b`` by hand, whose parameters have the names of AutoDelta's.

    To start an automatic guide NumPyro runs the model operation by operation, which compiles more
    than a hundred programs at each new shape; this one compiles ten.
    """
    del args, kwargs
    with numpyro.plate("classes", NUM_CATEGORIES):
        # Not at 0, where all classes are alike.
        start = np.sin(np.arange(NUM_CATEGORIES * NUM_FEATURES)).reshape(NUM_CATEGORIES, -1)
        start = jnp.asarray(start)
        w = numpyro.param("w_auto_loc", start, event_dim=1)
        numpyro.sample("w", dist.Delta(w, event_dim=1))
        b = numpyro.param("b_auto_loc", start[:, 0], event_dim=0)
        numpyro.sample("b", dist.Delta(b))


def point_guide(*args, **kwargs):
    """A guide of ``hierarchical``, likewise."""
    del args, kwargs
    positive = dist.constraints.positive
    scale = numpyro.param("scale_auto_loc", jnp.ones(()), constraint=positive)
    numpyro.sample("scale", dist.Delta(scale))
    class_points()


def class_points_of(num_categories, **shapes):
    """A guide of sites in a plate "classes" by hand, likewise."""

    def guide(*args, **kwargs):
        with numpyro.plate("classes", num_categories):
            for name, shape in shapes.items():
                start, event_dim = jnp.zeros((num_categories, *shape)), len(shape)
                loc = numpyro.param(f"{name}_auto_loc", start, event_dim=event_dim)
                numpyro.sample(name, dist.Delta(loc, event_dim=event_dim))

    return guide


def normals_of(shared=None, **plates):
    """A guide of normals by hand, whose parameters have the names of AutoNormal's.

    Of sites by name: the shapes of those outside of all plates, and for each plate its size and
    the shapes of those in it.
    """

    def sample(shapes, *size):
        for name, shape in shapes.items():
            start, event_dim = np.zeros((*size, *shape), np.float32), len(shape)
            loc = numpyro.param(f"{name}_auto_loc", start, event_dim=event_dim)
            positive = dist.constraints.softplus_positive
            scale = numpyro.param(
                f"{name}_auto_scale", start + 0.1, constraint=positive, event_dim=event_dim
            )
            numpyro.sample(name, dist.Normal(loc, scale).to_event(event_dim))

    def guide(*args, **kwargs):
        sample(shared or {})
        for plate, (size, shapes) in plates.items():
            with numpyro.plate(plate, size):
                sample(shapes, size)

    return guide
