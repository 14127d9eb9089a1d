# SPDX-License-Identifier: Apache-2.0
"""Sparse responsibilities of rows, and their sums for each component."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from numpyro_largecat.mixtures.conjugate_family import ConjugateFamily
from numpyro_largecat.ops.grouped_sums import grouped_sums
from numpyro_largecat.ops.long_sums import LongSums
from numpyro_largecat.ops.rows_by_device import sums_by_device, total
from numpyro_largecat.ops.top_l import take_last, top_l

CHUNK_ENTRIES = 2**22  # features and log weights that are held at once
CHUNK_ROWS = 2**10  # at most, since a sum of many rows loses what each of them adds
DENSE_SHARE = 8  # from L = K / 8 on, a product with all K components sums faster than a sort


class Globals(NamedTuple):
    """What the local step needs of the posterior of all components."""

    expectations: Array  # (K, P), of t(theta)
    log_weights: Array  # (K,), expected log mixing weights


class BatchSums(NamedTuple):
    """Sums over the rows of a batch."""

    counts: Array  # (K,), N_k
    statistics: Array  # (K, P), weighted sums of features
    bounds: Array  # (chunks,), of log sum of the L largest weights
    entropies: Array  # (chunks,), of the responsibilities
    log_bases: Array  # (chunks,)


class Responsibilities(NamedTuple):
    """The L components of each row that carry mass."""

    indices: Array  # (N, L), components
    probs: Array  # (N, L), summing to one


def log_weights_of(family: ConjugateFamily, x: Array, parameters: Globals) -> Array:
    """W of Eq. 5 without the base measure, (B, K): one product with the features."""
    return _products(family.features(x), parameters)


def _products(features: Array, parameters: Globals) -> Array:
    products = jnp.matmul(features, parameters.expectations.T, precision="highest")
    return products + parameters.log_weights


def sparse_step(log_weights: Array, num_active: int) -> tuple[Responsibilities, Array]:
    """The best L-sparse responsibilities, Eq. 8, and the bound that they reach, (B,)."""
    if num_active == log_weights.shape[-1]:
        indices = jnp.broadcast_to(jnp.arange(num_active, dtype=jnp.int32), log_weights.shape)
        values = log_weights
    else:
        indices, _ = top_l(log_weights, num_active)
        values = take_last(log_weights, indices)
    bound = jax.nn.logsumexp(values, axis=-1)
    return Responsibilities(indices, jnp.exp(values - bound[..., None])), bound


def chunk_rows(num_rows: int, num_features: int, num_components: int) -> int:
    """Rows that are treated at once: a power of two, so that few programs are compiled."""
    room = max(8, min(CHUNK_ROWS, CHUNK_ENTRIES // (num_features + num_components)))
    return min(2 ** (room.bit_length() - 1), 2 ** (max(num_rows, 1) - 1).bit_length())


@partial(jax.jit, static_argnames=("num_active", "chunk", "mesh"))
def sum_batch(
    family: ConjugateFamily,
    x: Array,
    is_row: Array,
    parameters: Globals,
    *,
    num_active: int,
    chunk: int,
    mesh: Mesh | None = None,
) -> BatchSums:
    """Local step of a batch and its sums, Eqs. 5, 7 and 8; rows with ``is_row`` = 0 are padding.

    Over a mesh each device takes its own rows, and O(K P) numbers are summed.

    Cost: O(N K P) for the weights, one product of matrices; O(N L P) for the sums, or O(N K P) if L
    is K / 8 or more. Scratch memory: O(chunk (P + K) + K P + N L); nothing of size N K or N P.
    """
    of_rows = partial(_sum_rows, num_active=num_active, chunk=chunk)
    sums: BatchSums = total(sums_by_device(of_rows, mesh)((family, parameters), (x, is_row)))
    return sums


def _sum_rows(
    shared: tuple[ConjugateFamily, Globals],
    batch: tuple[Array, Array],
    *,
    num_active: int,
    chunk: int,
) -> BatchSums:
    """The sums of the rows of one device: ``batch`` has them, and which of them are rows."""
    (family, parameters), (x, is_row) = shared, batch
    num_components = parameters.log_weights.shape[0]
    parts = (x.reshape(-1, chunk, *x.shape[1:]), is_row.reshape(-1, chunk))

    def local_step(part: tuple[Array, Array]) -> tuple[Array, Responsibilities, Array]:
        rows, is_row = part
        features = family.features(rows)
        sparse, bound = sparse_step(_products(features, parameters), num_active)
        entropy = -jax.scipy.special.xlogy(sparse.probs, sparse.probs).sum(-1)
        sums = (jnp.stack([bound, entropy, family.log_base(rows)]) * is_row).sum(-1)
        return features, sparse._replace(probs=sparse.probs * is_row[:, None]), sums

    def add(totals: LongSums, part: tuple[Array, Array]) -> tuple[LongSums, Array]:
        features, sparse, sums = local_step(part)
        weights = _spread(sparse, num_components)
        products = jnp.matmul(weights.T, features, precision="highest")
        return totals.add((weights.sum(0), products)), sums

    if DENSE_SHARE * num_active >= num_components:
        zeros = jnp.zeros_like(parameters.log_weights), jnp.zeros_like(parameters.expectations)
        totals, sums = lax.scan(add, LongSums.of(zeros), parts)
        return BatchSums(*totals.sums, *sums.T)
    sparse, sums = lax.map(lambda part: local_step(part)[1:], parts)
    counts, statistics = grouped_sums(
        x,
        sparse.indices.reshape(-1, num_active),
        sparse.probs.reshape(-1, num_active),
        num_components,
        lambda rows, weights: (weights.sum(), family.weighted_sum(rows, weights)),
    )
    return BatchSums(counts, statistics, *sums.T)


def _spread(sparse: Responsibilities, num_components: int) -> Array:
    """Responsibilities in all K components, (B, K)."""
    if sparse.probs.shape[1] == num_components:
        return sparse.probs
    rows = jnp.arange(len(sparse.probs))[:, None]
    zeros = jnp.zeros((len(sparse.probs), num_components), sparse.probs.dtype)
    return zeros.at[rows, sparse.indices].set(sparse.probs, unique_indices=True)
