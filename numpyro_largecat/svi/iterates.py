# SPDX-License-Identifier: Apache-2.0
"""A few entries of each parameter, recorded while a fit runs, to see whether they still drift."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from numpyro_largecat._checks import is_traced
from numpyro_largecat.handlers.touched_rows import PlateRows, TouchedRows
from numpyro_largecat.svi.narrow_tables import widen
from numpyro_largecat.svi.stored_params import StoredParam

MOST_ROWS = 8  # of a plate
MOST_ENTRIES = 16  # of an array
MOST_ITERATES = 1000  # that are kept, evenly spaced over the steps

RecordedIndex = tuple[NDArray[np.int64], ...]  # one entry of each axis for each recorded number


Recorded = dict[str, list[RecordedIndex | None]]  # of each leaf; None if it is left out


def choose_entries(sites: Mapping[str, StoredParam], params: Any, touched: TouchedRows) -> Recorded:
    """Choose entries to record: of a table, in rows that the first minibatch touched.

    None are chosen where the fit is traced, so that the rows are not known.
    """
    if is_traced((params, touched)):
        return {}
    found: Recorded = {}
    for name, value in params.items():
        rows = {a: _some_rows(touched.plates[p]) for a, p in sites[name].plates.items()}
        found[name] = [_some_entries(leaf, rows) for leaf in jax.tree.leaves(value)]
    return found


def recorded_values(recorded: Recorded, params: Any, computed: Any) -> dict[str, Array]:
    """Values of the entries, by parameter, in the types of ``computed``: O(entries)."""
    found = {}
    for name, indices in recorded.items():
        trees = jax.tree.leaves(params[name]), jax.tree.leaves(computed[name])
        leaves = zip(*trees, indices, strict=True)
        parts = [jnp.ravel(widen(x[i], like)) for x, like, i in leaves if i is not None]
        if parts:
            found[name] = jnp.concatenate(parts)
    return found


class IterateLog:
    """Values of the recorded entries over the steps of a fit, thinned to bound their number."""

    def __init__(self) -> None:
        self._stride = 1
        self._step = 0
        self._kept: list[dict[str, NDArray[Any]]] = []

    def add(self, values: dict[str, Array], count: int) -> None:
        """Append ``count`` steps."""
        arrays = {name: np.asarray(value) for name, value in values.items()}
        first = -self._step % self._stride
        for i in range(first, count, self._stride):
            # A copy: a view would keep the device's buffer of all steps.
            self._kept.append({name: array[i].copy() for name, array in arrays.items()})
        self._step += count
        while len(self._kept) > MOST_ITERATES:
            self._kept = self._kept[::2]
            self._stride *= 2

    @property
    def num_steps(self) -> int:
        """Steps that were recorded, kept or not."""
        return self._step

    def go_on(self, iterates: Mapping[str, NDArray[Any]], num_steps: int) -> None:
        """Begin with what a log of so many steps has kept."""
        self._step = num_steps
        while math.ceil(num_steps / self._stride) > MOST_ITERATES:
            self._stride *= 2
        length = len(next(iter(iterates.values()), ()))
        self._kept = [{n: values[i] for n, values in iterates.items()} for i in range(length)]

    def iterates(self) -> dict[str, NDArray[Any]]:
        """All that is kept, shape (iterates, entries)."""
        names = self._kept[0] if self._kept else {}
        return {name: np.stack([values[name] for values in self._kept]) for name in names}


def _some_rows(plate: PlateRows) -> NDArray[np.int64]:
    """Rows with weight 1 if there are some, which are the labels of a class plate.

    Their number does not depend on the batch, so that loops which record them are not compiled
    again for another; few rows repeat.
    """
    stored = np.asarray(plate.stored)
    number = stored.size
    if plate.weights is not None and plate.position is None:
        certain = np.asarray(plate.weights) == 1
        stored = stored[certain] if certain.any() else stored
    rows = np.unique(stored[stored < plate.size])
    return rows[_spread(len(rows), min(MOST_ROWS, number) if rows.size else 0)]


def _some_entries(leaf: Any, rows: dict[int, NDArray[np.int64]]) -> RecordedIndex | None:
    """The index of some entries, in these rows of some axes; () for the only one of a scalar."""
    shape = tuple(len(rows.get(a, range(n))) for a, n in enumerate(np.shape(leaf)))
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating) or 0 in shape:
        return None
    size = math.prod(shape)
    grid = np.unravel_index(_spread(size, min(MOST_ENTRIES, size)), shape) if shape else ()
    return tuple(rows[a][i] if a in rows else i for a, i in enumerate(grid))


def _spread(size: int, number: int) -> NDArray[np.int64]:
    """Places in [0, size), evenly spaced."""
    return np.linspace(0, size - 1, number).round().astype(np.int64)
