"""Measures for ``--monitor`` how a step spends its time: on data, on this rank's own work, and on
waiting for others.

In the backward pass of a step, ranks wait for each other, so their steps take equally long. A slow
rank shows in the time that it needs for everything else.
"""

import time
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from srunddp.telemetry import TelemetryPage, active_page, event

T = TypeVar("T")
# Seconds between two measurements of a GPU: the CUDA events of a measurement cost the GPU and the
# rank some microseconds.
_LOOK_EVERY = 0.5


class ThroughputMeter:
    """The methods of a step timer, which measure nothing here; used without ``--monitor``."""

    def timed(self, steps: Iterator[T]) -> Iterator[T]:
        """Return an iterator of the same steps.

        Args:
            steps: The steps of an epoch.
        """
        return steps

    def start_wait(self) -> None:
        """Note that this rank waits for other ranks from now on, until :meth:`end_wait`.

        The backward pass that shares gradients counts as such a wait.
        """

    def end_wait(self) -> None:
        """Note that the wait is over, and that this rank does its own work again."""

    def done(self, samples: int) -> None:
        """Note that a step is done.

        Args:
            samples: The number of samples in the step, over all ranks.
        """

    def epoch(self, number: int) -> None:
        """Note that an epoch begins.

        Args:
            number: The number of the epoch, from 1.
        """


class StepTimer(ThroughputMeter):
    """Measures the steps, and writes sums to the shared page for the supervisor."""

    def __init__(self, marks: TelemetryPage, device: torch.device) -> None:
        """Create a timer, which has measured nothing yet.

        Args:
            marks: The shared page.
            device: The device of this rank; a GPU is measured by its own clock.
        """
        self._marks = marks
        self._clock = time.perf_counter
        self._gpu = _Gpu() if device.type == "cuda" else None
        # Times of this step: when its data was requested, when the data arrived, and when the last
        # wait began.
        self._requested = self._clock()
        self._arrived = self._requested
        self._since = self._requested
        self._wait_s = 0.0

    def timed(self, steps: Iterator[T]) -> Iterator[T]:
        """Yield the same steps, and measure how long the rank waits for each.

        Args:
            steps: The steps of an epoch.
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
            # The rank queues work for the GPU and goes on before it is done, so the rank's clock
            # does not show how long the work takes.
            own = max(data, self._gpu.seconds())
        self._marks.add_step(samples, step, data, min(own, step))

    def epoch(self, number: int) -> None:
        event("epoch", number)
        self._marks.start_epoch(number)


class _Gpu:
    """Measures now and then how long a GPU works on a step, without the parts shared with other
    ranks.

    It uses the GPU's clock, because the rank queues work and goes on before the GPU has done it. A
    measurement begins at the request for data, so times at which the GPU waits for this rank count
    too.
    """

    def __init__(self) -> None:
        # Events at the beginning and end of each part of this rank's own work, in the measured
        # step.
        self._turns: list[Any] = []
        self._looking = False
        # When to begin the next measurement, by the rank's clock; and the result of the last one in
        # seconds.
        self._next = 0.0
        self._seconds = 0.0

    def begin(self, now: float) -> None:
        """Begin a step, and measure it if a measurement is due.

        If a measured step was begun and not ended before, its data did not come, and the
        measurement begins anew with this step.

        Args:
            now: The time by the rank's clock.
        """
        # Do not measure while the GPU still works on the last measured step: seconds() clears its
        # events once they are complete.
        if self._looking or (not self._turns and now >= self._next):
            self._next = now + _LOOK_EVERY
            self._looking = True
            self._turns.clear()
            self.turn()

    def turn(self) -> None:
        """Note, in a measured step, a change from this rank's own work to a part that is shared
        with other ranks, or back.
        """
        if self._looking:
            self._turns.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._turns[-1].record()

    def end(self) -> None:
        """End the step; if it is measured, its last part of own work ends here."""
        self.turn()
        self._looking = False

    def seconds(self) -> float:
        """Return how long the GPU worked on the last measured step that it has completed, in
        seconds; 0 before the first.

        A measured step that the GPU has not completed yet is not waited for.
        """
        if self._turns and self._turns[-1].query():
            parts = zip(self._turns[::2], self._turns[1::2], strict=False)
            self._seconds = sum(begin.elapsed_time(end) for begin, end in parts) / 1000
            self._turns.clear()
        return self._seconds


def make_step_timer(device: torch.device) -> ThroughputMeter:
    """Return a timer that measures if the run has ``--monitor``, else one that measures nothing.

    Args:
        device: The device of this rank.
    """
    marks = active_page()
    return StepTimer(marks, device) if marks else ThroughputMeter()
