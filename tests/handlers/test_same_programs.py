# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from numpyro_largecat.handlers.closed_over_arrays import compiled, run_compiled
from numpyro_largecat.handlers.same_programs import LARGEST_CONSTANT, key_of

X = jnp.arange(3.0)


def key(fn, *args):
    return key_of(jax.jit(fn).trace(*(args or (X,))).jaxpr.jaxpr)


def function(
    *, factor=0.1, start=0, most=3, axis=0, inner=(1.0, 2.0, 3.0), dtype=jnp.float32, other=jnp.sin
):
    """A new function of equal code; it has rules, loops, branches, constants and draws."""
    constant = np.asarray(inner, np.float32)

    @jax.jit
    def with_constant(x):
        return x + constant

    def fn(x):
        x = jax.nn.softplus(x) * factor + with_constant(x)
        x = lax.fori_loop(start, most, lambda i, x: x + i, x)
        x = lax.cond(x[0] > 0, other, jnp.cos, x)
        x += jax.random.normal(jax.random.key(0), (3,))
        return jnp.stack([x, x]).sum(axis=axis).astype(dtype), lax.map(jnp.exp, x)

    return fn


def test_functions_of_equal_code_have_equal_keys():
    first, second = key(function()), key(function())
    assert first is not None
    assert (first, hash(first)) == (second, hash(second))


@pytest.mark.parametrize(
    "change",
    [
        {"factor": 0.10000001},
        {"factor": np.array([0.1])},
        {"start": 1},
        {"most": 4},
        {"axis": 1},
        {"inner": (1.0, 2.0, 3.0000002)},
        {"dtype": jnp.float16},
        {"other": jnp.tan},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_differs_anywhere_has_another_key(change):
    assert key(function(**change)) not in (None, key(function()))


def test_zeros_of_both_signs_are_not_the_same():
    zeros = np.zeros(3, np.float32), -np.zeros(3, np.float32)
    assert len({key(jax.jit(lambda x, z=z: x * z)) for z in zeros}) == 2


@pytest.mark.parametrize("kind", [jax.custom_jvp, jax.custom_vjp, jax.checkpoint])
def test_what_functions_with_rules_compute_is_in_the_key(kind):
    def of(factor):
        fn = kind(lambda x: jnp.sin(factor * x))
        if kind is jax.custom_jvp:
            fn.defjvp(lambda x, dx: (fn(*x), dx[0]))
        elif kind is jax.custom_vjp:
            fn.defvjp(lambda x: (fn(x), None), lambda _, dx: (dx,))
        return lambda x: fn(x)

    assert key(of(2.0)) == key(of(2.0)) != key(of(3.0))
    assert key(of(2.0)) is not None


def test_shapes_and_types_of_arguments_are_in_the_key():
    keys = [key(lambda x: x, x) for x in (X, X[:2], X.astype(jnp.float16), 1.0, np.float32(1))]
    assert len(set(keys)) == 5


def test_what_cannot_be_compared_has_no_key():
    """A function of Python, a large array, a random key inside."""
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    large, random_key = np.zeros(LARGEST_CONSTANT // 4 + 1, np.float32), jax.random.key(0)
    large_inside = jax.jit(lambda x: x + large[:3] + jnp.asarray(large).sum())
    for fn in (
        lambda x: jax.pure_callback(lambda x: x, shape, x),
        lambda x: jax.jit(lambda x: jax.pure_callback(lambda x: x, shape, x))(x),
        large_inside,
        jax.jit(lambda x: x + jax.random.normal(random_key)),
    ):
        assert key(fn) is None, fn


def test_equal_functions_are_compiled_once(compiled):
    """The second time with other arrays that they close over."""

    def run(table):
        return run_compiled(lambda x: jnp.where(x > 1, x, table @ x * 0.376), X)

    np.testing.assert_allclose(run(jnp.eye(3)), [0, 0.376, 2], rtol=1e-6)
    assert compiled().count("evaluate") == 1
    np.testing.assert_allclose(run(2 * jnp.ones((3, 3))), [2.256, 2.256, 2], rtol=1e-6)
    assert compiled().count("evaluate") == 1


def test_a_derivative_is_that_of_its_own_function():
    """Two functions of equal values whose rules of differentiation differ."""

    def of_slope(slope):
        @jax.custom_jvp
        def fn(x):
            return 2 * x

        fn.defjvp(lambda x, dx: (fn(*x), slope * dx[0]))
        return fn

    for slope in (2.0, 5.0):
        fn = of_slope(slope)
        assert float(run_compiled(fn, 1.0)) == 2
        assert float(jax.grad(lambda x, fn=fn: run_compiled(fn, x))(1.0)) == slope
        assert float(compiled(jax.grad(fn))(1.0)) == slope
