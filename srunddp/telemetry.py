"""The page of memory that a supervisor and its worker share: the worker counts its steps there, and
the supervisor announces that it is about to end the worker.

Counting a step costs only a few writes to memory. With ``--monitor`` the worker also writes the
times of steps and of rarer events to the page, and the supervisor copies them to files, see
:mod:`srunddp.monitor.monitor`. The supervisor can read the page even after the worker was killed.
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
# The environment variable that tells rank 0's script the folder of --monitor's files.
MONITOR_FOLDER = "_SRUNDDP_MONITOR_FOLDER"

# Indexes of the page's 8-byte words. Words whose index is not listed here are unused.
_COUNT, _TERMINATING, _LOOKS, _NUMBER, _HAS_STEPS, _PAUSED, _PROBES = range(7)
_STEPS, _SAMPLES, _STEP_S, _DATA_S, _OWN_S, _LONGEST_STEP_S, _EPOCH = range(8, 15)
_JOINED, _RAN_ALONE, _CHECKPOINTED, _BEFORE_PAUSE = range(15, 19)
_EVENTS_AT = 256
_EVENT = struct.Struct("@ddQ")
# How many events the page can hold. If the worker notes more events between two calls of
# TelemetryPage.events(), the oldest are lost.
_KEPT = 4096
_SIZE = _EVENTS_AT + _KEPT * _EVENT.size


class Steps(NamedTuple):
    """Sums over the training steps of one rank.

    Attributes:
        steps: The number of steps.
        samples: The number of training samples in these steps, summed over all ranks.
        step_s: Seconds spent in steps.
        data_s: Seconds of ``step_s`` spent waiting for data.
        own_s: Seconds of ``step_s`` spent outside the backward pass. The backward pass is left
            out, because a rank waits for other ranks in it.
        longest_step_s: The longest step since the last call of :meth:`TelemetryPage.snapshot`, in
            seconds.
        epoch: The current epoch, counted from 1; 0 before the first.
    """

    steps: int = 0
    samples: int = 0
    step_s: float = 0.0
    data_s: float = 0.0
    own_s: float = 0.0
    longest_step_s: float = 0.0
    epoch: int = 0


class Event(NamedTuple):
    """An event of one rank that is rarer than a step.

    Attributes:
        time: Unix time in seconds.
        name: One of :data:`EVENTS`.
        value: A number that belongs to the event; NaN if it has none.
    """

    time: float
    name: str
    value: float


class TelemetryPage:
    """Memory shared by a supervisor and the worker that it forks.

    The description of each method says whether the supervisor or the worker calls it.

    Attributes:
        count: How many steps this process has counted so far.
        recording: Whether the page also has the times of steps and events (``--monitor``).
        descriptor: The file descriptor of the memory. A pickled page contains only its number, so
            only a process that inherits the descriptor can unpickle the page.
    """

    def __init__(self, *, recording: bool = False, descriptor: int | None = None) -> None:
        """Map the memory into this process.

        Args:
            recording: Whether the page also keeps the times of steps and events (``--monitor``).
            descriptor: The file descriptor of an existing page; None makes a new page.
        """
        self.descriptor = memory_file() if descriptor is None else descriptor
        size = _SIZE if recording else mmap.PAGESIZE
        os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        # Write each word by a single store through a memoryview, because the other process may
        # read the page at any moment. struct's pack_into() would first set the words to 0, and the
        # other process could read these zeros.
        self._words = memoryview(self._memory).cast("Q")
        self._seconds = memoryview(self._memory).cast("d")
        self.count = 0
        # Used by the worker only: how many events it has written, and what _LOOKS was when it last
        # set the longest step.
        self._events = 0
        self._looks = 0
        self.recording = recording
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(TelemetryPage, recording=self.recording, descriptor=self.descriptor), ()

    def never_free(self) -> None:
        """Keep the memory mapped until this process ends. Called in the worker.

        Unmapping the memory would close the file descriptor that Python's mmap has duplicated. If
        the script has closed this descriptor already, its number may now belong to one of the
        script's files, and that file would be closed instead.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))

    def beat(self) -> None:
        """Count one more step, which also ends a pause. Called in the worker."""
        self.count += 1
        self._words[_COUNT] = self.count
        self._words[_PAUSED] = 0
        if self.count == 1:
            self._words[_HAS_STEPS] = 1
            self.event("step")

    def pause(self) -> None:
        """Announce that no step is expected until the next :meth:`beat` or :meth:`resume`. Called
        in the worker.
        """
        # Set the pause before the count becomes 0. In the other order, the supervisor could find a
        # count of 0 without a pause, and conclude that this rank has not made its first step.
        self._words[_PAUSED] = 1
        self._words[_BEFORE_PAUSE] = self.count
        self._words[_COUNT] = 0

    def resume(self) -> None:
        """Announce that steps are expected again. Called in the worker."""
        self._words[_COUNT] = self.count
        self._words[_PAUSED] = 0

    def read(self) -> int:
        """Return the number of steps so far, but 0 during a pause. Called in the supervisor."""
        return self._words[_COUNT]

    def steps_made(self) -> int:
        """Return the number of steps so far, also during a pause. Called in the supervisor."""
        return self._words[_COUNT] or self._words[_BEFORE_PAUSE]

    def is_paused(self) -> bool:
        """Return whether the worker has announced a pause. Called in either process."""
        return bool(self._words[_PAUSED])

    def has_steps(self) -> bool:
        """Return whether the worker has made at least one step, also during a pause. Called in the
        supervisor.
        """
        return bool(self._words[_HAS_STEPS])

    def join_others(self) -> None:
        """Note that this rank works with other ranks. Called in the worker or in a child that it
        has forked.
        """
        self._words[_JOINED] = 1

    def conclude_alone(self) -> None:
        """Note that the script has run without other ranks, unless :meth:`join_others` was called.
        Called in the worker when the script is over.
        """
        self._words[_RAN_ALONE] = not self._words[_JOINED]

    def ran_alone(self) -> bool:
        """Return whether :meth:`conclude_alone` has noted that the script ran without other ranks;
        False while the script runs. Called in the supervisor.
        """
        return bool(self._words[_RAN_ALONE])

    def checkpointed_at(self) -> float | None:
        """Return the Unix time at which this rank finished its last checkpoint; None if it has
        written none. Called in the supervisor.
        """
        return self._seconds[_CHECKPOINTED] or None

    def announce_termination(self) -> None:
        """Announce that the supervisor is about to end the worker, because the root cause is known.
        Called in the supervisor.
        """
        # The supervisor calls this before it sends SIGTERM, because the worker's handler reads the
        # word to distinguish this SIGTERM from that of a preemption.
        self._words[_TERMINATING] = 1

    def is_terminating(self) -> bool:
        """Return whether :meth:`announce_termination` was called. Called in the worker."""
        return bool(self._words[_TERMINATING])

    def answer_probe(self) -> None:
        """Count an answer to a signal by which the supervisor finds out whether the main thread
        runs Python code, see :mod:`srunddp.supervisor.activity`. Called in the worker.
        """
        self._words[_PROBES] += 1

    def answered_probes(self) -> int:
        """Return how often :meth:`answer_probe` was called. Called in the supervisor."""
        return self._words[_PROBES]

    def start_epoch(self, number: int) -> None:
        """Note the epoch to which the next steps belong. Called in the worker, only if
        ``recording``.

        Args:
            number: The epoch, counted from 1.
        """
        self._words[_EPOCH] = number

    def add_step(self, samples: int, step_s: float, data_s: float, own_s: float) -> None:
        """Add one step to the sums. Called in the worker, only if ``recording``.

        Args:
            samples: The number of training samples in the step, summed over all ranks.
            step_s: How long the step took, in seconds.
            data_s: Seconds of ``step_s`` spent waiting for data.
            own_s: Seconds of ``step_s`` spent outside the backward pass, in which a rank also waits
                for other ranks.
        """
        # Keep the sums only in the page and not in Python objects too: after a training step, such
        # objects are no longer in the CPU's caches, so that using each of them costs time.
        words = self._words
        seconds = self._seconds
        words[_STEPS] += 1
        words[_SAMPLES] += samples
        seconds[_STEP_S] += step_s
        seconds[_DATA_S] += data_s
        seconds[_OWN_S] += own_s
        # The supervisor cannot reset the longest step itself, because the worker may write it at
        # the same moment. Instead snapshot() increments _LOOKS, and the worker's next step
        # overwrites the longest step, however short that next step is.
        if step_s > seconds[_LONGEST_STEP_S] or self._looks != words[_LOOKS]:
            self._looks = words[_LOOKS]
            seconds[_LONGEST_STEP_S] = step_s

    def read_steps(self) -> Steps:
        """Return the sums so far. Called in either process, only if ``recording``."""
        words = self._words
        (step_s, data_s, own_s, longest_step_s) = self._seconds[_STEP_S:_EPOCH]
        return Steps(
            words[_STEPS], words[_SAMPLES], step_s, data_s, own_s, longest_step_s, words[_EPOCH]
        )

    def snapshot(self) -> Steps:
        """Return the sums so far; ``longest_step_s`` then begins anew with the next step. Called in
        the supervisor, only if ``recording``.
        """
        self._words[_LOOKS] += 1
        return self.read_steps()

    def event(self, name: str, value: float = math.nan) -> None:
        """Note an event with the current time. Called in the worker. Without ``recording`` only the
        time of the last checkpoint is kept.

        Args:
            name: One of :data:`EVENTS`.
            value: A number that belongs to the event.
        """
        if name == "checkpoint_written":
            self._seconds[_CHECKPOINTED] = time.time()
        if not self.recording:
            return
        # Lock, because the thread that writes checkpoints may call this at the same moment.
        with self._lock:
            place = _EVENTS_AT + self._events % _KEPT * _EVENT.size
            self._memory[place : place + _EVENT.size] = _EVENT.pack(
                time.time(), value, EVENTS.index(name)
            )
            # Increase the number only after the event is written: the supervisor may read at any
            # moment, and takes as many events as the number says for completely written.
            self._events += 1
            self._words[_NUMBER] = self._events

    def events(self, seen: int) -> tuple[list[Event], int]:
        """Return the new events. Called in the supervisor, only if ``recording``.

        Args:
            seen: The number of events that the previous call has returned; 0 in the first call.

        Returns:
            The events since the previous call, and the number of events so far. If there were more
            events since the previous call than the page can hold, the oldest of them are missing.
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
    """Count this process's steps and events on a page from now on.

    Args:
        page: The page shared with the supervisor; None to count them nowhere.
    """
    global _page
    _page = page


def heartbeat(*, last: bool = False) -> None:
    """Report that this rank makes progress. Call it once per step, on all ranks.

    After the first call, at least one rank must call it within each ``--stall-timeout``. If none
    does, srunddp ends the run and names the rank that the others wait for. Before the first call
    there is no limit, except after a restart: if an earlier start has made steps, a longer limit
    holds for the first call. Without a supervisor the call does nothing.

    Args:
        last: Whether no further step is expected for now. Such a call counts no step, and there is
            no limit until the next call.
    """
    if _page is None:
        return
    if last:
        _page.pause()
    else:
        _page.beat()


@contextlib.contextmanager
def stall_limit_suspended() -> Iterator[None]:
    """Suspend the limit of ``--stall-timeout`` inside the ``with`` block, in which the rank does
    work that is no step, such as calling a callback of the user.
    """
    # In a nested block the limit is suspended already, and stays so until the outer block ends.
    if _page is None or _page.is_paused():
        yield
        return
    _page.pause()
    try:
        yield
    except BaseException:
        # After an error the rank most likely ends, which may take long too, so the limit stays
        # suspended. But if the rank has not made its first step, end the pause: before the first
        # step there is a limit only if an earlier start has made steps, and this limit is long.
        if not _page.count:
            _page.resume()
        raise
    _page.resume()


def event(name: str, value: float = math.nan) -> None:
    """Note an event with the current time. Most events are kept only with ``--monitor``.

    Args:
        name: One of :data:`EVENTS`.
        value: A number that belongs to the event.
    """
    if _page is not None:
        _page.event(name, value)


def join_others() -> None:
    """Note that this rank works with other ranks, so that its script does not count as one that ran
    alone. Without a supervisor this does nothing.
    """
    if _page is not None:
        _page.join_others()


def active_page() -> TelemetryPage | None:
    """Return the page to which the training loop writes its times; None without ``--monitor`` or
    without a supervisor.
    """
    if _page is not None and _page.recording:
        return _page
    return None


def is_supervised() -> bool:
    """Return whether this process has a supervisor, which reports how the run ends."""
    return _page is not None


def is_terminating() -> bool:
    """Return whether the supervisor is ending this rank because the root cause is known."""
    return _page is not None and _page.is_terminating()
