# SPDX-License-Identifier: Apache-2.0
"""What a benchmark of steps measures, for ``turns``."""

from __future__ import annotations

from typing import Protocol


class Cell(Protocol):
    """What is measured; a tuple, to be passed on as JSON."""

    method: str  # those of PyTorch begin with "torch"

    @property
    def steps_per_chunk(self) -> int:
        """Steps of one compiled loop."""

    @property
    def setting(self) -> dict[str, int]:
        """The setting of this cell's records, with the number of classes K."""


def runs_in_torch(cell: Cell) -> bool:
    """Whether PyTorch takes the steps of this cell."""
    return cell.method.startswith("torch")
