# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_largecat as lc


def test_steps_are_those_of_the_papers_text():
    """Three steps of one element, by the recursion in plain Python."""
    optimiser = lc.adaptive_steps(0.02)
    state = optimiser.init(jnp.zeros(1))
    mean_square = 0.0
    for t, gradient in enumerate((3.0, -1.0, 0.5), start=1):
        step, state = optimiser.update(jnp.array([gradient]), state)
        mean_square = 0.1 * gradient**2 + 0.9 * mean_square
        expected = -0.02 * t**-0.5 / (1 + mean_square**0.5) * gradient
        np.testing.assert_allclose(step, [expected], rtol=1e-5)


def test_the_rate_falls_every_2000_steps_of_the_fit():
    """An element seen for the first time at step 4000 takes 0.81 of its usual first step."""
    optimiser = lc.adaptive_steps()
    state = optimiser.init(jnp.zeros(()))
    first, _ = optimiser.update(jnp.array(2.0), state)
    by_gradients, steps = state
    steps = steps._replace(num_steps=jnp.array(4000))
    late, _ = optimiser.update(jnp.array(2.0), (by_gradients, steps))
    np.testing.assert_allclose(late, 0.81 * first, rtol=1e-6)


@pytest.mark.parametrize("step_size", [0.0, -0.1, float("inf"), float("nan")])
def test_step_sizes_that_are_none_are_refused(step_size):
    with pytest.raises(ValueError, match=r"`step_size` must be in \(0, inf\); got"):
        lc.adaptive_steps(step_size)
