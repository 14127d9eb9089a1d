# SPDX-License-Identifier: Apache-2.0
"""Which rows of which plate a step touches."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_largecat.handlers.plate_facts import plate_facts
from numpyro_largecat.ops.table_rows import merge_repeats


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("indices", "weights", "stored", "position"),
    meta_fields=("size", "full"),
)
@dataclass(frozen=True)
class PlateRows:
    """The rows of one plate this step; M entries, of which some may be padding or repeats."""

    indices: Array  # (M,), row of each entry, valid for reading
    size: int  # number of rows of the whole plate
    full: bool  # whether the entries are all rows in order
    weights: Array | None  # (M,), scale of each entry, if the plate gives its entries their own
    stored: Array  # (M,), distinct rows to read and write; `size` where there is none
    position: Array | None  # (M,), place of each entry in `stored`; None if entry m is stored[m]


@partial(jax.tree_util.register_dataclass, data_fields=("plates", "helpers"), meta_fields=())
@dataclass
class TouchedRows:
    """The rows of all plates this step, by plate name, filled in as a model is run."""

    plates: dict[str, PlateRows] = field(default_factory=dict)
    helpers: dict[str, Array] = field(default_factory=dict)  # values of the plates' helper sites


def rows_of_plate(msg: dict[str, Any]) -> PlateRows:
    """The rows that the message of a plate shows when all handlers have seen it."""
    size, indices, facts = msg["args"][0], msg["value"], plate_facts(msg)
    weights = facts.row_weights
    if facts.is_full or facts.is_distinct:
        return PlateRows(indices, size, facts.is_full, None, indices, None)
    if weights is not None and not facts.repeats:  # padding aside, which has weight 0
        return PlateRows(indices, size, False, weights, jnp.where(weights > 0, indices, size), None)
    valid = (indices >= 0) & (indices < size) if weights is None else weights > 0
    stored, position = merge_repeats(jnp.where(valid, indices, size), size)
    return PlateRows(indices, size, False, weights, stored, position)
