# SPDX-License-Identifier: Apache-2.0
"""Take the rows of a plate that belong to given ids."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import (
    check_ids_or_none,
    check_integers,
    check_shape,
    is_concrete,
    refuse_entries,
)
from numpyro_largecat._conversions import NO_ID, as_ids_or_none
from numpyro_largecat.ops.subsampling import place_among


class KnownIds(NamedTuple):
    """Which ids have a row in a plate, and where."""

    ids: Array  # distinct, sorted, then padding equal to the size of the plate, shape (R,)
    rows: Array | None  # row of each, shape (R,); None if id r has row r


class ReadRows(NamedTuple):
    """The classes of a plate that a model reads by id."""

    known: KnownIds
    row_weights: Array  # (M,), weights of all rows of the plate in prior and KL terms


def reverse_if(is_reversed: Array | None, *arrays: Array) -> tuple[Array, ...]:
    """Arrays in the opposite order of their last axis, if so; None for no."""
    if is_reversed is None:
        return arrays
    return tuple(jnp.where(is_reversed, jnp.flip(a, -1), a) for a in arrays)


def take_rows(
    plate: str,
    size: int,
    num_rows: int,
    known: KnownIds | None,
    values: Array,
    ids: ArrayLike,
    axis: int,
) -> Array:
    """The rows of ``values`` on ``axis`` that belong to ``ids``; 0 for none, NaN if unknown.

    ``known`` is None if the plate holds all its rows in order.

    Raises:
        ValueError: If ``values`` has not ``num_rows`` rows there, an id is out of range, or the
            plate was not given it.
        TypeError: If ``ids`` are not integers.
    """
    shape = np.shape(values)
    wanted = (*shape[:axis], num_rows, *shape[axis + 1 :])
    check_shape("`values`", values, wanted, f"the rows of plate '{plate}' on axis {axis}")
    check_integers("ids", ids)
    check_ids_or_none("`ids`", ids, size, f"rows of plate '{plate}'")
    if known is not None and is_concrete(ids) and is_concrete(known.ids):
        own = np.asarray(ids)
        unknown = (own != NO_ID) & ~np.isin(own, np.asarray(known.ids))
        need = f"among the ids that plate '{plate}' was given, `ids` or `reads`"
        refuse_entries("`ids`", own, unknown, need)
    return _take(values, known, as_ids_or_none(ids), size, axis)


@partial(jax.jit, static_argnames=("size", "axis"))
def _take(values: Array, known: KnownIds | None, ids: Array, size: int, axis: int) -> Array:
    num_rows = values.shape[axis]
    if known is None:
        row = jnp.where((ids >= 0) & (ids < num_rows), ids, num_rows)
    else:
        place = jnp.minimum(place_among(ids, known.ids), known.ids.shape[0] - 1)
        is_known = (known.ids[place] == ids) & (ids < size)
        row = place if known.rows is None else known.rows[place]
        row = jnp.where(is_known, row, num_rows)
    rows = jnp.take(values, row, axis=axis, mode="fill")
    is_none = (ids == NO_ID).reshape(ids.shape + (1,) * (values.ndim - axis - 1))
    return jnp.where(is_none, jnp.zeros((), rows.dtype), rows)
