"""The supervisor: the process that the launcher started. It never imports torch, and it learns how
its worker ends.

The supervisor forks the worker before any heavy import, and the worker becomes the user's script. A
thread of the supervisor waits for the other ranks in the rendezvous, so that the supervisor notices
signals and the worker's end meanwhile. After that the failure monitor decides what the end of one
rank means for all.

This module reads events from sockets, signals and the clock, and carries out actions.
:mod:`srunddp.supervisor.phases` says which actions follow from which event.
"""

import contextlib
import selectors
import signal
import socket
import threading
from collections.abc import Iterable
from dataclasses import field
from typing import Protocol

from srunddp.supervisor import signals
from srunddp.supervisor.activity import WorkerActivity
from srunddp.supervisor.agent_store import AgentStore
from srunddp.supervisor.clock import ActiveClock
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.descendants import Descendants
from srunddp.supervisor.events import (
    AbortRendezvous,
    Action,
    AnnounceEnd,
    EndWorker,
    Event,
    HandOverWorld,
    KillLeftBehind,
    LauncherHasEnded,
    LeaveWith,
    LetLeave,
    LookAtWorker,
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
    TellMaySave,
    TellScriptIsOver,
    TellWorkerHasEnded,
    TimeIsOver,
    VerdictIsKnown,
    VerdictTerms,
    WorkerIsGone,
    WorkerIsIdle,
    WriteFailure,
)
from srunddp.supervisor.failure_files import finish_writers, writers
from srunddp.supervisor.failure_monitor import FailureMonitor
from srunddp.supervisor.forwarding import HeldSignals, MissedSignal, SignalForwarding
from srunddp.supervisor.launcher import Launcher
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.output.redirect import OutputRedirect
from srunddp.supervisor.phases import Phase, State, Times, advance
from srunddp.supervisor.recorder import FailureRecorder
from srunddp.supervisor.root_cause import STALLED
from srunddp.supervisor.sentinel import Sentinel
from srunddp.supervisor.worker_messages import (
    Leave,
    NotesSignals,
    ScriptHasFailed,
    ScriptIsDone,
    SignalsNoted,
    StartedMpi,
    WorkerMessage,
)
from srunddp.supervisor.worker_process import WorkerPipe, WorkerProcess
from srunddp.util import python_stack
from srunddp.util.console import write_amid_output
from srunddp.util.quick_dataclass import dataclass

# The world, which is handed to the worker, and the failure monitor of this start.
RendezvousOutcome = tuple[WorkerMessage, FailureMonitor]


class RankAgent(Protocol):
    """The parts of a rank that the supervisor leaves to its caller: rendezvous and telemetry."""

    def rendezvous(self) -> RendezvousOutcome:
        """Wait for the other ranks, and return the world and the failure monitor. This runs in a
        thread, and may raise.
        """

    def abort_rendezvous(self, cause: str, exit_code: int) -> None:
        """End the rendezvous because this rank has failed, and tell the other ranks.

        Args:
            cause: Why this rank has failed.
            exit_code: The exit code of the failure.
        """

    def on_rendezvous(self) -> None:
        """Report the rendezvous, now that it is complete and the worker has got the world."""

    def announce_termination(self) -> None:
        """Tell the worker that it is about to be ended because of a root cause."""

    def answered_probes(self) -> int:
        """Return how many signals :data:`srunddp.supervisor.activity.PROBE` the worker has
        handled.
        """

    def stop_sampler(self) -> None:
        """Stop this node's sampler and the process that asks NVML, if they are children of this
        supervisor. This is called before all descendants are killed.
        """

    def agent_store(self) -> AgentStore | None:
        """Return the agent store, after the rendezvous on rank 0; None if this start has none."""


@dataclass(kw_only=True)
class Supervisor:
    """Watches one worker until it has ended and no other rank needs this one.

    Attributes:
        agent: The rendezvous and the telemetry of this rank.
        recorder: Makes this rank's failure.
        process: The worker.
        pipe: The supervisor's end of the pipe to the worker.
        output: The worker's output.
        grace: Seconds that a script may take to end if it has failed or stopped, or if it handles
            SIGTERM and is ended because of another rank; None for no limit.
        restart_grace: Seconds that any script may take to end before a restart.
        launcher: The launcher, which sends this rank signals.
        sentinel: Shows whether a signal has reached the worker too; None if there is no sentinel.
        early: Signals that came before the worker was forked, and that the worker still has to get.
        descendants: Ends the processes that the worker leaves behind.
        limits: How long the supervisor waits, and how often it looks.
        clock: The clock by which these times are measured.
        remaining: The process ids of descendants that could not be killed.
        asked: The numbers of all signals so far that ask for an end of the run.
        is_interrupted: Whether the script has ended by a KeyboardInterrupt.
    """

    agent: RankAgent
    recorder: FailureRecorder
    process: WorkerProcess
    pipe: WorkerPipe
    output: OutputRedirect
    grace: float | None
    restart_grace: float
    launcher: Launcher
    sentinel: Sentinel | None = None
    early: set[signal.Signals] = field(default_factory=set)
    descendants: Descendants = field(default_factory=Descendants)
    limits: Limits = DEFAULT_LIMITS
    clock: ActiveClock = field(default_factory=ActiveClock)
    remaining: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    is_interrupted: bool = False
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _state: State = field(default_factory=State)
    # The result of the rendezvous. The thread sets it before closing the socket, and the supervisor
    # reads it only after that.
    _outcome: RendezvousOutcome | BaseException | None = None
    _world: WorkerMessage | None = None
    _reads_pipe: bool = False
    _monitor: FailureMonitor | None = None
    _error: BaseException | None = None  # raised at the end of run()
    # Whether SIGTSTP has come and no SIGCONT since, so that this process stops with the worker.
    _is_to_stop: bool = False
    # The signals from senders other than ranks, and those that a script has sent to its supervisor
    # alone.
    _got: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._forwarding = SignalForwarding(self.sentinel, self.limits)
        self._held = HeldSignals(self.process, self.limits)
        self._times = Times(self.grace, self.restart_grace, self.limits)
        self._activity = WorkerActivity(
            self.process.pid, self.agent.answered_probes, self.recorder.dump
        )

    def run(self) -> int:
        """Supervise the worker to its end, and kill the processes that it leaves behind.

        Returns:
            The exit code for this process: the root cause's, or the worker's if there is none.

        Raises:
            SrunddpError: The rendezvous failed. The worker has been ended.
        """
        unfinished = set[int]()
        try:
            with self._selector:
                self._loop(self._watch())
                unfinished = self._close_agent_store()
        finally:
            self.agent.stop_sampler()
            unfinished |= finish_writers(self.limits.files_written_within)
            if self.process.given_up:
                given_up = {self.process.pid}
            else:
                given_up = set()
            self.remaining = self.descendants.kill(unfinished | given_up) - unfinished
            self.output.finish(self.limits.output_within)
        if self._error:
            raise self._error
        if self._monitor and self._monitor.root_cause:
            return self._monitor.root_cause.exit_code
        status = self.process.status or 0
        return status if status >= 0 else 128 - status

    @property
    def restart(self) -> str | None:
        """The text that says where the ranks meet for the next start; None if none follows."""
        return self._monitor.restart if self._monitor else None

    @property
    def monitor(self) -> FailureMonitor | None:
        """The failure monitor; None until the ranks have met."""
        return self._monitor

    def _watch(self) -> int:
        """Start the rendezvous, and register everything that is watched from the beginning.

        Returns:
            The descriptor of the signals.
        """
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._rendezvous, args=(theirs,), daemon=True).start()
        register = self._selector.register
        signals_descriptor = signals.descriptor()
        register(signals_descriptor, selectors.EVENT_READ, self._on_signals)
        register(ours, selectors.EVENT_READ, self._on_rendezvous)
        if self.sentinel:
            register(self.sentinel, selectors.EVENT_READ, self._on_sentinel)
        if self.launcher.pid:
            # An OSError means that the launcher has ended already, or that the kernel is too old
            # for pidfd_open().
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
            # Signals first: if the launcher's signal ended the worker, that is not the worker's own
            # failure.
            if handler := ready.pop(signals_descriptor, None):
                handler(signals_descriptor)
            for readable, handler in ready.items():
                handler(readable)

    # Events.

    def _handle(self, event: Event) -> None:
        """Enter the state that follows from an event, and carry out the actions."""
        self._state, actions = advance(self._state, event, self._times)
        for action in actions:
            self._carry_out(action)

    def _pass_time(self) -> float:
        """Do what is due, and return in how many seconds something is due next.

        This runs before every wait, whether or not something has happened, so everything here must
        be harmless when it is repeated.
        """
        now = self.clock.now
        # The time limit comes first: if it has passed by now, this counts as older than a verdict
        # that the failure monitor brings below.
        waits = [self.limits.longest_wait]
        if now >= self._state.until:
            self._handle(TimeIsOver(now))
            waits.append(0.0)  # handling it may have taken time: asking for stacks does
        if self._state.failure is None and (overdue := self.process.overdue(now)):
            cause, code = overdue
            self._handle(RankHasFailed(now, self.recorder.of(cause, code, now)))
        if self._monitor:
            # Ask before tick(): the failure monitor is told things here, such as the end of the
            # worker, after which tick() may close the connections.
            self._ask_monitor(self._monitor, now)
            waits.append(self._monitor.tick(now))
            # Ask again after tick(): tick() may have found that a lease is over, which no socket
            # reports, and then the worker must be gone within 3 s.
            self._ask_monitor(self._monitor, now)
        self._pass_on(self._forwarding.tick(now))
        others = (
            self._forwarding.next_tick(now),
            self._held.tick(lambda: self._on_worker(self.pipe.end)),
            self.process.tick(now),
            self.descendants.tick(writers()),
        )
        waits += [wait for wait in others if wait is not None]
        if self.process.given_up and not self._state.worker_has_ended:
            self._handle(WorkerIsGone(now, None))
            return 0.0
        return max(0.0, min(*waits, self._state.until - now))

    def _ask_monitor(self, monitor: FailureMonitor, now: float) -> None:
        """Turn the answers of the failure monitor into events.

        The supervisor asks at each turn, because the answers depend on other ranks and on time.
        Asking again does no harm: an event that comes again changes nothing, and a verdict is
        handled again only if it has changed, see :meth:`FailureMonitor.abandon`.
        """
        if monitor.root_cause:
            terms = VerdictTerms(
                is_culprit=self.recorder.rank in monitor.root_cause.ranks,
                restarts=monitor.restart is not None,
                fenced=monitor.fenced,
            )
            if terms != self._state.terms:
                is_asked = bool(self.recorder.ending_signal(now))
                may_save = not is_asked and signals.handles(self.process.pid, signal.SIGTERM)
                self._handle(VerdictIsKnown(now, terms, may_save))
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
        if agent_store := self.agent.agent_store():
            agent_store.watch(self._selector, self._on_agent_store)
        # Tell the failure monitor of the signals before it is told of a failure of this rank,
        # because there must be no restart if a signal has asked for an end.
        for number in tuple(self.asked):
            self._ask_for_end(number)
        self._handle(RanksHaveMet(now))

    def _on_connection(self, connection: SupervisorConnection) -> None:
        if self._monitor:
            self._monitor.on_readable(connection, self.clock.now)
            if not connection.open:
                self._selector.unregister(connection)

    def _on_agent_store(self, agent_store: AgentStore) -> None:
        """Start the agent store, because a process has connected to it. This is not an event,
        because it means the same in all phases.
        """
        if not self._monitor or self._monitor.root_cause:
            # After the root cause nothing new begins. Clients are refused, so that they need not
            # wait for the end of the run.
            agent_store.close()
            return
        agent_store.start()
        if agent_store.process is not None:
            self.descendants.own.add(agent_store.process)

    def _close_agent_store(self) -> set[int]:
        """Refuse the agent store's clients from now on.

        Returns:
            The process id of the store if the process could not be killed, otherwise an empty set.
            The process may hang in a file system that does not answer. It does no harm, because it
            has none of the worker's memory.
        """
        agent_store = self.agent.agent_store()
        if agent_store is None or agent_store.close() or agent_store.process is None:
            return set()
        return {agent_store.process}

    def _on_worker(self, _: socket.socket) -> None:
        """Handle the messages of the worker, once the ranks have met."""
        if not self._monitor or not self._reads_pipe:
            return
        now = self.clock.now
        for message in self.pipe.read():
            match message:
                case ScriptHasFailed():
                    self.is_interrupted = message.is_interrupt
                    self._handle(ScriptFailed(now, self.recorder.of_message(message, now)))
                case StartedMpi():
                    self._monitor.uses_mpi()  # not an event: it means the same in all phases
                case NotesSignals():
                    self._held.worker_notes = True  # not an event: the same in all phases
                case SignalsNoted(numbers):
                    self._held.add(numbers)  # not an event: the same in all phases
                case ScriptIsDone(waits):
                    self._handle(ScriptSucceeded(now, waits))
        if not self.pipe.open:
            self._reads_pipe = False
            self._selector.unregister(self.pipe.end)

    def _ask_for_end(self, number: int) -> None:
        """Note a signal that asks for an end of the run, and tell the failure monitor if there is
        one. This is not an event, because it means the same in all phases.
        """
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
            return  # the next turn finds the verdict that this has brought
        self._ask_for_end(signal.SIGHUP)  # as if the launcher had sent it before its end
        self._handle(LauncherHasEnded(now, failure))

    def _on_signals(self, _: int) -> None:
        arrived = signals.read()
        for received in arrived:
            if received.si_signo == signals.PRINT_STACK:
                if not self.process.ended:
                    self.recorder.print_stack(self.process.pid)
            elif received.si_signo != signal.SIGCHLD:
                self._on_signal(received)
        # Handle SIGCHLD after all other signals, because a signal of the launcher explains the
        # worker's end.
        if any(received.si_signo == signal.SIGCHLD for received in arrived):
            self._on_child()

    def _on_signal(self, received: signal.struct_siginfo) -> None:
        """Handle a signal that the worker has to get too: from its sender, or else from this
        process.
        """
        number = received.si_signo
        now = self.clock.now
        of_rank = self.launcher.is_of_rank(received.si_pid, self.descendants.not_of_worker)
        if not of_rank:
            self._note_request(number)
        if self.launcher.sent(received) and number in signals.ENDING:
            self.recorder.note_ending_signal(number, now)
        # A signal that came before the worker was forked cannot have reached the worker.
        is_passed_on = number in self.early or self.launcher.spares_the_worker(received)
        self.early -= {number}
        if is_passed_on:
            self.process.send(number)
        if number in (signal.SIGTSTP, signal.SIGCONT):
            self._is_to_stop = number == signal.SIGTSTP
        self._forwarding.add(number, now, is_passed_on=is_passed_on, of_rank=of_rank)
        self._stop_with_worker()

    def _note_request(self, number: int) -> None:
        """Note a signal that has come from a sender other than a rank, or that a rank has sent to
        its supervisor alone.
        """
        self._got.add(number)
        if number in signals.ENDING and signal.getsignal(number) is not signal.SIG_IGN:
            self._ask_for_end(number)

    def _on_sentinel(self, sentinel: Sentinel) -> None:
        self._pass_on(self._forwarding.on_answer())
        if self._forwarding.sentinel is None:
            self._selector.unregister(sentinel)
            sentinel.close()

    def _pass_on(self, missed: Iterable[MissedSignal]) -> None:
        for each in missed:
            # A signal that a script sends to its supervisor alone counts like one from any other
            # sender.
            if each.of_rank:
                self._note_request(each.number)
            self.process.send(each.number)

    def _on_child(self) -> None:
        """Handle the stop or the end of the worker, if SIGCHLD has come because of it."""
        self.process.collect(self.clock.now)
        if self.process.ended and not self._state.worker_has_ended:
            self._on_worker_end()
        else:
            self._stop_with_worker()

    def _stop_with_worker(self) -> None:
        """Stop this process if SIGTSTP has come and has stopped the worker.

        A shell has to see that its job is stopped, and a rank that its launcher has stopped must
        not count as one that hangs.
        """
        if self._is_to_stop and self.process.stopped_by == signal.SIGTSTP:
            self._is_to_stop = False
            if signal.SIGCONT not in signal.sigpending():
                signals.stop_by(signal.SIGTSTP, self.process.is_stopped)
                self._forwarding.go_on(self.clock.now)

    def _on_worker_end(self) -> None:
        now = self.clock.now
        # Read the messages that the worker sent before its end first. The pipe may have become
        # readable only after select() returned.
        self._on_worker(self.pipe.end)
        status = self.process.status
        number = -(status or 0)
        if number in self._got & {*signals.FOR_HANDLERS}:
            # The worker's script had no handler for this signal, so the sender has asked for the
            # end.
            self._ask_for_end(number)
        # The launcher's signal may have reached the worker before it reaches this process.
        by_signal = number in signals.ENDING and self.launcher.pid is not None
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
            case KillLeftBehind():
                self.descendants.begin_to_kill()
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
            case LookAtWorker():
                if not self._activity.look():
                    self._handle(WorkerIsIdle(now))
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
            case TellMaySave():
                monitor.saves()
            case TellEndAfterVerdict():
                monitor.ended()
            case _:
                raise AssertionError(action)

    def _hand_over_world(self) -> None:
        assert self._world is not None
        self.pipe.send(self._world)
        self.agent.on_rendezvous()
        # Read the pipe only from now on: in a rendezvous over MPI, the thread of the rendezvous has
        # read from it so far.
        self._reads_pipe = True
        self._selector.register(self.pipe.end, selectors.EVENT_READ, self._on_worker)

    def _name_lingering(self, seconds: float) -> None:
        text, _ = self._lingering(seconds)
        write_amid_output(f"srunddp: rank {self.recorder.rank} on {self.recorder.node}: {text}\n")

    def _report_lingering(self, now: float, seconds: float) -> None:
        text, trace = self._lingering(seconds)
        self._handle(RankHasFailed(now, self.recorder.of(text, STALLED, now, trace=trace)))

    def _lingering(self, seconds: float) -> tuple[str, str]:
        """Return a line that says where the worker hangs, and its stack as text.

        Args:
            seconds: How long ago the worker was told that it may leave.
        """
        stack = python_stack.main_stack(self.recorder.dump.request(self.process.pid))
        where = python_stack.top_frame(stack)
        text = f"its script is over, and it has not ended for {seconds:.0f} s, in {where}"
        return text, python_stack.format_stack(stack)
