# SPDX-License-Identifier: Apache-2.0
"""NumPyro's own handlers and control flow around models with our plates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.handlers import scope
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_largecat as lc
from tests.models import hierarchical, make_data, point_guide


@pytest.mark.slow
def test_a_model_may_be_there_twice_in_two_scopes():
    """It is fitted and predicted as without, with any divider, such as none."""
    x, y = make_data()
    model = hierarchical(num_sampled=4)

    def twice(*args):
        scope(model, prefix="a")(*args)
        scope(model, prefix="b", divider="")(*args)

    def guide(*args):
        scope(point_guide, prefix="a")(*args)
        scope(point_guide, prefix="b", divider="")(*args)

    svi = lc.SubsampledSVI(twice, guide, optax.adagrad(0.1), Trace_ELBO())
    batches = lc.ArrayBatches(x, y, batch_size=8)
    result = svi.run(jax.random.key(0), 5, batches=batches, progress_bar=False)
    visits = [result.state.local_state[name].rule_state.visits for name in ("a/y_u", "by_u")]
    assert np.sum(visits, axis=1).tolist() == [40, 40]  # 5 batches of 8
    w, b = (result.params[name] for name in ("bw_auto_loc", "bb_auto_loc"))
    assert not np.allclose(w, result.params["a/w_auto_loc"])
    fitted = lc.Fitted.from_svi(svi, result, site="by", chunk_size=5)
    found = fitted.on(x).log_likelihood(y)
    expected = jax.nn.log_softmax(x @ w.T + b)[jnp.arange(len(y)), y]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    "plate",
    [
        lambda y: lc.class_plate("rows", 50, y, 3),
        lambda y: lc.data_plate("rows", 50, jnp.arange(3)),
    ],
    ids=["class_plate", "data_plate"],
)
def test_a_plate_of_some_rows_inside_a_scan_is_refused(plate):
    def model(y):
        def body(carry, y):
            with plate(y):
                w = numpyro.sample("w", dist.Normal(0, 1))
            return carry, w.sum()

        scan(body, 0.0, y)

    svi = lc.SubsampledSVI(model, AutoDelta(model), optax.sgd(0.1), Trace_ELBO())
    with pytest.raises(NotImplementedError, match=r"plate 'rows' holds some.*Open it bef"):
        svi.init(jax.random.key(0), jnp.array([[1], [2]]))


@pytest.mark.parametrize("negatives", ["batch", "shared", "own"])
def test_a_choice_over_some_classes_inside_a_scan_is_refused(negatives):
    """Its distribution, with the classes in it, would be stacked over the steps."""

    def model(y):
        with lc.class_plate("classes", 50, y, 3, negatives=negatives) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))

        def body(carry, steps):
            psi = classes.utilities(lambda _, w: w, (y,), (w,))
            numpyro.sample("y", lc.UtilityCategorical(psi, classes, u=2.0), obs=steps)
            return carry, carry

        scan(body, 0.0, jnp.stack([y] * 4))

    svi = lc.SubsampledSVI(model, AutoDelta(model), optax.sgd(0.1), Trace_ELBO())
    with pytest.raises(NotImplementedError, match="observe it after the scan"):
        svi.init(jax.random.key(0), jnp.array([1, 2, 8, 6]))


def test_a_full_class_plate_may_be_inside_a_scan():
    def model():
        def body(carry, _):
            with lc.class_plate("rows", 50):
                w = numpyro.sample("w", dist.Normal(0, 1))
            return carry, w.sum()

        return scan(body, 0.0, None, length=2)[1]

    assert numpyro.handlers.seed(model, 0)().shape == (2,)


def test_rows_of_a_plate_outside_of_a_scan_are_used_inside():
    """As the message says: the choices are observed after the scan, at the states it returns."""
    y = jnp.array([3, 1, 3, 4])

    def model(y=None, rows=None):
        with lc.class_plate("classes", 50, y, 3) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))

        def body(z, _):
            z = numpyro.sample("z", dist.Normal(z + 0 * w.sum(), 1))
            return z, z

        _, z = scan(body, 0.0, None, length=4)
        with lc.data_plate("data", 4, rows) as rows:
            lc.sample_choice("y", z[:, None] * w, classes=classes, rows=rows, obs=y)

    svi = lc.SubsampledSVI(model, AutoDelta(model), optax.sgd(0.1), Trace_ELBO())
    result = svi.run(jax.random.key(0), 3, y, jnp.arange(4), progress_bar=False)
    assert result.params["w_auto_loc"].shape == (50,) and np.isfinite(result.losses).all()
