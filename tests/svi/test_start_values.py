# SPDX-License-Identifier: Apache-2.0
"""Start values of another shape than a parameter's own are refused, as one row for a table is."""

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

K, D, N = 12, 3, 40
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, D)).astype(np.float32), RNG.integers(0, K, N)


def model(x, y=None, rows=None):
    scale = numpyro.param("scale", lambda key: jnp.ones(D))
    with lc.class_plate("classes", K, y, 4) as classes:
        w = numpyro.sample("w", dist.Normal(0, scale).to_event(1))
    with lc.data_plate("data", N, rows) as rows:
        lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)


def begin(name, value, guide=None):
    svi = lc.SubsampledSVI(
        model, guide or AutoNormal(model), optax.adam(0.1), TraceMeanField_ELBO()
    )
    return svi.init(jax.random.key(0), X, Y, np.arange(N), init_params={name: value})


@pytest.mark.parametrize("shape", [(), (1,), (D,), (1, D), (K, 1), (K, D + 1), (5,)])
def test_a_value_that_is_no_table_of_the_parameter_is_refused(shape):
    with pytest.raises(ValueError, match=r"param 'w_auto_loc' in its own shape, \(12, 3\); got"):
        begin("w_auto_loc", np.zeros(shape, np.float32))


def test_a_parameter_that_makes_its_own_value_by_a_key_is_checked_too():
    with pytest.raises(ValueError, match=r"param 'scale' in its own shape, \(3,\); got \(\)"):
        begin("scale", np.ones((), np.float32))


def test_whole_numbers_are_refused():
    with pytest.raises(TypeError, match="floats for param 'w_auto_loc'; got int32"):
        begin("w_auto_loc", np.zeros((K, D), np.int32))


def test_a_guide_that_has_run_before_takes_its_own_tables_again():
    guide = AutoNormal(model)
    begin("scale", np.ones(D, np.float32), guide)
    begin("w_auto_loc", np.full((K, D), 0.5), guide)
