# SPDX-License-Identifier: Apache-2.0
"""What ends a learner while it finds its start says that there is no result yet."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_largecat as lc

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(20, 2))


def of_double_sum():
    rule = lc.double_sum.ImplicitSGD(1.0)
    lc.fit_double_sum(KEY, X, np.arange(20) % 3, 3, rule, progress_bar=False)


def of_mixture():
    family = lc.mixtures.GaussianFamily(jnp.zeros(2), jnp.eye(2))
    lc.fit_mixture(KEY, X, 2, family, batch_size=10, progress_bar=False)


@pytest.mark.parametrize(
    ("module", "step", "fit"),
    [
        ("double_sum.learning", "collect", of_double_sum),
        ("mixtures.fit_mixture", "look_at", of_mixture),
    ],
    ids=["double sum", "mixture"],
)
def test_there_is_none_before_the_first_batch(module, step, fit, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[f"numpyro_largecat.{module}"], step, interrupt)
    with pytest.raises(KeyboardInterrupt) as raised:
        fit()
    assert raised.value.result_so_far is None
