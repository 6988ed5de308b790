"""The phases of one rank's supervisor: the events that may happen in each phase, and the actions
that follow.

:func:`advance` is a pure function of the state and an event. The supervisor reads events from
sockets, signals and the clock, calls this function, and carries out the actions that it returns. An
event that is not in :data:`TABLE` changes nothing.

Without a failure the phases are MEETING, RUNNING, FINISHING, LEAVING, GONE, OVER. Two things lead
away from this path: a failure of this rank, which is reported once, and the verdict, after which
the worker is ended (ENDING, CLOSING). Once the ranks have met, a failure changes the phase only in
CRASHED.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import NamedTuple, TypeVar

from srunddp.errors import PeerError, Scope
from srunddp.supervisor.events import (
    AbortRendezvous,
    Action,
    AnnounceEnd,
    EndWorker,
    Event,
    FailureEvent,
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
from srunddp.supervisor.failure import Failure, FailureKind
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.util.quick_dataclass import dataclass


class Phase(Enum):
    """Where one rank's supervisor is; the value describes the phase in words."""

    MEETING = "the worker is there, and the ranks meet"
    ENDED_EARLY = "the worker has ended while the ranks meet, and its failure is not told yet"
    ABORTING = "this rank has failed while the ranks meet, and is telling the others"
    UNMET = "the ranks have not met, and the worker is being ended"
    RUNNING = "the script runs"
    FINISHING = "the script is over, and its worker waits until it may leave"
    LEAVING = "the worker may leave, and ends by itself"
    LINGERING = "the worker has not ended long after its script, and the user has been told so"
    CRASHED = "the worker has ended, but not with 0, and its failure is not told yet"
    ENDING = "the verdict is known, and the worker is being ended"
    GONE = "the worker has ended, and the other ranks go on, or the verdict is still to come"
    CLOSING = "the verdict is known, the worker has ended, and rank 0 closes the connections"
    OVER = "the supervisor leaves"


class Times(NamedTuple):
    """The times on which the phases depend, in seconds.

    Attributes:
        grace: How long a script may take to end if it has failed or stopped, or if it handles
            SIGTERM and is ended because of another rank; None for no limit, as in a single process,
            for which no other rank waits.
        restart_grace: How long any script may take to end before a restart.
        limits: The times that no option changes.
    """

    grace: float | None
    restart_grace: float
    limits: Limits = DEFAULT_LIMITS


# States.


@dataclass(frozen=True)
class State:
    """The phase of a supervisor, with everything else that decides what follows from the next
    event.

    Attributes:
        phase: The current phase.
        until: When the time limit of this phase has passed, by the supervisor's clock; infinite for
            a phase without a limit. Each entry into a phase sets it again.
        failure: The first failure of this rank, which has been reported; None for none.
        script_is_done: Whether the script has ended with 0, and the failure monitor has been told
            so.
        script_ends_itself: Whether the script has failed or stopped, and is about to end.
        leaves_since: When the worker was told that it may leave, in LEAVING and LINGERING; else
            infinite.
        is_told_to_leave: Whether the worker has been told that it may leave, which happens once.
        worker_has_ended: Whether the worker has ended, or cannot be killed.
        may_save: Whether the worker may save after the verdict: it ends because of another rank,
            and the script has set a handler for SIGTERM.
        terms: The consequences of the verdict for this rank; None until there is a verdict.
    """

    phase: Phase = Phase.MEETING
    until: float = math.inf
    failure: Failure | None = None
    script_is_done: bool = False
    script_ends_itself: bool = False
    leaves_since: float = math.inf
    is_told_to_leave: bool = False
    worker_has_ended: bool = False
    may_save: bool = False
    terms: VerdictTerms | None = None


Step = tuple[State, list[Action]]
Transition = TypeVar("Transition", bound=Callable[..., Step])


class Row(NamedTuple):
    """An entry of the table: what follows from one class of event in some phases.

    Attributes:
        phases: The phases in which this entry applies.
        event: The class of the event.
        following: The phases that may follow, the most likely first.
        take: Returns the next state and the actions, for a state, an event and the times.
    """

    phases: tuple[Phase, ...]
    event: type[Event]
    following: tuple[Phase, ...]
    take: Callable[..., Step]


ROWS: list[Row] = []
TABLE: dict[tuple[Phase, type[Event]], Row] = {}

EARLY_ENDS = (Phase.ABORTING, Phase.UNMET, Phase.OVER)
IN_THE_RUN = (Phase.RUNNING, Phase.FINISHING, Phase.LEAVING, Phase.LINGERING)


def advance(state: State, event: Event, times: Times) -> Step:
    """Return the next state and the actions that follow from an event.

    Args:
        state: The state before the event.
        event: What has happened.
        times: The times on which the phases depend.

    Returns:
        The state after the event, and the actions to carry out in this order. An action that leads
        to another event is always the last.
    """
    row = TABLE.get((state.phase, type(event)))
    if row is None:
        return state, []
    return row.take(state, event, times)


def time_to_end(state: State, terms: VerdictTerms, times: Times) -> float | None:
    """Return how many seconds the worker may take to end after a verdict; None for no limit."""
    # The order matters: a fence outranks a restart, and a restart outranks what a script may save.
    if terms.fenced:
        return 0.0  # another node may start our ranks now, so nothing may be saved here
    if terms.restarts:
        return times.restart_grace  # the same for all ranks, so that they meet again soon
    has_stopped = state.failure is not None and state.failure.weight >= FailureKind.STOPPED
    if state.script_ends_itself and (terms.is_culprit or has_stopped):
        return times.grace  # the script may be saving before it ends
    if state.may_save and times.grace is not None:
        return max(times.grace, times.limits.kill_after)
    return times.limits.kill_after


def _on(
    event: type[Event], *phases: Phase, to: tuple[Phase, ...] | Phase
) -> Callable[[Transition], Transition]:
    """Return a decorator that enters a function in the table.

    Args:
        event: The class of the event.
        phases: The phases in which the function handles the event.
        to: The phases that may follow, see :attr:`Row.following`.
    """

    def enter(take: Transition) -> Transition:
        following = to if isinstance(to, tuple) else (to,)
        row = Row(phases, event, following, take)
        ROWS.append(row)
        for phase in phases:
            assert (phase, event) not in TABLE
            TABLE[phase, event] = row
        return take

    return enter


def _enter(state: State, phase: Phase, until: float = math.inf) -> State:
    return replace(state, phase=phase, until=until)


# Before the ranks have met.


@_on(RanksHaveMet, Phase.MEETING, to=Phase.RUNNING)
def _start(state: State, _: RanksHaveMet, __: Times) -> Step:
    """Hand the world to the worker."""
    return _enter(state, Phase.RUNNING), [HandOverWorld()]


@_on(RanksDoNotMeet, Phase.MEETING, to=Phase.UNMET)
def _end_unmet(state: State, event: RanksDoNotMeet, times: Times) -> Step:
    """End the worker, whose script has not begun."""
    return _enter(state, Phase.UNMET), [LeaveWith(event.error), _soon(times)]


@_on(WorkerIsGone, Phase.MEETING, to=Phase.ENDED_EARLY)
def _end_early(state: State, event: WorkerIsGone, times: Times) -> Step:
    """Note the worker's end, and report it as a failure when the time of the next phase is over:
    even an end with 0 is one, because no script has run. The time is 0.1 s if the launcher's signal
    may have ended the worker and may still reach this supervisor; otherwise it is over at once.
    """
    ended = replace(state, worker_has_ended=True)
    return _enter(ended, Phase.ENDED_EARLY, _status_counts_from(event, times)), []


@_on(TimeIsOver, Phase.ENDED_EARLY, Phase.CRASHED, to=(Phase.ENDED_EARLY, Phase.CRASHED))
def _report_status(state: State, _: TimeIsOver, __: Times) -> Step:
    """Make a failure from the worker's exit code or signal."""
    return _enter(state, state.phase), [ReportStatus()]


@_on(RankHasFailed, Phase.MEETING, Phase.ENDED_EARLY, to=EARLY_ENDS)
@_on(LauncherHasEnded, Phase.MEETING, Phase.ENDED_EARLY, to=EARLY_ENDS)
def _fail_early(state: State, event: FailureEvent, times: Times) -> Step:
    """End the rendezvous, and tell the other ranks there of the failure; stay for 7 s at most. If
    the launcher's signal is the cause, do not stay: all ranks get the same signal and need not be
    told.
    """
    failure = event.failure
    failed = replace(state, failure=failure)
    if failure.weight is FailureKind.SIGNALLED:
        error = PeerError(failure.cause, code=failure.exit_code)
        following, actions = _unmet(failed, error, times)
        return following, [*actions, WriteFailure(failure)]
    until = event.at + times.limits.rendezvous_ends_within
    return _enter(failed, Phase.ABORTING, until), [AbortRendezvous(failure), WriteFailure(failure)]


@_on(RanksHaveMet, Phase.ENDED_EARLY, to=Phase.CRASHED)
def _meet_without_worker(state: State, _: RanksHaveMet, __: Times) -> Step:
    """Hand over the world although the worker has ended, so that the failure monitor exists. The
    failure is then told to the failure monitor and not in the rendezvous.
    """
    return _enter(state, Phase.CRASHED, state.until), [HandOverWorld()]


@_on(RanksDoNotMeet, Phase.ENDED_EARLY, to=Phase.UNMET)
def _end_unmet_early(state: State, event: RanksDoNotMeet, _: Times) -> Step:
    """Wait until the worker's end counts as a failure. The worker's end may be why the rendezvous
    has failed, as in MPI_Init, and the launcher's signal may be why the worker has ended.
    """
    return _enter(state, Phase.UNMET, state.until), [LeaveWith(event.error)]


@_on(RanksHaveMet, Phase.ABORTING, to=(Phase.RUNNING, Phase.GONE))
def _tell_failure_late(state: State, _: RanksHaveMet, __: Times) -> Step:
    """Tell the failure monitor of the failure: the last rank came before the rendezvous could be
    ended.

    If the worker is still running, it gets the world all the same, and the verdict ends it.
    """
    assert state.failure is not None
    actions = [HandOverWorld(), TellFailure(state.failure)]
    if state.worker_has_ended:
        return _enter(state, Phase.GONE), actions
    return _enter(state, Phase.RUNNING), actions


@_on(RanksDoNotMeet, Phase.ABORTING, to=(Phase.OVER, Phase.UNMET))
def _have_aborted(state: State, event: RanksDoNotMeet, times: Times) -> Step:
    """Leave with the error of the rendezvous, because the other ranks have been told."""
    return _unmet(state, event.error, times)


@_on(TimeIsOver, Phase.ABORTING, to=(Phase.OVER, Phase.UNMET))
def _stop_waiting_for_rendezvous(state: State, _: TimeIsOver, times: Times) -> Step:
    """Leave with this rank's failure as the error, and do not wait for the end of the rendezvous
    any longer: some waits in it cannot be interrupted, such as PMI's barrier.
    """
    failure = state.failure
    assert failure is not None
    cause = f"rank {failure.rank} on {failure.node} failed: {failure.cause}"
    return _unmet(state, PeerError(cause, code=failure.exit_code, scope=Scope.RANK), times)


@_on(WorkerIsGone, Phase.ABORTING, to=Phase.ABORTING)
def _end_while_aborting(state: State, _: WorkerIsGone, __: Times) -> Step:
    """Stay until the other ranks have been told. The worker's end is not reported, because the
    reason for this rank's failure is known already.
    """
    return replace(state, worker_has_ended=True), []


@_on(WorkerIsGone, Phase.UNMET, to=Phase.OVER)
def _leave_unmet(state: State, _: WorkerIsGone, __: Times) -> Step:
    """Leave, now that the worker has ended, with the error that was set before."""
    return _enter(replace(state, worker_has_ended=True), Phase.OVER), []


@_on(RanksHaveMet, Phase.UNMET, to=Phase.UNMET)
def _tell_failure_in_the_end(state: State, _: RanksHaveMet, __: Times) -> Step:
    """Tell the failure monitor of the failure. The worker is being ended and gets no world."""
    assert state.failure is not None  # without a failure the rendezvous has failed for good
    return state, [TellFailure(state.failure)]


@_on(RanksDoNotMeet, Phase.UNMET, to=Phase.UNMET)
def _learn_error_in_the_end(state: State, event: RanksDoNotMeet, _: Times) -> Step:
    """Leave with the error that the rendezvous has now ended with, because it says more than the
    error set before. If the launcher's signal is the cause, keep the error that says so.
    """
    if state.failure is not None and state.failure.weight is FailureKind.SIGNALLED:
        return state, []
    return state, [LeaveWith(event.error)]


@_on(TimeIsOver, Phase.UNMET, to=Phase.UNMET)
def _report_unmet_status(state: State, _: TimeIsOver, __: Times) -> Step:
    """Make a failure from the worker's exit code or signal. The failure shows whether the
    launcher's signal has ended the worker.
    """
    return _enter(state, Phase.UNMET), [ReportStatus()]


@_on(RankHasFailed, Phase.UNMET, to=(Phase.OVER, Phase.UNMET))
def _leave_with_cause(state: State, event: RankHasFailed, _: Times) -> Step:
    """Once the worker has ended, leave with the error of the rendezvous. If the launcher's signal
    has ended the worker, leave with the signal instead, because it has caused the other error.
    """
    failure = event.failure
    failed = replace(state, failure=failure)
    actions: list[Action] = [WriteFailure(failure)]
    if not state.worker_has_ended:
        return failed, actions
    if failure.weight is FailureKind.SIGNALLED:
        actions.append(LeaveWith(PeerError(failure.cause, code=failure.exit_code)))
    return _enter(failed, Phase.OVER), actions


def _unmet(state: State, error: BaseException, times: Times) -> Step:
    """Return the step that leaves with an error: at once, or when the worker has been ended."""
    if state.worker_has_ended:
        return _enter(state, Phase.OVER), [LeaveWith(error)]
    return _enter(state, Phase.UNMET), [LeaveWith(error), _soon(times)]


def _soon(times: Times) -> EndWorker:
    return EndWorker(ask=True, within=times.limits.kill_after)


def _status_counts_from(event: WorkerIsGone, times: Times) -> float:
    """Return the time from which the worker's exit status counts as a failure."""
    if event.signal_may_follow:
        return event.at + times.limits.signal_may_follow
    # Do not make a failure at once, but at the next turn: the supervisor first handles the messages
    # that came at the same moment.
    return event.at


# The script.


@_on(ScriptSucceeded, Phase.RUNNING, to=Phase.FINISHING)
def _finish(state: State, event: ScriptSucceeded, _: Times) -> Step:
    """Tell the failure monitor that the script is over."""
    done = replace(state, script_is_done=True)
    return _enter(done, Phase.FINISHING), [TellScriptIsOver(event.waits)]


@_on(MayLeave, Phase.FINISHING, to=Phase.LEAVING)
def _let_leave(state: State, event: MayLeave, times: Times) -> Step:
    """Tell the worker that it may leave. It may stay for 60 s, for example in exit handlers. There
    is no limit in a single process, for which no other rank waits, nor after a failure, because the
    verdict then ends the worker.
    """
    until = math.inf
    if times.grace is not None and state.failure is None:
        until = event.at + times.limits.ends_within
    leaving, actions = _told_to_leave(replace(state, leaves_since=event.at))
    return _enter(leaving, Phase.LEAVING, until), actions


@_on(TimeIsOver, Phase.LEAVING, to=Phase.LINGERING)
def _name_lingering(state: State, event: TimeIsOver, times: Times) -> Step:
    """Print where the worker hangs, and give it ``--grace`` until this counts as a failure."""
    until = state.until + (times.grace or 0.0)
    return _enter(state, Phase.LINGERING, until), [NameLingering(state.leaves_since)]


@_on(TimeIsOver, Phase.LINGERING, to=Phase.LINGERING)
def _fail_lingering(state: State, _: TimeIsOver, __: Times) -> Step:
    """Report a failure whose cause says where the worker hangs."""
    return _enter(state, Phase.LINGERING), [ReportLingering(state.leaves_since)]


@_on(RankHasFailed, *IN_THE_RUN, to=IN_THE_RUN)
def _fail(state: State, event: FailureEvent, _: Times) -> Step:
    """Tell the failure monitor, and write the traceback. Only the first failure counts."""
    # Entering the same phase again drops the time limit of LEAVING, because now the verdict ends
    # the worker.
    return _told(_enter(state, state.phase), event.failure)


@_on(ScriptFailed, *IN_THE_RUN, to=IN_THE_RUN)
def _fail_by_script(state: State, event: ScriptFailed, times: Times) -> Step:
    """Tell the failure monitor, and write the traceback. The script's process is about to end by
    itself, so the verdict may leave it ``--grace``.
    """
    return _fail(replace(state, script_ends_itself=True), event, times)


@_on(LauncherHasEnded, *IN_THE_RUN, to=IN_THE_RUN)
def _lose_launcher(state: State, event: LauncherHasEnded, times: Times) -> Step:
    """Tell the failure monitor, and write the traceback. The verdict will not leave the worker
    ``--grace``, because the end of the launcher is the end of its ranks.
    """
    return _fail(replace(state, script_ends_itself=False), event, times)


@_on(WorkerIsGone, *IN_THE_RUN, to=(Phase.GONE, Phase.CRASHED))
def _lose_worker(state: State, event: WorkerIsGone, times: Times) -> Step:
    """If the worker has ended with 0, tell the failure monitor so. If the script has not said that
    it is over (``os._exit(0)``), tell that first. Then kill the processes that the worker has left
    behind, because this supervisor stays until the workers of all ranks have ended.

    Any other end of the worker is a failure, unless a failure has been reported already. If the
    launcher's signal may have ended the worker, wait 0.1 s for that signal before reporting.
    """
    ended = replace(state, worker_has_ended=True)
    if event.status == 0:
        following, actions = _told_of_good_end(ended)
        return _enter(following, Phase.GONE), [*actions, KillLeftBehind()]
    if state.failure is not None:
        return _enter(ended, Phase.GONE), []
    return _enter(ended, Phase.CRASHED, _status_counts_from(event, times)), []


@_on(RankHasFailed, Phase.CRASHED, to=Phase.GONE)
@_on(LauncherHasEnded, Phase.CRASHED, to=Phase.GONE)
def _tell_crash(state: State, event: FailureEvent, _: Times) -> Step:
    """Tell the failure monitor, and write the traceback. If the launcher has ended, report that as
    the cause, because it explains the worker's end.
    """
    return _told(_enter(state, Phase.GONE), event.failure)


def _told(state: State, failure: Failure) -> Step:
    """Return the step that reports and writes a failure; nothing is done if a failure has been
    reported already.
    """
    if state.failure is not None:
        return state, []
    return replace(state, failure=failure), [TellFailure(failure), WriteFailure(failure)]


def _told_to_leave(state: State) -> Step:
    """Return the step that tells the worker that it may leave; nothing is done if the worker has
    been told already.
    """
    if state.is_told_to_leave:
        return state, []
    return replace(state, is_told_to_leave=True), [LetLeave()]


def _told_of_good_end(state: State) -> Step:
    """Return the step that tells the failure monitor that the worker has ended with 0.

    If the script has not said that it is over, the failure monitor is told this first, because rank
    0 counts both.
    """
    actions: list[Action] = []
    if not state.script_is_done:
        actions.append(TellScriptIsOver())
    return replace(state, script_is_done=True), [*actions, TellWorkerHasEnded()]


# The verdict.


@_on(VerdictIsKnown, *IN_THE_RUN, to=Phase.ENDING)
def _obey(state: State, event: VerdictIsKnown, times: Times) -> Step:
    """Tell the worker of the verdict, and end it within the time that it has. If this rank has
    failed, tell the worker that it may leave, and send no SIGTERM, because it is about to end. If
    the worker ends because of another rank and handles SIGTERM, tell rank 0 that it may be saving,
    and look every second whether it does anything.
    """
    terms = event.terms
    ending = _enter(replace(state, terms=terms), Phase.ENDING)
    # This comes before the signal, because the signal's handler in the worker reads it.
    actions: list[Action] = [AnnounceEnd()]
    is_victim = state.failure is None and not terms.is_culprit
    if is_victim and event.may_save and not (terms.fenced or terms.restarts):
        ending = replace(ending, may_save=True, until=event.at + times.limits.saving_looks)
        actions.append(TellMaySave())
    if state.failure is not None:
        ending, leave = _told_to_leave(ending)
        actions += leave
    return ending, [*actions, _end(ending, event.terms, times)]


@_on(VerdictIsKnown, Phase.ENDING, to=Phase.ENDING)
def _obey_again(state: State, event: VerdictIsKnown, times: Times) -> Step:
    """End the worker within the time that the new verdict leaves. A verdict changes if the launcher
    ends and another node may go on with the ranks of this node.
    """
    return replace(state, terms=event.terms), [_end(state, event.terms, times)]


@_on(TimeIsOver, Phase.ENDING, to=Phase.ENDING)
def _look_at_saving(state: State, event: TimeIsOver, times: Times) -> Step:
    """Look whether a worker that may be saving does anything."""
    return _enter(state, Phase.ENDING, event.at + times.limits.saving_looks), [LookAtWorker()]


@_on(WorkerIsIdle, Phase.ENDING, to=Phase.ENDING)
def _end_idle(state: State, _: WorkerIsIdle, __: Times) -> Step:
    """Kill the worker: most likely it waits for another rank, which is being ended too."""
    return _enter(state, Phase.ENDING), [EndWorker(ask=False, within=0.0)]


@_on(RankHasFailed, Phase.ENDING, to=Phase.ENDING)
def _fail_while_ending(state: State, event: FailureEvent, _: Times) -> Step:
    """Tell the failure monitor, because rank 0 waits for ranks that end by themselves. Tell the
    worker that it may leave, because it may be waiting for that. The failure does not extend the
    time that the worker has to end.
    """
    failed, actions = _told(state, event.failure)
    failed, leave = _told_to_leave(failed)
    return failed, [*actions, *leave]


@_on(ScriptFailed, Phase.ENDING, to=Phase.ENDING)
def _fail_by_script_while_ending(state: State, event: ScriptFailed, times: Times) -> Step:
    """Do the same as for any failure in this phase. Most likely the end of another rank has made
    the script fail.
    """
    return _fail_while_ending(replace(state, script_ends_itself=True), event, times)


@_on(LauncherHasEnded, Phase.ENDING, to=Phase.ENDING)
def _lose_launcher_while_ending(state: State, event: LauncherHasEnded, times: Times) -> Step:
    """Tell the failure monitor, and end the worker soon, because the end of the launcher is the end
    of its ranks.
    """
    assert state.terms is not None
    alone = replace(_enter(state, Phase.ENDING), script_ends_itself=False, may_save=False)
    failed, actions = _fail_while_ending(alone, event, times)
    return failed, [*actions, _end(failed, state.terms, times)]


@_on(ScriptSucceeded, Phase.ENDING, to=Phase.ENDING)
def _finish_while_ending(state: State, event: ScriptSucceeded, _: Times) -> Step:
    """Tell the failure monitor that the script is over, because rank 0 counts the scripts that are
    over. If the worker was allowed to save, it has finished with that: tell it that it may leave.
    """
    done = replace(state, script_is_done=True)
    leave: list[Action] = []
    if state.may_save:
        done, leave = _told_to_leave(done)
    return done, [TellScriptIsOver(event.waits), *leave]


@_on(WorkerIsGone, Phase.ENDING, to=Phase.CLOSING)
def _end_after_verdict(state: State, event: WorkerIsGone, times: Times) -> Step:
    """Tell rank 0 that the worker has ended, and wait until rank 0 closes the connections: a
    launcher may kill all ranks when one leaves with an error, and some may still be saving. If
    rank 0 does not close, leave after 12 s and ``--grace``.
    """
    ended = replace(state, worker_has_ended=True)
    actions: list[Action] = []
    if event.status == 0:
        ended, actions = _told_of_good_end(ended)
    return _enter(ended, Phase.CLOSING, _closes_by(event, times)), [*actions, TellEndAfterVerdict()]


@_on(VerdictIsKnown, Phase.GONE, to=Phase.CLOSING)
def _close(state: State, event: VerdictIsKnown, times: Times) -> Step:
    """Tell rank 0 that the worker has ended, and wait until rank 0 closes the connections, as in
    ENDING.
    """
    known = replace(state, terms=event.terms)
    return _enter(known, Phase.CLOSING, _closes_by(event, times)), [TellEndAfterVerdict()]


@_on(VerdictIsKnown, Phase.CRASHED, to=Phase.CLOSING)
def _close_after_crash(state: State, event: VerdictIsKnown, times: Times) -> Step:
    """Tell rank 0 that the worker has ended. Make a failure of its exit code or signal for the
    rank's log, and for rank 0, which waits for the report of ranks that end by themselves.
    """
    closing, actions = _close(state, event, times)
    return closing, [*actions, ReportStatus()]


@_on(RankHasFailed, Phase.CLOSING, to=Phase.CLOSING)
def _tell_crash_in_the_end(state: State, event: RankHasFailed, _: Times) -> Step:
    """Tell the failure monitor, and write the traceback."""
    return _told(state, event.failure)


@_on(LauncherHasEnded, Phase.GONE, Phase.CLOSING, to=(Phase.GONE, Phase.CLOSING))
def _lose_launcher_without_worker(state: State, event: LauncherHasEnded, _: Times) -> Step:
    """Tell the failure monitor, unless a failure has been reported. The other ranks of this
    launcher have lost it too, so the run cannot go on.
    """
    return _told(state, event.failure)


@_on(NobodyNeedsUs, Phase.GONE, Phase.CLOSING, to=Phase.OVER)
def _leave(state: State, _: NobodyNeedsUs, __: Times) -> Step:
    """Leave with the verdict's exit code; without a verdict, with the worker's."""
    return _enter(state, Phase.OVER), []


@_on(TimeIsOver, Phase.CLOSING, to=Phase.OVER)
def _leave_in_any_case(state: State, _: TimeIsOver, __: Times) -> Step:
    """Leave although rank 0 has not closed the connections: by now all workers that end in time
    have ended.
    """
    return _enter(state, Phase.OVER), []


def _end(state: State, terms: VerdictTerms, times: Times) -> EndWorker:
    """Return the action that ends the worker after a verdict. No SIGTERM is sent if this rank has
    failed, because its worker is about to end.
    """
    return EndWorker(ask=state.failure is None, within=time_to_end(state, terms, times))


def _closes_by(event: Event, times: Times) -> float:
    return event.at + times.limits.killed_within + (times.grace or 0.0)
