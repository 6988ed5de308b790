"""The process that srun started: it never imports torch, holds the line, and knows how its worker ended.

The worker, forked from it before any heavy import, becomes the user's script. The ranks meet while a thread of the
supervisor waits for them, so that signals and the worker's end are noticed meanwhile; then the guard decides what
the end of one rank means for all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from srunddp.errors import PeerError, Scope
from srunddp.supervisor import failure_files, process_tree, signals, stacks
from srunddp.supervisor.clock import ActiveClock
from srunddp.supervisor.failure import Failure, FailureKind, FailureRecorder
from srunddp.supervisor.root_cause import STALLED, RootCause
from srunddp.supervisor.worker_process import KILL_AFTER, WorkerPipe, WorkerProcess
from srunddp.util.console import write_stderr

_KILLED_WITHIN = 12.0
_MEETING_ENDS_WITHIN = 7.0  # after a failure, of which it tells the others
_SIGNAL_MAY_FOLLOW = 0.1
_TWICE_AFTER = 1.0  # where we do not know whether the worker has got a signal, it gets it once in so many seconds
_PUMPED_WITHIN = 0.5
_LONGEST_WAIT = 30.0
ENDS_WITHIN = 60.0  # a process whose script is over
_PIDFD_OPEN = 434  # Linux's number of this call, the same on all processors


class FailureMonitor(Protocol):
    """Who decides what a failure means for all: ``guard`` on rank 0, ``member`` on the others."""

    @property
    def verdict(self) -> RootCause | None:
        """Why all leave now."""

    @property
    def released(self) -> bool:
        """Whether the worker may leave."""

    @property
    def finished(self) -> bool:
        """Whether the supervisor may leave."""

    def lines(self) -> Iterable[socket.socket]:
        """What to watch for :meth:`on_line`."""

    def on_line(self, line: socket.socket, now: float) -> bool:
        """Read; False when the line has ended."""

    def fail(self, failure: Failure, now: float) -> None:
        """This rank has failed."""

    def done(self) -> None:
        """The script is over, without an error."""

    def left(self) -> None:
        """The worker has ended with 0."""

    def ended(self) -> None:
        """The worker has ended after the verdict."""

    def tick(self, now: float) -> float:
        """Do what is due; returns the seconds until something is."""


@dataclass(frozen=True)
class RendezvousOutcome:
    """What a meeting leaves: the message for the worker, and the guard."""

    message: dict[str, Any]
    guard: FailureMonitor


@dataclass
class Supervisor:
    """Watches one worker until it has ended, and its job with it.

    Attributes:
        report: makes this rank's failure.
        process: the worker; pipe: to it.
        meet: waits for the other ranks; runs in a thread, and may raise.
        interrupt: ends the meeting for what this rank has failed of, and its exit code.
        told: called once with what the meeting left.
        condemn: tells the worker that a verdict stands, before it is ended for that.
        ended: called when the worker has ended, before what it left is killed.
        finish: called after that, for the rest of its output; within so many seconds.
        grace: seconds that the end of a script may take that has failed or stopped; None for no limit.
        launcher: who sends this rank signals, and which of them reach the worker as well.
    """

    report: FailureRecorder
    process: WorkerProcess
    pipe: WorkerPipe
    meet: Callable[[], RendezvousOutcome]
    interrupt: Callable[[str, int], None]
    told: Callable[[RendezvousOutcome], None]
    condemn: Callable[[], None]
    ended: Callable[[], None]
    finish: Callable[[float], object]
    grace: float | None
    launcher: signals.Launcher
    _clock: ActiveClock = field(default_factory=ActiveClock)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _met: RendezvousOutcome | None = None
    _guard: FailureMonitor | None = None
    _error: BaseException | None = None
    _failure: Failure | None = None
    _done: bool = False
    _ends_itself: bool = False  # the script has failed or stopped, and is about to end
    _seen: bool = False  # its end has been dealt with
    _released: bool = False
    _speak_at: float | None = None
    _leave_by: float | None = None
    _forwarded: dict[int, float] = field(default_factory=dict)  # when each signal was last passed on
    _over_at: float | None = None
    _place: str = ""  # where the process hangs though its script is over

    def run(self) -> int:
        """Supervise to the end.

        Returns:
            The exit code to leave with: the verdict's, else the worker's.

        Raises:
            SrunddpError: the meeting's, after the worker has been ended.
        """
        try:
            with self._selector:
                self._watch()
                self._loop()
        finally:
            self.ended()
            given_up = failure_files.finish() | ({self.process.pid} if self.process.given_up else set())
            process_tree.kill_descendants(given_up)
            self.finish(_PUMPED_WITHIN)
        if self._error:
            raise self._error
        return self._exit_code()

    def _loop(self) -> None:
        while True:
            wait = self._tick()
            if self._is_over():
                return
            events = self._selector.select(wait)
            self._clock.advance(wait)
            # Signals first: a worker that the launcher ended has not failed by itself.
            for key, _ in sorted(events, key=lambda event: event[0].data != self._on_signals):
                key.data(key.fileobj)

    def _watch(self) -> None:
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._meet, args=(theirs,), daemon=True).start()
        register = self._selector.register
        register(signals.descriptor(), selectors.EVENT_READ, self._on_signals)
        register(ours, selectors.EVENT_READ, self._on_met)
        if self.launcher.pid:
            with contextlib.suppress(OSError):  # it is gone already, and the kernel ends us soon, or it is old
                register(_pidfd_open(self.launcher.pid), selectors.EVENT_READ, self._on_launcher)

    def _meet(self, ended: socket.socket) -> None:
        try:
            self._met = self.meet()
        except BaseException as error:
            self._error = error
        ended.close()

    def _is_over(self) -> bool:
        """Whether the worker has ended, and nothing keeps us."""
        if not self.process.ended:
            return False
        if self._error or (self._guard and self._guard.finished):
            return True
        return self._leave_by is not None and self._clock.now >= self._leave_by

    def _exit_code(self) -> int:
        if self._guard and self._guard.verdict:
            return self._guard.verdict.exit_code
        status = self.process.status or 0
        return status if status >= 0 else 128 - status

    def _tick(self) -> float:
        now, due = self._clock.now, [_LONGEST_WAIT]
        if self._speak_at is not None and now >= self._speak_at:
            self._speak_at = None
            self._fail(self.report.of_status(self.process.status or 0, now, dumped_core=self.process.dumped_core))
        if overdue := self.process.overdue(now):
            self._fail(self.report.of(*overdue, now))
        if self._guard:
            self._obey(now)
            due += [self._guard.tick(now), self._watch_end(now)]
        elif self._leave_by is not None and now >= self._leave_by and self._failure:
            # The meeting cannot be interrupted, as in PMI's barrier.
            failure, code = self._failure, self._failure.exit_code
            self._error = PeerError(f"rank {failure.rank} on {failure.node} failed: {failure.cause}", code=code)
            self._error.scope = Scope.RANK
            self.process.end(now, ask=True)
        due += [each - now for each in (self._speak_at, self._leave_by) if each is not None]
        if (wait := self.process.tick(now)) is not None:
            due.append(wait)
        return max(0.0, min(due))

    def _obey(self, now: float) -> None:
        guard = self._guard
        if guard and guard.verdict:
            self.condemn()
            if self._failure:
                self._release()  # it may wait for the others
            self._end_worker(now, guard.verdict)
            if self.process.ended and self._leave_by is None:
                guard.ended()
                self._leave_by = now + _KILLED_WITHIN + (self.grace or 0.0)
        elif guard and guard.released and self._done:
            self._over_at = now if self._over_at is None else self._over_at
            self._release()

    def _watch_end(self, now: float) -> float:
        """A script that is over, and whose process stays, as in an exit handler: named, and ended after a while."""
        if self._over_at is None or self.grace is None or self.process.ended or self._failure:
            return _LONGEST_WAIT
        due = self._over_at + ENDS_WITHIN + (self.grace if self._place else 0.0)
        if now < due:
            return due - now
        stack = stacks.main_stack(self.report.dump.ask(self.process.pid))
        where, told = (
            stacks.top_frame(stack),
            f"its script is over, and it has not ended for {now - self._over_at:.0f} s",
        )
        if self._place:
            self._fail(self.report.of(f"{told}, in {where}", STALLED, now, trace=stacks.format_stack(stack)))
        else:
            write_stderr(f"srunddp: rank {self.report.rank} on {self.report.node}: {told}, in {where}\n")
        self._place = where
        return 0.0

    def _end_worker(self, now: float, verdict: RootCause) -> None:
        # Who has failed is about to end by itself: the culprit, and all after a stop, may have something left to do.
        stops = self._failure is not None and self._failure.weight >= FailureKind.STOPPED
        has_time = self._ends_itself and (stops or self.report.rank in verdict.ranks)
        self.process.end(now, ask=not self._failure, within=self.grace if has_time else KILL_AFTER)

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self.pipe.send({"leave": True})

    def _on_met(self, ended: socket.socket) -> None:
        self._selector.unregister(ended)
        self._leave_by = None
        if self._met is None:
            self.process.end(self._clock.now, ask=True)
            return
        self._guard = self._met.guard
        self.pipe.send(self._met.message)
        self.told(self._met)
        self._selector.register(self.pipe.end, selectors.EVENT_READ, self._on_worker)
        for line in self._guard.lines():
            self._selector.register(line, selectors.EVENT_READ, self._on_line)
        if self._failure:
            self._guard.fail(self._failure, self._clock.now)
        elif self._seen:
            self._on_end()

    def _on_line(self, line: socket.socket) -> None:
        if self._guard and not self._guard.on_line(line, self._clock.now):
            self._selector.unregister(line)

    def _on_worker(self, _: socket.socket) -> None:
        message = self.pipe.receive()
        if message is None:
            self._selector.unregister(self.pipe.end)
        elif "failure" in message:
            self._ends_itself = True
            self._fail(self.report.of_message(message["failure"], self._clock.now))
        elif "done" in message and self._guard:
            self._done = True
            self._guard.done()

    def _on_launcher(self, process: int) -> None:
        self._selector.unregister(process)
        self._ends_itself = False
        self._fail(self.report.of(f"its launcher, process {self.launcher.pid}, has ended", 137, self._clock.now))

    def _on_signals(self, opened: int) -> None:
        arrived = signals.read(opened)
        for received in arrived:
            if received.number == signal.SIGCHLD:
                continue
            if self.launcher.sent(received) and received.number in signals.ENDING:
                self.report.ask(received.number, self._clock.now)
            if self._is_to_forward(received):
                self._forwarded[received.number] = self._clock.now
                self.process.send(received.number)
        if any(received.number == signal.SIGCHLD for received in arrived):
            self.process.collect(self._clock.now)
            if self.process.ended and not self._seen:
                self._on_end()

    def _is_to_forward(self, received: signals.Received) -> bool:
        """Whether the worker is to get this signal from us; twice would be wrong, and never would cost the run."""
        if received.number == signal.SIGCONT and not self.launcher.sent(received):
            return False  # a shell's, for the whole process group
        reached = self.launcher.reached_worker(received)
        if reached is None:
            last = self._forwarded.get(received.number)
            return received.number in signals.URGENT and (last is None or self._clock.now >= last + _TWICE_AFTER)
        return not reached

    def _on_end(self) -> None:
        """The worker has ended: tell the guard, or the meeting that goes on without it."""
        self._seen = True
        if self.process.status == 0 and self._guard:
            if not self._done:
                self._guard.done()
            self._guard.left()
        elif not (self._failure or self._error or (self._guard and self._guard.verdict)):
            # The launcher's signal may have come to the worker first.
            ended_by = -(self.process.status or 0)
            late = (
                ended_by in signals.ENDING and not self.report.asked(self._clock.now) and self.launcher.pid is not None
            )
            self._speak_at = self._clock.now + (_SIGNAL_MAY_FOLLOW if late else 0.0)

    def _fail(self, failure: Failure) -> None:
        if self._failure:
            return
        self._failure = failure
        self._tell(failure)
        self.report.write(failure)

    def _tell(self, failure: Failure) -> None:
        if self._guard:
            self._guard.fail(failure, self._clock.now)
        elif self.report.asked(self._clock.now):
            # All ranks end by the same signal, and nobody has to be told.
            self._error = PeerError(failure.cause, code=failure.exit_code)
        else:
            self.interrupt(failure.cause, failure.exit_code)
            self._leave_by = self._clock.now + _MEETING_ENDS_WITHIN


def _pidfd_open(process: int) -> int:
    """A descriptor that becomes readable when the process ends, also where this Python was built without the call."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(process)
    opened: int = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, process, 0)
    if opened < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return opened
