# SPDX-License-Identifier: Apache-2.0
"""The rows of the data that exist this step, and checks of their ids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import (
    check_in_range,
    check_integers,
    check_kind,
    check_shape,
    is_concrete,
)
from numpyro_largecat._conversions import as_ids


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("indices",),
    meta_fields=("name", "size", "dim"),
)
@dataclass(frozen=True)
class RowSubset:
    """The rows of the data that exist this step, as ``with lc.data_plate(...) as rows`` gives them.

    Attributes:
        indices: Row ids of the minibatch, shape (B,), integers in [0, N).
        name: Name of the plate.
        size: Number of rows N of the whole data.
        dim: Batch dimension of the plate, a negative int.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> lc.data_plate("data", 100, rows=jnp.array([7, 3])).rows.indices.tolist()
        [7, 3]
    """

    indices: Array
    name: str
    size: int
    dim: int


def check_row_subset(rows: Any) -> None:
    """Raise TypeError unless ``rows`` is a ``RowSubset``."""
    form = "what `with lc.data_plate(..., rows) as rows:` gives"
    check_kind("rows", rows, RowSubset, form)


def check_row_ids(name: str, rows: ArrayLike, size: int) -> Array:
    """Return the row ids of data plate ``name`` as an array of shape (B,), or raise."""
    check_integers("rows", rows)
    check_shape(f"`rows` of plate '{name}'", rows, ("B",), "an id for each row of the minibatch")
    check_in_range(f"`rows` of plate '{name}'", rows, size, "row ids")
    return as_ids(rows)


def refuse_repeated_rows(name: str, site: str, rows: ArrayLike) -> None:
    """Raise ValueError if ids of plate ``name`` repeat around latent ``site``; tracers pass."""
    if not is_concrete(rows):
        return
    ids, counts = np.unique(np.asarray(rows), return_counts=True)
    if (counts > 1).any():
        first = int(np.argmax(counts > 1))
        raise ValueError(
            f"site '{site}' has a value for each row of plate '{name}', but row {ids[first]} is "
            f"there {counts[first]} times, and its prior would count as often. To read a value by "
            "ids that repeat, draw it in an entity plate, which counts each prior once: "
            f'`with lc.entity_plate("{name}", size, ids, counts) as read:` and '
            "`read.rows_of(value, ids)`."
        )


def has_repeats(rows: Array) -> Array:
    """Whether any of these ids, shape (B,), is there twice. Cost: O(B log B)."""
    in_order = jnp.sort(rows)
    return (in_order[1:] == in_order[:-1]).any()
