"""What a rank and its supervisor tell each other in shared memory: how many steps there were, and
that all is over.

A mark is one write, no more. With ``--monitor`` there are also times of steps and of what is rarer,
for :mod:`srunddp.monitor.monitor`; they outlive the rank, however it ends.
"""

import contextlib
import ctypes
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

# Places of words of 8 bytes; those between are free.
_COUNT, _TERMINATING, _LOOKS, _NUMBER, _HAS_STEPS, _PAUSED, _PROBES = range(7)
_STEPS, _SAMPLES, _STEP_S, _DATA_S, _OWN_S, _LONGEST_STEP_S, _EPOCH = range(8, 15)
_JOINED, _RAN_ALONE, _CHECKPOINTED, _BEFORE_PAUSE = range(15, 19)
_EVENTS_AT = 256
_EVENT = struct.Struct("@ddQ")
# The events are a ring of so many. More than that between two looks of the recorder, and the oldest
# of them are lost.
_KEPT = 4096
_SIZE = _EVENTS_AT + _KEPT * _EVENT.size


class Steps(NamedTuple):
    """Sums over the training steps of one rank.

    Attributes:
        steps: Their number.
        samples: Of all ranks.
        step_s: Seconds in steps.
        data_s: Of these, waiting for data.
        own_s: Of these, not in the backward pass, where a rank waits for the others.
        longest_step_s: Seconds; since the recorder last looked.
        epoch: The present one, from 1.
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
        time: Unix time in seconds.
        name: One of :data:`EVENTS`.
        value: A figure that goes with it, NaN for none.
    """

    time: float
    name: str
    value: float


class TelemetryPage:
    """A page shared by a supervisor and the worker that it forks.

    Attributes:
        count: Of this process's steps so far.
        recording: Whether times are wanted, too.
        descriptor: Of the page; it is pickled for a process that inherits it.
    """

    def __init__(self, *, recording: bool = False, descriptor: int | None = None) -> None:
        """Map the page.

        Args:
            recording: Times are wanted, too.
            descriptor: Of a page that is there; None makes a new one.
        """
        self.descriptor = memory_file() if descriptor is None else descriptor
        size = _SIZE if recording else mmap.PAGESIZE
        os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        # The reader may look at any moment, and each word is one store. pack_into() would first
        # make all of them 0.
        self._words = memoryview(self._memory).cast("Q")
        self._seconds = memoryview(self._memory).cast("d")
        self.count = 0
        # How many events this worker has written, and how many looks of the recorder it has seen.
        self._events = 0
        self._looks = 0
        self.recording = recording
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(TelemetryPage, recording=self.recording, descriptor=self.descriptor), ()

    def never_free(self) -> None:
        """Keep the page to the end of this process, which belongs to a script.

        To free it would close the descriptor that mmap has made for itself. If the script has
        closed that, its number may be that of a file of the script's.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))

    def beat(self) -> None:
        """Count one step more; in the worker."""
        self.count += 1
        self._words[_COUNT] = self.count
        self._words[_PAUSED] = 0
        if self.count == 1:
            self._words[_HAS_STEPS] = 1
            self.event("step")

    def pause(self) -> None:
        """Say that no step is expected for now; in the worker."""
        # First, as a reader that finds no count and no pause takes this rank for one that has not
        # begun.
        self._words[_PAUSED] = 1
        self._words[_BEFORE_PAUSE] = self.count
        self._words[_COUNT] = 0

    def resume(self) -> None:
        """Say that steps are expected again; in the worker."""
        self._words[_COUNT] = self.count
        self._words[_PAUSED] = 0

    def read(self) -> int:
        """Return the steps so far, 0 where none is expected; in the supervisor."""
        return self._words[_COUNT]

    def steps_made(self) -> int:
        """Return the steps so far, whether more are expected or not; in the supervisor."""
        return self._words[_COUNT] or self._words[_BEFORE_PAUSE]

    def is_paused(self) -> bool:
        """Return whether the worker has said that no step is expected for now; in either."""
        return bool(self._words[_PAUSED])

    def has_steps(self) -> bool:
        """Return whether there has ever been a step; in the supervisor."""
        return bool(self._words[_HAS_STEPS])

    def join_others(self) -> None:
        """Say that this rank works with other ranks; in the worker, or in what it has forked."""
        self._words[_JOINED] = 1

    def conclude_alone(self) -> None:
        """Say that the script has worked alone, unless it has joined others; in the worker, when
        the script is over.
        """
        self._words[_RAN_ALONE] = not self._words[_JOINED]

    def ran_alone(self) -> bool:
        """Return what :meth:`conclude_alone` has found; in the supervisor."""
        return bool(self._words[_RAN_ALONE])

    def checkpointed_at(self) -> float | None:
        """Return the Unix time at which this rank had written its last checkpoint; None if it has
        written none; in the supervisor.
        """
        return self._seconds[_CHECKPOINTED] or None

    def announce_termination(self) -> None:
        """Say that the worker is about to be ended for a known root cause; in the supervisor."""
        # Before its SIGTERM: the worker's handler reads this to tell it from a preemption.
        self._words[_TERMINATING] = 1

    def is_terminating(self) -> bool:
        """Return whether :meth:`announce_termination` was called; in the worker."""
        return bool(self._words[_TERMINATING])

    def answer_probe(self) -> None:
        """Say that the main thread runs Python; in the worker."""
        self._words[_PROBES] += 1

    def answered_probes(self) -> int:
        """Return how often :meth:`answer_probe` was called; in the supervisor."""
        return self._words[_PROBES]

    def start_epoch(self, number: int) -> None:
        """Note the epoch of the next steps; in the worker, where ``recording``.

        Args:
            number: Counted from 1.
        """
        self._words[_EPOCH] = number

    def add_step(self, samples: int, step_s: float, data_s: float, own_s: float) -> None:
        """Add one step to the sums; in the worker, where ``recording``.

        Args:
            samples: In the step, of all ranks.
            step_s: Seconds of the step.
            data_s: Of these, waiting for data.
            own_s: Of these, not waiting for other ranks.
        """
        # The sums are kept here alone: after a step's own work, each Python object that is used
        # costs much.
        words = self._words
        seconds = self._seconds
        words[_STEPS] += 1
        words[_SAMPLES] += samples
        seconds[_STEP_S] += step_s
        seconds[_DATA_S] += data_s
        seconds[_OWN_S] += own_s
        # The recorder cannot set the longest step to 0 itself: the worker may write it at that
        # moment. It counts its looks, and the first step after one begins anew.
        if step_s > seconds[_LONGEST_STEP_S] or self._looks != words[_LOOKS]:
            self._looks = words[_LOOKS]
            seconds[_LONGEST_STEP_S] = step_s

    def read_steps(self) -> Steps:
        """Return the sums so far; in either, where ``recording``."""
        words = self._words
        (step_s, data_s, own_s, longest_step_s) = self._seconds[_STEP_S:_EPOCH]
        return Steps(
            words[_STEPS], words[_SAMPLES], step_s, data_s, own_s, longest_step_s, words[_EPOCH]
        )

    def snapshot(self) -> Steps:
        """Return the sums so far, and let the longest step begin anew; in the supervisor."""
        self._words[_LOOKS] += 1
        return self.read_steps()

    def event(self, name: str, value: float = math.nan) -> None:
        """Note something that is rarer than a step; in the worker. Where not ``recording``, only
        the time of the last checkpoint is kept.

        Args:
            name: One of :data:`EVENTS`.
            value: A figure that goes with it.
        """
        if name == "checkpoint_written":
            self._seconds[_CHECKPOINTED] = time.time()
        if not self.recording:
            return
        # A checkpoint is written by another thread, which notes when it is done.
        with self._lock:
            place = _EVENTS_AT + self._events % _KEPT * _EVENT.size
            self._memory[place : place + _EVENT.size] = _EVENT.pack(
                time.time(), value, EVENTS.index(name)
            )
            # Written last: the supervisor may read at any moment, and takes so many events for
            # complete.
            self._events += 1
            self._words[_NUMBER] = self._events

    def events(self, seen: int) -> tuple[list[Event], int]:
        """Return the events after the first ``seen``; in the supervisor, where ``recording``.

        Args:
            seen: How many were there at the last call.

        Returns:
            The events, and how many there are now.
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
    """Have the worker's steps counted on a page from now on.

    Args:
        page: Shared with the supervisor; None counts them nowhere.
    """
    global _page
    _page = page


def heartbeat(*, last: bool = False) -> None:
    """Say that this rank goes on; call it once a step, on all ranks.

    From the first call on some rank has to call it within each ``--stall-timeout``: else the run is
    ended, and the rank that the others wait for is named. After a restart there is a longer limit
    for the first call as well, if an earlier start has made steps. Without a supervisor nothing
    happens.

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
    """Let what runs within, which is no step, take as long as it likes."""
    # Nested, the limit is off already and has to stay off afterwards.
    if _page is None or _page.is_paused():
        yield
        return
    _page.pause()
    try:
        yield
    except BaseException:
        # What follows is most likely the end of the rank, which may take long as well. Before the
        # first step only a start after one with steps has a limit, and that one is long.
        if not _page.count:
            _page.resume()
        raise
    _page.resume()


def event(name: str, value: float = math.nan) -> None:
    """Note that one of :data:`EVENTS` happens now; most are kept only with ``--monitor``.

    Args:
        name: One of them.
        value: A figure that goes with it.
    """
    if _page is not None:
        _page.event(name, value)


def join_others() -> None:
    """Say that this rank works with other ranks; nothing without a supervisor."""
    if _page is not None:
        _page.join_others()


def active_page() -> TelemetryPage | None:
    """Return the page on which the loop writes its times; None without ``--monitor``."""
    if _page is not None and _page.recording:
        return _page
    return None


def is_supervised() -> bool:
    """Return whether there is a supervisor, which says how the run ends."""
    return _page is not None


def is_terminating() -> bool:
    """Return whether the supervisor ends this rank for a root cause that is known."""
    return _page is not None and _page.is_terminating()
