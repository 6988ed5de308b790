"""Where a step's time goes: to data, to this rank's own work, or to waiting for the others. For ``--monitor``.

The ranks of a step wait for each other in its backward pass, so that all their steps take equally long. A rank that is
slower than the others shows in what it needs for all else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from srunddp.observe.marks import Marks, event, recorded

T = TypeVar("T")
_LOOK_EVERY = 0.5  # seconds between two measurements of a GPU


class Pace:
    """Notes nothing: without ``--monitor``."""

    def arriving(self, steps: Iterator[T]) -> Iterator[T]:
        """The same steps, as they come."""
        return steps

    def waits(self) -> None:
        """What follows may wait for other ranks, until :meth:`goes_on`."""

    def goes_on(self) -> None:
        """This rank's own work again."""

    def shares(self) -> None:
        """The backward pass that shares gradients follows, until :meth:`goes_on`."""

    def done(self, samples: int) -> None:
        """The step is over; ``samples`` of all ranks were in it."""

    def epoch(self, number: int) -> None:
        """An epoch begins; counted from 1."""


class Timed(Pace):
    """Writes sums where the supervisor reads them."""

    def __init__(self, marks: Marks, device: torch.device) -> None:
        self._marks, self._clock = marks, time.perf_counter
        before = marks.read_steps()  # of a trainer before this one
        self._steps, self._samples, self._step_s, self._data_s, self._own_s, self._longest, self._epoch = before
        self._looks = marks.looks
        self._gpu = _Gpu() if device.type == "cuda" else None
        self._asked = self._arrived = self._since = self._clock()
        self._waited = 0.0

    def arriving(self, steps: Iterator[T]) -> Iterator[T]:
        """The same steps, and how long each was waited for."""
        while True:
            self._asked = self._clock()
            step = next(steps, None)
            if step is None:
                return
            self._arrived, self._waited = self._clock(), 0.0
            if self._gpu:
                self._gpu.begin(self._arrived)
            yield step

    def waits(self) -> None:
        """See :class:`Pace`."""
        self._since = self._clock()

    def goes_on(self) -> None:
        """See :class:`Pace`."""
        self._waited += self._clock() - self._since

    def shares(self) -> None:
        """See :class:`Pace`."""
        if self._gpu:
            self._gpu.end()
        self._since = self._clock()

    def done(self, samples: int) -> None:
        """See :class:`Pace`."""
        step, data = self._clock() - self._asked, self._arrived - self._asked
        # A rank with a GPU runs ahead of it, and waits where it reads the loss: for the others as well.
        own = data + self._gpu.seconds() if self._gpu else step - self._waited
        self._steps += 1
        self._samples += samples
        self._step_s += step
        self._data_s += data
        self._own_s += min(own, step)
        if self._looks != self._marks.looks:
            self._looks, self._longest = self._marks.looks, 0.0
        if step > self._longest:
            self._longest = step
        self._write()

    def epoch(self, number: int) -> None:
        """See :class:`Pace`."""
        event("epoch", number)
        self._epoch = number
        self._write()

    def _write(self) -> None:
        self._marks.write_steps(
            self._steps, self._samples, self._step_s, self._data_s, self._own_s, self._longest, self._epoch
        )


class _Gpu:
    """How long a GPU needs from a step's data to its backward pass, looked at now and then."""

    def __init__(self) -> None:
        self._start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._next, self._begun, self._ended = 0.0, False, False
        self._seconds = 0.0

    def begin(self, now: float) -> None:
        if not self._ended and now >= self._next:
            self._next, self._begun = now + _LOOK_EVERY, True
            self._start.record()

    def end(self) -> None:
        if self._begun:
            self._begun, self._ended = False, True
            self._end.record()

    def seconds(self) -> float:
        """Of the last step that was looked at; 0 before."""
        if self._ended and self._end.query():
            self._ended, self._seconds = False, self._start.elapsed_time(self._end) / 1000
        return self._seconds


def pace_of(device: torch.device) -> Pace:
    """What notes the times of a training on this device, where ``--monitor`` wants them."""
    marks = recorded()
    return Timed(marks, device) if marks else Pace()
