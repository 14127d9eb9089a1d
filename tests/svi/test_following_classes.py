# SPDX-License-Identifier: Apache-2.0
"""Utilities that follow the other classes of a step, which are others in each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc

K, N, D = 1_000, 20, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = RNG.integers(0, K, N)
ROWS = np.arange(N)
MISSING = np.setdiff1d(np.arange(K), Y)[0]  # a class that nobody can choose


def with_bias(change, *, num_sampled=30):
    """A softmax regression whose bias, or all of it, is changed."""

    def model(x, y=None, rows=None):
        with lc.class_plate("classes", K, labels=y, num_sampled=num_sampled) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
            b = numpyro.sample("b", dist.Normal(0, 1))
        scale = numpyro.sample("scale", dist.Normal(0, 1))  # 0 where nothing is fitted
        with lc.data_plate("data", N, rows) as rows:
            psi = x @ w.T + scale * change(b, classes)
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    return model


def softmax_of_rows(b, classes):
    return jax.nn.log_softmax(b)


def first_is_reference(b, classes):
    return b.at[0].set(0.0)


def later_is_reference(b, classes):
    return b.at[-1].set(0.0)


def centred(b, classes):
    return b - b.mean()


def estimated_centre(b, classes):
    return b - (classes.weights * b).sum() / K


def ranked(b, classes):
    return jnp.argsort(jnp.argsort(b)) / K


def by_id(b, classes):
    return jnp.where(classes.indices == 0, 0.0, b)


def by_feature(b, classes):
    return b * jnp.linspace(0, 1, K)[classes.indices]


def bounded(b, classes):
    return jnp.clip(b, -1, 1) + jnp.where(classes.indices == MISSING, -jnp.inf, 0)


def start(model, guide=None):
    guide = guide or AutoNormal(model)
    svi = lc.SubsampledSVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    return svi.init(jax.random.key(0), X, Y, ROWS)


FOLLOW = (
    softmax_of_rows,
    first_is_reference,
    later_is_reference,
    centred,
    estimated_centre,
    ranked,
)


@pytest.mark.parametrize("change", FOLLOW, ids=lambda change: change.__name__)
def test_utilities_that_follow_other_classes_are_refused_before_the_first_step(change):
    with pytest.raises(ValueError, match="depends on which classes"):
        start(with_bias(change))


@pytest.mark.parametrize("change", [by_id, by_feature, bounded], ids=lambda c: c.__name__)
def test_utilities_of_a_class_alone_are_taken(change):
    start(with_bias(change))


def test_all_classes_may_follow_each_other_where_each_step_holds_them():
    start(with_bias(centred, num_sampled=None))


def test_noise_of_the_model_itself_is_taken():
    """It is the same for a class in no two steps, and follows no other classes."""

    def dropout(b, classes):
        return b * jax.random.bernoulli(numpyro.prng_key(), 0.5, b.shape)

    start(with_bias(dropout))


def test_the_second_of_two_choices_is_looked_at():
    def model(x, y=None, rows=None):
        with lc.class_plate("first", K, labels=y, num_sampled=30) as first:
            a = numpyro.sample("a", dist.Normal(0, 1).expand([D]).to_event(1))
        with lc.class_plate("second", K // 2, labels=y // 2, num_sampled=20) as second:
            b = numpyro.sample("b", dist.Normal(0, 1).expand([D]).to_event(1))
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", x @ a.T, classes=first, rows=rows, obs=y)
            lc.sample_choice("z", x @ (b - b.mean(0)).T, classes=second, rows=rows, obs=y // 2)

    with pytest.raises(ValueError, match=r"plate 'second', and of choice 'z'"):
        start(model)


@pytest.mark.parametrize("negatives", ["shared", "own"])
def test_pairs_that_follow_other_classes_are_refused(negatives):
    def model(x, y=None, rows=None):
        with lc.class_plate("classes", K, y, 30, negatives=negatives) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        psi = classes.utilities(lambda x, w: x @ w, (x,), (w - w.mean(0),))
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    with pytest.raises(ValueError, match="depends on which classes"):
        start(model)
