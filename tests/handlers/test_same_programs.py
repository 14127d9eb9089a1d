# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

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


def test_constants_and_arguments_are_told_apart():
    """Both are inputs of a program, but for JAX two kinds of them."""
    a, b = jnp.ones(3), jnp.full(3, 2.0)
    np.testing.assert_array_equal(run_compiled(lambda: a * 7 + b), 9)
    np.testing.assert_array_equal(run_compiled(lambda x: a * 7 + x, b), 9)


def test_a_function_that_is_there_many_times_is_looked_at_once():
    """2 to the power of 40 times here."""
    fn = jax.jit(jnp.sin)
    for _ in range(40):
        fn = jax.jit(lambda x, fn=fn: fn(x) + fn(2 * x))
    assert key(fn) is not None


def test_parameters_that_are_not_of_jax_are_not_compared():
    """Equal ones of another library may say other things."""

    class Always:
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

    primitive = Primitive("of_another_library")
    primitive.def_abstract_eval(lambda x, by: x)
    assert key(lambda x: primitive.bind(x, by=1)) is not None
    assert key(lambda x: primitive.bind(x, by=Always())) is None


def test_programs_keep_no_array_that_was_closed_over():
    def run():
        table = jnp.ones(54_321)
        return run_compiled(lambda x: x + table.sum(), 1.0)

    assert run() == 54_322
    gc.collect()
    assert not [array for array in jax.live_arrays() if array.shape == (54_321,)]


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

    programs = [compiled(of_slope(slope)) for slope in (2.0, 5.0)]
    assert [float(program(1.0)) for program in programs] == [2, 2]
    assert [float(jax.grad(program)(1.0)) for program in programs] == [2, 5]
    for slope in (2.0, 5.0):
        fn = of_slope(slope)
        assert float(run_compiled(fn, 1.0)) == 2
        assert float(jax.grad(lambda x, fn=fn: run_compiled(fn, x))(1.0)) == slope
        assert float(compiled(jax.grad(fn))(1.0)) == slope
