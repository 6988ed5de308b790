"""The process that srun started: it never imports torch, and knows how its worker ended.

The worker, forked from it before any heavy import, becomes the user's script. The ranks meet while
a thread of the supervisor waits for them, so that signals and the worker's end are noticed
meanwhile; then the failure monitor decides what the end of one rank means for all.

What follows from what is in :mod:`srunddp.supervisor.phases`. Here events are read from sockets,
signals and the clock, and actions are carried out.
"""

import contextlib
import selectors
import signal
import socket
import threading
from dataclasses import dataclass, field
from typing import Protocol

from srunddp.supervisor import signals, stacks
from srunddp.supervisor.clock import ActiveClock
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.events import (
    AbortRendezvous,
    Action,
    AnnounceEnd,
    EndWorker,
    Event,
    HandOverWorld,
    LauncherHasEnded,
    LeaveWith,
    LetLeave,
    MayLeave,
    NameLingering,
    NobodyNeedsUs,
    RankHasFailed,
    RanksDoNotMeet,
    RanksHaveMet,
    ReportLingering,
    ReportStatus,
    ScriptFailed,
    ScriptSucceeded,
    TellEndAfterVerdict,
    TellFailure,
    TellScriptIsOver,
    TellWorkerHasEnded,
    TimeIsOver,
    VerdictIsKnown,
    VerdictTerms,
    WorkerIsGone,
    WriteFailure,
)
from srunddp.supervisor.failure_files import finish_writers
from srunddp.supervisor.failure_monitor import FailureMonitor
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.output.redirect import OutputRedirect
from srunddp.supervisor.phases import Phase, State, Times, advance
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
    remaining: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _state: State = field(default_factory=State)
    # What the rendezvous has come to; set by its thread, and read once that has said so.
    _outcome: RendezvousOutcome | BaseException | None = None
    _world: WorkerMessage | None = None
    _reads_pipe: bool = False
    _monitor: FailureMonitor | None = None
    _error: BaseException | None = None  # to leave with
    # When each signal was last passed on.
    _forwarded: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._times = Times(self.grace, self.restart_grace, self.limits)

    def run(self) -> int:
        """Supervise to the end.

        Returns:
            The exit code to leave with: the root cause's, else the worker's.

        Raises:
            SrunddpError: the rendezvous failed; the worker has been ended.
        """
        try:
            with self._selector:
                self._loop(self._watch())
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

    def _watch(self) -> int:
        """Watch what there is from the beginning; returns the descriptor of the signals."""
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._rendezvous, args=(theirs,), daemon=True).start()
        register = self._selector.register
        signals_descriptor = signals.descriptor()
        register(signals_descriptor, selectors.EVENT_READ, self._on_signals)
        register(ours, selectors.EVENT_READ, self._on_rendezvous)
        if self.launcher.pid:
            # An error says that the launcher is gone already, so that the kernel ends us soon; or
            # that the kernel is too old for pidfd_open().
            with contextlib.suppress(OSError):
                register(
                    signals.pidfd_open(self.launcher.pid),
                    selectors.EVENT_READ,
                    self._on_launcher_end,
                )
        return signals_descriptor

    def _rendezvous(self, ended: socket.socket) -> None:
        try:
            self._outcome = self.agent.rendezvous()
        except BaseException as error:
            self._outcome = error
        ended.close()

    def _loop(self, signals_descriptor: int) -> None:
        while True:
            wait = self._pass_time()
            if self._state.phase is Phase.OVER:
                return
            ready = {key.fileobj: key.data for key, _ in self._selector.select(wait)}
            self.clock.advance(wait)
            # Signals first: a worker that the launcher ended has not failed by itself.
            if handler := ready.pop(signals_descriptor, None):
                handler(signals_descriptor)
            for readable, handler in ready.items():
                handler(readable)

    # Events.

    def _handle(self, event: Event) -> None:
        """Carry out what follows from an event."""
        self._state, actions = advance(self._state, event, self._times)
        for action in actions:
            self._carry_out(action)

    def _pass_time(self) -> float:
        """Do what is due; returns the seconds until something is.

        Runs before every wait, with or without an event, so all that it does may be repeated.
        """
        now = self.clock.now
        # First the time: what was due before this turn counts as older than what the turn has
        # brought, such as a verdict.
        waits = [self.limits.longest_wait]
        if now >= self._state.until:
            self._handle(TimeIsOver(now))
            waits.append(0.0)  # it may have taken time, as a worker's stacks do
        if self._state.failure is None and (overdue := self.process.overdue(now)):
            cause, code = overdue
            self._handle(RankHasFailed(now, self.recorder.of(cause, code, now)))
        if self._monitor:
            # Before it ticks: it closes the connections once it knows that the worker has ended.
            self._ask_monitor(self._monitor, now)
            waits.append(self._monitor.tick(now))
            # And after: a lease may have ended in it, of which no socket tells, and from then on
            # the worker has 3 s to be gone.
            self._ask_monitor(self._monitor, now)
        if (wait := self.process.tick(now)) is not None:
            waits.append(wait)
        if self.process.given_up and not self._state.worker_has_ended:
            self._handle(WorkerIsGone(now, None))
            return 0.0
        return max(0.0, min(*waits, self._state.until - now))

    def _ask_monitor(self, monitor: FailureMonitor, now: float) -> None:
        """Turn what a failure monitor answers into events.

        It is asked at each turn, as the answers depend on other ranks, on its own times, and on
        whether its last words are on their way. An event that comes again changes nothing; the
        verdict comes again where it has changed, see :meth:`FailureMonitor.abandon`.
        """
        if monitor.root_cause:
            terms = VerdictTerms(
                is_culprit=self.recorder.rank in monitor.root_cause.ranks,
                restarts=monitor.restart is not None,
                fenced=monitor.fenced,
            )
            if terms != self._state.terms:
                self._handle(VerdictIsKnown(now, terms))
        if monitor.released:
            self._handle(MayLeave(now))
        if monitor.finished:
            self._handle(NobodyNeedsUs(now))

    def _on_rendezvous(self, ended: socket.socket) -> None:
        self._selector.unregister(ended)
        ended.close()
        now = self.clock.now
        if isinstance(self._outcome, BaseException):
            self._handle(RanksDoNotMeet(now, self._outcome))
            return
        assert self._outcome is not None
        self._world, self._monitor = self._outcome
        for connection in self._monitor.connections():
            self._selector.register(connection, selectors.EVENT_READ, self._on_connection)
        # Before a failure of this rank is told: where an end was asked for there is no restart.
        for number in tuple(self.asked):
            self._ask_for_end(number)
        self._handle(RanksHaveMet(now))

    def _on_connection(self, connection: SupervisorConnection) -> None:
        if self._monitor:
            self._monitor.on_readable(connection, self.clock.now)
            if not connection.open:
                self._selector.unregister(connection)

    def _on_worker(self, _: socket.socket) -> None:
        """Read what the worker says, which it does once the ranks have met."""
        if not self._monitor or not self._reads_pipe:
            return
        now = self.clock.now
        for message in self.pipe.read():
            match message:
                case ScriptHasFailed():
                    self._handle(ScriptFailed(now, self.recorder.of_message(message, now)))
                case StartedMpi():
                    self._monitor.uses_mpi()  # which is the same in all phases
                case ScriptIsDone(waits):
                    self._handle(ScriptSucceeded(now, waits))
        if not self.pipe.open:
            self._reads_pipe = False
            self._selector.unregister(self.pipe.end)

    def _ask_for_end(self, number: int) -> None:
        """Somebody wants an end of the run: that is the same in all phases."""
        self.asked.add(number)
        if self._monitor:
            self._monitor.asked(signals.signal_name(number))

    def _on_launcher_end(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        now = self.clock.now
        failure = self.recorder.of(
            f"its launcher, process {self.launcher.pid}, has ended", 137, now
        )
        if self._monitor and self._monitor.abandon(failure, now):
            return  # a verdict follows, or has changed
        self._ask_for_end(signal.SIGHUP)  # of which nothing will come any more
        self._handle(LauncherHasEnded(now, failure))

    def _on_signals(self, _: int) -> None:
        arrived = signals.read()
        for received in arrived:
            number = received.si_signo
            if number in signals.ENDING and signal.getsignal(number) is not signal.SIG_IGN:
                self._ask_for_end(number)
            if self.launcher.sent(received) and number in signals.ENDING:
                self.recorder.note_ending_signal(number, self.clock.now)
            if number == signals.PRINT_STACK:
                if not self.process.ended:
                    self.recorder.print_stack(self.process.pid)
            elif number != signal.SIGCHLD and self._is_to_forward(received):
                self.early.discard(signal.Signals(number))
                self._forwarded[number] = self.clock.now
                self.process.send(number)
        # After all others that came with it: the launcher's signal explains the worker's end.
        if any(received.si_signo == signal.SIGCHLD for received in arrived):
            self.process.collect(self.clock.now)
            if self.process.ended and not self._state.worker_has_ended:
                self._on_worker_end()

    def _is_to_forward(self, received: signal.struct_siginfo) -> bool:
        """Whether the worker is to get this signal from us; twice would be wrong, and never would
        cost the run.
        """
        if received.si_signo in self.early:
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
        now = self.clock.now
        # What it has said before its end counts before it. This SIGCHLD may have come since the
        # wait has returned, and then the pipe would be read in the next turn only.
        self._on_worker(self.pipe.end)
        status = self.process.status
        # The launcher's signal may have come to the worker first.
        by_signal = -(status or 0) in signals.ENDING and self.launcher.pid is not None
        late = by_signal and not self.recorder.ending_signal(now)
        self._handle(WorkerIsGone(now, status, signal_may_follow=late))

    # Actions.

    def _carry_out(self, action: Action) -> None:
        now = self.clock.now
        match action:
            case AbortRendezvous(failure):
                self.agent.abort_rendezvous(failure.cause, failure.exit_code)
            case WriteFailure(failure):
                self.recorder.write(failure)
            case ReportStatus():
                status = self.process.status or 0
                dumped_core = self.process.dumped_core
                failure = self.recorder.of_status(status, now, dumped_core=dumped_core)
                self._handle(RankHasFailed(now, failure))
            case NameLingering(since):
                self._name_lingering(now - since)
            case ReportLingering(since):
                self._report_lingering(now, now - since)
            case LeaveWith(error):
                self._error = error
            case _:
                self._tell_worker(action, now)

    def _tell_worker(self, action: Action, now: float) -> None:
        match action:
            case HandOverWorld():
                self._hand_over_world()
            case AnnounceEnd():
                self.agent.announce_termination()
            case LetLeave():
                self.pipe.send(Leave())
            case EndWorker(ask, within):
                self.process.end(now, ask=ask, within=within)
            case _:
                assert self._monitor is not None
                self._tell_monitor(self._monitor, action, now)

    def _tell_monitor(self, monitor: FailureMonitor, action: Action, now: float) -> None:
        match action:
            case TellFailure(failure):
                monitor.fail(failure, now)
            case TellScriptIsOver(waits):
                monitor.done(waits=waits)
            case TellWorkerHasEnded():
                monitor.left()
            case TellEndAfterVerdict():
                monitor.ended()
            case _:
                raise AssertionError(action)

    def _hand_over_world(self) -> None:
        assert self._world is not None
        self.pipe.send(self._world)
        self.agent.on_rendezvous()
        # Not before: over MPI the thread of the rendezvous has read from it.
        self._reads_pipe = True
        self._selector.register(self.pipe.end, selectors.EVENT_READ, self._on_worker)

    def _name_lingering(self, seconds: float) -> None:
        text, _ = self._lingering(seconds)
        write_stderr(f"srunddp: rank {self.recorder.rank} on {self.recorder.node}: {text}\n")

    def _report_lingering(self, now: float, seconds: float) -> None:
        text, trace = self._lingering(seconds)
        self._handle(RankHasFailed(now, self.recorder.of(text, STALLED, now, trace=trace)))

    def _lingering(self, seconds: float) -> tuple[str, str]:
        """Return where the worker hangs, in words, and its stack."""
        stack = stacks.main_stack(self.recorder.dump.request(self.process.pid))
        where = stacks.top_frame(stack)
        text = f"its script is over, and it has not ended for {seconds:.0f} s, in {where}"
        return text, stacks.format_stack(stack)
