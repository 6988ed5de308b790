"""The training loss, read one step late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from srunddp.train.metrics.accumulator import LaggedLoss

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def check(device: torch.device) -> None:
    late = LaggedLoss(device)
    losses = torch.tensor([1.5, 2.25, -3.0], device=device, requires_grad=True)
    assert [late.push(loss, samples) for loss, samples in zip(losses, (4, 0, 3), strict=True)] == [None, 1.5, 2.25]
    assert (late.total, late.count) == (6.0, 4)
    assert late.flush() == -3.0
    assert (late.total, late.count) == (-3.0, 7)
    assert late.flush() is None
    assert (late.total, late.count) == (-3.0, 7)
    assert late.push(losses[1], 1) is None
    assert late.flush() == 2.25


def test_a_loss_comes_one_push_later_and_the_last_by_flush() -> None:
    check(CPU)


@pytest.mark.gpu
def test_the_same_on_a_gpu() -> None:
    check(CUDA)


@pytest.mark.gpu
def test_a_push_does_not_wait_for_its_own_step() -> None:
    late, loss = LaggedLoss(CUDA), torch.ones((), device=CUDA)
    late.push(loss, 1)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of the GPU
    late.push(loss + 1, 1)
    assert not torch.cuda.current_stream().query()
    assert late.flush() == 2.0


def test_the_sum_is_that_of_float64() -> None:
    late = LaggedLoss(CPU)
    for _ in range(1000):
        late.push(torch.tensor(0.1, dtype=torch.float64), 3)
    late.flush()
    exact = 0.0
    for _ in range(1000):
        exact += 0.1 * 3
    assert (late.total, late.count) == (exact, 3000)


class Gpu:
    """Copies to page-locked memory arrive when somebody waits for the event recorded behind them, not before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pending: list[tuple[Tensor, Tensor]] = []
        gpu = self

        class Event:
            def __init__(self, blocking: bool) -> None:
                self.recorded = 0

            def record(self) -> None:
                self.recorded = len(gpu.pending)

            def synchronize(self) -> None:
                gpu.waited.append(self.recorded)
                for slot, value in gpu.pending[: self.recorded]:
                    slot.fill_(value)

        class Slot(Tensor):
            def copy_(self, source: Tensor, non_blocking: bool = False) -> Any:  # type: ignore[override]
                assert non_blocking
                gpu.pending.append((self, source.clone()))

        def empty(size: tuple[()], *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
            assert pin_memory
            return torch.full(size, torch.nan, dtype=dtype).as_subclass(Slot)

        self.waited: list[int] = []
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch, "empty", empty)


def test_a_gpu_s_loss_is_read_only_behind_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a made-up GPU: each push waits for the copy before its own, and for no other."""
    gpu = Gpu(monkeypatch)
    late = LaggedLoss(CUDA)
    read = [late.push(torch.tensor(float(step), requires_grad=True), 2) for step in range(5)]
    assert read == [None, 0.0, 1.0, 2.0, 3.0]
    assert gpu.waited == [1, 2, 3, 4]
    assert (late.flush(), gpu.waited[-1]) == (4.0, 5)
    assert (late.total, late.count) == (20.0, 10)
