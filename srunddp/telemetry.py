"""What a rank and its supervisor tell each other in shared memory: how many steps there were, and that all is over.

A mark is one write, no more. With ``--monitor`` there are also times of steps and of what is rarer, for
:mod:`srunddp.monitor.monitor`; they outlive the rank, however it ends.
"""

import contextlib
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from srunddp.util.kernel_file import memory_file

EVENTS = (
    "import", "imported", "init", "initialised", "fit", "step", "epoch", "epoch_end", "evaluation",
    "evaluation_end", "checkpoint", "checkpoint_written", "resumed",
)  # fmt: skip
# The variable by which rank 0's script knows where the files of --monitor are.
MONITOR_FOLDER = "_SRUNDDP_MONITOR_FOLDER"

_COUNT = struct.Struct("=Q")
_STEPS = struct.Struct("@QQddddQ")
_COUNT_AT, _TERMINATING_AT, _GENERATION_AT, _NUMBER_AT, _HAS_STEPS_AT, _STEPS_AT, _EVENTS_AT = 0, 8, 16, 24, 32, 64, 256
_EVENT = struct.Struct("@ddQ")
_KEPT = 4096  # events that are not lost before the recorder looks
_SIZE = _EVENTS_AT + _KEPT * _EVENT.size


class Steps(NamedTuple):
    """Sums over the training steps of one rank.

    Attributes:
        steps: their number; samples: of all ranks.
        step_s: seconds in steps; data_s: of these, waiting for data; own_s: of these, not in the backward pass,
            where a rank waits for the others.
        longest_step_s: since the recorder last looked.
        epoch: the present one, from 1.
    """

    steps: int = 0
    samples: int = 0
    step_s: float = 0.0
    data_s: float = 0.0
    own_s: float = 0.0
    longest_step_s: float = 0.0
    epoch: int = 0


class Event(NamedTuple):
    """Something that happened once.

    Attributes:
        time: Unix time in seconds; name: one of :data:`EVENTS`; value: a figure that goes with it, NaN for none.
    """

    time: float
    name: str
    value: float


class TelemetryPage:
    """A page shared by a supervisor and the worker that it forks.

    Attributes:
        count: of this process's steps so far.
        recording: whether times are wanted, too.
        descriptor: of the page; it is pickled for a process that inherits it.
    """

    def __init__(self, *, recording: bool = False, descriptor: int | None = None) -> None:
        self.descriptor = memory_file() if descriptor is None else descriptor
        size = _SIZE if recording else mmap.PAGESIZE
        os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        self.count = self._events = 0
        self.recording = recording
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(TelemetryPage, recording=self.recording, descriptor=self.descriptor), ()

    def beat(self) -> None:
        """In the worker: one step more."""
        self.count += 1
        self._put(_COUNT_AT, _COUNT.pack(self.count))
        if self.count == 1:
            self._put(_HAS_STEPS_AT, _COUNT.pack(1))
            self.event("step")

    def pause(self) -> None:
        """In the worker: no step is expected for now."""
        self._put(_COUNT_AT, _COUNT.pack(0))

    def resume(self) -> None:
        """In the worker: steps are expected again."""
        self._put(_COUNT_AT, _COUNT.pack(self.count))

    def read(self) -> int:
        """In the supervisor: the steps so far; 0 where none is expected."""
        return int(_COUNT.unpack_from(self._memory, _COUNT_AT)[0])

    def has_steps(self) -> bool:
        """In the supervisor: whether there has been a step, also where none is expected now."""
        return bool(_COUNT.unpack_from(self._memory, _HAS_STEPS_AT)[0])

    def announce_termination(self) -> None:
        """In the supervisor: the worker is about to be ended, for a root cause that is known."""
        self._put(_TERMINATING_AT, _COUNT.pack(1))

    def is_terminating(self) -> bool:
        """In the worker: whether that was said."""
        return bool(_COUNT.unpack_from(self._memory, _TERMINATING_AT)[0])

    @property
    def generation(self) -> int:
        """In the worker: changes when the recorder has looked."""
        return self._memory[_GENERATION_AT]

    def write_steps(self, *figures: float) -> None:
        """In the worker, where ``recording``: those of :class:`Steps`."""
        self._put(_STEPS_AT, _STEPS.pack(*figures))

    def read_steps(self) -> Steps:
        """In either, where ``recording``: what was written last."""
        return Steps(*_STEPS.unpack_from(self._memory, _STEPS_AT))

    def snapshot(self) -> Steps:
        """In the supervisor, where ``recording``: the same, and the longest step begins again."""
        self._memory[_GENERATION_AT] = (self._memory[_GENERATION_AT] + 1) % 256
        return self.read_steps()

    def event(self, name: str, value: float = math.nan) -> None:
        """In the worker: something that is rarer than a step; nothing where not ``recording``."""
        if not self.recording:
            return
        with self._lock:  # a checkpoint is written by another thread
            place = _EVENTS_AT + self._events % _KEPT * _EVENT.size
            self._put(place, _EVENT.pack(time.time(), value, EVENTS.index(name)))
            self._events += 1
            self._put(_NUMBER_AT, _COUNT.pack(self._events))

    def events(self, seen: int) -> tuple[list[Event], int]:
        """In the supervisor, where ``recording``: the events after the first ``seen``, and how many there are now."""
        count = int(_COUNT.unpack_from(self._memory, _NUMBER_AT)[0])
        places = range(max(seen, count - _KEPT), count)
        found = [_EVENT.unpack_from(self._memory, _EVENTS_AT + place % _KEPT * _EVENT.size) for place in places]
        return [Event(when, EVENTS[number], value) for when, value, number in found], count

    def _put(self, place: int, words: bytes) -> None:
        # The reader may look at any moment, and each word is one store. pack_into() would first make all of them 0.
        self._memory[place : place + len(words)] = words


_page: TelemetryPage | None = None


def install(page: TelemetryPage | None) -> None:
    """In the worker: its steps are counted here from now on; with None nowhere."""
    global _page
    _page = page


def heartbeat(*, last: bool = False) -> None:
    """Say that this rank goes on; call it once a step.

    From the first call on the ranks are expected to go on calling it: when none has for ``--stall-timeout`` seconds,
    the run is ended and the rank that the others wait for is named. Without a supervisor nothing happens.

    Args:
        last: what follows may take as long as it likes, until the next call.
    """
    if _page is None:
        return
    if last:
        _page.pause()
    else:
        _page.beat()


@contextlib.contextmanager
def stall_limit_suspended() -> Iterator[None]:
    """What runs within is no step, and may take as long as it likes."""
    if _page is None or not _page.read():
        yield
        return
    _page.pause()
    yield
    _page.resume()


def event(name: str, value: float = math.nan) -> None:
    """Note that one of :data:`EVENTS` happens now; nothing without ``--monitor``."""
    if _page is not None:
        _page.event(name, value)


def active_page() -> TelemetryPage | None:
    """Where the loop writes its times; None without ``--monitor``."""
    return _page if _page is not None and _page.recording else None


def is_supervised() -> bool:
    """Whether there is a supervisor, which says how the run ends."""
    return _page is not None


def is_terminating() -> bool:
    """Whether the supervisor ends this rank for a root cause that is known."""
    return _page is not None and _page.is_terminating()
