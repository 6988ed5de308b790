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
    """Handlers that have replaced those from before, until they are put back.

    In the main thread only: Python lets no other one set handlers.
    """

    def __init__(self) -> None:
        self._ours: dict[signal.Signals, Handler] = {}
        self._before: dict[signal.Signals, Any] = {}

    def __contains__(self, number: signal.Signals) -> bool:
        return number in self._before

    def set(self, number: signal.Signals, handler: Handler) -> None:
        """Handle a signal for the first time.

        Args:
            number: Of the signal.
            handler: Called in the main thread, between two instructions of Python.
        """
        # Noted before the handler is set: the signal may come at once, and the handler may put back
        # what was there.
        self._before[number] = _settable(signal.getsignal(number))
        self._ours[number] = handler
        if self not in _in_use:
            _in_use.append(self)
        signal.signal(number, handler)

    def put_back(self, number: signal.Signals) -> None:
        """Have what was from before handle a signal.

        Args:
            number: Of the signal, which :meth:`set` was called for.
        """
        signal.signal(number, self._before[number])

    def put_all_back(self) -> None:
        """Have what was from before handle all signals, and forget it."""
        for number in self._before:
            self.put_back(number)
        self._forget()

    def leave_to_child(self) -> None:
        """Put back what was from before, in a process that the rank has forked.

        But not where the script has set a handler of its own since.
        """
        for number in self._active():
            self.put_back(number)
        self._forget()

    def fatal_to_child(self) -> list[signal.Signals]:
        """Return the signals that end a process which the rank forks.

        That is where nothing handled them before.
        """
        return [number for number in self._active() if self._before[number] is signal.SIG_DFL]

    def _active(self) -> list[signal.Signals]:
        """Return the signals that our handlers get, without those that the script has set since."""
        return [number for number, ours in self._ours.items() if signal.getsignal(number) == ours]

    def _forget(self) -> None:
        self._ours = {}
        self._before = {}
        if self in _in_use:
            _in_use.remove(self)


def _settable(handler: Any) -> Any:
    """Return what ``signal.signal`` takes for a handler that was there.

    Python does not know one that C has set, as MPI may, and says None.
    """
    if handler is None:
        return signal.SIG_DFL
    return handler


_in_use: list[RankHandlers] = []  # the innermost last


class _Fork(threading.local):
    """A fork by one thread: the signals that were blocked before."""

    mask: set[int | signal.Signals] | None = None


_fork = _Fork()


def _before_fork() -> None:
    # A signal that comes before the child has put its own handlers back would only be noted, in a
    # list that nobody reads there: a terminate() right after a start would be lost, and a join()
    # hang. Blocked, it comes afterwards. Only where it is to end the child: a handler of Python's
    # from before could raise, and an exception in a fork hook is printed and dropped.
    fatal = [number for handlers in _in_use for number in handlers.fatal_to_child()]
    if fatal:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, fatal)
    else:
        _fork.mask = None


def _after_in_parent() -> None:
    if _fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _after_in_child() -> None:
    # The innermost first, as each puts back what it has found. A copy: the list becomes shorter.
    for handlers in reversed([*_in_use]):
        handlers.leave_to_child()
    _after_in_parent()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
