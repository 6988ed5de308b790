"""Signal handlers that are the rank's alone: what it forks has those from before.

A process that the script forks, such as one of a ``multiprocessing.Pool``, would else note a
SIGTERM that is to end it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], object]


class RankHandlers:
    """Handlers that have replaced those from before, until they are put back. In the main thread
    only.
    """

    def __init__(self) -> None:
        self._ours: dict[signal.Signals, Handler] = {}
        self._before: dict[signal.Signals, Any] = {}

    def __contains__(self, number: signal.Signals) -> bool:
        return number in self._before

    def set(self, number: signal.Signals, handler: Handler) -> None:
        """Handle a signal for the first time."""
        # First, as the signal may come at once.
        self._before[number] = _settable(signal.getsignal(number))
        self._ours[number] = handler
        if self not in _in_use:
            _in_use.append(self)
        signal.signal(number, handler)

    def put_back(self, number: signal.Signals) -> None:
        """Have what was from before handle a signal."""
        signal.signal(number, self._before[number])

    def put_all_back(self) -> None:
        """Have what was from before handle all signals, and forget it."""
        for number in self._before:
            self.put_back(number)
        self._forget()

    def leave_to_child(self) -> None:
        """In a process that the rank has forked: as :meth:`put_all_back`, except for what the
        script has set since.
        """
        for number in self._active():
            self.put_back(number)
        self._forget()

    def fatal_to_child(self) -> list[signal.Signals]:
        """The signals that end a process which the rank forks, unless something handles them
        there.
        """
        return [number for number in self._active() if self._before[number] is signal.SIG_DFL]

    def _active(self) -> list[signal.Signals]:
        """The signals that our handlers get, and none that the script has set since."""
        return [number for number, ours in self._ours.items() if signal.getsignal(number) == ours]

    def _forget(self) -> None:
        self._ours = {}
        self._before = {}
        if self in _in_use:
            _in_use.remove(self)


def _settable(handler: Any) -> Any:
    """What ``signal.signal`` takes for it: Python does not know a handler that C has set."""
    if handler is None:
        return signal.SIG_DFL
    return handler


_in_use: list[RankHandlers] = []  # the innermost last


class _Fork(threading.local):
    """A fork by one thread: the signals that were blocked before."""

    mask: set[int | signal.Signals] | None = None


_fork = _Fork()


def _before_fork() -> None:
    # One that comes before the child has its own handlers must not be lost, as of a terminate()
    # that follows at once. Only where no handler of Python's is to get it: what that raised would
    # be lost in here.
    fatal = [number for handlers in _in_use for number in handlers.fatal_to_child()]
    if fatal:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, fatal)
    else:
        _fork.mask = None


def _after_in_parent() -> None:
    if _fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _after_in_child() -> None:
    for handlers in reversed([*_in_use]):
        handlers.leave_to_child()
    _after_in_parent()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
