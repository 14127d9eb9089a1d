# SPDX-License-Identifier: Apache-2.0
"""The classes of a plate that a model reads by id, as the items of a history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_ids_or_none, check_integers
from numpyro_largecat._conversions import as_ids_or_none
from numpyro_largecat.ops.subsampling import place_among, sorted_distinct
from numpyro_largecat.plates.class_subset import ClassSubset
from numpyro_largecat.plates.rows_by_id import KnownIds, ReadRows, reverse_if


def checked_reads(plate: str, reads: ArrayLike | Sequence[ArrayLike], num_categories: int) -> Array:
    """All ids that are read, as one axis; those that int32 cannot hold become out of range.

    Raises:
        ValueError: If an id is neither a class nor -1, or there are none; tracers pass.
        TypeError: If ids are not integers.
    """
    own: list[Any] = list(reads) if isinstance(reads, (tuple, list)) else [reads]
    for given in own:
        check_integers("reads", given)
        check_ids_or_none(f"`reads` of plate '{plate}'", given, num_categories, "classes")
    flat = [as_ids_or_none(given).ravel() for given in own]
    if sum(given.size for given in flat) == 0:
        raise ValueError(f"`reads` of plate '{plate}' must not be empty.")
    return jnp.concatenate(flat)


def with_read_rows(
    classes: ClassSubset, reads: Array, *, is_reversed: Array | None = None
) -> ClassSubset:
    r"""Let a plate that holds some of the classes also hold those that a model reads by id.

    What is read has weight 1 in prior and KL terms, as labels have, and then a class that was drawn
    stands for others only if it is not read: with labels L, reads R and drawn classes d,

    .. math::
        \sum_{k=1}^K f(k) = \sum_{k \in L \cup R} f(k) + E\Big[
            \sum_s w_s \, [d_s \notin R] \, f(d_s)\Big].

    In the likelihood of a choice nothing changes: what is only read is no alternative there. A
    class that is both read and a label, or drawn, has one row. A chunk of classes, which stand for
    no others, has rows of its own for what is read, of weight 0, so that chunks add up.

    The rows of what is only read come last, by id; ``is_reversed`` in the opposite order.
    """
    is_chunk = classes.kind == "chunk"
    indices, known, row_weights = _with_read_rows(
        classes.indices, classes.weights, reads, is_reversed, classes.num_categories, is_chunk
    )
    return replace(classes, indices=indices, reads=ReadRows(known, row_weights))


@partial(jax.jit, static_argnums=(4, 5))
def _with_read_rows(
    indices: Array,
    weights: Array,
    reads: Array,
    is_reversed: Array | None,
    num_categories: int,
    is_chunk: bool,
) -> tuple[Array, KnownIds, Array]:
    """Rows of the plate, where those of read classes are, and all weights."""
    ids = sorted_distinct(reads, num_categories)[:num_categories]
    num_scored = indices.shape[0]
    own_rows = num_scored + jnp.arange(ids.shape[0], dtype=jnp.int32)
    own_rows, own_ids = reverse_if(is_reversed, own_rows, jnp.minimum(ids, num_categories - 1))
    all_indices = jnp.concatenate([indices, own_ids])
    if is_chunk:
        row_weights = jnp.concatenate([weights, jnp.zeros(ids.shape, weights.dtype)])
        return all_indices, KnownIds(ids, own_rows), row_weights
    present = jnp.where(weights > 0, indices, num_categories)  # padding has no class
    order = jnp.argsort(present).astype(jnp.int32)
    place = jnp.minimum(place_among(ids, present[order]), num_scored - 1)
    is_class = ids < num_categories
    is_scored = is_class & (present[order][place] == ids)
    rows = jnp.where(is_scored, order[place], own_rows)
    is_read = jnp.zeros(num_scored, bool).at[rows].set(is_scored, mode="drop")
    own_weights = (is_class & ~is_scored).astype(weights.dtype)
    (own_weights,) = reverse_if(is_reversed, own_weights)
    row_weights = jnp.concatenate([jnp.where(is_read, 1, weights), own_weights])
    return all_indices, KnownIds(ids, rows), row_weights
