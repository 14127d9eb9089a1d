# SPDX-License-Identifier: Apache-2.0
"""Parameters whose shapes do not fit the plates that they are in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from scipy.special import log_softmax

import numpyro_largecat as lc
from tests.models import class_points_of

K, N = 12, 6
Y = jnp.array([3, 1, 3, 0, 7, 7])


def start(shape, event_dim, num_sampled=3):
    """Run the model once, with a parameter of some shape in its class plate."""
    kwargs = {} if event_dim is None else {"event_dim": event_dim}

    def model():
        with lc.class_plate("classes", K, Y, num_sampled) as classes:
            loc = numpyro.param("loc", jnp.zeros(shape), **kwargs)
            b = numpyro.sample("b", dist.Normal(loc, 1).expand_by(()))
        with numpyro.plate("data", N):
            numpyro.sample("y", lc.UtilityCategorical(b, classes), obs=Y)

    svi = lc.SubsampledSVI(model, AutoDelta(model), optax.sgd(0.1), Trace_ELBO())
    return jax.eval_shape(svi.init, jax.random.key(0))


@pytest.mark.parametrize(
    ("shape", "num_sampled", "fix"),
    [
        ((K,), 3, 0),
        ((K, 2), 3, 1),
        ((K, 2, 2), 3, 2),
        ((K,), 6, 0),  # 12 rows in the step, which are not the 12 classes in order
    ],
)
def test_a_table_without_event_dim_is_refused_with_the_one_to_give(shape, num_sampled, fix):
    message = (
        rf"param 'loc' inside plate 'classes'.*with {K} entries at axis 0.*event_dim=None"
        rf".*holds {N + num_sampled} rows.*event_dim={fix}\)"
    )
    with pytest.raises(ValueError, match=message):
        start(shape, None, num_sampled)


def test_a_table_whose_event_dim_takes_all_of_its_axes_is_refused():
    with pytest.raises(ValueError, match=r"event_dim=1 does not make it that axis.*event_dim=0\)"):
        start((K,), 1)


def test_a_parameter_of_the_rows_of_one_step_is_refused():
    """Its entries would be other classes in each step."""
    with pytest.raises(ValueError, match=r"each of the 9 rows.*all 12 rows, and event_dim=0"):
        start((N + 3,), None)


@pytest.mark.parametrize(
    ("shape", "event_dim", "axis"), [((11,), 0, -1), ((K, 3), 0, -1), ((3, K), 1, -2)]
)
@pytest.mark.parametrize("num_sampled", [3, None])
def test_a_table_of_other_rows_is_refused(shape, event_dim, axis, num_sampled):
    message = rf"param 'loc' inside plate 'classes' must have 12 rows at axis {axis}.*event_dim"
    with pytest.raises(ValueError, match=message):
        start(shape, event_dim, num_sampled)


@pytest.mark.slow
def test_tables_and_shared_parameters_are_not_refused():
    """A table is read by the rows of the step; a scalar, or a network's, is shared by all."""

    def model():
        with lc.class_plate("classes", K, Y, 3) as classes:
            table = numpyro.param("table", jnp.zeros(K), event_dim=0)
            shared = numpyro.param("shared", jnp.zeros(())) + numpyro.param(
                "row", jnp.zeros(1), event_dim=0
            )
            b = numpyro.sample("b", dist.Normal(table + shared, 1))
        with numpyro.plate("data", N):
            numpyro.sample("y", lc.UtilityCategorical(b, classes), obs=Y)

    svi = lc.SubsampledSVI(model, AutoDelta(model), optax.sgd(0.1), Trace_ELBO())
    params = svi.run(jax.random.key(0), 1, progress_bar=False).params
    shapes = {name: params[name].shape for name in ("table", "shared", "row")}
    assert shapes == {"table": (K,), "shared": (), "row": (1,)}


def test_a_table_in_a_full_plate_is_refused_only_where_a_chunk_of_it_is_read():
    """All its rows are there in order, until a prediction goes by chunks of classes."""

    def model(x, y=None):
        with lc.class_plate("classes", K) as classes:
            loc = numpyro.param("loc", jnp.zeros(K))
            b = numpyro.sample("b", dist.Normal(loc, 1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", lc.UtilityCategorical(x[:, None] * b, classes), obs=y)

    x, guide = np.ones(N, np.float32), class_points_of(K, b=())
    svi = lc.SubsampledSVI(model, guide, optax.sgd(0.1), Trace_ELBO())
    result = svi.run(jax.random.key(0), 1, x, Y, progress_bar=False)
    assert np.isfinite(result.losses).all()
    with pytest.raises(ValueError, match=r"param 'loc' inside plate 'classes'.*event_dim=0\)"):
        lc.Fitted(model, guide, result.params, chunk_size=5).on(x).top_classes(2)


def test_a_plain_plate_that_subsamples_says_the_same():
    def model():
        with numpyro.plate("rows", 20, subsample_size=4):
            z = numpyro.param("z", jnp.zeros(20))
            numpyro.factor("f", z)

    svi = lc.SubsampledSVI(model, lambda: None, optax.sgd(0.1), Trace_ELBO())
    with pytest.raises(ValueError, match=r"param 'z' inside plate 'rows'.*event_dim=0\)"):
        jax.eval_shape(svi.init, jax.random.key(0))


@pytest.mark.parametrize("num_features", [2, 5])
def test_shared_parameters_of_a_fit_may_have_as_many_entries_as_a_chunk(num_features) -> None:
    """Two classes are looked at first, and then five at a time; a step has ten rows."""

    def model(x, y=None):
        with lc.class_plate("classes", K, y, num_sampled=4) as classes:
            scale = numpyro.param("scale", jnp.arange(1.0, num_features + 1))
            w = numpyro.sample("w", dist.Normal(0, 1).expand([num_features]).to_event(1))
        numpyro.sample("y", lc.UtilityCategorical(x @ (scale * w).T, classes), obs=y)

    x, y = np.ones((6, num_features), np.float32), np.arange(6)
    table = np.random.default_rng(0).normal(size=(K, num_features)).astype(np.float32)
    params = {"w_auto_loc": table, "scale": np.full(num_features, 2.0, np.float32)}
    fit = lc.Fitted(model, class_points_of(K, w=(num_features,)), params, chunk_size=5)
    expected = log_softmax(x @ (2 * table).T, axis=1)[y, y]
    np.testing.assert_allclose(fit.on(x).log_likelihood(y), expected, rtol=1e-5)


@pytest.mark.parametrize("init_params", [None, {"z": jnp.arange(7.0)}])
def test_parameters_of_the_rows_of_a_step_are_refused_whatever_they_start_from(init_params) -> None:
    def model(y):
        with lc.class_plate("classes", K, y, num_sampled=4) as classes:
            z = numpyro.param("z", jnp.zeros(7))
            b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", lc.UtilityCategorical(jnp.ones((3, 1)) * (b + z), classes), obs=y)

    svi = lc.SubsampledSVI(model, AutoDelta(model), optax.adam(0.1), Trace_ELBO())
    with pytest.raises(
        ValueError, match=r"shape \(7,\), an entry for each of the 7 rows of a step"
    ):
        svi.init(jax.random.key(0), jnp.arange(3), init_params=init_params)
