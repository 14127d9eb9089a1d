# SPDX-License-Identifier: Apache-2.0
"""A diagnosis names latent values that move the utilities and that u does not follow."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
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


def model(users, y=None, rows=None, num_sampled=5, how="nothing"):
    """Utilities of users' rows v, shared slopes b, and weights of classes around a scale tau."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([D]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with lc.entity_plate("users", NUM_USERS, users, COUNTS) as read:
        v = numpyro.sample("v", dist.Normal(0, 1).expand([D]).to_event(1))
    with lc.class_plate("classes", K, y, num_sampled) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    own = read.rows_of(v, users)
    utilities, follow = {
        "nothing": ((own + b) @ w.T, None),
        "a part": (lambda x: (x + b) @ w.T, own),
        "half": (lambda x: (0.5 * x + 0.5 * own) @ w.T, own),
        "a sum": (lambda x: x @ w.T, own + b),
        "all but a scale": (lambda x: tau * (x @ w.T), own + b),
        "all": (
            lambda x: x[1][:, None] * (x[0] @ w.T),
            (own + b, jnp.broadcast_to(tau, users.shape)),
        ),
    }[how]
    with lc.data_plate("data", N, rows) as rows:
        lc.sample_choice("y", utilities, follow=follow, classes=classes, rows=rows, obs=y)


def named(make_guide=AutoNormal, **options):
    """The findings that name values, of a fit of the model with these options."""
    own_model = partial(model, **options)
    svi = lc.SubsampledSVI(
        own_model, make_guide(own_model), optax.adam(0.01), TraceMeanField_ELBO()
    )
    batches = lc.ArrayBatches(USERS, Y, batch_size=20)
    result = svi.run(jax.random.key(0), 30, batches=batches, progress_bar=False)
    found = (
        lc.Fitted.from_svi(svi, result)
        .on()
        .diagnose(rng_key=jax.random.key(1), batches=batches, num_draws=0, num_repeats=2)
    )
    return [finding for finding in found.findings if "u follows" in finding.name]


@pytest.mark.parametrize(
    ("options", "sites"),
    [
        slow_case({}, ["b", "v"]),
        ({"how": "a part"}, ["b"]),
        slow_case({"how": "half"}, ["v"]),
        slow_case({"how": "a sum"}, []),
        ({"how": "all but a scale"}, ["tau"]),
        slow_case({"how": "all"}, []),
        slow_case({"num_sampled": None}, []),
        slow_case({"make_guide": AutoDelta}, []),
    ],
    ids=["nothing", "a part", "half", "a sum", "all but a scale", "all", "all classes", "points"],
)
def test_what_moves_utilities_around_the_values_to_follow_is_named(options, sites):
    findings = named(**options)
    assert [finding.name for finding in findings] == [
        f"share of draws that u follows, {site}" for site in sites
    ]
    assert all("follow=" in finding.advice and finding.value < 0.7 for finding in findings)


def test_where_all_classes_are_at_hand_u_is_that_of_each_draw():
    findings = named(num_sampled=K - 1)
    assert [finding.value for finding in findings] == [1.0, 1.0]
    assert not any(finding.advice for finding in findings)
