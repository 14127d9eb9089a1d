# SPDX-License-Identifier: Apache-2.0
"""The unrolled cipher against JAX's own, to the bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from numpyro_largecat.ops.unrolled_threefry import encrypt, unrolled_threefry

SHAPES = [(), (1,), (7,), (0,), (3, 2), (600, 129)]
SEEDS = 0, 2**31 + 7


def unrolled(key):
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=unrolled_threefry)


def test_a_block_is_that_of_the_published_cipher() -> None:
    """The vectors of the paper's code, of which the third has the digits of pi."""
    vectors = [
        ([0, 0], [0, 0], [0x6B200159, 0x99BA4EFE]),
        ([0xFFFFFFFF] * 2, [0xFFFFFFFF] * 2, [0x1CB996FC, 0xBB002BE7]),
        ([0x13198A2E, 0x03707344], [0x243F6A88, 0x85A308D3], [0xC4923A9C, 0x483DF7A0]),
    ]
    for key, block, expected in vectors:
        found = encrypt(jnp.array(key, jnp.uint32), *jnp.array(block, jnp.uint32)[:, None])
        assert np.concatenate(found).tolist() == expected


def test_blocks_are_those_of_jax() -> None:
    key = jnp.array([3, 2**31 + 5], jnp.uint32)
    counts = jnp.arange(2**32 - 10, 2**32, dtype=jnp.uint32)
    np.testing.assert_array_equal(
        np.concatenate(encrypt(key, counts[:5], counts[5:])), threefry_2x32(key, counts)
    )


@pytest.mark.parametrize("draw", [jax.random.normal, jax.random.exponential, jax.random.bits])
@pytest.mark.parametrize("seed", SEEDS)
def test_draws_are_those_of_jax_by_both_words(draw, seed) -> None:
    def of_each_shape(key):
        return [draw(key, shape) for shape in SHAPES]

    key = jax.random.key(seed)
    with jax.threefry_partitionable(False):
        expected = jax.jit(of_each_shape)(key)
    for shape, found, drawn in zip(
        SHAPES, jax.jit(of_each_shape)(unrolled(key)), expected, strict=True
    ):
        np.testing.assert_array_equal(found, drawn, err_msg=str(shape))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint64"])
def test_other_widths_are_those_of_jax(dtype, x64) -> None:
    with jax.threefry_partitionable(False):
        expected = jax.random.bits(jax.random.key(0), (5,), dtype)
    found = jax.random.bits(unrolled(jax.random.key(0)), (5,), dtype)
    np.testing.assert_array_equal(found, expected)


def test_keys_are_split_and_folded_in_as_by_jax() -> None:
    key = jax.random.key(7)
    with jax.threefry_partitionable(False):
        parts = jax.random.split(key, 3), jax.random.fold_in(key, 5)
    found = jax.random.split(unrolled(key), 3), jax.random.fold_in(unrolled(key), 5)
    for own, expected in zip(found, parts, strict=True):
        np.testing.assert_array_equal(jax.random.key_data(own), jax.random.key_data(expected))


def test_draws_of_many_keys_are_those_of_each() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    found = jax.jit(jax.vmap(lambda key: jax.random.normal(key, (3,))))(unrolled(keys))
    each = [jax.random.normal(unrolled(key), (3,)) for key in keys]
    np.testing.assert_array_equal(found, np.stack(each))


def test_a_draw_is_no_loop() -> None:
    """XLA fuses what is in none, and reads and writes the numbers once."""
    key = unrolled(jax.random.key(0))
    text = jax.jit(lambda key: jax.random.bits(key, (1000,))).lower(key).as_text()
    assert "while" not in text
