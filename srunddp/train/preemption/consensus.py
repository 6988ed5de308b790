"""How all ranks come to stop after the same step: an all-reduce about once a second."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from srunddp.train.preemption.signals import StopRequest
from srunddp.train.world import World

_SIGNALS = 128  # more than there are
_MOST_STEPS = 64  # from one all-reduce to the next, as steps may become slower


class StopConsensus:
    """An all-reduce about once a second, at the same steps on all ranks: its interval is itself agreed on.

    Not at every step, as a step may take less time than an all-reduce.
    """

    def __init__(self, world: World, every: float = 1.0) -> None:
        """Begin with an all-reduce after the first step.

        Args:
            world: the ranks that agree.
            every: seconds from one all-reduce to the next; at most one a step.
        """
        self._world = world
        self._every = every
        self.restart()

    def restart(self) -> None:
        """What follows takes another time than before; all ranks call this at the same step."""
        self._interval = self._steps_left = 1
        self._last = time.perf_counter()

    def due(self) -> bool:
        """Count a step; whether :meth:`all_reduce` is to be called after it."""
        self._steps_left -= 1
        return self._steps_left <= 0

    def all_reduce(self, request: StopRequest, cause: int, *, checkpoint_due: bool) -> tuple[StopRequest, int, bool]:
        """The strongest request of all ranks, its cause, and whether one of them wants a checkpoint.

        They call this after the same step.
        """
        now = time.perf_counter()
        seconds = (now - self._last) / self._interval
        self._last = now
        # In one number, so that the cause is the request's own.
        encoded, any_due, seconds = all_reduce_max(self._world, _SIGNALS * request + cause, checkpoint_due, seconds)
        self._interval = max(1, min(2 * self._interval, int(self._every / max(seconds, 1e-6)), _MOST_STEPS))
        self._steps_left = self._interval
        most_request, most_cause = divmod(int(encoded), _SIGNALS)
        return StopRequest(most_request), most_cause, bool(any_due)


def all_reduce_max(world: World, *values: float) -> list[float]:
    """The greatest of each of the values over all ranks; a collective of the default process group."""
    if world.world_size == 1:
        return list(values)
    row = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(row, dist.ReduceOp.MAX)
    return [float(value) for value in row.tolist()]
