# SPDX-License-Identifier: Apache-2.0
"""Plates over the rows of the data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import HMCECS, MCMC, NUTS, SA, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from numpyro.infer.util import log_density
from scipy.stats import norm

import numpyro_largecat as lc
from numpyro_largecat.svi.batch_checks import check_batches


def traced(model, *args):
    """The site z of a run of the model in one program: its value and its scale."""

    def run():
        site = handlers.trace(handlers.seed(model, 0)).get_trace(*args)["z"]
        return {"value": site["value"], "scale": site["scale"]}

    return jax.jit(run)()


def data_model(rows=None, size=12, dim=None, obs=None):
    plate = lc.data_plate("data", size, rows, dim=dim)
    with plate as rows:
        numpyro.sample("z", dist.Normal(0, 1), obs=obs)
        table = numpyro.param("table", 10.0 * jnp.arange(size), event_dim=0)
    return rows, table


def test_data_plate_scales_by_its_share_and_slices_parameters():
    rows, table = handlers.seed(data_model, 0)(np.array([7, 3, 5]))
    assert rows.indices.tolist() == [7, 3, 5]
    assert (rows.name, rows.size, rows.dim) == ("data", 12, -1)
    assert table.tolist() == [70, 30, 50]
    site = traced(data_model, np.array([7, 3, 5]))
    assert site["value"].shape == (3,)
    assert site["scale"] == 4


def test_a_full_data_plate_has_all_rows_in_order():
    rows, table = handlers.seed(data_model, 0)()
    assert rows.indices.tolist() == list(range(12))
    assert table.tolist() == [10.0 * n for n in range(12)]
    assert traced(data_model)["scale"] in (None, 1)


def test_a_permutation_of_all_rows_is_respected():
    rows = np.random.default_rng(0).permutation(12)
    _, table = handlers.seed(data_model, 0)(rows)
    assert table.tolist() == (10.0 * rows).tolist()
    assert traced(data_model, rows)["scale"] in (None, 1)


def test_data_plate_in_another_dimension():
    def model():
        with lc.data_plate("data", 12, np.array([7, 3]), dim=-2) as rows:
            with numpyro.plate("inner", 3):
                numpyro.sample("z", dist.Normal(0, 1))
                table = numpyro.param("table", jnp.arange(36.0).reshape(12, 3), event_dim=0)
        return rows.dim, table

    dim, table = handlers.seed(model, 0)()
    assert dim == -2
    assert table.tolist() == [[21, 22, 23], [9, 10, 11]]
    assert traced(model)["value"].shape == (2, 3)
    assert traced(model)["scale"] == 6


def test_data_plate_under_jit():
    rows = jax.jit(lambda rows: handlers.seed(data_model, 0)(rows)[1])(jnp.array([5, 1]))
    assert rows.tolist() == [50, 10]


BAD_ROWS = {
    "floats": (np.array([1.0]), TypeError, "`rows` must be integers; got dtype float"),
    "two axes": (
        np.array([[1]]),
        ValueError,
        r"`rows` of plate 'data' must have shape \(B,\).*got shape \(1, 1\)",
    ),
    "no axis": (np.array(1), ValueError, r"must have shape \(B,\).*got shape \(\)"),
    "too large": (
        np.array([1, 12]),
        ValueError,
        r"`rows` of plate 'data' must be row ids, integers in \[0, 12\); got 12 at position 1",
    ),
    "negative": (np.array([-3]), ValueError, "`rows` of plate 'data'.*got -3 at position 0"),
}


@pytest.mark.parametrize(("rows", "error", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_rows_are_refused(rows, error, message):
    with pytest.raises(error, match=message):
        handlers.seed(data_model, 0)(rows)


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (3.0, TypeError)])
def test_data_plate_needs_a_size(size, error):
    with pytest.raises(error, match="`size` must be"):
        lc.data_plate("data", size)


def local_model(rows):
    with lc.data_plate("data", 12, rows) as rows:
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=rows.indices.astype(float))


@pytest.mark.slow
def test_a_guide_with_data_rows_of_its_own_is_refused():
    svi = SVI(local_model, AutoNormal(local_model), optax.sgd(0.1), Trace_ELBO())
    with pytest.raises(ValueError, match=r"plate 'data': the guide opened.*rows of its own"):
        svi.init(jax.random.key(0), np.array([7, 3]))


def test_local_variables_of_the_rows_are_moved_with_create_plates():
    """z = 0 at the start, so its gradient is N / B times the observation, the row's id."""

    def open_rows(rows):
        return lc.data_plate("data", 12, rows)

    guide = AutoDelta(
        local_model,
        create_plates=open_rows,
        init_loc_fn=numpyro.infer.init_to_value(values={"z": jnp.zeros(2)}),
    )
    svi = SVI(local_model, guide, optax.sgd(1.0), Trace_ELBO())

    @jax.jit
    def step(key):
        state, _ = svi.update(svi.init(key, np.array([7, 3])), np.array([7, 3]))
        return svi.get_params(state)["z_auto_loc"]

    z = step(jax.random.key(0))
    np.testing.assert_allclose(z, 6 * np.array([0, 0, 0, 3, 0, 0, 0, 7, 0, 0, 0, 0]), atol=1e-5)


REPEATED = np.array([7, 3, 7])


def test_ids_that_repeat_are_refused_around_a_latent_site():
    """Its prior would count once for each time that its id occurs; elsewhere it is NaN."""
    message = r"site 'z' has a value for each row of plate 'data'.*row 7 is there 2.*entity_plate"
    svi = lc.SubsampledSVI(local_model, AutoNormal(local_model), optax.sgd(0.1), Trace_ELBO())
    with pytest.raises(ValueError, match=message):
        svi.init(jax.random.key(0), REPEATED)

    def density(rows):
        z = np.zeros(3, np.float32)
        return log_density(handlers.seed(data_model, 0), (rows,), {}, {"z": z})[0]

    for run in (density, jax.jit(density)):
        assert jnp.isnan(run(REPEATED))
        assert jnp.isfinite(run(jnp.array([7, 3, 5])))


@pytest.mark.parametrize("kind", [np.arange, jnp.arange, lambda n: np.arange(n).astype(np.int16)])
@pytest.mark.some_cases(1)
def test_ids_of_any_kind_are_the_same_in_model_and_guide(kind):
    """An array that is converted in each run holds the rows of the run before; jitted and not."""

    def model(x, rows):
        with lc.data_plate("data", 3, rows):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=x)

    x, rows = np.ones(3, np.float32), kind(3)
    svi = lc.SubsampledSVI(model, AutoDelta(model), optax.sgd(0.1), Trace_ELBO())
    state = svi.init(jax.random.key(0), x, rows)
    z = np.asarray(svi.get_params(state)["z_auto_loc"])
    expected = -(norm.logpdf(z) + norm.logpdf(1, z)).sum()
    inside = jax.jit(lambda state: svi.evaluate(state, x, rows))
    for found in (
        svi.evaluate(state, x, rows),
        svi.evaluate(state, x, rows.tolist()),
        inside(state),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_ids_may_repeat_around_what_is_observed_or_discrete():
    """Rows drawn with replacement; what is discrete is drawn, or summed over for each row."""

    def model(rows, obs=None):
        table = data_model(rows, obs=obs)[1]
        with lc.data_plate("more", 12, rows):
            numpyro.sample("k", dist.Bernoulli(0.5))
        return table

    ones = jnp.ones(3)
    assert handlers.seed(model, 0)(REPEATED).tolist() == [70, 30, 70]  # an outcome that is drawn
    expected = 12 * dist.Normal(0, 1).log_prob(1.0) + 12 * np.log(0.5)

    def density_of(model, *args):
        return jax.jit(lambda *args: log_density(model, args, {}, {})[0])(*args)

    seeded = handlers.seed(model, 0)
    conditioned = handlers.condition(seeded, {"z": ones})
    np.testing.assert_allclose(density_of(seeded, REPEATED, ones), expected, rtol=1e-5)
    np.testing.assert_allclose(density_of(conditioned, REPEATED), expected, rtol=1e-5)


def users_guide(x, y=None, users=None):
    del x, y
    with lc.data_plate("users", 5, users):
        loc = numpyro.param("z_auto_loc", jnp.zeros(5), event_dim=0)
        numpyro.sample("z", dist.Normal(loc, 0.1))


def users_model(x, y=None, users=None):
    with lc.data_plate("users", 5, users):
        z = numpyro.sample("z", dist.Normal(0, 1))
    with numpyro.plate("data", 12, subsample_size=len(x)):
        numpyro.sample("y", dist.Normal(x + z, 1), obs=y)


def test_ids_that_repeat_in_other_minibatches_are_refused_before_the_first_step():
    """Each user's prior counts by occurrence also where no minibatch holds a user twice."""
    svi = lc.SubsampledSVI(users_model, users_guide, optax.sgd(0.1), Trace_ELBO())
    x, users = np.ones(12, np.float32), np.arange(12) % 5
    with pytest.raises(ValueError, match=r"site 'z' has a value.*plate 'users'.*row 0 is there 3"):
        check_batches(
            lambda x, y, users, rows: users_model(x, y, users),
            lc.ArrayBatches(x, x, users, batch_size=3),
            (),
            {},
        )
    repeated = np.array([1, 1, 2])
    state = svi.init(jax.random.key(0), x[:3], x[:3], users[:3])
    evaluate = jax.jit(svi.evaluate)
    assert np.isfinite(evaluate(state, x[:3], x[:3], users[:3]))
    assert np.isnan(evaluate(state, x[:3], x[:3], repeated))
    with pytest.raises(ValueError, match="row 1 is there 2 times"):
        svi.init(jax.random.key(0), x[:3], x[:3], repeated)


@pytest.mark.parametrize("kernel", ["NUTS", "HMCECS", "SA"])
def test_some_of_the_rows_are_refused_in_a_markov_chain(kernel):
    """It would take them for all rows, each many times; all rows, in any order, are right."""
    data = np.random.default_rng(0).normal(size=20).astype(np.float32)

    def model(rows):
        w = numpyro.sample("w", dist.Normal(0, 10))
        with lc.data_plate("data", 20, rows):
            numpyro.sample("y", dist.Normal(w, 1), obs=jnp.asarray(data)[rows])

    def run(rows):
        make = {"NUTS": NUTS, "SA": SA, "HMCECS": lambda model: HMCECS(NUTS(model))}[kernel]
        chain = MCMC(make(model), num_warmup=2, num_samples=2, progress_bar=False)
        chain.run(jax.random.key(0), rows)

    with pytest.raises(ValueError, match="plate 'data' holds 5 of 20 rows, which HMC and NUTS"):
        run(np.arange(5))
    if kernel == "NUTS":
        run(np.arange(20)[::-1].copy())
