# SPDX-License-Identifier: Apache-2.0
"""PyTorch's point estimates of a softmax regression: exact, and with sampled negatives.

This needs the extra ``benchmarks``; ``records.torch_is_missing`` says whether it is there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks import cell as cells
from benchmarks.step_cells import BATCH_SIZE, LEARNING_RATE, NUM_SAMPLED, Cell, make_data

# Say that they are off, as they are by default: the optimisers would warn.
torch.sparse.check_sparse_tensor_invariants.disable()
ALL_THREADS = torch.get_num_threads()  # before any of them is changed


class SampledSoftmax(nn.Module):
    """Softmax over an observation's own class and S classes that are drawn for the minibatch.

    Each utility, the own one too, gets ``-log(S q_k)``, where q is the distribution of the draws.
    This scores better held-out data than to correct the drawn ones alone, and than to leave out the
    drawn classes that are an observation's own. Only the rows of these classes get gradients.
    """

    def __init__(self, num_categories: int, num_features: int, *, bias: bool) -> None:
        super().__init__()
        self.w = nn.Embedding(num_categories, num_features, sparse=True)
        self.b = nn.Embedding(num_categories, 1, sparse=True) if bias else None
        for weights in self.parameters():
            nn.init.zeros_(weights)

    def against_batch(self, x: Tensor, y: Tensor, drawn: Tensor) -> Tensor:
        """Mean loss where the classes of the other observations are compared with too.

        Nothing is corrected: these classes are as likely as each other.
        """
        utilities = x @ self.w(torch.cat([y, drawn])).T
        return F.cross_entropy(utilities, torch.arange(len(y)))

    def forward(self, x: Tensor, y: Tensor, drawn: Tensor, correction: Tensor | None) -> Tensor:
        """Mean loss of a minibatch.

        ``correction`` is ``-log(S q_k)`` for each class, or None if all are drawn alike, so that it
        cancels.
        """
        classes = torch.cat([y, drawn])
        w = self.w(classes)
        own = (x * w[: len(y)]).sum(1)
        others = x @ w[len(y) :].T
        shift = None if correction is None else correction[classes]
        if self.b is not None:
            b = self.b(classes)[:, 0]
            shift = b if shift is None else b + shift
        if shift is not None:
            own, others = own + shift[: len(y)], others + shift[len(y) :]
        return (torch.logsumexp(torch.cat([own[:, None], others], 1), 1) - own).mean()


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


def best_number_of_threads(work: Callable[[], object]) -> int:
    """Try all threads and one, as on a busy machine; leave PyTorch with the faster."""
    seconds = {}
    for number in (ALL_THREADS, 1):
        torch.set_num_threads(number)
        work()
        start = time.perf_counter()
        work()
        seconds[number] = time.perf_counter() - start
    best = min(seconds, key=lambda number: seconds[number])
    torch.set_num_threads(best)
    return best


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Move the parameters along the gradient of the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def step_loop(
    cell: cells.Cell,
    optimizer: torch.optim.Optimizer,
    rows: ShuffledRows,
    loss_of: Callable[[Tensor], Tensor],
) -> Callable[[], None]:
    """Make a chunk of a cell's steps, each on the loss of the minibatch of the next rows."""

    def chunk() -> None:
        for _ in range(cell.steps_per_chunk):
            loss = loss_of(rows.draw())
            take_step(optimizer, loss)
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"{cell} gave a loss that is not finite.")

    return chunk


def make_step_loop(cell: Cell) -> Callable[[], None]:
    """Make the loop of a cell of ``step_cost``: uniform draws, no bias, as in the other cells.

    But for a bias in ``torch_exact``, a hundredth of its numbers.
    """
    x, y = make_data(cell)
    if cell.method == "torch_exact":
        sizes = {"batch_size": BATCH_SIZE, "num_sampled": NUM_SAMPLED}
        adam: dict[str, Any] = {"optimizer": "adam", "learning_rate": LEARNING_RATE}
        peer = Peer(cell.method, x, y, cell.num_categories, **sizes, **adam)
        return partial(peer.run, cell.steps_per_chunk)
    torch.manual_seed(0)
    features, labels = torch.from_numpy(x), torch.from_numpy(y).long()
    softmax = SampledSoftmax(cell.num_categories, cell.num_features, bias=False)
    optimizer = torch.optim.SparseAdam(softmax.parameters(), LEARNING_RATE)

    def loss_of(batch: Tensor) -> Tensor:
        drawn = torch.randint(cell.num_categories, (NUM_SAMPLED,))
        if cell.method == "torch_batch":
            return softmax.against_batch(features[batch], labels[batch], drawn)
        return softmax(features[batch], labels[batch], drawn, None)

    return step_loop(cell, optimizer, ShuffledRows(len(y), BATCH_SIZE), loss_of)


class Peer:
    """A point estimate that PyTorch learns in ``time_to_quality``: utilities ``x @ w.T + b``.

    ``torch_exact`` has the softmax over all classes. ``torch_sampled`` draws S classes as often as
    the training data have them, and corrects for that. Each has its own kind of optimiser of that
    name, ``adam`` or ``adagrad``.
    """

    def __init__(
        self,
        method: str,
        x: NDArray[np.float32],
        y: NDArray[np.int32],
        num_categories: int,
        *,
        batch_size: int,
        num_sampled: int,
        optimizer: str,
        learning_rate: float,
    ) -> None:
        torch.manual_seed(0)
        self._x, self._y = torch.from_numpy(x), torch.from_numpy(y).long()
        self._rows = ShuffledRows(len(y), batch_size)
        self._num_sampled = num_sampled
        self._softmax: nn.Linear | SampledSoftmax
        if method == "torch_exact":
            self._softmax = nn.Linear(x.shape[1], num_categories)
            nn.init.zeros_(self._softmax.weight)
            nn.init.zeros_(self._softmax.bias)
            kinds = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
            options = {"fused": True}
        else:
            self._softmax = SampledSoftmax(num_categories, x.shape[1], bias=True)
            kinds = {"adam": torch.optim.SparseAdam, "adagrad": torch.optim.Adagrad}
            options = {}
        parameters = list(self._softmax.parameters())
        self._optimizer = kinds[optimizer](parameters, learning_rate, **options)
        counts = torch.bincount(self._y, minlength=num_categories)
        self._correction = -torch.log(num_sampled * counts / len(y))  # infinite if never drawn

    def run(self, num_steps: int) -> None:
        """Take some steps."""
        for _ in range(num_steps):
            batch = self._rows.draw()
            x, y = self._x[batch], self._y[batch]
            if isinstance(self._softmax, SampledSoftmax):
                drawn = self._y[torch.randint(len(self._y), (self._num_sampled,))]
                loss = self._softmax(x, y, drawn, self._correction)
            else:
                loss = F.cross_entropy(self._softmax(x), y)
            take_step(self._optimizer, loss)

    def weights(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Weights (K, D) and biases (K,) as they are now."""
        if isinstance(self._softmax, SampledSoftmax):
            w, b = (parameter.detach().numpy() for parameter in self._softmax.parameters())
            return w, b[:, 0]
        return self._softmax.weight.detach().numpy(), self._softmax.bias.detach().numpy()
