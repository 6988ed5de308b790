"""Where a step's time goes: to data, to this rank's own work, or to waiting for the others. For
``--monitor``.

The ranks of a step wait for each other in its backward pass, so that all their steps take equally
long. A rank that is slower than the others shows in what it needs for all else.
"""

import time
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from srunddp.telemetry import TelemetryPage, active_page, event

T = TypeVar("T")
# Seconds between two measurements of a GPU: their events cost it and the rank some microseconds.
_LOOK_EVERY = 0.5


class ThroughputMeter:
    """Notes nothing: without ``--monitor``."""

    def timed(self, steps: Iterator[T]) -> Iterator[T]:
        """Return the same steps, as they come.

        Args:
            steps: Of an epoch.
        """
        return steps

    def start_wait(self) -> None:
        """Begin to wait for other ranks, until :meth:`end_wait`.

        As in the backward pass that shares gradients.
        """

    def end_wait(self) -> None:
        """Begin this rank's own work again."""

    def done(self, samples: int) -> None:
        """End the step.

        Args:
            samples: That were in it, of all ranks.
        """

    def epoch(self, number: int) -> None:
        """Begin an epoch.

        Args:
            number: Counted from 1.
        """


class StepTimer(ThroughputMeter):
    """Writes sums where the supervisor reads them."""

    def __init__(self, marks: TelemetryPage, device: torch.device) -> None:
        """Note nothing yet.

        Args:
            marks: Where the supervisor reads.
            device: Of this rank; a GPU is measured by its own clock.
        """
        self._marks = marks
        self._clock = time.perf_counter
        self._gpu = _Gpu() if device.type == "cuda" else None
        # Of this step, by the clock: when its data was asked for and came, and the last wait's
        # begin.
        self._requested = self._clock()
        self._arrived = self._requested
        self._since = self._requested
        self._wait_s = 0.0

    def timed(self, steps: Iterator[T]) -> Iterator[T]:
        """Yield the same steps, and note how long each was waited for.

        Args:
            steps: Of an epoch.
        """
        while True:
            self._requested = self._clock()
            if self._gpu:
                self._gpu.begin(self._requested)
            step = next(steps, None)
            if step is None:
                return
            self._arrived = self._clock()
            self._wait_s = 0.0
            yield step

    def start_wait(self) -> None:
        if self._gpu:
            self._gpu.turn()
        self._since = self._clock()

    def end_wait(self) -> None:
        if self._gpu:
            self._gpu.turn()
        self._wait_s += self._clock() - self._since

    def done(self, samples: int) -> None:
        step = self._clock() - self._requested
        data = self._arrived - self._requested
        own = step - self._wait_s
        if self._gpu:
            self._gpu.end()
            # The rank queues the GPU's work and runs ahead, so that its own clock does not tell how
            # long that takes.
            own = max(data, self._gpu.seconds())
        self._marks.add_step(samples, step, data, min(own, step))

    def epoch(self, number: int) -> None:
        event("epoch", number)
        self._marks.start_epoch(number)


class _Gpu:
    """How long a GPU is at a step without what is shared with other ranks, looked at now and then.

    By its own clock, as the rank runs ahead of it: from the request for data on, so that it counts
    where the GPU waits for this rank.
    """

    def __init__(self) -> None:
        # Of the step that is looked at: events at the begin and end of each own part.
        self._turns: list[Any] = []
        self._looking = False
        # When to look next, by the rank's clock, and what the last look found.
        self._next = 0.0
        self._seconds = 0.0

    def begin(self, now: float) -> None:
        """Begin a step; one that was begun before had no data.

        Args:
            now: By the rank's clock.
        """
        # Not while the GPU is still at the step that was looked at: seconds() clears its events
        # once they are through.
        if self._looking or (not self._turns and now >= self._next):
            self._next = now + _LOOK_EVERY
            self._looking = True
            self._turns.clear()
            self.turn()

    def turn(self) -> None:
        """Turn from own work to what is shared, or back."""
        if self._looking:
            self._turns.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._turns[-1].record()

    def end(self) -> None:
        """End the step."""
        self.turn()
        self._looking = False

    def seconds(self) -> float:
        """Return how long the GPU was at the last step that was looked at; 0 before.

        That is one with which it is through: to ask for a later one would wait for it.
        """
        if self._turns and self._turns[-1].query():
            parts = zip(self._turns[::2], self._turns[1::2], strict=False)
            self._seconds = sum(begin.elapsed_time(end) for begin, end in parts) / 1000
            self._turns.clear()
        return self._seconds


def make_step_timer(device: torch.device) -> ThroughputMeter:
    """Return what notes the times of a training, where ``--monitor`` wants them.

    Args:
        device: Of this rank.
    """
    marks = active_page()
    return StepTimer(marks, device) if marks else ThroughputMeter()
