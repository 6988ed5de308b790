"""The process that srun started: it never imports torch, and knows how its worker ended.

The worker, forked from it before any heavy import, becomes the user's script. The ranks meet while
a thread of the supervisor waits for them, so that signals and the worker's end are noticed
meanwhile; then the failure monitor decides what the end of one rank means for all.
"""

import contextlib
import selectors
import signal
import socket
import threading
from dataclasses import dataclass, field
from typing import Protocol

from srunddp.errors import PeerError, Scope
from srunddp.supervisor import signals, stacks
from srunddp.supervisor.clock import ActiveClock
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.failure import Failure, FailureKind
from srunddp.supervisor.failure_files import finish_writers
from srunddp.supervisor.failure_monitor import FailureMonitor
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.output.redirect import OutputRedirect
from srunddp.supervisor.recorder import FailureRecorder
from srunddp.supervisor.root_cause import STALLED
from srunddp.supervisor.worker_messages import (
    Leave,
    ScriptHasFailed,
    ScriptIsDone,
    StartedMpi,
    WorkerMessage,
)
from srunddp.supervisor.worker_process import WorkerPipe, WorkerProcess, kill_descendants
from srunddp.util.console import write_stderr

# What the worker is told, and who judges failures from now on.
RendezvousOutcome = tuple[WorkerMessage, FailureMonitor]


class RankAgent(Protocol):
    """The parts of a rank that a supervisor does not know: its rendezvous and its telemetry."""

    def rendezvous(self) -> RendezvousOutcome:
        """Wait for the other ranks. Runs in a thread, and may raise."""

    def abort_rendezvous(self, cause: str, exit_code: int) -> None:
        """End the rendezvous for what this rank has failed of."""

    def on_rendezvous(self) -> None:
        """The rendezvous is complete, and the worker has been told of it."""

    def announce_termination(self) -> None:
        """Tell the worker that it is about to be ended for a root cause."""

    def stop_sampler(self) -> None:
        """The worker has ended, and what it left is about to be killed."""


@dataclass(kw_only=True)
class Supervisor:
    """Watches one worker until it has ended, and its job with it.

    Attributes:
        agent: does for this rank what is not the supervisor's.
        recorder: makes this rank's failure.
        process: the worker; pipe: to it; output: its.
        remaining: what could not be killed; asked: signals that ask for an end, of any time.
        grace: seconds that the end of a script may take that has failed or stopped; None for no
            limit.
        restart_grace: the same before a restart, for all ranks.
        early: signals that came before the worker was there, to get them.
        launcher: who sends this rank signals, and which of them reach the worker as well.
        limits: how long it waits for what; clock: what all of these times are measured by.
    """

    agent: RankAgent
    recorder: FailureRecorder
    process: WorkerProcess
    pipe: WorkerPipe
    output: OutputRedirect
    grace: float | None
    restart_grace: float
    launcher: signals.Launcher
    early: set[signal.Signals] = field(default_factory=set)
    limits: Limits = DEFAULT_LIMITS
    clock: ActiveClock = field(default_factory=ActiveClock)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _signals: int = -1
    _outcome: RendezvousOutcome | None = None
    _monitor: FailureMonitor | None = None
    _error: BaseException | None = None
    _failure: Failure | None = None
    _script_done: bool = False
    _ends_itself: bool = False  # the script has failed or stopped, and is about to end
    _end_handled: bool = False  # the worker's
    _released: bool = False
    _report_status_at: float | None = None
    _leave_by: float | None = None
    # When each signal was last passed on.
    _forwarded: dict[int, float] = field(default_factory=dict)
    _over_at: float | None = None
    _lingers_in: str = ""  # where the process hangs though its script is over
    remaining: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)

    def run(self) -> int:
        """Supervise to the end.

        Returns:
            The exit code to leave with: the root cause's, else the worker's.

        Raises:
            SrunddpError: the rendezvous failed; the worker has been ended.
        """
        try:
            with self._selector:
                self._watch()
                self._loop()
        finally:
            self.agent.stop_sampler()
            writers = finish_writers(self.limits.files_written_within)
            if self.process.given_up:
                given_up = {self.process.pid}
            else:
                given_up = set()
            left = kill_descendants(self.limits.all_gone_within, writers | given_up)
            self.remaining = left - writers
            self.output.finish(self.limits.output_within)
        if self._error:
            raise self._error
        if self._monitor and self._monitor.root_cause:
            return self._monitor.root_cause.exit_code
        status = self.process.status or 0
        return status if status >= 0 else 128 - status

    @property
    def restart(self) -> str | None:
        """What rank 0 has published for the next start; None where the run is over."""
        return self._monitor.restart if self._monitor else None

    @property
    def monitor(self) -> FailureMonitor | None:
        """Who judges a failure, once the ranks have met."""
        return self._monitor

    def _watch(self) -> None:
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._rendezvous, args=(theirs,), daemon=True).start()
        register = self._selector.register
        self._signals = signals.descriptor()
        register(self._signals, selectors.EVENT_READ, self._on_signals)
        register(ours, selectors.EVENT_READ, self._on_rendezvous)
        if self.launcher.pid:
            # It is gone already, and the kernel ends us soon, or it is old.
            with contextlib.suppress(OSError):
                register(
                    signals.pidfd_open(self.launcher.pid),
                    selectors.EVENT_READ,
                    self._on_launcher_end,
                )

    def _rendezvous(self, ended: socket.socket) -> None:
        try:
            self._outcome = self.agent.rendezvous()
        except BaseException as error:
            self._error = error
        ended.close()

    def _loop(self) -> None:
        while True:
            wait = self._tick()
            if self._is_over():
                return
            ready = {key.fileobj: key.data for key, _ in self._selector.select(wait)}
            self.clock.advance(wait)
            # Signals first: a worker that the launcher ended has not failed by itself.
            if handler := ready.pop(self._signals, None):
                handler(self._signals)
            for readable, handler in ready.items():
                handler(readable)

    def _is_over(self) -> bool:
        """Whether the worker has ended, and nothing keeps us."""
        if not self.process.ended:
            return False
        if self._error or (self._monitor and self._monitor.finished):
            return True
        return self._leave_by is not None and self.clock.now >= self._leave_by

    def _tick(self) -> float:
        now = self.clock.now
        due = [self.limits.longest_wait]
        if self._report_status_at is not None and now >= self._report_status_at:
            self._report_status_at = None
            status = self.process.status or 0
            dumped_core = self.process.dumped_core
            self._fail(self.recorder.of_status(status, now, dumped_core=dumped_core))
        if not self._failure and (overdue := self.process.overdue(now)):
            self._fail(self.recorder.of(*overdue, now))
        if self._monitor:
            self._obey(self._monitor, now)
            due += [self._monitor.tick(now), self._watch_end(now)]
        elif self._leave_by is not None and now >= self._leave_by and self._failure:
            # The rendezvous cannot be interrupted, as in PMI's barrier.
            cause = (
                f"rank {self._failure.rank} on {self._failure.node} failed: {self._failure.cause}"
            )
            self._error = PeerError(cause, code=self._failure.exit_code, scope=Scope.RANK)
            self.process.end(now, ask=True, within=self.limits.kill_after)
        due += [each - now for each in (self._report_status_at, self._leave_by) if each is not None]
        if (wait := self.process.tick(now)) is not None:
            due.append(wait)
        return max(0.0, min(due))

    def _obey(self, monitor: FailureMonitor, now: float) -> None:
        if monitor.root_cause:
            self.agent.announce_termination()
            if self._failure:
                self._release()  # it may wait for the others
            # Who has failed is about to end by itself: the culprit, and all after a stop, may have
            # something to do.
            stops = self._failure is not None and self._failure.weight >= FailureKind.STOPPED
            has_time = self._ends_itself and (
                stops or self.recorder.rank in monitor.root_cause.ranks
            )
            within = self.grace if has_time else self.limits.kill_after
            within = within if monitor.restart is None else self.restart_grace
            within = 0.0 if monitor.fenced else within
            self.process.end(now, ask=not self._failure, within=within)
            if self.process.ended and self._leave_by is None:
                monitor.ended()
                self._leave_by = now + self.limits.killed_within + (self.grace or 0.0)
        elif monitor.released and self._script_done:
            self._over_at = now if self._over_at is None else self._over_at
            self._release()

    def _watch_end(self, now: float) -> float:
        """A script that is over, and whose process stays, as in an exit handler: named, and ended
        after a while.
        """
        if self._over_at is None or self.grace is None or self.process.ended or self._failure:
            return self.limits.longest_wait
        due = self._over_at + self.limits.ends_within + (self.grace if self._lingers_in else 0.0)
        if now < due:
            return due - now
        stack = stacks.main_stack(self.recorder.dump.request(self.process.pid))
        where = stacks.top_frame(stack)
        text = (
            f"its script is over, and it has not ended for {now - self._over_at:.0f} s, in {where}"
        )
        if self._lingers_in:
            self._fail(self.recorder.of(text, STALLED, now, trace=stacks.format_stack(stack)))
        else:
            write_stderr(f"srunddp: rank {self.recorder.rank} on {self.recorder.node}: {text}\n")
        self._lingers_in = where
        return 0.0

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self.pipe.send(Leave())

    def _on_rendezvous(self, ended: socket.socket) -> None:
        self._selector.unregister(ended)
        self._leave_by = None
        if self._outcome is None:
            self.process.end(self.clock.now, ask=True, within=self.limits.kill_after)
            return
        message, self._monitor = self._outcome
        self.pipe.send(message)
        self.agent.on_rendezvous()
        self._selector.register(self.pipe.end, selectors.EVENT_READ, self._on_worker)
        for connection in self._monitor.connections():
            self._selector.register(connection, selectors.EVENT_READ, self._on_connection)
        for number in tuple(self.asked):
            self._ask_for_end(number)
        if self._failure:
            self._monitor.fail(self._failure, self.clock.now)
        elif self._end_handled:
            self._on_worker_end()

    def _on_connection(self, connection: SupervisorConnection) -> None:
        if self._monitor:
            self._monitor.on_readable(connection, self.clock.now)
            if not connection.open:
                self._selector.unregister(connection)

    def _on_worker(self, _: socket.socket) -> None:
        match self.pipe.receive():
            case None:
                self._selector.unregister(self.pipe.end)
            case ScriptHasFailed() as message:
                self._ends_itself = True
                self._fail(self.recorder.of_message(message, self.clock.now))
            case StartedMpi() if self._monitor:
                self._monitor.uses_mpi()
            case ScriptIsDone(waits) if self._monitor:
                self._script_done = True
                self._monitor.done(waits=waits)

    def _ask_for_end(self, number: int) -> None:
        self.asked.add(number)
        if self._monitor:
            self._monitor.asked(signals.signal_name(number))

    def _on_launcher_end(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        failure = self.recorder.of(
            f"its launcher, process {self.launcher.pid}, has ended", 137, self.clock.now
        )
        if self._monitor and self._monitor.abandon(failure):
            return
        self._ask_for_end(signal.SIGHUP)  # of which nothing will come any more
        self._ends_itself = False
        self._fail(failure)

    def _on_signals(self, _: int) -> None:
        arrived = signals.read()
        for received in arrived:
            number = received.si_signo
            if number in signals.ENDING and signal.getsignal(number) is not signal.SIG_IGN:
                self._ask_for_end(number)
            if self.launcher.sent(received) and number in signals.ENDING:
                self.recorder.note_ending_signal(number, self.clock.now)
            if number == signals.PRINT_STACK and not self.process.ended:
                self.recorder.print_stack(self.process.pid)
            elif number not in (signals.PRINT_STACK, signal.SIGCHLD) and self._is_to_forward(
                received
            ):
                self._forwarded[number] = self.clock.now
                self.process.send(number)
        if any(received.si_signo == signal.SIGCHLD for received in arrived):
            self.process.collect(self.clock.now)
            if self.process.ended and not self._end_handled:
                self._on_worker_end()

    def _is_to_forward(self, received: signal.struct_siginfo) -> bool:
        """Whether the worker is to get this signal from us; twice would be wrong, and never would
        cost the run.
        """
        if received.si_signo in self.early:
            self.early.discard(signal.Signals(received.si_signo))
            return True
        if received.si_signo == signal.SIGCONT and not self.launcher.sent(received):
            return False  # a shell's, for the whole process group
        reached = self.launcher.reached_worker(received)
        if reached is None:
            last = self._forwarded.get(received.si_signo)
            is_new = last is None or self.clock.now >= last + self.limits.forwards_every
            return received.si_signo in signals.URGENT and is_new
        return not reached

    def _on_worker_end(self) -> None:
        """Tell the failure monitor, or the rendezvous that goes on without the worker."""
        self._end_handled = True
        if self.process.status == 0 and self._monitor:
            if not self._script_done:
                self._monitor.done()
            self._monitor.left()
        elif not (self._failure or self._error or (self._monitor and self._monitor.root_cause)):
            # The launcher's signal may have come to the worker first.
            by_signal = (
                -(self.process.status or 0) in signals.ENDING and self.launcher.pid is not None
            )
            late = by_signal and not self.recorder.ending_signal(self.clock.now)
            self._report_status_at = self.clock.now + (
                self.limits.signal_may_follow if late else 0.0
            )

    def _fail(self, failure: Failure) -> None:
        if self._failure:
            return
        self._failure = failure
        if self._monitor:
            self._monitor.fail(failure, self.clock.now)
        elif self.recorder.ending_signal(self.clock.now):
            # All ranks end by the same signal, and nobody has to be told.
            self._error = PeerError(failure.cause, code=failure.exit_code)
        else:
            self.agent.abort_rendezvous(failure.cause, failure.exit_code)
            self._leave_by = self.clock.now + self.limits.rendezvous_ends_within
        self.recorder.write(failure)
