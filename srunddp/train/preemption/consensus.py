"""What all ranks agree on at the same step: that the run ends, or that a checkpoint is due by the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from srunddp.train.preemption.signals import StopRequest
from srunddp.train.world import World

_SIGNALS = 128  # more than there are
_MOST_STEPS = 64  # from one all-reduce to the next, as steps may become slower


@dataclass(frozen=True)
class Agreed:
    """The same on all ranks.

    Attributes:
        request: the strongest of any rank; cause: a signal that led to it, 0 for the end of the job.
        save: a checkpoint is due.
    """

    request: StopRequest
    cause: int
    save: bool


class StopConsensus:
    """An all-reduce about once a second, at the same steps on all ranks: its interval is itself agreed on.

    Not at every step, as a step may take less time than an all-reduce.
    """

    def __init__(self, world: World, every: float = 1.0) -> None:
        """Args:
        every: seconds from one all-reduce to the next; at most one a step.
        """
        self._world = world
        self._every = every
        self.begin()

    def begin(self) -> None:
        """What follows takes another time than before; all ranks call this at the same step."""
        self._interval = self._steps_left = 1
        self._last = time.perf_counter()

    def due(self) -> bool:
        """Count a step; whether :meth:`all_reduce` is to be called after it."""
        self._steps_left -= 1
        return self._steps_left <= 0

    def all_reduce(self, request: StopRequest, cause: int, *, save: bool) -> Agreed:
        """Tell the other ranks what this one wants, and hear what they do; all ranks call this after the same step."""
        now = time.perf_counter()
        seconds = (now - self._last) / self._interval
        self._last = now
        # In one number, so that the cause is the request's own.
        encoded, most_save, seconds = self._maximum(_SIGNALS * request + cause, save, seconds)
        self._interval = max(1, min(2 * self._interval, int(self._every / max(seconds, 1e-6)), _MOST_STEPS))
        self._steps_left = self._interval
        most_request, most_cause = divmod(int(encoded), _SIGNALS)
        return Agreed(StopRequest(most_request), most_cause, bool(most_save))

    def _maximum(self, *values: float) -> list[float]:
        if self._world.world_size == 1:
            return list(values)
        row = torch.tensor(values, dtype=torch.float64, device=self._world.device)
        dist.all_reduce(row, dist.ReduceOp.MAX)
        return [float(value) for value in row.tolist()]
