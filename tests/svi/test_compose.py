# SPDX-License-Identifier: Apache-2.0
"""SubsampledSVI with models that were not written for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.example_libraries import stax
from numpyro.distributions import constraints
from numpyro.handlers import substitute
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoNormal

import numpyro_largecat as lc
from tests.models import NUM_CATEGORIES, NUM_ROWS, hierarchical, make_data, point_guide
from tests.slow_cases import slow_case


def points(name, size, shape=()):
    """Sample site ``name`` of a plate of ``size`` rows, at a parameter that starts at 0."""
    loc = numpyro.param(f"{name}_auto_loc", jnp.zeros((size, *shape)), event_dim=len(shape))
    numpyro.sample(name, dist.Delta(loc, event_dim=len(shape)))


def fit(model, guide, *args, steps=3, loss=None, optim=None, **kwargs):
    svi = lc.SubsampledSVI(model, guide, optim or optax.adagrad(0.1), loss or TraceMeanField_ELBO())
    return svi.run(jax.random.key(0), steps, *args, progress_bar=False, **kwargs)


def changed_rows(table):
    """Rows that differ from the first, untouched value; tables start constant."""
    table = np.asarray(table)
    return np.flatnonzero((table != np.median(table)).any(axis=tuple(range(1, table.ndim))))


@pytest.mark.slow
def test_numpyros_local_latents_under_a_subsampled_plate():
    """NumPyro's own example of a local latent per row: only drawn rows move, as in dense SVI."""
    data = jax.random.normal(jax.random.key(1), (30,)) + 2
    fixed = {"data": jnp.array([4, 0, 22])}

    def model(data):
        loc = numpyro.sample("loc", dist.Normal(0, 10))
        with numpyro.plate("data", 30, subsample_size=3):
            z = numpyro.sample("z", dist.Normal(loc, 1))
            numpyro.sample("obs", dist.Normal(z, 1), obs=numpyro.subsample(data, event_dim=0))

    guide = AutoNormal(model)
    free = fit(model, guide, data, steps=4)
    assert np.isfinite(free.losses).all()
    optim, loss = optax.adagrad(0.1), Trace_ELBO()
    svi = lc.SubsampledSVI(substitute(model, data=fixed), guide, optim, loss)
    init = svi.get_params(svi.init(jax.random.key(0), data))
    in_dense = substitute(AutoNormal(model), data=fixed)
    dense = SVI(substitute(model, data=fixed), in_dense, optim, loss)
    with jax.threefry_partitionable(False):  # the bits of our steps
        a, b = (
            s.run(jax.random.key(2), 4, data, init_params=dict(init), progress_bar=False)
            for s in (dense, svi)
        )
    np.testing.assert_allclose(b.losses, a.losses, rtol=1e-4)
    for name in a.params:
        np.testing.assert_allclose(b.params[name], a.params[name], rtol=1e-4, atol=1e-5)
    moved = np.flatnonzero(b.params["z_auto_loc"] != init["z_auto_loc"])
    assert moved.tolist() == [0, 4, 22]


def test_plain_plates_draw_other_rows_in_each_step():
    def model():
        with numpyro.plate("rows", 50, subsample_size=5):
            numpyro.param("visited", jnp.zeros(50), event_dim=0)
            u = numpyro.param("visited", jnp.zeros(50), event_dim=0)
            numpyro.factor("f", u)

    result = fit(model, lambda: None, steps=4, optim=optax.sgd(1.0), loss=Trace_ELBO())
    visits = np.asarray(result.params["visited"]) / (50 / 5)
    assert visits.sum() == 4 * 5
    assert len(np.flatnonzero(visits)) > 10  # 20 draws of 5 out of 50


def test_nested_subsampled_plates_touch_the_product_of_their_rows():
    fixed = {"rows": jnp.array([1, 3]), "columns": jnp.array([0, 4, 2])}

    def model():
        with numpyro.plate("rows", 5, subsample_size=2, dim=-2):
            with numpyro.plate("columns", 6, subsample_size=3, dim=-1):
                numpyro.sample("z", dist.Normal(3.0, 1).expand([2]).to_event(1))

    def guide():
        with numpyro.plate("rows", 5, dim=-2), numpyro.plate("columns", 6, dim=-1):
            loc = numpyro.param("z_auto_loc", jnp.zeros((5, 6, 2)), event_dim=1)
            numpyro.sample("z", dist.Delta(loc, event_dim=1))

    result = fit(substitute(model, data=fixed), guide, optim=optax.sgd(0.01))
    loc = np.asarray(result.params["z_auto_loc"])
    assert loc.shape == (5, 6, 2)
    expected = np.zeros((5, 6, 2), bool)
    expected[np.ix_([1, 3], [0, 2, 4])] = True
    np.testing.assert_array_equal(loc != 0, expected)


@pytest.mark.slow
def test_class_plate_inside_a_data_plate():
    """A weight for each group and class: rows of the group plate times touched classes."""
    groups = jnp.array([2, 0])
    labels = jnp.array([7, 7, 1])

    def model():
        with lc.data_plate("groups", 4, groups, dim=-2):
            with lc.class_plate("classes", 10, labels, num_sampled=2, dim=-1) as classes:
                w = numpyro.sample("w", dist.Normal(3.0, 1))
        with numpyro.plate("obs", 3):
            numpyro.sample("y", lc.UtilityCategorical(w[0], classes), obs=labels)

    def guide():
        with numpyro.plate("groups", 4, dim=-2), numpyro.plate("classes", 10, dim=-1):
            loc = numpyro.param("w_auto_loc", jnp.zeros((4, 10)), event_dim=0)
            numpyro.sample("w", dist.Delta(loc))

    result = fit(model, guide, steps=1)
    moved = np.asarray(result.params["w_auto_loc"]) != 0
    assert moved.any(axis=1).tolist() == [True, False, True, False]
    assert moved.any(axis=0).sum() == 4 and moved[:, [1, 7]][[0, 2]].all()


def test_a_row_that_the_users_plate_repeats_gets_the_sum_of_its_gradients():
    def model(rows):
        with lc.data_plate("data", 6, rows):
            numpyro.factor("f", numpyro.param("z", jnp.zeros(6), event_dim=0))

    result = fit(
        model,
        lambda rows: None,
        jnp.array([4, 1, 4]),
        steps=1,
        optim=optax.sgd(1.0),
        loss=Trace_ELBO(),
    )
    np.testing.assert_allclose(result.params["z"], [0, 2, 0, 0, 4, 0])  # scale N / B = 2


def test_two_class_plates_and_two_sites():
    """Two outcomes with their own classes, one of them with kept u, share a latent factor."""
    y1, y2 = jnp.array([3, 1, 3]), jnp.array([400, 7, 9])

    def model(rows):
        with lc.class_plate("first", 5, y1, num_sampled=2) as first:
            a = numpyro.sample("a", dist.Normal(0, 1))
        with lc.class_plate("second", 500, y2, num_sampled=4) as second:
            b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        with lc.data_plate("data", 20, rows) as rows:
            z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
            lc.sample_choice("y1", z[:, :1] + a, classes=first, rows=rows, obs=y1)
            lc.sample_choice("y2", z @ b.T, classes=second, rows=rows, obs=y2)

    def guide(rows):
        with numpyro.plate("first", 5):
            points("a", 5)
        with numpyro.plate("second", 500):
            points("b", 500, (2,))
        with numpyro.plate("data", 20):
            points("z", 20, (2,))

    rows = jnp.array([11, 0, 4])
    start = {"b_auto_loc": jnp.ones((500, 2))}  # at 0 nothing moves z
    result = fit(model, guide, rows, init_params=start)
    assert np.isfinite(result.losses).all()
    assert set(np.flatnonzero(result.params["z_auto_loc"].any(axis=1))) <= {0, 4, 11}
    for site in ("y1_u", "y2_u"):
        visits = result.state.local_state[site].rule_state.visits
        assert np.flatnonzero(visits).tolist() == [0, 4, 11]


def test_a_neural_network_gives_the_utilities():
    """Network weights are dense parameters, the output layer a class plate."""
    x, y = map(np.asarray, make_data())
    init, apply = stax.serial(stax.Dense(8), stax.Tanh, stax.Dense(4))

    def model(x, y, rows):
        net = numpyro.module("net", (init, apply), (x.shape[0], 3))
        with lc.class_plate("classes", NUM_CATEGORIES, y, num_sampled=3) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
        with lc.data_plate("data", NUM_ROWS, rows) as rows:
            lc.sample_choice("y", net(x) @ w.T, classes=classes, rows=rows, obs=y)

    def guide(x, y, rows):
        with numpyro.plate("classes", NUM_CATEGORIES):
            points("w", NUM_CATEGORIES, (4,))

    batches = lc.ArrayBatches(x, y, batch_size=10)
    result = fit(model, guide, steps=300, batches=batches, optim=optax.adam(0.03))
    assert isinstance(result.params["net$params"], (list, tuple))
    assert result.losses[-50:].mean() < result.losses[:20].mean()


@pytest.mark.parametrize("loss", [Trace_ELBO, slow_case(TraceMeanField_ELBO)])
@pytest.mark.slow
def test_particles_share_their_rows_and_average(loss):
    """With a point guide all particles agree, so the loss equals that of one particle."""
    x, y = map(np.asarray, make_data())
    model = hierarchical(num_sampled=4)
    losses = []
    for particles, vectorize in ((1, True), (4, True), (4, False)):
        elbo = loss(num_particles=particles, vectorize_particles=vectorize)
        result = fit(model, point_guide, x, y, steps=3, loss=elbo)
        losses.append(result.losses)
        assert (result.state.local_state["y_u"].rule_state.visits == 3).all()
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5, err_msg="under vmap")
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-5, err_msg="one by one")


def test_other_losses_work_without_local_parameters_and_are_refused_with_them():
    x, y = map(np.asarray, make_data())
    exact, kept = hierarchical(), hierarchical(num_sampled=4)
    assert np.isfinite(fit(exact, point_guide, x, y, loss=RenyiELBO()).losses).all()
    with pytest.raises(NotImplementedError, match=r"RenyiELBO.*mean over particles"):
        fit(kept, point_guide, x, y, loss=RenyiELBO(num_particles=3))
    with pytest.raises(NotImplementedError, match=r"TraceEnum_ELBO.*place of '\w+'.*TopL_ELBO"):
        fit(exact, point_guide, x, y, loss=TraceEnum_ELBO())


@pytest.mark.slow
def test_guides_over_the_joint_of_a_full_plate_work():
    x, y = map(np.asarray, make_data())
    model = hierarchical()
    assert np.isfinite(fit(model, AutoDiagonalNormal(model), x, y, loss=Trace_ELBO()).losses).all()


@pytest.mark.slow
def test_known_weights_leave_only_u_to_move():
    """With all classes at hand its best value makes the bound the exact log likelihood."""
    x, y = make_data()
    w = jnp.asarray(np.random.default_rng(0).normal(size=(NUM_CATEGORIES, 3)), jnp.float32)

    def model(x, y, rows):
        with lc.class_plate("classes", NUM_CATEGORIES, y, NUM_CATEGORIES - 1) as classes:
            known = w[classes.indices]
        with lc.data_plate("data", NUM_ROWS, rows) as rows:
            lc.sample_choice("y", x @ known.T, classes=classes, rows=rows, obs=y)

    result = fit(model, lambda *_: None, x, y, np.arange(NUM_ROWS))
    assert result.params.keys() == {"y_u"}
    utilities = np.asarray(x @ w.T, np.float64)
    exact = utilities[np.arange(NUM_ROWS), y] - np.logaddexp.reduce(utilities, axis=1)
    np.testing.assert_allclose(result.losses[-1], -exact.sum(), rtol=1e-5)


@pytest.mark.slow
def test_improper_priors_and_constrained_tables():
    """Priors that cannot be drawn from, and tables whose constraint is inside each row."""
    y = jnp.array([3, 3, 1])

    def model():
        slope = numpyro.sample("slope", dist.ImproperUniform(constraints.positive, (), ()))
        with lc.class_plate("classes", 30, y, num_sampled=4) as classes:
            share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
            scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        with numpyro.plate("data", 3):
            psi = slope * jnp.log(share[:, 0]) + scale
            numpyro.sample("y", lc.UtilityCategorical(psi, classes), obs=y)

    result = fit(model, AutoDelta(model), loss=Trace_ELBO(), steps=5)
    assert result.params["share_auto_loc"].shape == (30, 3)
    np.testing.assert_allclose(result.params["share_auto_loc"].sum(-1), 1, rtol=1e-5)
    assert (result.params["scale_auto_loc"] > 0).all()


def test_a_constraint_across_rows_is_refused():
    def model():
        with lc.class_plate("classes", 30, jnp.array([2]), num_sampled=4):
            numpyro.param("p", jnp.ones(30) / 30, constraint=constraints.simplex, event_dim=0)

    with pytest.raises(ValueError, match="would mix rows of plate 'classes'"):
        fit(model, lambda: None, loss=Trace_ELBO())


@pytest.mark.slow
def test_an_optimiser_that_mixes_rows_is_refused_only_where_rows_are_taken():
    x, y = map(np.asarray, make_data())
    exact, sampled = hierarchical(), hierarchical(num_sampled=4)
    assert np.isfinite(fit(exact, point_guide, x, y, optim=optax.lamb(0.1)).losses).all()
    with pytest.raises(ValueError, match="cannot run this optimiser"):
        fit(sampled, point_guide, x, y, optim=optax.lamb(0.1))


def test_plates_of_the_guide_alone_keep_their_own_rows():
    def model():
        numpyro.sample("x", dist.Normal(0, 1))

    def guide():
        with numpyro.plate("own", 40, subsample_size=4):
            z = numpyro.param("z", jnp.ones(40), event_dim=0)
        numpyro.sample("x", dist.Normal(z.mean(), 1))

    with pytest.warns(UserWarning, match="plate statements in guide but not model"):
        result = fit(model, guide, steps=1, optim=optax.sgd(0.1), loss=Trace_ELBO())
    assert len(changed_rows(result.params["z"][:, None])) == 4


@pytest.mark.slow
def test_batches_may_change_their_size():
    x, y = map(np.asarray, make_data())
    optim = optax.adagrad(0.1)
    svi = lc.SubsampledSVI(hierarchical(4), point_guide, optim, TraceMeanField_ELBO())
    state = svi.init(jax.random.key(0), x[:8], y[:8], np.arange(8))
    update, evaluate = jax.jit(svi.update), jax.jit(svi.evaluate)
    for size in (8, 5):
        rows = np.arange(size)
        state, loss = update(state, x[rows], y[rows], rows)
        assert np.isfinite(loss)
    assert np.isfinite(evaluate(state, x, y, np.arange(NUM_ROWS)))


def test_mutable_state_and_handlers_scale():
    def model(x):
        seen = numpyro.primitives.mutable("seen", {"count": jnp.array(0.0)})
        seen["count"] = seen["count"] + 1
        with numpyro.handlers.scale(scale=3.0), lc.data_plate("data", 6, jnp.array([2, 5])):
            numpyro.factor("f", numpyro.param("z", jnp.zeros(6), event_dim=0) * x)

    result = fit(
        model, lambda x: None, jnp.ones(2), steps=2, optim=optax.sgd(1.0), loss=Trace_ELBO()
    )
    np.testing.assert_allclose(result.params["z"], [0, 0, 18, 0, 0, 18])  # 2 steps * 3 * 6 / 2
    assert result.state.mutable_state["seen"]["count"] == 3  # one visit in init


@pytest.mark.slow
def test_float64(x64):
    x, y = map(np.asarray, make_data())
    result = fit(hierarchical(num_sampled=4), point_guide, x, y)
    assert {v.dtype for v in result.params.values()} == {np.dtype("float64")}
    assert result.losses.dtype == np.float64 and np.isfinite(result.losses).all()


@pytest.mark.slow
def test_init_under_vmap_over_the_data():
    """With an automatic guide, whose search for start values then closes over traced data."""
    x, y = (array[:6] for array in make_data())
    rows, many = np.arange(6), jnp.stack([jnp.asarray(x), 2 * jnp.asarray(x)])

    def start(x):
        model = hierarchical(4)
        guide = AutoNormal(model)
        svi = lc.SubsampledSVI(model, guide, optax.adam(0.1), TraceMeanField_ELBO())
        return svi.get_params(svi.init(jax.random.key(0), x, y, rows))

    of_both, of_second = jax.vmap(start)(many), start(many[1])
    for name, value in of_second.items():
        np.testing.assert_allclose(of_both[name][1], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_update_under_vmap():
    """An ensemble of fits is a vmapped update."""
    x, y = (array[:6] for array in make_data())  # of few classes, so that draws differ
    rows, start = np.arange(6), {"w_auto_loc": jax.random.normal(jax.random.key(9), (12, 3))}
    svi = lc.SubsampledSVI(hierarchical(4), point_guide, optax.adam(0.1), TraceMeanField_ELBO())
    state = svi.init(jax.random.key(0), x, y, rows, init_params=start)
    states = jax.vmap(lambda key: state._replace(rng_key=key))(jax.random.split(state.rng_key, 3))
    new, losses = jax.jit(jax.vmap(lambda s: svi.update(s, x, y, rows)))(states)
    assert len(set(np.asarray(losses).tolist())) == 3
    one, loss = jax.jit(svi.update)(jax.tree.map(lambda leaf: leaf[1], states), x, y, rows)
    np.testing.assert_allclose(loss, losses[1], rtol=1e-5)
    np.testing.assert_allclose(
        svi.get_params(one)["w_auto_loc"],
        svi.get_params(jax.tree.map(lambda leaf: leaf[1], new))["w_auto_loc"],
        rtol=1e-4,
        atol=1e-6,
    )
