# SPDX-License-Identifier: Apache-2.0
"""PyTorch's losses are what they are said to be; skipped where PyTorch is not installed."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch comes with the extra `benchmarks`")
peers = pytest.importorskip("benchmarks.torch_peers")


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_sampled_loss_is_the_corrected_softmax(bias: bool, corrected: bool) -> None:
    """Each observation has its own class and the drawn ones."""
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(shape) for shape in ((3, 2), (6, 2), (6,)))
    y, drawn = np.array([1, 4, 1]), np.array([4, 0, 5])
    correction = rng.standard_normal(6)
    softmax = peers.SampledSoftmax(6, 2, bias=bias).double()
    tables = [w, b[:, None]] if bias else [w]
    with torch.no_grad():
        for parameter, table in zip(softmax.parameters(), tables, strict=True):
            parameter.copy_(torch.from_numpy(table))
    x_, y_, drawn_, correction_ = map(torch.from_numpy, (x, y, drawn, correction))
    loss = softmax(x_, y_, drawn_, correction_ if corrected else None)

    utilities = x @ w.T + bias * b + corrected * correction
    expected = [
        np.log(np.exp(u[[k, *drawn]]).sum()) - u[k] for u, k in zip(utilities, y, strict=True)
    ]
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-12)


def test_a_loss_against_the_batch_is_the_softmax_over_its_labels_and_the_draws() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 2)), rng.standard_normal((6, 2))
    y, drawn = np.array([1, 4, 2]), np.array([4, 0, 5])
    softmax = peers.SampledSoftmax(6, 2, bias=False).double()
    with torch.no_grad():
        softmax.w.weight.copy_(torch.from_numpy(w))
    loss = softmax.against_batch(*map(torch.from_numpy, (x, y, drawn)))
    utilities = x @ w[[*y, *drawn]].T
    own = utilities[range(3), range(3)]
    expected = np.log(np.exp(utilities).sum(axis=1)) - own
    assert loss.item() == pytest.approx(expected.mean(), rel=1e-12)


def test_only_rows_of_the_batch_and_the_draws_get_gradients() -> None:
    softmax = peers.SampledSoftmax(1000, 2, bias=True)
    y, drawn = torch.tensor([7, 8]), torch.tensor([8, 999])
    softmax(torch.ones(2, 2), y, drawn, None).backward()
    for parameter in softmax.parameters():
        assert parameter.grad.is_sparse
        assert parameter.grad.coalesce().indices().tolist() == [[7, 8, 999]]


def test_an_epoch_has_each_row_once() -> None:
    torch.manual_seed(0)
    rows = peers.ShuffledRows(12, 4)
    epochs = [torch.cat([rows.draw() for _ in range(3)]).tolist() for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]  # alike in 1 of 12! runs
    assert len(set(epochs[0])) == 12


@pytest.mark.slow
@pytest.mark.parametrize("method", ["torch_exact", "torch_sampled"])
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_a_peer_learns(method: str, optimizer: str) -> None:
    """On ten classes that the features separate, half of the loss of a guess is gone soon."""
    y = np.arange(400, dtype=np.int32) % 10
    x = np.eye(10, dtype=np.float32)[y]
    peer = peers.Peer(
        method, x, y, 10, batch_size=40, num_sampled=5, optimizer=optimizer, learning_rate=0.3
    )
    peer.run(50)
    w, b = peer.weights()
    assert w.shape == (10, 10) and b.shape == (10,)
    utilities = np.eye(10) @ w.T + b
    log_probs = utilities - np.log(np.exp(utilities).sum(axis=1, keepdims=True))
    assert np.trace(log_probs) / 10 > -np.log(10) / 2
