# SPDX-License-Identifier: Apache-2.0
"""The cells of ``step_cost``: a method at a number of classes, with all sizes and the data."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_ROWS = 20_000
BATCH_SIZE = 500
NUM_SAMPLED = 100
LEARNING_RATE = 0.01
# Tables of size (K, D). Each parameter has two moments of Adam.
POSTERIOR_TABLES = 6  # location and scale
POINT_TABLES = 3  # the weights alone
TORCH = ("torch", "torch_batch", "torch_exact")
POINT_METHODS = ("delta", "shared_delta", *TORCH)


class Cell(NamedTuple):
    """One method at one number of classes."""

    method: str
    num_categories: int
    num_features: int
    steps_per_chunk: int  # steps of one compiled loop

    @property
    def setting(self) -> dict[str, int]:
        """The setting of this cell's records."""
        return {
            "K": self.num_categories,
            "B": BATCH_SIZE,
            "S": NUM_SAMPLED,
            "D": self.num_features,
        }

    @property
    def table_mb(self) -> float:
        """Memory that parameters and moments need, in MB."""
        num_tables = POINT_TABLES if self.method in POINT_METHODS else POSTERIOR_TABLES
        num_bytes = 2 if self.method == "bfloat16" else 4
        return 1e-6 * num_bytes * num_tables * self.num_categories * self.num_features


# Cells that take turns: each group fits in 24 GB, and has all that its ratios need.
FULL_GROUPS = (
    (
        Cell("subsampled", 10**3, 128, 100),
        Cell("subsampled", 10**4, 128, 100),
        Cell("subsampled", 10**5, 128, 100),
        Cell("subsampled", 10**6, 128, 100),
        Cell("delta", 10**5, 128, 100),
        Cell("delta", 10**6, 128, 100),
        Cell("shared", 10**5, 128, 100),
        Cell("shared", 10**6, 128, 100),
        Cell("shared_delta", 10**5, 128, 100),
        Cell("shared_delta", 10**6, 128, 100),
        Cell("torch", 10**3, 128, 100),
        Cell("torch", 10**4, 128, 100),
        Cell("torch", 10**5, 128, 100),
        Cell("torch", 10**6, 128, 100),
        Cell("torch_batch", 10**5, 128, 100),
        Cell("torch_batch", 10**6, 128, 100),
        Cell("torch_exact", 10**3, 128, 50),
        Cell("torch_exact", 10**4, 128, 10),
        Cell("torch_exact", 10**5, 128, 3),
        Cell("numpyro", 10**3, 128, 50),
        Cell("numpyro", 10**4, 128, 10),
        Cell("numpyro", 10**5, 128, 3),
    ),
    (
        Cell("subsampled", 10**6, 128, 100),
        Cell("bfloat16", 10**6, 128, 100),
        Cell("probit", 10**3, 128, 100),
        Cell("probit", 10**6, 128, 100),
        Cell("logistic", 10**3, 128, 100),
        Cell("logistic", 10**6, 128, 100),
    ),
)
QUICK_GROUPS = (
    (
        Cell("subsampled", 10**3, 8, 5),
        Cell("subsampled", 10**4, 8, 5),
        Cell("shared_delta", 10**3, 8, 5),
        Cell("torch", 10**3, 8, 5),
        Cell("torch_batch", 10**3, 8, 5),
        Cell("torch_exact", 10**3, 8, 2),
        Cell("numpyro", 10**3, 8, 2),
    ),
    (
        Cell("bfloat16", 10**3, 8, 5),
        Cell("logistic", 10**3, 8, 5),
    ),
)


def make_data(cell: Cell) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Draw features and labels; what they are does not matter for the cost."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NUM_ROWS, cell.num_features), np.float32)
    y = rng.integers(cell.num_categories, size=NUM_ROWS, dtype=np.int32)
    return x, y
