"""The process that srun started: it never imports torch, holds the line, and knows how its worker ended.

The worker, forked from it before any heavy import, becomes the user's script. The ranks meet while a
thread of the supervisor waits for them, so that signals and the worker's end are noticed meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from srunddp.bootstrap.line import send
from srunddp.run import signals

_KILL_AFTER = 5.0
_LAST_WORD = 0.5


class Pipe:
    """Messages between a supervisor and its worker, one JSON object each."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def send(self, message: dict[str, Any]) -> None:
        """Send; a peer that is gone is noticed by whoever waits for it."""
        try:
            self.end.send(json.dumps(message).encode())
        except OSError:
            return

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other side has closed or ended."""
        try:
            data = self.end.recv(1 << 16)
        except OSError:
            return None
        return dict(json.loads(data)) if data else None


def pipe() -> tuple[Pipe, Pipe]:
    """The supervisor's end and the worker's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Pipe(ours), Pipe(theirs)


@dataclass(frozen=True)
class Met:
    """What a meeting leaves: the message for the worker, and the lines that stay open."""

    message: dict[str, Any]
    lines: tuple[socket.socket, ...]


@dataclass
class Supervisor:
    """Watches one worker until it has ended.

    Attributes:
        worker: its process id; pipe: to it.
        meet: waits for the other ranks; runs in a thread, and may raise.
        told: called once with what the meeting left.
        launcher: the process whose signals reach the worker as well, and not just us; None for none.
        last: this is rank 0, whose worker hosts the store and so leaves when the others have said goodbye.
    """

    worker: int
    pipe: Pipe
    meet: Callable[[], Met]
    told: Callable[[Met], None]
    launcher: int | None
    last: bool
    _working: set[socket.socket] = field(default_factory=set)
    _error: BaseException | None = None
    _done: bool = False
    _met: Met | None = None
    _code: int | None = None

    def run(self) -> int:
        """Supervise to the end.

        Returns:
            The worker's exit code, or 128 and the number of the signal that ended it.

        Raises:
            SrunddpError: the meeting's, after the worker has been ended.
        """
        bell, rope = socket.socketpair()
        meeting = threading.Thread(target=self._meet, args=(rope,), daemon=True)
        meeting.start()
        with selectors.DefaultSelector() as selector:
            opened = signals.descriptor()
            selector.register(opened, selectors.EVENT_READ, lambda _: self._on_signals(opened))
            selector.register(bell, selectors.EVENT_READ, lambda _: self._on_met(selector, bell))
            while self._code is None:
                events = selector.select(_KILL_AFTER if self._error else None)
                for key, _ in events:
                    key.data(key.fileobj)
                if not events:
                    os.kill(self.worker, signal.SIGKILL)
        if self._met is None:
            # The worker may have ended by what the meeting is about to say.
            meeting.join(_LAST_WORD)
        if self._error:
            raise self._error
        return self._code

    def _meet(self, rope: socket.socket) -> None:
        try:
            self._met = self.meet()
        except BaseException as error:
            self._error = error
        rope.close()

    def _on_met(self, selector: selectors.BaseSelector, bell: socket.socket) -> None:
        selector.unregister(bell)
        if self._met is None:
            if self._code is None:
                os.kill(self.worker, signal.SIGTERM)
            return
        self.told(self._met)
        self.pipe.send(self._met.message)
        selector.register(self.pipe.end, selectors.EVENT_READ, lambda _: self._on_worker(selector))
        self._working = set(self._met.lines) if self.last else set()
        for line in self._met.lines:
            selector.register(line, selectors.EVENT_READ, lambda ended: self._on_line(selector, ended))

    def _on_worker(self, selector: selectors.BaseSelector) -> None:
        if self.pipe.receive() is None:
            selector.unregister(self.pipe.end)
            return
        self._done = True
        # A goodbye, and not the line's end: MPI_Finalize, which comes next, needs all ranks at once.
        for line in () if self.last else self._met.lines if self._met else ():
            send(line, {"goodbye": True})
        self._release()

    def _on_line(self, selector: selectors.BaseSelector, line: socket.socket) -> None:
        try:
            ended = not line.recv(4096)
        except OSError:
            ended = True
        if ended:
            selector.unregister(line)
        # All that a rank sends after the meeting is its goodbye.
        self._working.discard(line)
        self._release()

    def _release(self) -> None:
        if self._done and not self._working:
            self.pipe.send({"leave": True})

    def _on_signals(self, opened: int) -> None:
        for received in signals.read(opened):
            if received.number == signal.SIGCHLD:
                self._reap()
            elif not self._worker_has_it(received) and self._code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.worker, received.number)

    def _worker_has_it(self, received: signals.Received) -> bool:
        # A terminal's keys go to the whole foreground group; Slurm signals every process of a step, and Open MPI
        # and Hydra the whole process group. Passing such a signal on would deliver it twice. An alarm is ours alone.
        of_a_terminal = received.from_kernel and received.number in signals.TERMINAL
        # A sender outside our process namespace has no id, and 0 comes here: the launcher too, where it is outside.
        return of_a_terminal or received.sender == self.launcher

    def _reap(self) -> None:
        ended, status = os.waitpid(self.worker, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            self._code = code if code >= 0 else 128 - code
