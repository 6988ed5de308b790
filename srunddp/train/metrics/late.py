"""The training loss as a number, one step late: the rank never waits for the step that it has just begun."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class LateLoss:
    """Reads each loss when the next one comes, and sums them.

    On a GPU the loss is copied to page-locked memory behind the step's work, while the next step is prepared already.
    A push waits, at most, for the step before: with ``push`` called last in a step, the GPU has work to do then.

    Attributes:
        total: the sum of ``loss * samples`` over the losses read so far, in float64.
        count: their samples.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: where the losses will be."""
        self.total = 0.0
        self.count = 0
        self._copies: _Copies = _Pinned() if device.type == "cuda" else _Immediate()
        self._samples = 0

    def push(self, loss: Tensor, samples: int) -> float | None:
        """Take a step's loss, and read the one before.

        Args:
            loss: the mean over its samples, of no dimension.
            samples: that it counts for; may be 0.

        Returns:
            The loss that was pushed before; None at first.
        """
        before = self._copies.swap(loss)
        if before is not None:
            self.total += before * self._samples
            self.count += self._samples
        self._samples = samples
        return before

    def flush(self) -> float | None:
        """Read the last loss, waiting for its step; None where it has been read already."""
        last = self._copies.last()
        if last is not None:
            self.total += last * self._samples
            self.count += self._samples
        return last


class _Copies(Protocol):
    def swap(self, loss: Tensor) -> float | None: ...

    def last(self) -> float | None: ...


class _Immediate:
    """On the CPU the loss is there when it is pushed, and reading it waits for nothing."""

    def __init__(self) -> None:
        self._value: float | None = None

    def swap(self, loss: Tensor) -> float | None:
        before, self._value = self._value, loss.item()
        return before

    def last(self) -> float | None:
        last, self._value = self._value, None
        return last


class _Pinned:
    """Two page-locked numbers in turn, each with an event that says when its copy is there."""

    def __init__(self) -> None:
        # Waits without spinning: the core is the loader workers' meanwhile.
        self._events = tuple(torch.cuda.Event(blocking=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._slots: tuple[Tensor, ...] = ()
        self._turn = 0
        self._pending = False

    def swap(self, loss: Tensor) -> float | None:
        loss = loss.detach()
        if not self._slots:
            self._slots = tuple(torch.empty((), dtype=loss.dtype, pin_memory=True) for _ in self._events)
        self._turn = 1 - self._turn
        self._slots[self._turn].copy_(loss, non_blocking=True)
        self._events[self._turn].record()
        before = self._read(1 - self._turn) if self._pending else None
        self._pending = True
        return before

    def last(self) -> float | None:
        if not self._pending:
            return None
        self._pending = False
        return self._read(self._turn)

    def _read(self, turn: int) -> float:
        self._events[turn].synchronize()
        return float(self._slots[turn])
