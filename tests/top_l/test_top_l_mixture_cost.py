# SPDX-License-Identifier: Apache-2.0
"""An L-sparse mixture takes the memory of chunks, and gradients of L components."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import pytest

import numpyro_largecat as lc
from numpyro_largecat.top_l import component_weights
from tests.memory import temp_bytes

N, D, L = 4000, 32, 4
CHUNK = 4 * component_weights.MAX_ENTRIES  # bytes


def diagonal(loc, scale):
    return dist.Normal(loc, scale, validate_args=False).to_event(1)


def full(loc, factor):
    return dist.MultivariateNormal(loc, scale_tril=factor, validate_args=False)


def arguments(make, num_components, num_rows=N):
    shapes = {diagonal: (num_components, D), full: (num_components, D, D)}
    shapes = [(num_components,), (num_components, D), shapes[make], (num_rows, D)]
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def total(make, num_active):
    def log_prob(logits, loc, scale, values):
        mixing = dist.Categorical(logits=logits, validate_args=False)
        return lc.TopLMixture(mixing, make(loc, scale), num_active).log_prob(values).sum()

    return log_prob


def gradient(make, num_active):
    return jax.grad(total(make, num_active), argnums=(0, 1, 2))


@pytest.mark.parametrize("make", [diagonal, full])
@pytest.mark.parametrize("num_active", [L, 500])
def test_memory_is_that_of_chunks(make, num_active):
    """With 500 components, of which an array (N, K, D) has 256 MB, and the dense gradient more."""
    args = arguments(make, 500)
    table = 4 * 500 * D * (1 if make is diagonal else D)
    used = temp_bytes(gradient(make, num_active), *args)
    assert used < 5 * CHUNK + 4 * table < 4 * N * 500 * D / 2


def test_memory_of_a_value_does_not_grow_with_observations_but_by_its_results():
    """Some numbers for each of the L components, not D of them."""
    rows = component_weights.MAX_ENTRIES // (L * D)  # of a chunk
    used = [temp_bytes(total(full, L), *arguments(full, 500, n * rows)) for n in (2, 4)]
    assert used[1] - used[0] < 2 * rows * L * 4 * 8


def flops(fn, args):
    return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]


def gradient_flops(num_components, num_active):
    """Operations of the gradient beyond those of the value, without loops over chunks."""
    args = arguments(diagonal, num_components, num_rows=200)
    fn = total(diagonal, num_active)
    return flops(jax.value_and_grad(fn, argnums=(0, 1, 2)), args) - flops(fn, args)


def test_gradients_cost_what_the_active_components_cost():
    """Twice the components change nothing, twice as many active ones double it."""
    base = gradient_flops(200, L)
    assert gradient_flops(400, L) == pytest.approx(base, rel=0.1)
    assert gradient_flops(200, 2 * L) == pytest.approx(2 * base, rel=0.15)


def test_draws_take_one_component_each():
    """Not all K of them, as in NumPyro's mixture."""

    def draw(num_components):
        args = arguments(full, num_components)[:3]

        def sample(logits, loc, scale):
            mixing = dist.Categorical(logits=logits, validate_args=False)
            mixture = lc.TopLMixture(mixing, full(loc, scale), L)
            return mixture.sample(jax.random.key(0), (2000,))

        return temp_bytes(sample, *args)

    assert draw(500) < 8 * CHUNK < 4 * 2000 * 500 * D * 2
    assert draw(500) - draw(250) < 2 * CHUNK
