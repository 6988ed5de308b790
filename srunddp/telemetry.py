"""What a rank and its supervisor tell each other in shared memory: how many steps there were, and
that all is over.

A mark is one write, no more. With ``--monitor`` there are also times of steps and of what is rarer,
for :mod:`srunddp.monitor.monitor`; they outlive the rank, however it ends.
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
    "import",
    "imported",
    "init",
    "initialised",
    "fit",
    "step",
    "epoch",
    "epoch_end",
    "evaluation",
    "evaluation_end",
    "checkpoint",
    "checkpoint_written",
    "resumed",
)
# The variable by which rank 0's script knows where the files of --monitor are.
MONITOR_FOLDER = "_SRUNDDP_MONITOR_FOLDER"

# Words of 8 bytes.
_COUNT, _TERMINATING, _LOOKS, _NUMBER, _HAS_STEPS = range(5)
_STEPS, _SAMPLES, _STEP_S, _DATA_S, _OWN_S, _LONGEST_STEP_S, _EPOCH = range(8, 15)
_EVENTS_AT = 256
_EVENT = struct.Struct("@ddQ")
_KEPT = 4096  # events that are not lost before the recorder looks
_SIZE = _EVENTS_AT + _KEPT * _EVENT.size


class Steps(NamedTuple):
    """Sums over the training steps of one rank.

    Attributes:
        steps: their number; samples: of all ranks.
        step_s: seconds in steps; data_s: of these, waiting for data; own_s: of these, not in the
            backward pass, where a rank waits for the others.
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
        time: Unix time in seconds; name: one of :data:`EVENTS`; value: a figure that goes with it,
            NaN for none.
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
        # The reader may look at any moment, and each word is one store. pack_into() would first
        # make all of them 0.
        self._words = memoryview(self._memory).cast("Q")
        self._seconds = memoryview(self._memory).cast("d")
        self.count = self._events = self._looks = 0
        self.recording = recording
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(TelemetryPage, recording=self.recording, descriptor=self.descriptor), ()

    def beat(self) -> None:
        """In the worker: one step more."""
        self.count += 1
        self._words[_COUNT] = self.count
        if self.count == 1:
            self._words[_HAS_STEPS] = 1
            self.event("step")

    def pause(self) -> None:
        """In the worker: no step is expected for now."""
        self._words[_COUNT] = 0

    def resume(self) -> None:
        """In the worker: steps are expected again."""
        self._words[_COUNT] = self.count

    def read(self) -> int:
        """In the supervisor: the steps so far; 0 where none is expected."""
        return self._words[_COUNT]

    def has_steps(self) -> bool:
        """In the supervisor: whether there has been a step, also where none is expected now."""
        return bool(self._words[_HAS_STEPS])

    def announce_termination(self) -> None:
        """In the supervisor: the worker is about to be ended, for a root cause that is known."""
        self._words[_TERMINATING] = 1

    def is_terminating(self) -> bool:
        """In the worker: whether that was said."""
        return bool(self._words[_TERMINATING])

    def start_epoch(self, number: int) -> None:
        """In the worker, where ``recording``: that of the next steps, from 1."""
        self._words[_EPOCH] = number

    def add_step(self, samples: int, step_s: float, data_s: float, own_s: float) -> None:
        """In the worker, where ``recording``: one step more, as in :class:`Steps`."""
        # The sums are kept here alone: after a step's own work, each Python object that is used
        # costs much.
        words = self._words
        seconds = self._seconds
        words[_STEPS] += 1
        words[_SAMPLES] += samples
        seconds[_STEP_S] += step_s
        seconds[_DATA_S] += data_s
        seconds[_OWN_S] += own_s
        if step_s > seconds[_LONGEST_STEP_S] or self._looks != words[_LOOKS]:
            self._looks = words[_LOOKS]
            seconds[_LONGEST_STEP_S] = step_s

    def read_steps(self) -> Steps:
        """In either, where ``recording``: the sums so far."""
        words = self._words
        (step_s, data_s, own_s, longest_step_s) = self._seconds[_STEP_S:_EPOCH]
        return Steps(
            words[_STEPS], words[_SAMPLES], step_s, data_s, own_s, longest_step_s, words[_EPOCH]
        )

    def snapshot(self) -> Steps:
        """In the supervisor, where ``recording``: the same, and the longest step begins again."""
        self._words[_LOOKS] += 1
        return self.read_steps()

    def event(self, name: str, value: float = math.nan) -> None:
        """In the worker: something that is rarer than a step; nothing where not ``recording``."""
        if not self.recording:
            return
        with self._lock:  # a checkpoint is written by another thread
            place = _EVENTS_AT + self._events % _KEPT * _EVENT.size
            self._memory[place : place + _EVENT.size] = _EVENT.pack(
                time.time(), value, EVENTS.index(name)
            )
            self._events += 1
            self._words[_NUMBER] = self._events

    def events(self, seen: int) -> tuple[list[Event], int]:
        """In the supervisor, where ``recording``: the events after the first ``seen``, and how many
        there are now.
        """
        count = self._words[_NUMBER]
        places = range(max(seen, count - _KEPT), count)
        found = [
            _EVENT.unpack_from(self._memory, _EVENTS_AT + place % _KEPT * _EVENT.size)
            for place in places
        ]
        return [Event(when, EVENTS[number], value) for when, value, number in found], count


_page: TelemetryPage | None = None


def install(page: TelemetryPage | None) -> None:
    """In the worker: its steps are counted here from now on; with None nowhere."""
    global _page
    _page = page


def heartbeat(*, last: bool = False) -> None:
    """Say that this rank goes on; call it once a step, on all ranks.

    From the first call on some rank has to call it within each ``--stall-timeout``: else the run is
    ended, and the rank that the others wait for is named. Without a supervisor nothing happens.

    Args:
        last: there is no limit until the next call.
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
    if _page is not None and _page.recording:
        return _page
    return None


def is_supervised() -> bool:
    """Whether there is a supervisor, which says how the run ends."""
    return _page is not None


def is_terminating() -> bool:
    """Whether the supervisor ends this rank for a root cause that is known."""
    return _page is not None and _page.is_terminating()
