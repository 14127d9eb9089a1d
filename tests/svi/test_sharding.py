# SPDX-License-Identifier: Apache-2.0
"""A fit whose tables are spread over devices is that of one device, and sends no table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.sharding import AxisType
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from numpyro_largecat.svi.run_data import RunData
from tests.collectives import shapes_sent
from tests.models import class_points_of, hierarchical, make_data, point_guide
from tests.slow_cases import slow_case

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")

KEY = jax.random.key(0)
X, Y = (np.asarray(a) for a in make_data())
QUIET = {"progress_bar": False}
OVER_CLASSES = ((8,), ("model",)), {"classes": "model"}  # 12 classes: 4 rows of padding
OVER_BOTH = ((4, 2), ("model", "batch")), {"classes": "model", "data": "batch"}


def spread(over):
    (sizes, names), sharding = over
    return {
        "mesh": jax.make_mesh(sizes, names, (AxisType.Auto,) * len(names)),
        "sharding": sharding,
    }


def svi_of(over=None, model=None, guide=point_guide, optim=None, loss=None, **options):
    model = hierarchical(4) if model is None else model
    options |= {} if over is None else spread(over)
    optim, loss = optim or optax.adam(0.05), loss or TraceMeanField_ELBO()
    return lc.SubsampledSVI(model, guide, optim, loss, **options)


def batches_of(kind=lc.ArrayBatches):
    return kind(X, Y, batch_size=8)


def assert_close(result, one):
    """The same numbers, where there is no padding, but for the order of sums."""
    assert result.params.keys() == one.params.keys()
    for name, value in one.params.items():
        rows = result.params[name][: len(value)] if np.ndim(value) else result.params[name]
        np.testing.assert_allclose(rows, value, rtol=2e-4, atol=2e-5, err_msg=name)
    np.testing.assert_allclose(result.losses, one.losses, rtol=1e-4)
    assert result.iterates.keys() == one.iterates.keys()


@pytest.fixture(scope="module")
def one():
    return svi_of().run(KEY, 12, batches=batches_of(), **QUIET)


@pytest.mark.parametrize("over", [OVER_BOTH, slow_case(OVER_CLASSES)])
@pytest.mark.parametrize("kind", [lc.ArrayBatches, lc.StreamedBatches])
@pytest.mark.some_cases(1)
def test_a_fit_is_that_of_one_device(over, kind, one):
    assert_close(svi_of(over).run(KEY, 12, batches=batches_of(kind), **QUIET), one)


@pytest.mark.slow
def test_each_device_has_its_rows_and_no_others():
    result = svi_of(OVER_BOTH).run(KEY, 2, batches=batches_of(), **QUIET)
    tables = {"w_auto_loc": ("model", 3), "b_auto_loc": ("model", 3), "y_u": ("batch", 20)}
    for name, (axis, rows) in tables.items():
        assert result.params[name].sharding.spec[0] == axis
        assert {s.data.shape[0] for s in result.params[name].addressable_shards} == {rows}
    moments = [x for x in jax.tree.leaves(result.state.optim_state) if x.shape == (12, 3)]
    assert len(moments) == 3  # and the parameter
    assert all(x.sharding.spec[0] == "model" for x in moments)


@pytest.mark.parametrize("family", ["normal", "logistic"])
@pytest.mark.slow
def test_every_other_error_family(family):
    def model(x, y, rows):
        with lc.class_plate("classes", 12, y, num_sampled=4) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with lc.data_plate("data", 40, rows) as batch:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=batch, obs=y, noise=family)

    def fit(over=None):
        svi = svi_of(over, model, class_points_of(12, w=(3,)), loss=Trace_ELBO())
        return svi.run(KEY, 4, batches=batches_of(), **QUIET)

    assert_close(fit(OVER_BOTH), fit())


USERS = lc.EntityCounts.of(10, np.arange(40) % 10)


def two_sided(x, y, rows):
    """Users and places, each a table; 10 users of a batch of 8 rows, some twice."""
    users = rows % 10
    with lc.class_plate("classes", 12, y, num_sampled=4) as classes:
        places = numpyro.sample("places", dist.Normal(0, 1).expand([3]).to_event(1))
    with lc.entity_plate("users", 10, users, counts=USERS) as of:
        mine = numpyro.sample("users_at", dist.Normal(0, 1).expand([3]).to_event(1))
    with lc.data_plate("data", 40, rows) as batch:
        utilities = (of.rows_of(mine, users) + x) @ places.T
        lc.sample_choice("y", utilities, classes=classes, rows=batch, obs=y)


@pytest.mark.slow
def test_two_tables():
    """Over one axis of the mesh, and each over its own."""

    def fit(over=None):
        svi = svi_of(over, two_sided, AutoNormal(two_sided))
        return svi.run(KEY, 4, batches=batches_of(), **QUIET)

    (mesh, sharding), of_one = OVER_BOTH, fit()
    for axis in ("model", "batch"):
        assert_close(fit((mesh, sharding | {"users": axis})), of_one)


@pytest.mark.slow
def test_all_classes_at_once_and_padding():
    """A plate that a step holds whole has its rows alone."""

    def fit(over=None):
        return svi_of(over, hierarchical(None)).run(KEY, 4, batches=batches_of(), **QUIET)

    assert_close(fit(OVER_CLASSES), fit())


@pytest.mark.slow
def test_tables_of_bfloat16():
    def fit(over=None):
        svi = svi_of(over, table_dtype=jnp.bfloat16)
        return svi.run(KEY, 4, batches=batches_of(), **QUIET)

    result, one = fit(OVER_CLASSES), fit()
    np.testing.assert_allclose(result.losses, one.losses, rtol=2e-2)
    np.testing.assert_allclose(
        result.params["w_auto_loc"][:12], one.params["w_auto_loc"], atol=0.02
    )


@pytest.mark.slow
def test_float64(x64):
    def fit(over=None):
        return svi_of(over).run(KEY, 4, batches=batches_of(), **QUIET)

    result, one = fit(OVER_BOTH), fit()
    assert result.params["w_auto_loc"].dtype == jnp.float64
    np.testing.assert_allclose(result.params["w_auto_loc"], one.params["w_auto_loc"], rtol=1e-9)


@pytest.mark.slow
def test_updates_and_arguments_without_batches():
    svi, alone = svi_of(OVER_CLASSES), svi_of()
    args = X[:8], Y[:8], np.arange(8)
    state, other = svi.init(KEY, *args), alone.init(KEY, *args)
    for _ in range(3):
        state, loss = jax.jit(svi.update)(state, *args)
        other, other_loss = jax.jit(alone.update)(other, *args)
        np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
    assert state.optim_state[1][0]["w_auto_loc"].sharding.spec[0] == "model"
    assert_close(svi.run(KEY, 3, *args, **QUIET), alone.run(KEY, 3, *args, **QUIET))


@pytest.mark.slow
def test_an_iterator_of_batches(one):
    def stream():
        for step in range(99):
            yield tuple(np.asarray(a) for a in batches_of().batch(step))

    assert_close(svi_of(OVER_CLASSES).run(KEY, 12, batches=stream(), **QUIET), one)


@pytest.mark.slow
def test_a_mesh_with_explicit_axes_is_taken(one):
    """As ``jax.make_mesh`` makes them by default from JAX 0.9 on."""
    mesh = jax.make_mesh((8,), ("model",), (AxisType.Explicit,))
    svi = svi_of(mesh=mesh, sharding={"classes": "model"})
    assert_close(svi.run(KEY, 12, batches=batches_of(), **QUIET), one)


# --- What is sent, and what each device holds ----------------------------------------------------

SIZES = {"classes": 80_008, "users": 40_008, "data": 20_002}  # no other array has such axes
FEATURES, BATCH, SAMPLED = 16, 64, 32
ALL_USERS = lc.EntityCounts.of(SIZES["users"], np.arange(SIZES["data"]))


def large(x, y, rows):
    with lc.class_plate("classes", SIZES["classes"], y, num_sampled=SAMPLED) as classes:
        places = numpyro.sample("places", dist.Normal(0, 1).expand([FEATURES]).to_event(1))
    with lc.entity_plate("users", SIZES["users"], rows, counts=ALL_USERS) as of:
        mine = numpyro.sample("users_at", dist.Normal(0, 1).expand([FEATURES]).to_event(1))
    with lc.data_plate("data", SIZES["data"], rows) as batch:
        utilities = (of.rows_of(mine, rows) + x) @ places.T
        lc.sample_choice("y", utilities, classes=classes, rows=batch, obs=y)


@pytest.fixture(scope="module")
def programs():
    """The compiled first run and step of large tables on eight devices, and their bytes."""
    svi = svi_of(
        (OVER_BOTH[0], {"classes": "model", "users": "model", "data": "batch"}),
        large,
        AutoNormal(large),
    )
    args = jnp.ones((BATCH, FEATURES)), jnp.arange(BATCH), jnp.arange(BATCH)
    init = jax.jit(svi.init).lower(KEY, *args).compile()
    state = init(KEY, *args)
    step = jax.jit(svi.update, donate_argnums=0).lower(state, *args).compile()
    share = sum(
        leaf.nbytes // leaf.sharding.mesh.shape[leaf.sharding.spec[0]]
        for leaf in jax.tree.leaves(state)
        if leaf.ndim and leaf.shape[0] in SIZES.values()
    )
    return init, step, share


@pytest.mark.slow
def test_a_step_sends_nothing_that_grows_with_a_plate(programs):
    sent = shapes_sent(programs[1])
    assert sent  # of the touched rows, at least
    most = max(BATCH, BATCH + SAMPLED)  # rows of a plate in a step
    assert all(np.prod(shape) <= most * FEATURES for shape in sent)


def test_a_device_holds_its_share_and_no_table_whole(programs):
    """The first run too: all else that it needs is less than a twentieth of its share."""
    init, step, share = programs
    assert init.memory_analysis().output_size_in_bytes <= 1.05 * share
    assert step.memory_analysis().alias_size_in_bytes >= 0.95 * share
    for program in (init, step):
        assert program.memory_analysis().temp_size_in_bytes <= 0.05 * share


# --- Checkpoints ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_goes_on_bit_by_bit_and_over_other_devices(tmp_path, one):
    def run(num_steps, over, folder=tmp_path / "parts"):
        checkpoints = lc.Checkpoints(folder, every_steps=4)
        svi = svi_of(over)
        options = {"checkpoints": checkpoints, "resume": True, **QUIET}
        return svi.run(KEY, num_steps, batches=batches_of(), **options)

    run(5, OVER_CLASSES)
    result = run(8, OVER_CLASSES)
    whole = run(8, OVER_CLASSES, tmp_path / "whole")
    for name, rows in {"w_auto_loc": 12, "b_auto_loc": 12, "y_u": 40}.items():
        np.testing.assert_array_equal(result.params[name][:rows], whole.params[name][:rows])
    run(10, OVER_BOTH)
    assert_close(run(12, None), one)


# --- Errors --------------------------------------------------------------------------------------


def test_what_is_no_mesh_or_axis_is_refused():
    mesh = jax.make_mesh((8,), ("model",), (AxisType.Auto,))
    with pytest.raises(TypeError, match=r"`mesh` must be a `jax.make_mesh.*; got None"):
        svi_of(sharding={"classes": "model"})
    with pytest.raises(TypeError, match="`sharding` must be a dict from plates to axes"):
        svi_of(mesh=mesh)
    with pytest.raises(ValueError, match=r"`sharding\['classes'\]` must be an axis of `mesh`"):
        svi_of(mesh=mesh, sharding={"classes": "data"})


def test_a_plate_that_the_model_has_not_is_refused():
    svi = svi_of((OVER_CLASSES[0], {"places": "model"}))
    with pytest.raises(ValueError, match=r"plate 'places'; the model has \['classes', 'data'\]"):
        svi.init(KEY, X[:8], Y[:8], np.arange(8))


def test_a_batch_that_cannot_be_divided_is_refused():
    svi, message = svi_of(OVER_BOTH), r"`batch_size` must be a multiple of 2.*; got 9"
    with pytest.raises(ValueError, match=message):
        svi.run(KEY, 2, batches=lc.StreamedBatches(X, Y, batch_size=9), **QUIET)
    arrays = RunData((), {}, lc.ArrayBatches(X, Y, batch_size=9))
    with pytest.raises(ValueError, match=message):
        arrays.check_batch_size(svi.plan)


@pytest.mark.slow
def test_an_automatic_guide_of_bounds_that_are_arrays_is_refused():
    def model(x, y, rows):
        c = numpyro.sample("c", dist.Uniform(-jnp.ones(3), jnp.ones(3)).to_event(1))
        with lc.class_plate("classes", 12, y, num_sampled=4) as classes:
            w = numpyro.sample("w", dist.Uniform(-2.0, 2.0).expand([3]).to_event(1))
        with lc.data_plate("data", 40, rows) as batch:
            lc.sample_choice("y", (x + c) @ w.T, classes=classes, rows=batch, obs=y)

    svi = svi_of(OVER_CLASSES, model, AutoNormal(model))
    with pytest.raises(NotImplementedError, match=r"\['c'\] have bounds that are arrays"):
        svi.init(KEY, X[:8], Y[:8], np.arange(8))


def test_labels_out_of_range_are_refused():
    with pytest.raises(ValueError, match="12"):
        svi_of(OVER_CLASSES).init(KEY, X[:8], np.full(8, 12), np.arange(8))
