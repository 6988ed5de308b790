"""The training loss, read one step late."""

from __future__ import annotations

import torch

from srunddp.train.metrics.accumulator import LaggedLoss

CPU = torch.device("cpu")


def test_a_loss_comes_one_push_later_and_the_last_by_flush() -> None:
    late = LaggedLoss(CPU)
    losses = torch.tensor([1.5, 2.25, -3.0], requires_grad=True)
    assert [late.push(loss, samples) for loss, samples in zip(losses, (4, 0, 3), strict=True)] == [None, 1.5, 2.25]
    assert (late.total, late.count) == (6.0, 4)
    assert late.flush() == -3.0
    assert (late.total, late.count) == (-3.0, 7)
    assert late.flush() is None
    assert late.push(losses[1], 1) is None
    assert late.flush() == 2.25


def test_the_sum_is_that_of_float64() -> None:
    late = LaggedLoss(CPU)
    for _ in range(1000):
        late.push(torch.tensor(0.1, dtype=torch.float64), 3)
    late.flush()
    exact = 0.0
    for _ in range(1000):
        exact += 0.1 * 3
    assert (late.total, late.count) == (exact, 3000)
