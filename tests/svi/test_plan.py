# SPDX-License-Identifier: Apache-2.0
"""What ``init`` learns is one object that nothing changes, and that compiled loops compare."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import jax
import jax.numpy as jnp
import numpyro
import optax
import pytest
from numpyro.distributions import constraints
from numpyro.infer import Trace_ELBO

import numpyro_largecat as lc


def svi_of(limits):
    def model():
        a = numpyro.param("a", 0.5, constraint=constraints.interval(0.0, limits["high"]))
        numpyro.factor("loss", -((a - 3.0) ** 2))

    return lc.SubsampledSVI(model, lambda: None, optax.adam(0.5), Trace_ELBO())


def test_a_plan_cannot_be_changed_and_init_makes_an_equal_one():
    svi = svi_of({"high": 1.0})
    before = svi.plan
    svi.init(jax.random.key(0))
    first = svi.plan
    assert not before.stored and first.stored.keys() == {"a"}
    with pytest.raises(FrozenInstanceError):
        first.stored = {}
    svi.init(jax.random.key(1))
    assert svi.plan == first and svi.plan is not first and hash(svi.plan) == hash(first)


def test_a_later_run_sees_a_constraint_that_has_changed():
    """Its arrays have the same shapes, but its compiled loop is another."""
    limits = {"high": 1.0}
    svi = svi_of(limits)
    narrow = svi.run(jax.random.key(0), 100, progress_bar=False).params["a"]
    limits["high"] = 10.0
    wide = svi.run(jax.random.key(0), 100, progress_bar=False).params["a"]
    assert narrow <= 1
    assert jnp.abs(wide - 3) < 0.2
