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
PRICES = jnp.asarray(RNG.uniform(1, 6, K), jnp.float32)
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


def cheapest(b, classes):
    price = PRICES[classes.indices]
    return price / price.min()


def log_weights(b, classes):
    return jnp.log(classes.weights)


def nests(b, classes):
    """The first nest holds one class, with which others have nothing to do."""
    nest = jnp.minimum(classes.indices, 1)
    return jnp.log(jax.ops.segment_sum(jnp.exp(b), nest, 2))[nest]


FOLLOW = (
    cheapest,
    log_weights,
    nests,
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


def test_noise_of_the_model_does_not_hide_what_follows_other_classes():
    def model(x, y=None, rows=None):
        with lc.class_plate("classes", K, labels=y, num_sampled=30) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        x = x * jax.random.bernoulli(numpyro.prng_key(), 0.8, x.shape)
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", x @ (w - w.mean(0)).T, classes=classes, rows=rows, obs=y)

    with pytest.raises(ValueError, match="depends on which classes"):
        start(model)


def test_a_network_that_draws_its_own_start_hides_nothing():
    def model(x, y=None, rows=None):
        with lc.class_plate("classes", K, labels=y, num_sampled=30) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        layer = numpyro.param("layer", lambda key: jax.random.normal(key, (D, D)))
        with lc.data_plate("data", N, rows) as rows:
            psi = x @ layer @ jnp.sort(w, axis=0).T
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    with pytest.raises(ValueError, match="depends on which classes"):
        start(model)


def outside(statement):
    """A model with another statement outside of the class plate, of its rows."""

    def model(x, y=None, rows=None):
        with lc.class_plate("classes", K, labels=y, num_sampled=30) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        statement(b, classes)
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", x[:, :1] + b, classes=classes, rows=rows, obs=y)

    return model


def soft_sum_to_zero(b, classes):
    numpyro.factor("other", -(b.sum() ** 2))


def neighbours_by_place(b, classes):
    edges = np.arange(K - 1)
    numpyro.factor("other", -((b[edges] - b[edges + 1]) ** 2).sum())


def prior_of_a_mean(b, classes):
    numpyro.sample("other", dist.Normal(b.mean(), 1))


def survey(b, classes):
    numpyro.sample("other", dist.Normal(b.max(), 1), obs=1.0)


def estimated_sum(b, classes):
    numpyro.factor("other", -(classes.weights * b**2).sum())


def of_features(b, classes):
    numpyro.factor("other", -(PRICES.sum() ** 2))


OUTSIDE = (soft_sum_to_zero, neighbours_by_place, prior_of_a_mean, survey)


@pytest.mark.parametrize("statement", OUTSIDE, ids=lambda statement: statement.__name__)
def test_what_is_outside_of_a_plate_must_not_follow_its_rows(statement):
    with pytest.raises(ValueError, match="site 'other', outside of it, depends on which"):
        start(outside(statement))


@pytest.mark.parametrize("statement", [estimated_sum, of_features], ids=lambda s: s.__name__)
def test_what_estimates_a_sum_over_all_classes_is_taken(statement):
    start(outside(statement))


INSIDE = {
    "random walk": lambda b: numpyro.factor("other", -((b - jnp.roll(b, 1)) ** 2)),
    "soft sum": lambda b: numpyro.factor("other", -(b.sum() ** 2)),
    "prior of centred rows": lambda b: numpyro.sample("other", dist.Normal(b - b.mean(), 1)),
    "observed": lambda b: numpyro.sample("other", dist.Normal(b - b.mean(), 1), obs=0 * b),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_is_in_a_plate_must_follow_its_own_row_alone(name):
    def model(x, y=None, rows=None):
        with lc.class_plate("classes", K, labels=y, num_sampled=30) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
            INSIDE[name](b)
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", x[:, :1] + b, classes=classes, rows=rows, obs=y)

    with pytest.raises(ValueError, match="log density of site 'other' for class"):
        start(model)


@pytest.mark.parametrize("centre", [False, True])
def test_classes_that_make_a_choice_themselves_follow_their_own_row_alone(centre):
    """Each has a kind that is known, which its row predicts."""
    kind_of = jnp.asarray(RNG.integers(0, 4, K))

    def model(x, y=None, rows=None):
        slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([4]).to_event(1))
        with lc.class_plate("classes", K, labels=y, num_sampled=30) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
            own = b - b.mean() if centre else b
            kinds = lc.UtilityCategorical(own[:, None] * slopes)
            numpyro.sample("kind", kinds, obs=kind_of[classes.indices])
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", x[:, :1] + b, classes=classes, rows=rows, obs=y)

    if centre:
        with pytest.raises(ValueError, match="log density of site 'kind' for class"):
            start(model)
    else:
        start(model)


def test_a_gate_that_starts_at_0_hides_nothing():
    def model(x, y=None, rows=None):
        gate = numpyro.param("gate", 0.0)
        with lc.class_plate("classes", K, labels=y, num_sampled=30) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", N, rows) as rows:
            psi = x[:, :1] + b + gate * b.mean() * b
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    with pytest.raises(ValueError, match="depends on which classes"):
        start(model)


def test_features_are_arguments_of_numpy():
    def model(x, price, y=None, rows=None):
        with lc.class_plate("classes", K, labels=y, num_sampled=30) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        own = price[classes.indices]
        with lc.data_plate("data", N, rows) as rows:
            psi = x[:, :1] * own / own.min() + b
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.01), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match="depends on which classes"):
        svi.init(jax.random.key(0), X, np.asarray(PRICES), Y, ROWS)


def test_rows_of_another_plate_may_be_read_by_the_classes_that_are_held():
    """The plate of kinds then holds others too; a kind is the same wherever it is."""
    kind_of = jnp.asarray(RNG.integers(0, 40, K))

    def model(x, y=None, rows=None):
        with lc.class_plate("classes", K, labels=y, num_sampled=30) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        own = kind_of[classes.indices]
        with lc.class_plate("kinds", 40, reads=own, num_sampled=5) as kinds:
            g = numpyro.sample("g", dist.Normal(0, 1))
        with lc.data_plate("data", N, rows) as rows:
            psi = x[:, :1] + b + kinds.rows_of(g, own)
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    start(model)


def test_utilities_over_another_plate_must_not_follow_the_rows_of_this_one():
    def model(x, y=None, rows=None):
        with lc.class_plate("tags", K, labels=y, num_sampled=30) as tags:
            g = numpyro.sample("g", dist.Normal(0, 1))
        with lc.class_plate("classes", K // 2, labels=y // 2, num_sampled=20) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", x[:, :1] + g, classes=tags, rows=rows, obs=y)
            psi = jnp.exp(g.mean()) * x @ w.T
            lc.sample_choice("z", psi, classes=classes, rows=rows, obs=y // 2)

    with pytest.raises(ValueError, match="site 'z', outside of it, depends on which"):
        start(model)


@pytest.mark.parametrize("num_categories", [2, 3, 4, 5, 9])
def test_few_classes_are_looked_at_too(num_categories):
    def model(y=None, rows=None):
        with lc.class_plate("classes", num_categories, labels=y, num_sampled=1) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", 2, rows) as rows:
            psi = jnp.broadcast_to(b.at[0].set(0), (2, *b.shape))
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.01), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match="depends on which classes"):
        svi.init(jax.random.key(0), np.array([0, 1]), np.arange(2))


def test_a_model_that_asserts_the_shapes_of_its_steps_is_taken():
    def model(x, y=None, rows=None):
        with lc.class_plate("classes", 5_000, labels=y, num_sampled=600) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        psi = x @ w.T
        assert psi.shape == (N, N + 600)
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    start(model)


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
