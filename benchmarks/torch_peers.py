# SPDX-License-Identifier: Apache-2.0
"""PyTorch's point estimates of a softmax regression: exact, and with sampled negatives.

This needs the extra ``benchmarks``; ``records.torch_is_missing`` says whether it is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.step_cells import BATCH_SIZE, LEARNING_RATE, NUM_SAMPLED, Cell


class SampledSoftmax(nn.Module):
    """Softmax over an observation's own class and S classes that are drawn for the minibatch.

    A drawn class k stands for all that were not drawn: its utility gets ``-log(S q_k)``, where q is
    the distribution of the draws. Only the rows of these classes get gradients.
    """

    def __init__(self, num_categories: int, num_features: int, *, bias: bool) -> None:
        super().__init__()
        self.w = nn.Embedding(num_categories, num_features, sparse=True)
        self.b = nn.Embedding(num_categories, 1, sparse=True) if bias else None
        for table in (self.w, self.b):
            if table is not None:
                nn.init.zeros_(table.weight)

    def forward(self, x: Tensor, y: Tensor, drawn: Tensor, correction: Tensor | float) -> Tensor:
        """Mean loss of a minibatch; ``correction`` is ``-log(S q_k)`` of the drawn classes."""
        classes = torch.cat([y, drawn])
        w = self.w(classes)
        own = (x * w[: len(y)]).sum(1, keepdim=True)
        others = x @ w[len(y) :].T + correction
        if self.b is not None:
            b = self.b(classes)
            own = own + b[: len(y)]
            others = others + b[len(y) :].T
        return (torch.logsumexp(torch.cat([own, others], 1), 1) - own[:, 0]).mean()


class ShuffledRows:
    """Minibatches of row numbers, in a new order in each epoch."""

    def __init__(self, num_rows: int, batch_size: int) -> None:
        self._order = torch.randperm(num_rows)
        self._batch_size = batch_size
        self._position = 0

    def draw(self) -> Tensor:
        """The next minibatch; the rows that are left at an epoch's end are left out."""
        if self._position + self._batch_size > len(self._order):
            self._order = torch.randperm(len(self._order))
            self._position = 0
        start, self._position = self._position, self._position + self._batch_size
        return self._order[start : self._position]


def make_step_loop(cell: Cell, x: NDArray[np.float32], y: NDArray[np.int32]) -> Callable[[], None]:
    """Make the loop of a cell of ``step_cost``: uniform draws, no bias, as in the other cells.

    A drawn class that is also an observation's own is left in, which saves a mask.
    """
    torch.manual_seed(0)
    features, labels = torch.from_numpy(x), torch.from_numpy(y).long()
    softmax = SampledSoftmax(cell.num_categories, cell.num_features, bias=False)
    optimizer = torch.optim.SparseAdam(softmax.parameters(), LEARNING_RATE)
    rows = ShuffledRows(len(y), BATCH_SIZE)
    correction = math.log(cell.num_categories / NUM_SAMPLED)

    def chunk() -> None:
        for _ in range(cell.steps_per_chunk):
            batch = rows.draw()
            drawn = torch.randint(cell.num_categories, (NUM_SAMPLED,))
            loss = softmax(features[batch], labels[batch], drawn, correction)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"{cell} gave a loss that is not finite.")

    return chunk
