# SPDX-License-Identifier: Apache-2.0
"""PyTorch's matrix factorisation with a sampled softmax: sparse embeddings of users and items.

This needs the extra ``benchmarks``; ``records.torch_is_missing`` says whether it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.torch_peers import SampledSoftmax, ShuffledRows, step_loop, take_step
from benchmarks.two_sided_cells import (
    BATCH_SIZE,
    LEARNING_RATE,
    NUM_FEATURES,
    NUM_SAMPLED,
    Cell,
    make_data,
)


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


def make_step_loop(cell: Cell) -> Callable[[], None]:
    """Make the loop of a cell: uniform draws, no bias, as ours has them."""
    torch.manual_seed(0)
    users, items = (torch.from_numpy(ids).long() for ids in make_data(cell))
    model = TwoSided(cell.size, cell.size, NUM_FEATURES, bias=False)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), LEARNING_RATE)

    def loss_of(batch: Tensor) -> Tensor:
        drawn = torch.randint(cell.size, (NUM_SAMPLED,))
        return model(users[batch], items[batch], drawn, None)

    return step_loop(cell, optimizer, ShuffledRows(len(items), BATCH_SIZE), loss_of)


class Factorisation:
    """PyTorch's point estimate of both tables, by draws as frequent as in the training data."""

    def __init__(self, problem: Any, setting: Any, num_features: int, start: float) -> None:
        torch.manual_seed(0)
        self._users, self._items = (torch.from_numpy(x).long() for x in problem.train)
        sizes = problem.num_users, problem.num_items, num_features
        self._model = TwoSided(*sizes, bias=True, start=start)
        log_frequencies = torch.from_numpy(problem.log_frequencies())
        self._bias().weight.data[:, 0] = log_frequencies
        counts = torch.bincount(self._items, minlength=problem.num_items)
        self._shift = -torch.log(setting.num_sampled * counts / len(self._items))
        self._rows = ShuffledRows(len(self._items), setting.batch_size)
        self._optimizer = torch.optim.SparseAdam(
            list(self._model.parameters()), setting.learning_rate
        )
        self._setting = setting

    def _bias(self) -> nn.Embedding:
        assert self._model.softmax.b is not None
        return self._model.softmax.b

    def run(self, num_steps: int) -> None:
        """Take some steps."""
        for _ in range(num_steps):
            batch = self._rows.draw()
            users, items = self._users[batch], self._items[batch]
            drawn = self._items[torch.randint(len(self._items), (self._setting.num_sampled,))]
            loss = self._model(users, items, drawn, self._shift)
            if self._setting.shrinkage:
                v, w = self._model.v(users), self._model.softmax.w(torch.cat([items, drawn]))
                squares = (v**2).sum() + (w**2).sum()
                loss = loss + self._setting.shrinkage * squares / len(items)
            take_step(self._optimizer, loss)

    def tables(self) -> tuple[Any, ...]:
        """Tables v, w and b as they are now."""
        v, w, b = self._model.v, self._model.softmax.w, self._bias()
        return *(x.weight.detach().numpy() for x in (v, w)), b.weight.detach().numpy()[:, 0]
