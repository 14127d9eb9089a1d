# SPDX-License-Identifier: Apache-2.0
"""Models that take rows of a plate by their place, as if the plate held all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc

U, N = 50, 40
RNG = np.random.default_rng(0)
USERS, FRIENDS = RNG.integers(0, U, N), RNG.integers(0, U, (N, 2))
COUNTS = lc.EntityCounts.of(U, USERS, FRIENDS)
X = RNG.normal(size=N).astype(np.float32)


def by_id(read, v, ids):
    return read.rows_of(v, ids)


def by_place(read, v, ids):
    return v[ids]


def friends(read_user, read_friends):
    def model(users, friends, x=None, rows=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with lc.entity_plate("users", U, (users, friends), COUNTS) as read:
            v = numpyro.sample("v", dist.Normal(0, scale).expand([3]).to_event(1))
        centre = (read.weights[:, None] * v).sum(0)  # an estimate of the sum over all users
        of_friends = read_friends(read, v, friends).mean(1)
        loc = (read_user(read, v, users) * of_friends).sum(1) + centre.sum() / U
        with lc.data_plate("data", N, rows):
            numpyro.sample("x", dist.Normal(loc, 0.5), obs=x)

    return model


def tied(read):
    def model(history, y=None, rows=None):
        with lc.class_plate("words", U, y, num_sampled=5, reads=history) as words:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        psi = read(words, w, history).mean(1) @ words.scored(w).T
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", psi, classes=words, rows=rows, obs=y)

    return model


def one_parameter(*args):
    """A guide that draws nothing: none has a part in what is refused."""
    del args
    numpyro.param("any", jnp.zeros(()))


def init(model, *args, guide=one_parameter):
    """The parameters at the start, by name."""
    svi = lc.SubsampledSVI(model, guide, optax.adam(0.1), TraceMeanField_ELBO())
    args = (*(a[:10] for a in args), np.arange(10))
    return svi.get_params(svi.init(jax.random.key(0), *args))


@pytest.mark.slow
def test_reading_by_id_is_taken() -> None:
    """Also beside weighted sums over the rows, in whatever order they are summed."""
    for model, name, args in (
        (friends(by_id, by_id), "v", (USERS, FRIENDS, X)),
        (tied(by_id), "w", (FRIENDS, USERS)),
    ):
        assert init(model, *args, guide=AutoNormal(model))[f"{name}_auto_loc"].shape == (U, 3)


@pytest.mark.parametrize("readers", [(by_place, by_id), (by_id, by_place)])
def test_entities_that_are_read_by_place_are_refused(readers) -> None:
    with pytest.raises(ValueError, match=r"density of site 'x' depends on the order.*'users'"):
        init(friends(*readers), USERS, FRIENDS, X)


def test_classes_that_are_read_by_place_are_refused() -> None:
    """Where a guide is set up in the same program, too."""
    model = tied(by_place)
    with pytest.raises(ValueError, match=r"density of site 'y' depends on the order.*'words'"):
        init(model, FRIENDS, USERS, guide=AutoNormal(model))


@pytest.mark.parametrize("options", [{}, {"proposal": lc.HeadProposal(np.arange(3))}])
def test_classes_read_by_place_are_refused_without_reads_too(options) -> None:
    """Where an argument may be ids: it is neither labels nor row ids."""

    def model(history, y=None, rows=None):
        with lc.class_plate("words", U, y, num_sampled=5, **options) as words:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with lc.data_plate("data", N, rows) as rows:
            psi = w[history].mean(1) @ w.T
            lc.sample_choice("y", psi, classes=words, rows=rows, obs=y)

    with pytest.raises(ValueError, match=r"density of site 'y' depends on the order.*reads=ids"):
        init(model, FRIENDS, USERS)


def test_a_site_of_entities_and_classes_is_read_by_id() -> None:
    """Each pair of a user and a class has a value of its own."""
    counts = lc.EntityCounts.of(U, USERS)

    def model_of(read_users):
        def model(users, y, rows):
            plate = lc.entity_plate("users", U, users, counts, dim=-2)
            with plate as read, lc.class_plate("classes", 30, y, 4, dim=-1) as classes:
                taste = numpyro.sample("taste", dist.Normal(0, 1))
            psi = read_users(read, taste, users)
            with lc.data_plate("data", N, rows) as rows:
                lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

        return model

    init(model_of(by_id), USERS, USERS % 30)
    with pytest.raises(ValueError, match="depends on the order of the rows"):
        init(model_of(by_place), USERS, USERS % 30)


def test_a_class_plate_that_nothing_reads_by_id_keeps_its_order() -> None:
    """Its classes have unequal weights by their place: 26 others in 16 intervals."""
    users = jnp.asarray(USERS)
    counts = lc.EntityCounts.of(U, USERS)

    def model(y, rows):
        own = users[rows]
        plate = lc.entity_plate("users", U, own, counts, dim=-2)
        with plate as read, lc.class_plate("classes", 30, y, 16, dim=-1) as classes:
            taste = numpyro.sample("taste", dist.Normal(0, 1))
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", read.rows_of(taste, own), classes=classes, rows=rows, obs=y)

    init(model, USERS % 7)


def test_ids_that_are_features_are_taken() -> None:
    """Of a table of their own, beside features of the classes."""
    features = jnp.asarray(RNG.normal(size=(U, 3)))

    def model(history, y=None, rows=None):
        table = numpyro.sample("table", dist.Normal(0, 1).expand([U, 3]).to_event(2))
        with lc.class_plate("words", U, y, num_sampled=5) as words:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with lc.data_plate("data", N, rows) as rows:
            psi = table[history].mean(1) @ (w + features[words.indices]).T
            lc.sample_choice("y", psi, classes=words, rows=rows, obs=y)

    init(model, FRIENDS, USERS)


def test_a_model_may_observe_nothing_but_the_entities() -> None:
    counts = lc.EntityCounts.of(U, USERS)

    def model(users, features, rows=None):
        with lc.entity_plate("users", U, users, counts) as read:
            v = numpyro.sample("v", dist.Normal(0, 1))
            numpyro.sample("f", dist.Normal(v, 1), obs=features[read.indices])

    svi = lc.SubsampledSVI(model, one_parameter, optax.adam(0.1), TraceMeanField_ELBO())
    svi.init(jax.random.key(0), USERS[:10], jnp.zeros(U))


def test_discrete_rows_are_no_false_alarm() -> None:
    """They are drawn by place, in either order, however they are read."""
    counts = lc.EntityCounts.of(U, USERS)

    def model(users, x=None, rows=None):
        with lc.entity_plate("users", U, users, counts) as read:
            z = numpyro.sample("z", dist.Bernoulli(0.5))
        with lc.data_plate("data", N, rows):
            numpyro.sample("x", dist.Normal(2.0 * read.rows_of(z, users), 1), obs=x)

    def guide(users, x=None, rows=None):
        with lc.entity_plate("users", U, users, counts):
            p = numpyro.param("p", jnp.full(U, 0.5), event_dim=0)
            numpyro.sample("z", dist.Bernoulli(p))

    svi = lc.SubsampledSVI(model, guide, optax.adam(0.1), Trace_ELBO())
    with pytest.warns(UserWarning, match="site 'z' is discrete and latent"):
        svi.init(jax.random.key(0), USERS[:10], X[:10], np.arange(10))


def test_all_entities_in_one_minibatch_are_not_taken_for_a_full_plate() -> None:
    """There each row is in the place of its id, but not in the next minibatch."""
    groups = np.tile(np.arange(5), 8)
    counts = lc.EntityCounts.of(5, groups)

    def model(groups, x=None, rows=None):
        with lc.entity_plate("groups", 5, groups, counts):
            v = numpyro.sample("v", dist.Normal(0, 1))
        with lc.data_plate("data", N, rows):
            numpyro.sample("x", dist.Normal(v[groups], 0.5), obs=x)

    with pytest.raises(ValueError, match=r"'x' depends on the order.*`read.rows_of\(v, ids\)`"):
        init(model, groups, X)


def test_a_full_plate_may_be_read_by_place() -> None:
    def model(groups, x=None, rows=None):
        with lc.entity_plate("groups", U):
            v = numpyro.sample("v", dist.Normal(0, 1))
        with lc.data_plate("data", N, rows):
            numpyro.sample("x", dist.Normal(v[groups], 0.5), obs=x)

    init(model, USERS, X)
