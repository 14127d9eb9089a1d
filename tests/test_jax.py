# SPDX-License-Identifier: Apache-2.0
"""The JAX that is installed compiles to right values what utilities are made of.

JAX 0.10.2, which ``pyproject.toml`` rules out, does not on CPUs: sums over a short axis are wrong
where threads share the rows. Here they are compiled as for a user, without the options by which the
other tests compile sooner.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax
import numpy as np

rng = np.random.default_rng(0)
things = rng.normal(size=(361, 12, 4, 6)).astype(np.float32)
tastes = rng.normal(size=(16, 361, 6)).astype(np.float32)
offset = np.float32([0.5, -1.0, 2.0, 0.0])


def utilities(taste):  # of a mixed logit, people x choices x things
    return offset + (things * taste[:, None, None]).sum(-1)


def length(row):
    return ((np.eye(3, dtype=np.float32) @ row) ** 2).sum()


wanted = offset + np.einsum("ptaf,mpf->mpta", things, tastes)
np.testing.assert_allclose(jax.jit(jax.vmap(utilities))(tastes), wanted, rtol=1e-4, atol=1e-4)
rows = np.arange(40_000, dtype=np.float32)[:, None] * np.float32([1, 0, 0])
np.testing.assert_allclose(jax.jit(jax.vmap(length))(rows), rows[:, 0] ** 2, rtol=1e-5)
"""


@pytest.mark.smoke
def test_sums_over_short_axes_are_right():
    """Of many rows, so that threads share them."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment)
