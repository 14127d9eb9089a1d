# SPDX-License-Identifier: Apache-2.0
"""Models evaluated on consecutive classes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy.stats import norm

import numpyro_largecat as lc

LABELS = np.array([4, 2, 4])


def test_a_chunk_holds_consecutive_classes():
    def make(start, size):
        with lc.plates.class_chunk(name="classes", start=start, size=size):
            return lc.class_plate("classes", 10, LABELS, 3).classes

    classes = make(3, 4)
    assert classes.kind == "chunk"
    assert classes.indices.tolist() == [3, 4, 5, 6]
    assert classes.weights.tolist() == [1.0] * 4
    last = make(8, 4)
    assert last.indices.tolist() == [8, 9, 9, 9]
    assert last.weights.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert make(0, 10).indices.tolist() == list(range(10))


def test_a_chunk_is_of_one_plate_alone():
    def model():
        return lc.class_plate("a", 10).classes.kind, lc.class_plate("b", 10).classes.kind

    assert lc.plates.class_chunk(model, name="a", start=0, size=2)() == ("chunk", "full")


@pytest.mark.parametrize("num_sampled", [None, 3])
@pytest.mark.parametrize("size", [4, 13])
def test_chunks_add_up_to_all_classes(num_sampled, size):
    """A scan over chunks, with a traced start, gives the log density of all rows."""
    table = jnp.array(np.random.default_rng(0).normal(size=10), jnp.float32)

    def model(loc):
        with lc.class_plate("classes", 10, LABELS, num_sampled) as classes:
            w = numpyro.param("w", table, event_dim=0)
            numpyro.sample("t", dist.Normal(loc, 1), obs=w)
        numpyro.deterministic("sum", classes.weights @ classes.indices)

    @jax.jit
    def total(loc):
        def add(sums, start):
            chunk = lc.plates.class_chunk(
                handlers.seed(model, 0), name="classes", start=start, size=size
            )
            log_p, sites = log_density(chunk, (loc,), {}, {})
            return (sums[0] + log_p, sums[1] + sites["sum"]["value"]), None

        return lax.scan(add, (0.0, 0.0), jnp.arange(0, 10, size))[0]

    log_p, sum_of_indices = total(0.5)
    np.testing.assert_allclose(log_p, norm.logpdf(table, 0.5).sum(), rtol=1e-5)
    assert sum_of_indices == 45


def test_a_chunk_of_a_guide_reads_its_rows():
    def guide():
        with lc.class_plate("classes", 30, LABELS, 3):
            loc = numpyro.param("loc", jnp.arange(30.0), event_dim=0)
            return numpyro.sample("w", dist.Delta(loc))

    chunk = lc.plates.class_chunk(guide, name="classes", start=27, size=4)
    assert handlers.seed(chunk, 0)().tolist() == [27, 28, 29, 29]


@pytest.mark.parametrize(
    ("size", "error"), [(0, ValueError), (2.0, TypeError), (jnp.array(2), TypeError)]
)
def test_a_chunk_needs_a_size(size, error):
    with pytest.raises(error, match="`size` must be"):
        lc.plates.class_chunk(name="classes", start=0, size=size)
