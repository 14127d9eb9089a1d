# SPDX-License-Identifier: Apache-2.0
"""The entities that exist this step, and how often the observations read each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat.ops.subsampling import place_among, sorted_distinct
from numpyro_largecat.plates.entity_counts import EntityCounts
from numpyro_largecat.plates.rows_by_id import KnownIds, reverse_if, take_rows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("indices", "weights", "known"),
    meta_fields=("name", "size", "is_chosen"),
)
@dataclass(frozen=True)
class EntitySubset:
    """The entities that exist this step, as ``with lc.entity_plate(...) as users`` gives them.

    Attributes:
        indices: Entity of each row of the plate, shape (M,), integers in [0, U). Use it to gather
            features of the entities.
        weights: Weight of each row in prior and KL terms, shape (M,). A padded row has weight 0.
        known: The distinct ids, sorted, then padding equal to U, shape (M,), and their rows. None
            for all entities, and for rows that a handler chose.
        name: Name of the plate.
        size: Number of entities U.
        is_chosen: Whether a handler chose the rows, which stand for no others.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> lc.entity_plate("users", 3).entities.indices.tolist()
        [0, 1, 2]
    """

    indices: Array
    weights: Array
    known: KnownIds | None
    name: str
    size: int
    is_chosen: bool = False

    def rows_of(self, values: Array, ids: ArrayLike, axis: int = 0) -> Array:
        """The rows of ``values`` that belong to ``ids``, in training as in prediction.

        Where an id is -1 the row is 0.

        Shapes: (M, ...) and ids of any shape (...,) to (..., ...).

        Cost: O(size of the result), and O(log M) for each id.

        Args:
            values: Values with the rows of the plate on ``axis``, as a site inside it has them.
            ids: Entities, which must be among those that the plate was given.
            axis: Axis of ``values`` that has the rows of the plate, 0 or above.

        Raises:
            ValueError: If ``values`` has not M rows on ``axis``, or if an id is out of range or was
                not given to the plate. (Under ``jit``, where ids are not known, its row is NaN.)
            TypeError: If ``ids`` are not integers.
            NotImplementedError: If a handler chose the rows.

        Example:
            >>> import jax.numpy as jnp
            >>> import numpyro_largecat as lc
            >>> users = lc.entity_plate("users", 3).entities
            >>> users.rows_of(jnp.array([0.5, 1.5, 2.5]), jnp.array([[2, -1], [0, 2]])).tolist()
            [[2.5, 0.0], [0.5, 2.5]]
        """
        if self.is_chosen:
            raise NotImplementedError(
                f"plate '{self.name}' holds rows that a handler chose, not those of `ids`."
            )
        num_rows = self.indices.shape[0]
        return take_rows(self.name, self.size, num_rows, self.known, values, ids, axis)

    def reversed_if(self, is_reversed: Array | None) -> EntitySubset:
        """The same entities, the last first if so."""
        if is_reversed is None or self.known is None:
            return self
        rows = jnp.arange(self.indices.shape[0])
        indices, weights, rows = reverse_if(is_reversed, self.indices, self.weights, rows)
        return replace(self, indices=indices, weights=weights, known=KnownIds(self.known.ids, rows))


def entities_of_ids(
    name: str, size: int, ids: Sequence[Array], counts: EntityCounts, also: Array | None
) -> EntitySubset:
    """The distinct entities of arrays of ids, and those of ``also``, which are only read.

    Their weights are (N / B) c / n, see ``entity_plate``; NaN for one that is in no count.
    """
    indices, weights, known = _entities(size, ids, counts, also)
    return EntitySubset(indices, weights, KnownIds(known, None), name, size)


@partial(jax.jit, static_argnames="size")
def _entities(
    size: int, ids: Sequence[Array], counts: EntityCounts, also: Array | None
) -> tuple[Array, Array, Array]:
    """Rows, weights and distinct ids."""
    flat = jnp.concatenate([given.ravel() for given in ids])
    asked = flat if also is None else jnp.concatenate([flat, also])
    known = sorted_distinct(asked, size)[:size]
    indices = jnp.minimum(known, size - 1)
    ordered = jnp.sort(flat)
    in_batch = place_among(known + 1, ordered) - place_among(known, ordered)
    in_all = counts.counts[indices].astype(jnp.result_type(float))
    share = jnp.where(in_all > 0, in_batch / jnp.maximum(in_all, 1), jnp.nan)
    share = jnp.where((known < size) & (in_batch > 0), share, 0.0)
    return indices, share * (counts.num_ids / flat.shape[0]), known


def all_entities(name: str, size: int) -> EntitySubset:
    """All entities in order."""
    indices = jnp.arange(size, dtype=jnp.int32)
    return EntitySubset(indices, jnp.ones(size), None, name, size)


def chosen_entities(name: str, size: int, rows: Array) -> EntitySubset:
    """The entities that a handler chose, which stand for no others."""
    return EntitySubset(rows, jnp.ones(rows.shape), None, name, size, is_chosen=True)
