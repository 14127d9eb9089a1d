# SPDX-License-Identifier: Apache-2.0
"""PyTorch's matrix factorisation with a sampled softmax: sparse embeddings of users and items.

This needs the extra ``benchmarks``; ``records.torch_is_missing`` says whether it is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.torch_peers import SampledSoftmax, ShuffledRows
from benchmarks.two_sided_cells import BATCH_SIZE, LEARNING_RATE, NUM_FEATURES, NUM_SAMPLED, Cell


class TwoSided(nn.Module):
    """Utilities ``v[user] @ w.T``, and a bias of each item if asked for."""

    def __init__(
        self, num_users: int, num_items: int, num_features: int, *, bias: bool, start: float = 0.1
    ) -> None:
        super().__init__()
        self.v = nn.Embedding(num_users, num_features, sparse=True)
        self.softmax = SampledSoftmax(num_items, num_features, bias=bias)
        for embedding in (self.v, self.softmax.w):
            nn.init.normal_(embedding.weight, std=start)

    def forward(self, users: Tensor, items: Tensor, drawn: Tensor, shift: Tensor | None) -> Tensor:
        """Mean loss of a minibatch."""
        return self.softmax(self.v(users), items, drawn, shift)


def make_step_loop(
    cell: Cell, users: NDArray[np.int32], items: NDArray[np.int32]
) -> Callable[[], None]:
    """Make the loop of a cell: uniform draws, no bias, as ours has them."""
    torch.manual_seed(0)
    read, labels = torch.from_numpy(users).long(), torch.from_numpy(items).long()
    model = TwoSided(cell.size, cell.size, NUM_FEATURES, bias=False)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), LEARNING_RATE)
    rows = ShuffledRows(len(items), BATCH_SIZE)

    def chunk() -> None:
        for _ in range(cell.steps_per_chunk):
            batch = rows.draw()
            drawn = torch.randint(cell.size, (NUM_SAMPLED,))
            loss = model(read[batch], labels[batch], drawn, None)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"{cell} gave a loss that is not finite.")

    return chunk
