# SPDX-License-Identifier: Apache-2.0
"""Rows that are spread over several arrays, such as the files of a large data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat._checks import check_shape


class Shards:
    """Several arrays as if their rows were in one, without a copy.

    Cost: O(shards) memory; reading rows costs what it costs in each array that has some of them.

    Args:
        arrays: At least one array, such as memory maps, shapes (N_i, ...).

    Raises:
        ValueError: If there is no array, or if they differ in the shape of a row or in dtype.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> parts = [np.arange(4).reshape(2, 2), np.arange(4, 10).reshape(3, 2)]  # or memory maps
        >>> shards = lc.data.Shards(parts)
        >>> len(shards), shards[np.array([0, 2, 4])].tolist()
        (5, [[0, 1], [4, 5], [8, 9]])
    """

    takes_rows = True  # by an array of numbers

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.arrays = list(arrays)
        if not self.arrays:
            raise ValueError("Shards needs at least one array.")
        first = self.arrays[0]
        for i, array in enumerate(self.arrays):
            check_shape(
                f"shard {i}", array, ("N", *first.shape[1:]), "rows like those of the first"
            )
            if array.dtype != first.dtype:
                raise ValueError(f"shard {i} must have dtype {first.dtype}; got {array.dtype}.")
        self._ends = np.cumsum([array.shape[0] for array in self.arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows by ascending numbers, an array of integers."""
        cuts = np.searchsorted(rows, self._ends)
        starts, firsts = [0, *cuts[:-1]], [0, *self._ends[:-1]]
        parts = zip(self.arrays, starts, cuts, firsts, strict=True)
        found = [array[rows[a:b] - first] for array, a, b, first in parts if a < b]
        return np.concatenate(found or [self.arrays[0][:0]])
