# SPDX-License-Identifier: Apache-2.0
"""A diagnosis names users' rows that u does not follow."""

from __future__ import annotations

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_largecat as lc
from tests.slow_cases import slow_case

NUM_USERS, K, D, N = 6, 30, 2, 60
RNG = np.random.default_rng(0)
USERS, Y = RNG.integers(0, NUM_USERS, N), RNG.integers(0, K, N)
COUNTS = lc.EntityCounts.of(NUM_USERS, USERS)


def model(users, y=None, rows=None, num_sampled=5, follow=False):
    with lc.entity_plate("users", NUM_USERS, users, COUNTS) as read:
        v = numpyro.sample("v", dist.Normal(0, 1).expand([D]).to_event(1))
    with lc.class_plate("classes", K, y, num_sampled) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    own = read.rows_of(v, users)
    utilities, how = own @ w.T, {}
    if follow:
        utilities, how = (lambda own: own @ w.T), {"follow": own}
    with lc.data_plate("data", N, rows) as rows:
        lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=y, **how)


@pytest.mark.parametrize(
    ("options", "make_guide", "expected"),
    [
        ({}, AutoNormal, ["values that u follows, v"]),
        ({"follow": True}, AutoNormal, []),
        slow_case({"num_sampled": None}, AutoNormal, []),
        slow_case({}, AutoDelta, []),
    ],
    ids=["not followed", "followed", "all classes", "points"],
)
def test_rows_that_u_does_not_follow_are_named(options, make_guide, expected):
    def own_model(*args, **kwargs):
        model(*args, **kwargs, **options)

    svi = lc.SubsampledSVI(
        own_model, make_guide(own_model), optax.adam(0.01), TraceMeanField_ELBO()
    )
    batches = lc.ArrayBatches(USERS, Y, batch_size=20)
    result = svi.run(jax.random.key(0), 5, batches=batches, progress_bar=False)
    found = (
        lc.Fitted.from_svi(svi, result)
        .on()
        .diagnose(rng_key=jax.random.key(1), batches=batches, num_draws=0, num_repeats=2)
    )
    named = [finding for finding in found.findings if "u follows" in finding.name]
    assert [finding.name for finding in named] == expected
    assert all("follow=" in finding.advice for finding in named)
