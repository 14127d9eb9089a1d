# SPDX-License-Identifier: Apache-2.0
"""Log weights of mixture components for observations: of all components, or of chosen ones."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax

from numpyro_largecat.ops.pair_blocks import pair_blocks
from numpyro_largecat.ops.row_chunks import map_rows
from numpyro_largecat.ops.top_l import largest
from numpyro_largecat.top_l.replace_parameters import cannot_take, replace_parameters

MAX_ENTRIES = 2**22  # of one array of log densities with their events, at once
MATRIX_ENTRIES = 256  # of a parameter for one component, from which on it is gathered by blocks
MAX_BLOCK = 128  # places in a block


class Components:
    """K distributions with batch shape (..., K), any of which can be taken for any observation.

    Args:
        distribution: The components, on the last axis of the batch shape.
        shape: Shape of the observations, with which the batch axes before the last one broadcast.

    Raises:
        NotImplementedError: As ``replace_parameters``.
    """

    def __init__(self, distribution: dist.Distribution, shape: tuple[int, ...]) -> None:
        self.distribution = distribution
        self.shape = shape
        self.num_components = distribution.batch_shape[-1]
        self.parameters: list[tuple[tuple[int, ...], int]] = []  # rows of each, entries of an event

        def note(array: Array, event_dim: int) -> Array:
            rows, last, event = _axes(jnp.shape(array), event_dim)
            if not _is_within((*rows, last), distribution.batch_shape):
                raise cannot_take(distribution, f"a parameter of shape {jnp.shape(array)}")
            self.parameters.append((rows, math.prod(event)))
            return array

        replace_parameters(distribution, note, distribution.batch_shape)

    def all_of(self, observations: Array) -> dist.Distribution:
        """All components for ``observations`` (A,), by their ids: batch shape (A, K)."""

        def take(array: Array, event_dim: int) -> Array:
            if _is_common(array, event_dim):
                return array
            table, row = self._table(array, event_dim, observations)
            return table if row is None else table[row]

        return replace_parameters(
            self.distribution, take, (*observations.shape, self.num_components)
        )

    def take(
        self, observations: Array, components: Array, shared_rows: tuple[int, ...] | None = None
    ) -> dist.Distribution:
        """Components (A, B) or (A, 1) for ``observations`` (A, B): batch shape (A, B).

        Args:
            observations: Ids of observations.
            components: Ids of components.
            shared_rows: A shape of rows of parameters that are the same in the places of each A:
                what has one value for each of these rows is gathered once for each A.
        """

        def take(array: Array, event_dim: int) -> Array:
            if _is_common(array, event_dim):
                return array
            outer = _axes(jnp.shape(array), event_dim)[0]
            shares = shared_rows is not None and _is_within(outer, shared_rows)
            own = observations[:, :1] if shares else observations
            table, row = self._table(array, event_dim, own)
            if table.shape[1] == 1:
                return table if row is None else table[row, 0]
            return table[0, components] if row is None else table[row, components]

        return replace_parameters(self.distribution, take, observations.shape)

    def entries(self, table: Array, observations: Array, components: Array | None) -> Array:
        """Entries of ``table`` (..., K) for ``observations``, of all or some components."""
        table, row = self._table(table, 0, observations)
        if components is None:
            return table if row is None else table[row]
        return table[0, components] if row is None else table[row, components]

    def draw(self, rng_key: Array, chosen: Array) -> Array:
        """Draw from the component of each observation, shape (N, *event_shape), by chunks."""
        if not chosen.size:
            one = jax.eval_shape(self.distribution.sample, rng_key)
            return jnp.zeros((0, *self.distribution.event_shape), one.dtype)
        entries = max([math.prod(self.distribution.event_shape), *(n for _, n in self.parameters)])
        size = max(1, MAX_ENTRIES // max(1, entries))

        def draws(observations: Array) -> Array:
            key = jax.random.fold_in(rng_key, observations[0])
            own = chosen[observations][:, None]
            return self.take(observations[:, None], own).sample(key)[:, 0]

        return map_rows(draws, chosen.shape[0], size)

    def _table(self, array: Any, event_dim: int, observations: Array) -> tuple[Array, Array | None]:
        """Array as (C, 1 or K, *event), and its row for each observation; None if C is 1."""
        outer, last, event = _axes(jnp.shape(array), event_dim)
        num_rows = math.prod(outer)
        table = jnp.asarray(array).reshape(num_rows, last, *event)
        return table, None if num_rows == 1 else self.row_in(outer, observations)

    def row_in(self, outer: tuple[int, ...], observations: Array) -> Array:
        """Row-major place of each observation in axes of shape ``outer``, which broadcast."""
        if outer == self.shape:
            return observations
        place = jnp.zeros_like(observations)
        coordinates = jnp.unravel_index(observations, self.shape)
        for size, coordinate in zip(
            outer, coordinates[len(self.shape) - len(outer) :], strict=True
        ):
            place = place * size + (coordinate if size > 1 else 0)
        return place.astype(observations.dtype)


class ComponentWeights:
    r"""Log weights W_nk = log pi_k + log F(x_n | phi_k) of N observations and K components.

    Args:
        mixing: Log probabilities of the components, shape (..., K), which broadcast with the
            shape of the observations.
        components: The components.
        values: Observations, shape (N, *event_shape).
    """

    def __init__(self, mixing: Array, components: Components, values: Array) -> None:
        self.mixing = mixing
        self.components = components
        self.values = values
        self.num_observations = values.shape[0]
        self.event_size = math.prod(values.shape[1:])

    def best(self, num_active: int) -> Array:
        """Components of the ``num_active`` largest log weights, shape (N, L), without gradients."""
        constant = self.without_gradients()

        def select(observations: Array) -> Array:
            return largest(constant.of(observations), num_active)

        if not self.num_observations:
            return jnp.zeros((0, num_active), jnp.int32)
        return map_rows(select, self.num_observations, self._chunk_of_all())

    def all(self) -> Array:
        """Log weights of all components, shape (N, K)."""
        if not self.num_observations:
            return jnp.zeros((0, self.components.num_components), self.mixing.dtype)
        return map_rows(self.of, self.num_observations, self._chunk_of_all())

    def at(self, components: Array) -> Array:
        """Log weights of the components (N, L), shape (N, L)."""
        if not self.num_observations:
            return jnp.zeros(components.shape, self.mixing.dtype)

        def weights(observations: Array) -> Array:
            chosen = components[observations]
            log_pi = self.components.entries(self.mixing, observations[:, None], chosen)
            return log_pi + self._log_density(observations, chosen)

        gathered = [size for rows, size in self._parameters() if rows > 1 or size < MATRIX_ENTRIES]
        return map_rows(weights, self.num_observations, self._chunk(components.shape[1], gathered))

    def without_gradients(self) -> ComponentWeights:
        """The same numbers, constant for the gradient."""
        mixing, distribution, values = jax.tree.map(
            lax.stop_gradient, (self.mixing, self.components.distribution, self.values)
        )
        return ComponentWeights(mixing, Components(distribution, self.components.shape), values)

    def of(self, observations: Array) -> Array:
        """Log weights of all components for ``observations`` (A,), shape (A, K)."""
        values = self.values[observations][:, None]
        log_density = self.components.all_of(observations).log_prob(values)
        return self.components.entries(self.mixing, observations, None) + log_density

    def _parameters(self) -> list[tuple[int, int]]:
        """Number of rows of each parameter, and its entries for one component."""
        return [(math.prod(rows), size) for rows, size in self.components.parameters]

    def _chunk_of_all(self) -> int:
        own = [size for rows, size in self._parameters() if rows > 1]
        return self._chunk(self.components.num_components, own)

    def _chunk(self, num_components: int, gathered: list[int]) -> int:
        """Number of observations whose values and gathered parameters have MAX_ENTRIES entries."""
        return max(1, MAX_ENTRIES // (num_components * max(1, self.event_size, *gathered)))

    def _log_density(self, observations: Array, chosen: Array) -> Array:
        """Log density of ``observations`` (A,) under the components (A, L)."""
        shared = self._rows_of_matrices()
        if shared is not None:
            num_groups = math.prod(shared) * self.components.num_components
            size = _block_size(chosen.size, num_groups)
            if size > 1:
                return self._by_blocks(observations, chosen, shared, num_groups, size)
        pairs = jnp.broadcast_to(observations[:, None], chosen.shape)
        distribution = self.components.take(pairs, chosen)
        log_density = distribution.log_prob(self.values[observations][:, None])
        return jnp.broadcast_to(log_density, chosen.shape)

    def _rows_of_matrices(self) -> tuple[int, ...] | None:
        """Broadcast shape of the rows of large parameters; None if there are none."""
        large = [rows for rows, size in self.components.parameters if size >= MATRIX_ENTRIES]
        return jnp.broadcast_shapes(*large) if large else None

    def _by_blocks(
        self,
        observations: Array,
        chosen: Array,
        shared: tuple[int, ...],
        num_groups: int,
        size: int,
    ) -> Array:
        observations = jnp.broadcast_to(observations[:, None], chosen.shape).reshape(-1)
        ids = chosen.reshape(-1)
        rows = self.components.row_in(shared, observations)
        groups = rows * self.components.num_components + ids
        blocks = pair_blocks(groups, num_groups, size)
        in_block = observations[blocks.pairs]
        distribution = self.components.take(in_block, ids[blocks.pairs][:, :1], shared)
        log_density = distribution.log_prob(self.values[in_block])
        log_density = jnp.broadcast_to(log_density, in_block.shape)
        return log_density.reshape(-1)[blocks.places].reshape(chosen.shape)


def _axes(shape: tuple[int, ...], event_dim: int) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Axes before that of the components, its length, and those of an event."""
    cut = max(0, len(shape) - event_dim)
    batch = shape[:cut] or (1,)
    return batch[:-1], batch[-1], shape[cut:]


def _is_common(array: Array, event_dim: int) -> bool:
    """Whether a parameter is the same for all observations and components."""
    outer, last, _ = _axes(jnp.shape(array), event_dim)
    return last * math.prod(outer) == 1


def _is_within(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether ``shape`` broadcasts to ``other``."""
    padded = (1,) * (len(shape) - len(other)) + other
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(padded), strict=False))


def _block_size(num_pairs: int, num_groups: int) -> int:
    """Power of two near half the number of pairs in a group, so that few places are left over."""
    mean = num_pairs / num_groups
    return min(MAX_BLOCK, 2 ** max(0, math.floor(math.log2(mean / 2)))) if mean >= 2 else 1
