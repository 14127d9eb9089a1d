# SPDX-License-Identifier: Apache-2.0
"""Draws of rows by their weights, beside posteriors in closed form."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from tests.memory import temp_bytes

SD, NOISE = 1.5, 0.7
PEOPLE = 5
IDS = np.array([3, 0, 4, 1])  # nothing is observed of person 2
X = np.array([-1.2, 0.4, 2.0, 0.9], np.float32)
LOSS = lc.ImportanceWeighted_ELBO("people")


def people_by_id(ids, x, rows=None, size=PEOPLE, counts=None):
    """One observation of each person, around a loc that is learned."""
    loc = numpyro.sample("loc", dist.Normal(0, 2))
    counts = lc.EntityCounts.of(size, IDS) if counts is None else counts
    with lc.entity_plate("people", size, ids, counts) as read:
        z = numpyro.sample("z", dist.Normal(loc, SD))
    with lc.data_plate("data", len(IDS), rows):
        numpyro.sample("x", dist.Normal(read.rows_of(z, ids), NOISE), obs=x)


def wide_guide(ids, x, rows=None, size=PEOPLE, counts=None):
    """No posterior of any row."""
    at = numpyro.param("at", 0.3)
    numpyro.sample("loc", dist.Normal(at, 0.1))
    counts = lc.EntityCounts.of(size, IDS) if counts is None else counts
    with lc.entity_plate("people", size, ids, counts):
        scale = numpyro.param("scale", 2.0 * jnp.ones(size), event_dim=0)
        numpyro.sample("z", dist.Normal(0.0, scale))


def fitted(model, guide, *args, loss=LOSS):
    """An SVI and its first state."""
    svi = lc.SubsampledSVI(model, guide, optax.sgd(0.0), loss)
    return svi, svi.init(random.key(0), *args)


def exact(loc, x):
    """Mean and standard deviation of a person's z, given loc."""
    precision = 1 / SD**2 + 1 / NOISE**2
    return (loc / SD**2 + x / NOISE**2) / precision, precision**-0.5


def test_rows_have_their_posterior_in_the_order_of_the_ids():
    """Whose draws are of which mean and spread; 1 of 10^4 correct programs fails."""
    svi, state = fitted(people_by_id, wide_guide, IDS, X)
    options = {"num_samples": 4000, "num_draws": 200}
    draws = lc.weighted_posterior(random.key(1), svi, state, IDS, X, **options)
    z, loc = (np.asarray(draws.values[name]) for name in ("z", "loc"))
    assert z.shape == (4000, 4)
    means, sd = exact(loc[:, None], X)
    standard = (z - means) / sd
    # With 200 draws the bias is below the noise of 4,000 samples.
    assert (np.abs(standard.mean(0)) < 4.5 / 4000**0.5).all()
    assert (np.abs(standard.std(0) - 1) < 4.5 / 8000**0.5).all()


def test_dense_sites_are_drawn_by_the_guide():
    """loc is Normal(0.3, 0.1) there; 1 of 10^5 correct programs fails."""
    svi, state = fitted(people_by_id, wide_guide, IDS, X)
    draws = lc.weighted_posterior(random.key(1), svi, state, IDS, X, num_samples=1000, num_draws=2)
    loc = np.asarray(draws.values["loc"])
    assert abs(loc.mean() - 0.3) < 0.1 * 4.5 / 1000**0.5
    assert abs(loc.std() / 0.1 - 1) < 4.5 / 2000**0.5


def test_some_of_the_people_have_the_posterior_that_they_have_among_all():
    """In a minibatch of two, in an order of its own; 1 of 10^4 correct programs fails."""
    svi, state = fitted(people_by_id, wide_guide, IDS, X)
    some = np.array([2, 0])
    args = IDS[some], X[some], some
    options = {"num_samples": 4000, "num_draws": 200}
    draws = lc.weighted_posterior(random.key(1), svi, state, *args, **options)
    means, sd = exact(np.asarray(draws.values["loc"])[:, None], X[some])
    standard = (np.asarray(draws.values["z"]) - means) / sd
    assert (np.abs(standard.mean(0)) < 4.5 / 4000**0.5).all()


def test_nobody_has_no_value():
    """An id of -1 reads no row."""
    ids = np.array([3, -1, 4, 1])
    svi, state = fitted(people_by_id, wide_guide, ids, X)
    draws = lc.weighted_posterior(random.key(1), svi, state, ids, X, num_samples=3)
    assert np.isnan(draws.values["z"]).all(axis=0).tolist() == [False, True, False, False]
    assert np.isnan(draws.effective_draws).all(axis=0).tolist() == [False, True, False, False]


def two_sites(x, rows=None):
    """Of a row two sites, one of which has two values, and measurements on a plate of their own."""
    with lc.data_plate("people", 3, rows, dim=-2):
        a = numpyro.sample("a", dist.Normal(0, SD))
        b = numpyro.sample("b", dist.Normal(0, SD).expand([2]).to_event(1))
        with numpyro.plate("twice", 2):
            numpyro.sample("x", dist.Normal(a + b[..., 0], NOISE), obs=x)


def same_in_both(x, rows=None):
    """The sites of a draw have the same value."""
    with lc.data_plate("people", 3, rows, dim=-2):
        a = numpyro.sample("a", dist.Normal(0, 1))
        same = jnp.stack([a, -a], axis=-1)
        numpyro.sample("b", dist.Normal(same, 1e-3).to_event(1))


def test_the_sites_of_a_row_are_of_one_draw():
    """Whichever is chosen, whatever the axes of the sites."""
    x = np.array([[0.3, 1.0], [-0.4, 0.1], [1.2, -0.8]], np.float32)
    svi, state = fitted(two_sites, same_in_both, x)
    draws = lc.weighted_posterior(random.key(1), svi, state, x, num_samples=50)
    a, b = draws.values["a"], draws.values["b"]
    assert a.shape == (50, 3, 1)
    assert b.shape == (50, 3, 1, 2)
    np.testing.assert_allclose(b[..., 0], a, atol=0.01)
    np.testing.assert_allclose(b[..., 1], -a, atol=0.01)


def test_effective_draws_are_all_for_an_exact_guide_and_few_for_a_narrow_one():
    """1 / sum of squared shares; what is too narrow by far still has some that count."""
    narrow = jnp.ones(PEOPLE).at[4].set(0.02)

    def guide(ids, x, rows=None):
        loc = numpyro.sample("loc", dist.Normal(0.3, 0.1))
        with lc.entity_plate("people", PEOPLE, ids, lc.EntityCounts.of(PEOPLE, IDS)) as read:
            mean, sd = exact(loc, jnp.zeros(PEOPLE).at[IDS].set(X)[read.indices])
            scale = numpyro.param("narrow", narrow, event_dim=0)
            numpyro.sample("z", dist.Normal(mean, sd * scale))

    svi, state = fitted(people_by_id, guide, IDS, X)
    draws = lc.weighted_posterior(random.key(1), svi, state, IDS, X, num_samples=9, num_draws=30)
    of_ids = np.asarray(draws.effective_draws).mean(0)
    np.testing.assert_allclose(of_ids[[0, 1, 3]], 30, rtol=1e-3)
    assert of_ids[2] < 29


def test_a_row_of_which_no_draw_has_a_density_is_nan():
    """Not the guide's first draw."""

    def model(x, rows=None):
        with lc.data_plate("people", 3, rows):
            z = numpyro.sample("z", dist.LogNormal(0, 1))
            numpyro.sample("x", dist.Normal(z, NOISE), obs=x)

    def guide(x, rows=None):
        with lc.data_plate("people", 3, rows):
            at = numpyro.param("at", jnp.array([1.0, -3.0, 0.5]), event_dim=0)
            numpyro.sample("z", dist.Uniform(at - 0.4, at + 0.4))

    x = np.array([0.3, -0.4, 0.2], np.float32)
    svi, state = fitted(model, guide, x)
    draws = lc.weighted_posterior(random.key(1), svi, state, x, num_samples=4)
    assert np.isnan(draws.values["z"]).all(axis=0).tolist() == [False, True, False]


@pytest.mark.filterwarnings("ignore:site 'kind' is discrete")  # no gradients, but weights
def test_integers_that_are_not_known_are_minus_one():
    """They have no NaN, and keep their type."""
    ids = np.array([3, -1, 4, 1])

    def choose(prior):
        with lc.entity_plate("people", PEOPLE, ids, lc.EntityCounts.of(PEOPLE, ids)) as read:
            kind = numpyro.sample("kind", dist.Bernoulli(prior))
        return read.rows_of(kind.astype(float), ids)

    def model(x):
        loc = choose(0.5)
        with lc.data_plate("data", len(ids)):
            numpyro.sample("x", dist.Normal(loc, NOISE), obs=x)

    svi, state = fitted(model, lambda x: choose(0.3), X)
    draws = lc.weighted_posterior(random.key(1), svi, state, X, num_samples=20)
    kind = np.asarray(draws.values["kind"])
    assert kind.dtype.kind == "i"
    assert set(kind[:, [0, 2, 3]].ravel()) == {0, 1}
    assert set(kind[:, 1]) == {-1}


def test_whoever_was_not_counted_is_refused():
    """Their weights are not known; under ``jit`` all is NaN."""
    svi, state = fitted(people_by_id, wide_guide, IDS, X)

    def draw(state):
        ids, rows = np.array([2, 0]), np.array([0, 1])
        return lc.weighted_posterior(random.key(1), svi, state, ids, X[:2], rows, num_samples=5)

    with pytest.raises(ValueError, match="has not the weight of a minibatch"):
        draw(state)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(jax.jit(draw)(state)))


def test_rows_of_a_second_table_are_in_the_order_of_their_ids_too():
    """Each item's value is ten times its id."""
    items = np.array([6, 1, 6, 0])

    def tables(guide, people_ids, item_ids):
        with lc.entity_plate("items", 7, item_ids, lc.EntityCounts.of(7, items)) as of_items:
            at = 10.0 * of_items.indices if guide else 0.0
            u = numpyro.sample("u", dist.Normal(at, 1e-3 if guide else 100.0))
        with lc.entity_plate("people", PEOPLE, people_ids, lc.EntityCounts.of(PEOPLE, IDS)) as read:
            z = numpyro.sample("z", dist.Normal(0, SD))
        return of_items.rows_of(u, item_ids) + read.rows_of(z, people_ids)

    def model(ids, item_ids, x):
        loc = tables(False, ids, item_ids)
        with lc.data_plate("data", len(IDS)):
            numpyro.sample("x", dist.Normal(loc, NOISE), obs=x)

    def guide(ids, item_ids, x):
        tables(True, ids, item_ids)

    svi, state = fitted(model, guide, IDS, items, X)
    draws = lc.weighted_posterior(random.key(1), svi, state, IDS, items, X, num_samples=3)
    np.testing.assert_allclose(draws.values["u"].mean(0), 10 * items, atol=0.1)


def test_a_plate_that_draws_its_rows_is_refused():
    """Nobody would know whose values these are."""

    def model(x):
        with numpyro.plate("people", 6, subsample_size=3):
            z = numpyro.sample("z", dist.Normal(0, SD))
            numpyro.sample("x", dist.Normal(z, NOISE), obs=numpyro.subsample(x, event_dim=0))

    x = np.arange(6, dtype=np.float32)
    svi, state = fitted(model, AutoNormal(model), x)
    with pytest.raises(ValueError, match="plate 'people' draws other rows each time"):
        lc.weighted_posterior(random.key(1), svi, state, x, num_samples=3)


def test_an_outcome_that_is_left_out_is_refused():
    """The model would draw it, and its density count as one of data."""

    def model(ids, x, y=None):
        with lc.entity_plate("people", PEOPLE, ids, lc.EntityCounts.of(PEOPLE, IDS)) as read:
            z = numpyro.sample("z", dist.Normal(0, SD))
        with lc.data_plate("data", len(IDS)):
            numpyro.sample("x", dist.Normal(read.rows_of(z, ids), NOISE), obs=x)
            numpyro.sample("y", dist.Normal(0, jnp.exp(read.rows_of(z, ids))), obs=y)

    svi, state = fitted(model, AutoNormal(model), IDS, X, X)
    with pytest.raises(ValueError, match="site 'y' is neither observed nor drawn by the guide"):
        lc.weighted_posterior(random.key(1), svi, state, IDS, X, num_samples=3)


def test_one_row_is_looked_at_too():
    """What is outside of the plate must not depend on it."""

    def model(x, rows=None):
        with lc.data_plate("people", 5, rows):
            z = numpyro.sample("z", dist.Normal(0, SD))
            numpyro.sample("x", dist.Normal(z, NOISE), obs=x)
        numpyro.sample("total", dist.Normal(z.sum(), 0.3), obs=30.0)

    x = np.arange(5, dtype=np.float32)
    svi, state = fitted(model, AutoNormal(model), x)
    with pytest.raises(ValueError, match="depends on other rows, or what is outside"):
        lc.weighted_posterior(random.key(1), svi, state, x[:1], np.array([0]), num_samples=3)


def test_it_is_the_same_under_jit():
    """With the state as an argument."""
    svi, state = fitted(people_by_id, wide_guide, IDS, X)

    def draw(state):
        return lc.weighted_posterior(random.key(1), svi, state, IDS, X, num_samples=5)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), jax.jit(draw)(state), draw(state)
    )


def test_arrays_of_numpy_may_be_indexed_by_rows():
    """As in a fit, where minibatches are arrays of JAX."""

    def model(x, rows=None):
        with lc.data_plate("people", 3, rows) as rows:
            z = numpyro.sample("z", dist.Normal(0, SD))
            numpyro.sample("x", dist.Normal(z, NOISE), obs=x[rows.indices])

    x = np.array([0.3, -0.4, 1.2], np.float32)
    svi, state = fitted(model, AutoNormal(model), x)
    draws = lc.weighted_posterior(random.key(1), svi, state, x, num_samples=2)
    assert np.isfinite(draws.values["z"]).all()


def test_it_costs_the_rows_that_are_given():
    """Of 10^6 people four are drawn; a table of them has 4 MB."""
    size = 10**6
    options = {"size": size, "counts": lc.EntityCounts.of(size, IDS)}
    model, guide = partial(people_by_id, **options), partial(wide_guide, **options)
    svi, state = fitted(model, guide, IDS, X)

    def draw(state):
        return lc.weighted_posterior(random.key(1), svi, state, IDS, X, num_samples=5)

    assert temp_bytes(draw, state) < 10**6


def test_a_fit_by_another_loss_is_refused():
    """Its rows are no proposal."""
    svi, state = fitted(people_by_id, wide_guide, IDS, X, loss=Trace_ELBO())
    with pytest.raises(ValueError, match="its loss is Trace_ELBO"):
        lc.weighted_posterior(random.key(1), svi, state, IDS, X, num_samples=5)


def scaled(*args, **kwargs):
    """Rows that count twice."""
    with numpyro.handlers.scale(scale=2.0):
        people_by_id(*args, **kwargs)


def test_what_the_loss_refuses_is_refused():
    """Outside of ``jit`` with the error of the loss; inside all is NaN."""
    svi, state = fitted(scaled, wide_guide, IDS, X)

    def draw(state):
        return lc.weighted_posterior(random.key(1), svi, state, IDS, X, num_samples=5)

    with pytest.raises(ValueError, match="a handler `scale` is around"):
        draw(state)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(jax.jit(draw)(state)))


def test_lists_are_taken_as_arrays():
    """As by a fit."""
    svi, state = fitted(people_by_id, wide_guide, IDS, X)
    draws = lc.weighted_posterior(
        random.key(1), svi, state, IDS.tolist(), X.tolist(), num_samples=2
    )
    assert draws.values["z"].shape == (2, 4)


def test_names_in_the_place_of_ids_are_refused():
    """With the argument that has them."""
    svi, state = fitted(people_by_id, wide_guide, IDS, X)
    with pytest.raises(TypeError, match="`ids` must be an array of numbers"):
        lc.weighted_posterior(
            random.key(1), svi, state, np.array(["a", "b", "c", "d"]), X, num_samples=2
        )


def test_they_are_there_for_arviz():
    """One chain, with names of people."""
    svi, state = fitted(people_by_id, wide_guide, IDS, X)
    draws = lc.weighted_posterior(random.key(1), svi, state, IDS, X, num_samples=5)
    names = {"people": ["d", "a", "e", "b"]}
    posterior = draws.to_arviz(coords=names, dims={"z": ["people"]}).posterior
    assert posterior["loc"].shape == (1, 5)
    np.testing.assert_array_equal(posterior["z"].sel(people="e")[0], draws.values["z"][:, 2])


def test_other_readings_warn_that_rows_are_a_proposal():
    """Where it is known how the fit came about."""

    def model(ids, y=None, rows=None):
        with lc.entity_plate("people", PEOPLE, ids, lc.EntityCounts.of(PEOPLE, IDS)) as read:
            z = numpyro.sample("z", dist.Normal(0, 1))
        with lc.class_plate("classes", 2) as classes:
            utilities = read.rows_of(z, ids)[:, None] * classes.indices
        with lc.data_plate("data", len(IDS), rows):
            numpyro.sample("y", lc.UtilityCategorical(utilities, classes), obs=y)

    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.1), LOSS)
    y = np.array([0, 1, 1, 0])
    result = svi.run(random.key(0), 2, IDS, y, progress_bar=False)
    reading = lc.Fitted.from_svi(svi, result).on(IDS)
    with pytest.warns(UserWarning, match="wider than their posterior"):
        reading.log_likelihood(y)


def test_params_are_not_taken_for_a_state():
    """The message says where the state is."""
    svi, state = fitted(people_by_id, wide_guide, IDS, X)
    with pytest.raises(TypeError, match=r"such as `result.state`"):
        lc.weighted_posterior(random.key(1), svi, svi.get_params(state), IDS, X, num_samples=5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_samples": 0}, "`num_samples` must be at least 1"),
        ({"num_samples": 2, "num_draws": 0}, "`num_draws` must be at least 1"),
    ],
)
def test_arguments_are_checked(options, match):
    """Numbers of samples and of draws."""
    svi, state = fitted(people_by_id, wide_guide, IDS, X)
    with pytest.raises(ValueError, match=match):
        lc.weighted_posterior(random.key(1), svi, state, IDS, X, **options)


def with_computed_sites(ids, x, rows=None):
    """Deterministic sites of a row, of dense sites, of many rows, and of observations."""
    loc = numpyro.sample("loc", dist.Normal(0, 2))
    numpyro.deterministic("twice", 2 * loc)
    counts = lc.EntityCounts.of(PEOPLE, IDS)
    with lc.entity_plate("people", PEOPLE, ids, counts) as read:
        z = numpyro.sample("z", dist.Normal(loc, SD))
        numpyro.deterministic("powers", jnp.stack([z, z**2], -1))
        numpyro.deterministic("is_high", z > 0)
        numpyro.deterministic("is_low", (z < 0).astype(jnp.uint8))
        numpyro.deterministic("from_mean", z - z.mean())
        numpyro.deterministic("from_first", z - z[0])
        numpyro.deterministic("share", 1e-6 * jax.nn.softmax(z))
        numpyro.deterministic("variance", jnp.array(SD**2))  # has no axis for the people
        numpyro.deterministic("keys", random.split(random.key(0), len(z)))
        numpyro.deterministic("pair", (z, z))
    numpyro.deterministic("mean", z.mean())
    with lc.data_plate("data", len(IDS), rows):
        mean = numpyro.deterministic("mean_of_x", read.rows_of(z, ids))
        numpyro.sample("x", dist.Normal(mean, NOISE), obs=x)


def computed_draws(ids=IDS[:2], x=X[:2], rows=(0, 1), model=with_computed_sites):
    """Values of a fit of the model above."""
    guide = AutoNormal(model)
    svi, state = fitted(model, guide, IDS, X)
    rows = None if rows is None else jnp.array(rows)
    return lc.weighted_posterior(random.key(3), svi, state, ids, x, rows, num_samples=50).values


def test_deterministic_sites_are_those_of_the_rows_that_are_chosen():
    values = computed_draws()
    z = values["z"]
    np.testing.assert_allclose(values["twice"], 2 * values["loc"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(values["powers"], np.stack([z, z**2], -1), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(values["is_high"], z > 0)
    np.testing.assert_array_equal(values["is_low"], z < 0)


def test_deterministic_sites_that_move_with_other_rows_are_not_known():
    """In half of the samples the first row, that others depend on, is one that is not moved."""
    values = computed_draws()
    names = ("from_mean", "from_first", "share", "mean")
    assert all(np.isnan(values[name]).all() for name in names)


def test_deterministic_sites_of_observations_and_what_is_no_array_by_row_are_left_out():
    assert not {"mean_of_x", "variance", "keys", "pair"} & computed_draws().keys()


def test_deterministic_sites_of_nobody_are_not_known():
    values = computed_draws(np.array([3, -1]), X[:2])
    assert np.isnan(values["powers"][:, 1]).all() and (values["is_high"][:, 1] == -1).all()
    assert np.isfinite(values["powers"][:, 0]).all()


def test_deterministic_sites_that_move_with_rows_of_another_table_are_not_known():
    items, counts = np.array([6, 1]), lc.EntityCounts.of(7, np.array([6, 1, 3, 6]))

    def model(ids, items, x, rows=None):
        with lc.entity_plate("items", 7, items, counts) as of_item:
            u = numpyro.sample("u", dist.Normal(0, 1))
            numpyro.deterministic("twice_u", 2 * u)
        numpyro.deterministic("mean_u", u.mean())
        with lc.entity_plate("people", PEOPLE, ids, lc.EntityCounts.of(PEOPLE, IDS)) as read:
            z = numpyro.sample("z", dist.Normal(0, SD))
        with lc.data_plate("data", len(IDS), rows):
            mean = read.rows_of(z, ids) + of_item.rows_of(u, items)
            numpyro.sample("x", dist.Normal(mean, NOISE), obs=x)

    args = IDS[:2], items, X[:2], jnp.arange(2)
    svi, state = fitted(model, AutoNormal(model), *args)
    values = lc.weighted_posterior(random.key(3), svi, state, *args, num_samples=20).values
    assert np.isnan(values["mean_u"]).all()
    np.testing.assert_allclose(values["twice_u"], 2 * values["u"], rtol=1e-5, atol=1e-6)


def test_a_mean_of_all_rows_is_known():
    def model(x, rows=None):
        with lc.data_plate("people", len(X), rows):
            z = numpyro.sample("z", dist.Normal(0, SD))
            numpyro.sample("x", dist.Normal(z, NOISE), obs=x)
        numpyro.deterministic("mean", z.mean())

    svi, state = fitted(model, AutoNormal(model), X)
    values = lc.weighted_posterior(random.key(3), svi, state, X, num_samples=50).values
    np.testing.assert_allclose(values["mean"], values["z"].mean(-1), rtol=1e-5)


def test_a_mean_of_all_rows_is_not_known_where_a_row_is_not():
    def model(x, rows=None):
        with lc.data_plate("people", 3, rows):
            z = numpyro.sample("z", dist.LogNormal(0, 1))
            numpyro.sample("x", dist.Normal(z, NOISE), obs=x)
        numpyro.deterministic("mean", z.mean())

    def guide(x, rows=None):
        with lc.data_plate("people", 3, rows):
            at = numpyro.param("at", jnp.array([1.0, -3.0, 0.5]), event_dim=0)
            numpyro.sample("z", dist.Uniform(at - 0.4, at + 0.4))

    svi, state = fitted(model, guide, X[:3])
    values = lc.weighted_posterior(random.key(3), svi, state, X[:3], num_samples=5).values
    assert np.isfinite(values["z"][:, 0]).all() and np.isnan(values["mean"]).all()


def test_values_that_are_not_centred_are_there_with_what_they_make():
    @lc.not_centred
    def model(ids, x, rows=None):
        return with_computed_sites(ids, x, rows)

    values = computed_draws(model=model)
    made = values["loc"][:, None] + SD * values["z_decentered"]
    np.testing.assert_allclose(values["z"], made, rtol=1e-5, atol=1e-6)
