# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from numpyro_largecat.ops.fixed_point import newton_step


def test_steps_end_where_the_function_leaves_its_argument():
    x = jnp.array([-3.0, 0.0, 40.0])
    for _ in range(20):
        x = newton_step(lambda x: jnp.log(3 + 0.5 * jnp.exp(x)), x)
    np.testing.assert_allclose(x, np.log(6), rtol=1e-5)


def test_no_step_is_longer_than_allowed_where_the_function_follows_its_argument():
    x = jnp.zeros(3)
    np.testing.assert_allclose(newton_step(lambda x: x + 1, x), 5)
    np.testing.assert_allclose(newton_step(lambda x: x - 1, x, longest=2.0), -2)
    np.testing.assert_array_equal(newton_step(lambda x: x, x), 0)
