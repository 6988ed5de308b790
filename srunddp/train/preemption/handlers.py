"""Signal handlers for the rank only: processes that it forks get the previous handlers.

Otherwise a process that the script forks, such as one of a ``multiprocessing.Pool``, would only
note a SIGTERM that has to end it.
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
    """Signal handlers of this process, and the previous handlers that they replace until these are
    put back.

    Use this only in the main thread: Python lets no other thread set handlers.
    """

    def __init__(self) -> None:
        self._ours: dict[signal.Signals, Handler] = {}
        self._before: dict[signal.Signals, Any] = {}

    def __contains__(self, number: signal.Signals) -> bool:
        return number in self._before

    def set(self, number: signal.Signals, handler: Handler) -> None:
        """Replace the handler of a signal, and note the previous one.

        Args:
            number: The number of the signal, for which this object has set no handler yet.
            handler: Called in the main thread, between two Python instructions.
        """
        # Note the previous handler before setting the new one: the signal may arrive at once, and
        # the new handler may put the previous one back.
        self._before[number] = _settable(signal.getsignal(number))
        self._ours[number] = handler
        if self not in _in_use:
            _in_use.append(self)
        signal.signal(number, handler)

    def put_back(self, number: signal.Signals) -> None:
        """Put back the previous handler of a signal.

        Args:
            number: The number of a signal for which :meth:`set` was called.
        """
        signal.signal(number, self._before[number])

    def put_all_back(self) -> None:
        """Put back the previous handlers of all signals, and forget them."""
        for number in self._before:
            self.put_back(number)
        self._forget()

    def leave_to_child(self) -> None:
        """Put back the previous handlers in a process that the rank has forked.

        Signals for which the script has set its own handler since are left alone.
        """
        for number in self._active():
            self.put_back(number)
        self._forget()

    def fatal_to_child(self) -> list[signal.Signals]:
        """Return the signals that would end a process that the rank forks.

        These are the signals that had no handler before.
        """
        return [number for number in self._active() if self._before[number] is signal.SIG_DFL]

    def _active(self) -> list[signal.Signals]:
        """Return the signals that this object's handlers still get, without those for which the
        script has set another handler since.
        """
        return [number for number, ours in self._ours.items() if signal.getsignal(number) == ours]

    def _forget(self) -> None:
        self._ours = {}
        self._before = {}
        if self in _in_use:
            _in_use.remove(self)


def _settable(handler: Any) -> Any:
    """Return a previous handler in a form that ``signal.signal`` accepts.

    Python does not know handlers set from C, for example by MPI, and returns None for them.
    """
    if handler is None:
        return signal.SIG_DFL
    return handler


_in_use: list[RankHandlers] = []  # the objects that have set handlers, the latest last


class _Fork(threading.local):
    """The signals that a thread had blocked before its fork."""

    mask: set[int | signal.Signals] | None = None


_fork = _Fork()


def _before_fork() -> None:
    # Block signals until the child has put the previous handlers back. Otherwise a signal that
    # arrives in between would only be noted, in a list that nobody reads in the child: after a
    # start() and a terminate(), a join() would hang. A blocked signal is delivered afterwards.
    # Block only signals that then end the child: a previous Python handler could raise, and an
    # exception in a fork hook is printed and dropped.
    fatal = [number for handlers in _in_use for number in handlers.fatal_to_child()]
    if fatal:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, fatal)
    else:
        _fork.mask = None


def _after_in_parent() -> None:
    if _fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _after_in_child() -> None:
    # Begin with the latest object, because each one puts back the handlers that it replaced.
    # Iterate over a copy of the list, because leave_to_child() removes the object from it.
    for handlers in reversed([*_in_use]):
        handlers.leave_to_child()
    _after_in_parent()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
