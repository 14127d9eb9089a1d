# SPDX-License-Identifier: Apache-2.0
"""Priors of mixing weights."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference_mixtures as reference
from tests.mixtures.cases import MIXING

COUNTS = np.array([3.5, 0.0, 12.25, 0.5, 3.5])


def potential_of(mixing: Any, objective: str) -> Any:
    return mixing.log_normalizer if objective == "variational" else mixing.max_log_density


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("objective", ["variational", "map"])
@pytest.mark.usefixtures("x64")
def test_gradient_and_prior_term_are_those_of_textbooks(name: str, objective: str) -> None:
    """The gradient is E[log pi] or log pi; the rest of the value is the prior's."""
    mixing, learn = MIXING[name]
    potential = potential_of(mixing, objective)
    value, log_weights = jax.value_and_grad(potential)(jnp.asarray(COUNTS))
    wanted, prior_term = learn(COUNTS, objective)
    np.testing.assert_allclose(log_weights, wanted, rtol=1e-10)
    start = potential(jnp.zeros(5)) if objective == "variational" else 0.0
    np.testing.assert_allclose(value - start - log_weights @ COUNTS, prior_term, rtol=1e-10)


@pytest.mark.parametrize("objective", ["variational", "map"])
@pytest.mark.parametrize("concentration", [0.3, 1.0, 7.0])
@pytest.mark.usefixtures("x64")
def test_no_order_of_the_sticks_is_better_than_by_size(
    concentration: float, objective: str
) -> None:
    """Brute force over all orders of five components."""

    def gain(order: Any) -> float:
        weights, prior_term = reference.learn_sticks(concentration, COUNTS, objective, order)
        return prior_term + float(weights @ COUNTS)

    best = max(gain(order) for order in permutations(range(5)))
    np.testing.assert_allclose(gain(np.argsort(-COUNTS, kind="stable")), best, rtol=1e-12)


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("objective", ["variational", "map"])
@pytest.mark.usefixtures("x64")
def test_labels_mean_nothing(name: str, objective: str) -> None:
    potential = jax.value_and_grad(potential_of(MIXING[name][0], objective))
    order = np.array([4, 2, 0, 1, 3])
    value, log_weights = potential(jnp.asarray(COUNTS))
    other_value, other_log_weights = potential(jnp.asarray(COUNTS[order]))
    np.testing.assert_allclose(value, other_value)
    np.testing.assert_allclose(np.sort(log_weights), np.sort(other_log_weights))
    np.testing.assert_allclose(log_weights[2], other_log_weights[1])
