# SPDX-License-Identifier: Apache-2.0
"""Sparse responsibilities, their sums by component, and what they cost."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp, softmax

import numpyro_largecat as lc
from numpyro_largecat.mixtures.local_step import (
    DENSE_SHARE,
    BatchSums,
    Globals,
    chunk_rows,
    log_weights_of,
    sparse_step,
    sum_batch,
)
from numpyro_largecat.mixtures.row_stream import padded
from numpyro_largecat.ops.grouped_sums import BLOCK_ROWS, grouped_sums
from numpyro_largecat.ops.top_l import top_l
from tests.memory import temp_bytes
from tests.mixtures.cases import CASES, one_hot
from tests.reference_mixtures import sparse_responsibilities

FAMILY = lc.mixtures.DiagonalGaussianFamily(np.zeros(2), np.ones(2))


def random_globals(num_components: int, num_features: int, dtype: Any = float) -> Globals:
    """Expectations of any size; only the local step looks at them."""
    random = np.random.default_rng(3)
    return Globals(
        jnp.asarray(random.normal(size=(num_components, num_features)), dtype),
        jnp.asarray(random.normal(size=num_components), dtype),
    )


def test_sums_of_many_rows_lose_no_more_than_those_of_a_few() -> None:
    """Of all in one batch, in float32; added one by one the error would be above 1e-4."""
    x = np.random.default_rng(0).normal(2, 1, size=(400_000, 2)).astype(np.float32)
    rows, is_row = padded(x, np.dtype(np.float32), chunk_rows(len(x), 5, 1))
    parameters = random_globals(1, 5, np.float32)
    chunk = chunk_rows(len(x), 5, 1)
    found = sum_batch(FAMILY, rows, is_row, parameters, num_active=1, chunk=chunk)
    exact = np.concatenate([[len(x)], x.sum(0, dtype=float), (x.astype(float) ** 2).sum(0)])
    np.testing.assert_allclose(found.statistics[0], exact, rtol=1e-6)


@pytest.mark.parametrize("num_active", [1, 2, 3, 8, 40])
@pytest.mark.usefixtures("x64")
@pytest.mark.some_cases(2)
def test_summary_is_that_of_loops(num_active: int) -> None:
    """Sums for each component, bounds and entropies, whichever way they are summed."""
    num_components = 40
    x = np.random.default_rng(0).normal(size=(300, 2))
    parameters = random_globals(num_components, 5)
    rows, is_row = padded(x, np.dtype(float), 128)
    found = sum_batch(FAMILY, rows, is_row, parameters, num_active=num_active, chunk=128)
    features = np.concatenate([np.ones((300, 1)), x, x**2], 1)
    w = features @ parameters.expectations.T + parameters.log_weights
    r = sparse_responsibilities(np.asarray(w), num_active)
    np.testing.assert_allclose(found.counts, r.sum(0), atol=1e-10)
    np.testing.assert_allclose(found.statistics, r.T @ features, atol=1e-10)
    log_r = np.log(np.where(r > 0, r, 1))
    np.testing.assert_allclose(found.entropies.sum(), -(r * log_r).sum())
    np.testing.assert_allclose(found.bounds.sum(), (r * (w - log_r)).sum())
    np.testing.assert_allclose(found.log_bases.sum(), -300 * np.log(2 * np.pi))


def test_both_ways_to_sum_are_tested() -> None:
    """At 40 components, L = 3 sorts and L = 8 does not."""
    assert DENSE_SHARE * 3 < 40 <= DENSE_SHARE * 8


def test_the_bound_increases_with_the_number_of_active_components() -> None:
    """At fixed globals, and at L = K it is that of the dense mixture."""
    w = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)
    steps = jax.jit(lambda w: [sparse_step(w, num_active) for num_active in range(1, 8)])(w)
    bounds = np.stack([bound for _, bound in steps])
    assert (np.diff(bounds, axis=0) > 0).all()
    np.testing.assert_allclose(bounds[-1], logsumexp(w, axis=1), rtol=1e-6)
    np.testing.assert_allclose(steps[-1][0].probs, softmax(w, axis=1), rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("x64")
@pytest.mark.some_cases(2)
def test_statistics_are_the_derivative_of_the_bound(name: str) -> None:
    """So prior + d bound / d E[t] is the new natural parameter: a natural gradient of step 1."""
    family, _, x = CASES[name]
    r, ones = one_hot(len(x), 5), jnp.ones(len(x))

    @jax.jit
    def both(rows: Any) -> tuple[Globals, BatchSums]:
        natural = family.prior() + r.T @ family.features(rows)
        expectations = jax.vmap(jax.grad(family.log_normalizer))(natural)
        parameters = Globals(expectations, jnp.log(jnp.arange(1.0, 6)))

        def bound(parameters: Globals) -> Any:
            return sparse_step(log_weights_of(family, rows, parameters), 2)[1].sum()

        found = sum_batch(family, rows, ones, parameters, num_active=2, chunk=len(x))
        return jax.grad(bound)(parameters), found

    slopes, found = both(jnp.asarray(x))
    np.testing.assert_allclose(found.statistics, slopes.expectations, atol=1e-9)
    np.testing.assert_allclose(found.counts, slopes.log_weights, atol=1e-9)


@pytest.mark.parametrize("num_rows", [1, 127, 129, 700])
@pytest.mark.usefixtures("x64")
def test_grouped_sums_of_uneven_groups(num_rows: int) -> None:
    """Empty groups, full blocks, and a group with nearly all rows."""
    random = np.random.default_rng(num_rows)
    groups = random.choice(6, size=(num_rows, 2), p=[0, 0.9, 0.03, 0, 0.07, 0])
    weights, x = random.uniform(size=(num_rows, 2)), random.normal(size=(num_rows, 3))
    sums = jax.jit(lambda *parts: grouped_sums(*parts, 6, lambda rows, w: w @ rows))
    found = sums(x, groups, weights)
    wanted = np.zeros((6, 3))
    for n in range(num_rows):
        for place in range(2):
            wanted[groups[n, place]] += weights[n, place] * x[n]
    np.testing.assert_allclose(found, wanted, atol=1e-10)
    assert num_rows < BLOCK_ROWS or (groups == 1).sum() > BLOCK_ROWS


def test_top_l_orders_and_breaks_ties() -> None:
    indices, values = top_l(jnp.array([[1.0, 3, 3, 0], [5, 1, 2, 4]]), 2)
    assert indices.tolist() == [[1, 2], [0, 3]]
    assert values.tolist() == [[3, 3], [5, 4]]
    assert indices.dtype == jnp.int32


def lowered_bytes(num_rows: int, num_components: int, size: int, num_active: int) -> int:
    """Scratch memory of the local step and summary with full covariances."""
    family = lc.mixtures.ZeroMeanGaussianFamily(np.eye(size))
    num_features = 1 + size * (size + 1) // 2
    chunk = chunk_rows(num_rows, num_features, num_components)
    shape = jax.ShapeDtypeStruct
    arguments = (
        shape((num_rows, size), jnp.float32),
        shape((num_rows,), jnp.float32),
        Globals(
            shape((num_components, num_features), jnp.float32),
            shape((num_components,), jnp.float32),
        ),
    )
    return temp_bytes(
        lambda x, is_row, parameters: sum_batch(
            family, x, is_row, parameters, num_active=num_active, chunk=chunk
        ),
        *arguments,
    )


@pytest.mark.parametrize("num_active", [4, 800])
def test_memory_has_no_array_of_rows_by_components_or_features(num_active: int) -> None:
    """For 2^18 rows, K = 800 and D = 32 scratch is a part of N K, and grows by O(L) per row."""
    num_rows, num_components, size = 2**18, 800, 32
    small = lowered_bytes(num_rows, num_components, size, num_active)
    large = lowered_bytes(2 * num_rows, num_components, size, num_active)
    assert small < 4 * num_rows * num_components / 4
    per_row = (large - small) / num_rows
    assert per_row < 4 * (12 * 4 + size + 16)  # of indices, weights and order; N K would be 3,200


def test_chunks_are_few_in_shape_and_bounded() -> None:
    """Powers of two, no larger than the batch needs, and within the room for entries."""
    assert [chunk_rows(n, 5, 10) for n in (1, 2, 3, 1000)] == [1, 2, 4, 1024]
    for num_components in (1, 200, 10**4, 10**7):
        chunk = chunk_rows(10**6, 2081, num_components)
        assert chunk & (chunk - 1) == 0
        assert chunk == 8 or chunk * (2081 + num_components) <= 2**22


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_full_covariances_in_float32_at_a_large_offset(offset: float) -> None:
    """With ``loc`` among the data, log weights are as right as without the offset."""
    random = np.random.default_rng(5)
    x = (offset + random.normal(size=(200, 3)) @ np.diag([1, 0.1, 3])).astype(np.float32)
    family = lc.mixtures.GaussianFamily(np.full(3, offset), np.eye(3))

    @jax.jit
    def in_double(rows: Any) -> Any:
        natural = family.prior() + family.features(rows).sum(0)[None]
        expectations = jax.vmap(jax.grad(family.log_normalizer))(natural)
        return expectations, log_weights_of(family, rows, Globals(expectations, jnp.zeros(1)))

    with jax.enable_x64(True):
        expectations, exact = map(np.asarray, in_double(jnp.asarray(x, jnp.float64)))
    parameters = Globals(jnp.asarray(expectations, jnp.float32), jnp.zeros(1))
    found = log_weights_of(family, jnp.asarray(x), parameters)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5)
