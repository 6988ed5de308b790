"""The guard of a world of one, who has nobody to tell."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from srunddp.supervisor.failure import Failure
from srunddp.supervisor.root_cause import RootCause, report, write

_SELDOM = 3600.0
# Of other ends whoever asked for them knows, and Python is silent about them, too.
_UNFORESEEN = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class SingleProcess:
    """Its failure is the verdict.

    Attributes:
        verdict: once it has failed; released: the worker may end; finished: and so may we.
    """

    def __init__(self, folder: Path | None) -> None:
        self.verdict: RootCause | None = None
        self.released = self.finished = False
        self._folder = folder

    def lines(self) -> Iterable[socket.socket]:
        """There is none."""
        return ()

    def on_line(self, _: socket.socket, now: float) -> bool:
        """Never called."""
        return False

    def fail(self, failure: Failure, _: float) -> None:
        """This rank has failed."""
        if not self.verdict:
            told = failure.shown or failure.exit_code - 128 not in _UNFORESEEN
            self.verdict = RootCause.of(replace(failure, shown=told))
            report(self.verdict, {})
            write(self.verdict, {}, self._folder)
            self.finished = True

    def done(self) -> None:
        """The script is over, without an error."""
        self.released = True

    def left(self) -> None:
        """The worker has ended with 0."""
        self.finished = True

    def ended(self) -> None:
        """There is nobody to tell."""

    def tick(self, _: float) -> float:
        """Nothing is ever due."""
        return _SELDOM
