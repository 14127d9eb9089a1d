# SPDX-License-Identifier: Apache-2.0
"""SubsampledSVI against numpyro.infer.SVI and against exact gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.handlers import substitute
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal

import numpyro_largecat as lc
from numpyro_largecat.plates.uniform_classes import DrawnClasses
from tests.models import NUM_CATEGORIES, explicit_u, hierarchical, make_data
from tests.slow_cases import slow_case

LOSSES = {"trace": Trace_ELBO(), "mean_field": TraceMeanField_ELBO()}


def assert_same_params(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], err_msg=name, **tolerance)


def in_one_program(run):
    """Losses and parameters of a run of NumPyro, which by itself runs a hundred programs."""

    @jax.jit
    def fit(*args):
        result = run(*args)
        return result.losses, result.params

    return fit


def hand_written_guide(x, y=None, rows=None):
    numpyro.sample("scale", dist.LogNormal(numpyro.param("scale_loc", 0.1), 0.2))
    with numpyro.plate("classes", NUM_CATEGORIES):
        loc = numpyro.param("w_loc", jnp.zeros((NUM_CATEGORIES, 3)), event_dim=1)
        sd = numpyro.param(
            "w_sd",
            jnp.full((NUM_CATEGORIES, 3), 0.2),
            constraint=dist.constraints.positive,
            event_dim=1,
        )
        numpyro.sample("w", dist.Normal(loc, sd).to_event(1))
        numpyro.sample("b", dist.Normal(numpyro.param("b_loc", jnp.zeros(12), event_dim=0), 0.1))


def guide_list(model):
    guide = AutoGuideList(model)
    guide.append(AutoNormal(numpyro.handlers.block(model, hide=["b", "scale", "y"])))
    guide.append(AutoDelta(numpyro.handlers.block(model, hide=["w", "y"])))
    return guide


GUIDES = {
    "normal": AutoNormal,
    "delta": AutoDelta,
    "list": guide_list,
    "hand": lambda model: hand_written_guide,
}
OPTIMISERS = {
    "sgd": optax.sgd(1e-3),
    "adam": optax.adam(1e-2),
    "numpyro_adam": numpyro.optim.Adam(1e-2),
    "clipped": numpyro.optim.ClippedAdam(1e-2, clip_norm=3.0),
}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("guide", "optim"),
    [
        ("hand", "adam"),
        ("delta", "numpyro_adam"),
        slow_case("normal", "sgd"),
        slow_case("list", "clipped"),
    ],
)
@pytest.mark.some_cases(1)
def test_full_plates_give_the_steps_of_numpyro(guide, optim):
    """Issue (a): the same parameters after 50 steps under the same seeds."""
    x, y = map(np.asarray, make_data())
    model = hierarchical()
    loss = LOSSES["mean_field" if guide in ("normal", "hand") else "trace"]

    def run(cls, key):
        svi = cls(model, GUIDES[guide](model), OPTIMISERS[optim], loss)
        return svi.run(key, 50, x, y, progress_bar=False)

    with jax.threefry_partitionable(False):  # the bits of our steps
        losses, params = in_one_program(lambda key: run(SVI, key))(jax.random.key(0))
        result = run(lc.SubsampledSVI, jax.random.key(0))
    np.testing.assert_allclose(result.losses, losses, rtol=2e-5)
    assert_same_params(result.params, params, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("labels", "loss", "optim"),
    [
        slow_case("equal", "trace", optax.sgd(1e-5)),
        slow_case("distinct", "mean_field", optax.adagrad(0.05)),
        ("repeated", "trace", optax.adagrad(0.05)),
    ],
)
def test_steps_on_touched_rows_equal_dense_steps_on_the_same_subset(labels, loss, optim):
    """SGD and Adagrad do not move rows without gradient, so NumPyro's dense steps must agree."""
    batch = {"equal": [7] * 6, "distinct": [0, 1, 2, 3, 4, 5], "repeated": [3, 9, 3, 0, 9, 3]}
    y, rows = np.array(batch[labels]), np.array([4, 30, 2, 11, 39, 0])
    x = np.asarray(make_data()[0])[rows]
    others = np.array([k for k in range(NUM_CATEGORIES) if k not in batch[labels]][:4])
    weight = (NUM_CATEGORIES - len(set(batch[labels]))) / 4
    fixed = {"classes_rows": DrawnClasses(others, jnp.full(4, weight))}
    model = explicit_u(num_sampled=4)

    def plates(x, y, rows):
        return lc.class_plate("classes", NUM_CATEGORIES, y, 4)

    def restricted(model_or_guide):
        return substitute(model_or_guide, data=fixed)

    lazy = lc.SubsampledSVI(restricted(model), AutoNormal(model), optim, LOSSES[loss])

    def run_dense(key, values):
        guide = restricted(AutoNormal(model, create_plates=plates))
        dense = SVI(restricted(model), guide, optim, LOSSES[loss])
        return dense.run(key, 5, x, y, rows, init_params=values, progress_bar=False)

    with jax.threefry_partitionable(False):  # the bits of our steps
        state = lazy.init(jax.random.key(3), x, y, rows)
        values = lazy.get_params(state)
        losses, params = in_one_program(run_dense)(jax.random.key(3), values)
        result = lazy.run(jax.random.key(3), 5, x, y, rows, init_state=state, progress_bar=False)
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5)
    assert_same_params(result.params, params, rtol=1e-4, atol=1e-5)
    assert not np.allclose(result.params["w_auto_loc"], values["w_auto_loc"])
