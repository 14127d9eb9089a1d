# SPDX-License-Identifier: Apache-2.0
"""The cells of ``two_sided``: a method at a number of users and items."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_ROWS = 200_000
BATCH_SIZE = 500
NUM_SAMPLED = 100
NUM_FEATURES = 32
LEARNING_RATE = 0.01


class Cell(NamedTuple):
    """One method at one number of users, and of as many items."""

    method: str
    size: int
    steps_per_chunk: int  # steps of one compiled loop

    @property
    def setting(self) -> dict[str, int]:
        """The setting of this cell's records."""
        return {
            "U": self.size,
            "K": self.size,
            "B": BATCH_SIZE,
            "S": NUM_SAMPLED,
            "D": NUM_FEATURES,
        }


FULL_CELLS = tuple(
    Cell(method, size, 100) for size in (10**4, 10**5, 10**6) for method in ("subsampled", "torch")
)
QUICK_CELLS = (
    Cell("subsampled", 10**3, 5),
    Cell("subsampled", 10**4, 5),
    Cell("torch", 10**3, 5),
)


def make_data(cell: Cell) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Draw the user and the item of each observation; which they are does not matter here."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(cell.size, size=(2, NUM_ROWS), dtype=np.int32)
    return users, items
