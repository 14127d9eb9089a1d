# SPDX-License-Identifier: Apache-2.0
"""A mixture over eight emulated devices is that of one, and sends sums and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import numpyro_largecat as lc
from numpyro_largecat.mixtures.local_step import Globals, sum_batch
from tests.collectives import shapes_sent

if len(jax.devices()) < 8:  # on a machine whose accelerators are fewer
    pytest.skip("needs eight devices", allow_module_level=True)

N, D, K = 203, 3, 17  # so many components that one of each row is summed after a sort
MESH = Mesh(np.array(jax.devices()), ("rows",))
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D)) + 6 * RNG.integers(K, size=(N, 1))


def fit(mesh, **options):
    family = lc.mixtures.GaussianFamily(X.mean(0), jnp.eye(D))
    arguments = {"num_passes": 3, "batch_size": 70, "progress_bar": False} | options
    return lc.fit_mixture(jax.random.key(0), X, K, family, mesh=mesh, **arguments)


@pytest.mark.parametrize("num_active", [1, K])
@pytest.mark.parametrize("method", ["memoized", "stochastic"])
@pytest.mark.some_cases(2)
def test_a_fit_is_that_of_one_device(method, num_active, x64) -> None:
    one, many = (fit(m, method=method, num_active=num_active) for m in (None, MESH))
    np.testing.assert_allclose(many.bounds, one.bounds, rtol=1e-10)
    np.testing.assert_allclose(many.counts, one.counts, rtol=1e-8)
    np.testing.assert_allclose(many.statistics, one.statistics, rtol=1e-8, atol=1e-8)


def test_a_checkpoint_goes_on_over_other_devices(tmp_path, x64) -> None:
    checkpoints = lc.Checkpoints(tmp_path, every_steps=1)
    fit(MESH, num_passes=2, checkpoints=checkpoints)
    found = fit(None, checkpoints=checkpoints, resume=True)
    np.testing.assert_allclose(found.statistics, fit(None).statistics, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("num_active", [1, K])
def test_devices_send_the_sums_alone(num_active) -> None:
    """K P numbers, K counts and three numbers for each chunk of rows, whatever their number."""
    family, chunk, num_rows = lc.mixtures.DiagonalGaussianFamily(np.zeros(D), np.ones(D)), 64, 4096
    size = len(family.prior())
    parameters = Globals(jnp.zeros((K, size)), jnp.zeros(K))
    x, is_row = jnp.zeros((num_rows, D)), jnp.ones(num_rows)
    options = {"num_active": num_active, "chunk": chunk, "mesh": MESH}
    sent = shapes_sent(sum_batch.lower(family, x, is_row, parameters, **options).compile())
    chunks_of_device = num_rows // chunk // MESH.size
    assert sum(np.prod(shape) for shape in sent) == K * size + K + 3 * chunks_of_device
