# SPDX-License-Identifier: Apache-2.0
"""Plates over entities that are read by id: rows, weights and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

import numpyro_largecat as lc

N, B, U, D = 24, 6, 9, 2
RNG = np.random.default_rng(0)
USERS = np.where(RNG.random(N) < 0.5, 3, RNG.integers(0, 7, N))  # one is half of the data
HISTORY = RNG.integers(-1, 8, (N, 3))  # -1 for none; nobody reads entity 8
X = RNG.normal(size=N)
BATCHES = RNG.permutation(N).reshape(-1, B)  # each observation once
READS = {
    "one array": (USERS,),
    "two arrays of other shapes": (USERS, HISTORY),
    "padded": (HISTORY,),
}


def regression(ids, counts, x, dim=None):
    """Observations x around the sum of the rows that each of them reads."""
    with lc.entity_plate("users", U, ids, counts, dim=dim) as users:
        v = numpyro.param("v", jnp.zeros((U, D)), event_dim=1)
        numpyro.sample("prior", dist.StudentT(3, 0.5, 2).expand([D]).to_event(1), obs=v)
    ids = (np.arange(U),) if ids is None else ids
    read = [users.rows_of(v, given).reshape(len(given), -1).sum(1) for given in ids]
    with handlers.scale(scale=N / len(x)):
        numpyro.sample("x", dist.Normal(sum(read), 0.3).to_event(1), obs=x)


def values_and_gradients(arrays, table):
    """Log densities of each batch of one pass over the data."""
    counts = lc.EntityCounts.of(U, *arrays)

    @jax.jit
    @jax.value_and_grad
    def of_batch(table, rows):
        ids = tuple(jnp.asarray(given)[rows] for given in arrays)
        return log_density(regression, (ids, counts, jnp.asarray(X)[rows]), {}, {"v": table})[0]

    return zip(*(of_batch(table, rows) for rows in BATCHES), strict=True)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("arrays", READS.values(), ids=READS)
@pytest.mark.slow
def test_a_pass_over_the_data_has_the_whole_as_its_mean(arrays) -> None:
    """In value and gradient, with each prior once: nothing is random, so they are equal."""
    table = jnp.asarray(np.random.default_rng(1).normal(size=(U, D)))

    def whole(table):
        read = 0.0
        for ids in arrays:
            rows = jnp.where((ids == -1)[..., None], 0, table[ids])
            read += rows.reshape(N, -1).sum(1)
        is_read = np.isin(np.arange(U), np.concatenate([ids.ravel() for ids in arrays]))
        prior = dist.StudentT(3, 0.5, 2).log_prob(table).sum(1)
        return prior @ is_read + dist.Normal(read, 0.3).log_prob(X).sum()

    values, gradients = values_and_gradients(arrays, table)
    expected, gradient = jax.value_and_grad(whole)(table)
    np.testing.assert_allclose(np.mean(values), expected, rtol=1e-9)
    np.testing.assert_allclose(np.mean(gradients, axis=0), gradient, rtol=1e-9, atol=1e-9)


def test_each_entity_weighs_one_on_average_over_a_pass() -> None:
    """Those of 91 of 100 observations as those of one; the others have no rows."""
    ids = np.array([4] * 91 + [0, 1, 2, 3, 5, 6, 7, 8, 8])
    counts = lc.EntityCounts.of(10, ids)
    weights = np.zeros(10)
    for rows in np.random.default_rng(0).permutation(100).reshape(10, 10):
        users = lc.entity_plate("users", 10, ids[rows], counts).entities
        np.add.at(weights, users.indices, np.asarray(users.weights) / 10)
    np.testing.assert_allclose(weights, [1] * 9 + [0], rtol=1e-6)


def test_rows_are_distinct_and_padded() -> None:
    users = lc.entity_plate("users", U, USERS[:6], lc.EntityCounts.of(U, USERS)).entities
    distinct = np.unique(USERS[:6])
    assert users.indices.shape == (6,)
    assert users.indices[: len(distinct)].tolist() == distinct.tolist()
    assert (users.weights[len(distinct) :] == 0).all()


def test_there_are_no_more_rows_than_entities() -> None:
    users = lc.entity_plate("users", U, HISTORY, lc.EntityCounts.of(U, HISTORY)).entities
    assert users.indices.tolist() == list(range(U))
    np.testing.assert_allclose(users.weights[:8], 1)
    assert users.weights[8] == 0  # which nobody reads


def test_without_ids_all_entities_are_there() -> None:
    with lc.entity_plate("users", U) as users:
        v = numpyro.param("v", jnp.arange(9.0), event_dim=0)
    assert v.tolist() == users.indices.tolist() == list(range(9))
    assert users.rows_of(v, np.array([[7, -1]])).tolist() == [[7.0, 0.0]]


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_are_read_along_an_axis(axis: int) -> None:
    """By ids of any shape, also those that NumPy keeps in 64 bits."""
    users = lc.entity_plate("users", 99, np.array([70, 20, 70]), COUNTS).entities
    values = jnp.array([[20.0, 70.0, 0.0], [0.2, 0.7, 0.0]])
    values = values.T if axis == 0 else values
    found = users.rows_of(values, np.array([[70, 20], [-1, 70]]), axis=axis)
    wanted = np.array([[[70, 0.7], [20, 0.2]], [[0, 0], [70, 0.7]]])
    np.testing.assert_allclose(found, wanted if axis == 0 else np.moveaxis(wanted, 2, 0))


COUNTS = lc.EntityCounts.of(99, np.array([70, 20, 70, 30]))


def test_rows_that_are_not_there_are_refused_and_nan_under_jit() -> None:
    """And those out of range there."""
    users = lc.entity_plate("users", 99, np.array([70, 20]), COUNTS).entities
    values = jnp.array([1.0, 2.0])
    found = jax.jit(users.rows_of)(values, jnp.array([20, 30, 70, 99, -2]))
    np.testing.assert_array_equal(found, [1, np.nan, 2, np.nan, np.nan])
    unsigned = jax.jit(users.rows_of)(values, jnp.array([70, 2**32 - 1], jnp.uint32))
    np.testing.assert_array_equal(unsigned, [2, np.nan])  # whose bits are those of -1
    with pytest.raises(ValueError, match=r"`ids` must be among the ids that plate 'users' was.*30"):
        users.rows_of(values, jnp.array([20, 30]))


@pytest.mark.parametrize("bad", [99, -2, 2**33, 2**32 - 1])
def test_ids_out_of_range_are_refused(bad: int) -> None:
    """Also those that 32 bits would make an entity, or none."""
    ids = np.array([3, bad])
    match = rf"`ids` of plate 'users' must be entities.*got {bad} at position 1"
    with pytest.raises(ValueError, match=match):
        lc.entity_plate("users", 99, ids, COUNTS)
    with pytest.raises(ValueError, match=rf"`ids` must be entities.*got {bad} at position 1"):
        lc.EntityCounts.of(99, ids)
    users = lc.entity_plate("users", 99).entities
    with pytest.raises(ValueError, match=rf"`ids` must be rows of plate.*got {bad} at position 1"):
        users.rows_of(jnp.zeros(99), ids)


def test_ids_out_of_range_make_the_density_nan_under_jit() -> None:
    def density(ids):
        arguments = (ids,), lc.EntityCounts.of(U, USERS), jnp.zeros(2)
        return log_density(regression, arguments, {}, {"v": jnp.zeros((U, D))})[0]

    assert np.isfinite(jax.jit(density)(jnp.array([3, 3])))
    for bad in (U, -2):
        assert np.isnan(jax.jit(density)(jnp.array([3, bad])))


def test_an_entity_without_a_count_is_refused_and_nan_under_jit() -> None:
    """It is in no observation that was counted, so nothing says how much it weighs."""
    counts = lc.EntityCounts.of(U, np.array([1, 2]))
    with pytest.raises(ValueError, match=r"plate 'users' must count.*1 entities have no count, 5"):
        lc.entity_plate("users", U, np.array([1, 5]), counts)
    found = jax.jit(lambda ids: lc.entity_plate("users", U, ids, counts).entities.weights)
    np.testing.assert_array_equal(found(np.array([1, 5])), [1, np.nan])


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((np.array([0.5]), COUNTS), TypeError, "`ids`.*integers"),
        ((np.array([1]),), TypeError, r"`counts` must be lc.EntityCounts.of\(size, \*all_ids\)"),
        ((np.array([1]), np.ones(99)), TypeError, "`counts` must be"),
        ((np.array([1]), lc.EntityCounts.of(5, [1])), ValueError, "for each of 99 entities; got 5"),
        ((np.zeros(0, int), COUNTS), ValueError, "`ids` of plate 'users' must not be empty"),
    ],
)
def test_what_a_plate_refuses(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        lc.entity_plate("users", 99, *arguments)


def test_what_counts_refuse() -> None:
    with pytest.raises(ValueError, match="`ids` must be the ids of all observations; got no array"):
        lc.EntityCounts.of(5)
    with pytest.raises(TypeError, match="`ids` must be known outside of `jit`"):
        jax.jit(lambda ids: lc.EntityCounts.of(5, ids).counts)(jnp.array([1]))
    with pytest.raises(TypeError, match=r"`ids`.*integers"):
        lc.EntityCounts.of(5, np.array([1.0]))


def test_values_of_other_rows_are_refused() -> None:
    users = lc.entity_plate("users", 99, np.array([70, 20]), COUNTS).entities
    with pytest.raises(ValueError, match=r"`values` must.*plate 'users' on axis 0.*\(99, 2\)"):
        users.rows_of(jnp.zeros((99, 2)), np.array([70]))


def test_rows_that_a_handler_chose_are_not_read_by_id() -> None:
    with lc.plates.class_chunk(name="users", start=3, size=U):
        users = lc.entity_plate("users", U, USERS[:3], lc.EntityCounts.of(U, USERS)).entities
    with pytest.raises(NotImplementedError, match="plate 'users' holds rows that a handler chose"):
        users.rows_of(jnp.zeros(U), USERS[:3])


def test_weights_are_on_the_dimension_of_the_plate() -> None:
    """Crossed with another plate, and given by the user."""

    def model():
        users = lc.entity_plate("users", 99, np.array([70, 20, 70]), COUNTS, dim=-2)
        with users, numpyro.plate("k", 4):
            return numpyro.sample("v", dist.Normal(0, 1))

    site = handlers.trace(handlers.seed(model, 0)).get_trace()["v"]
    assert site["value"].shape == (3, 4)
    np.testing.assert_allclose(site["scale"], [[4 / 3], [4 / 3], [0]], rtol=1e-6)


def test_a_site_of_two_such_plates_is_refused() -> None:
    """The product of two weights is not 1 on average, unless one of them is always 1."""
    every = np.repeat(np.arange(99), np.asarray(COUNTS.counts))

    def model(ids, counts=COUNTS):
        users = lc.entity_plate("users", 99, np.array([70, 20, 70]), COUNTS, dim=-2)
        with users, lc.entity_plate("words", 99, ids, counts, dim=-1):
            numpyro.sample("v", dist.Normal(0, 1))

    for run in (model, handlers.scope(model, "a")):
        with pytest.raises(ValueError, match="v' is inside the entity plates 'users' and 'words'"):
            handlers.seed(run, 0)(np.array([70, 20, 70]))
    handlers.seed(model, 0)(every)
    handlers.seed(model, 0)(None, None)


def test_some_of_the_observations_are_refused_in_a_markov_chain() -> None:
    def model(ids):
        with lc.entity_plate("users", 99, ids, COUNTS) as users:
            v = numpyro.sample("v", dist.Normal(0, 1))
        numpyro.sample(
            "x", dist.Normal(users.rows_of(v, ids), 1).to_event(1), obs=np.ones(len(ids))
        )

    chain = MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(ValueError, match="'users' holds the entities of some of the observations"):
        chain.run(jax.random.key(0), np.array([70, 20, 70]))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", ["ours", "NumPyro's"])
def test_a_site_of_entities_and_of_some_rows_is_refused(kind, inside) -> None:
    """An entity comes with the rows that read it, whichever plate is opened first."""

    def model(ids, counts=COUNTS, size=9):
        users = lc.entity_plate("users", 99, ids, counts, dim=-1 if inside else -2)
        rows_dim = -2 if inside else -1
        if kind == "ours":
            data = lc.data_plate("data", size, jnp.arange(3), dim=rows_dim)
        else:
            data = numpyro.plate("data", size, subsample_size=3, dim=rows_dim)
        with data if inside else users, users if inside else data:
            numpyro.sample("v", dist.Normal(0, 1))

    ids = np.array([70, 20, 70])
    with pytest.raises(ValueError, match=r"'users' and the plate 'data', which holds 3 of 9 rows"):
        handlers.seed(model, 0)(ids)
    handlers.seed(model, 0)(ids, size=3)
    handlers.seed(model, 0)(None, None)


def test_a_site_of_entities_and_drawn_classes_counts_each_pair_once() -> None:
    """Of 20,000 minibatches; a correct program has a mean 5 standard errors off once in 300,000."""
    ids, labels = jnp.array([0, 0, 1, 1, 1]), jnp.array([0, 1, 2, 0, 0])
    counts = lc.EntityCounts.of(2, ids)

    def model(row):
        users = lc.entity_plate("users", 2, ids[row, None], counts, dim=-2)
        with lc.class_plate("classes", 3, labels[row, None], 1), users:
            numpyro.sample("v", dist.Normal(0, 1))

    def weights(key, row):
        sites = handlers.trace(handlers.seed(model, key)).get_trace(row)
        pairs = sites["users"]["value"][:, None], sites["classes"]["value"]
        return jnp.zeros((2, 3)).at[pairs].add(sites["v"]["scale"])

    keys = jax.random.split(jax.random.key(0), 20_000)
    found = jax.jit(jax.vmap(weights))(keys, jnp.arange(20_000) % 5)
    error = found.std(axis=0) / 20_000**0.5
    np.testing.assert_array_less(abs(found.mean(axis=0) - 1), 5 * error)


@pytest.mark.slow
def test_a_step_touches_the_rows_of_its_entities_alone() -> None:
    """Those that no observation of the batch reads stay as they were, and so does their state."""

    def model(users, x):
        counts = lc.EntityCounts(jnp.ones(U, jnp.int32), U)
        with lc.entity_plate("users", U, users, counts) as read:
            v = numpyro.sample("v", dist.Normal(0, 1))
        numpyro.sample("x", dist.Normal(read.rows_of(v, users), 1).to_event(1), obs=x)

    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.1), TraceMeanField_ELBO())
    users, x = jnp.array([7, 2, 7]), jnp.ones(3)
    before = svi.init(jax.random.key(0), users, x)
    after, loss = svi.update(before, users, x)
    assert np.isfinite(loss)
    moved = svi.get_params(after)["v_auto_loc"] != svi.get_params(before)["v_auto_loc"]
    assert np.flatnonzero(moved).tolist() == [2, 7]
