"""One rank's supervisor as a table: no order of events leaves a worker alive, tells two failures or
never ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.errors import PeerError
from srunddp.supervisor import phases
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
from srunddp.supervisor.limits import DEFAULT_LIMITS
from srunddp.supervisor.phases import Phase, State, Times, advance, time_to_end
from tests.support import phase_table

GRACE = 30.0
TIMES = Times(GRACE, restart_grace=60.0)
ALONE = Times(None, restart_grace=60.0)

BOOM = Failure(1, "node02", "ValueError: boom", 7)
CRASH = Failure(1, "node02", "killed by SIGSEGV", 139)
STOPPED = Failure(1, "node02", "stopped after step 5", 75, FailureKind.STOPPED)
SIGNALLED = Failure(1, "node02", "the launcher ended the run", 143, FailureKind.SIGNALLED)
LAUNCHER = Failure(1, "node02", "its launcher has ended", 137)
ERROR = RuntimeError("the ranks do not meet")
OTHER = VerdictTerms()
CULPRIT = VerdictTerms(is_culprit=True)
FENCED = VerdictTerms(fenced=True)
RESTART = VerdictTerms(restarts=True)

MONITOR = (TellFailure, TellScriptIsOver, TellWorkerHasEnded, TellMaySave, TellEndAfterVerdict)
WITH_WORKER = {
    Phase.MEETING,
    Phase.RUNNING,
    Phase.FINISHING,
    Phase.LEAVING,
    Phase.LINGERING,
    Phase.ENDING,
}
REPORTS = (ReportStatus, ReportLingering)
HANDLES = (False, True)
UNTIMED = {Phase.RUNNING, Phase.FINISHING, Phase.GONE, Phase.OVER}
WITHOUT_WORKER = {Phase.ENDED_EARLY, Phase.CRASHED, Phase.GONE, Phase.CLOSING, Phase.OVER}


def test_how_it_works_has_the_phases() -> None:
    """Else run: python -m tests.support.phase_table."""
    page = phase_table.PAGE.read_text()
    assert phase_table.rendered(page) == page


@dataclass(frozen=True)
class Rank:
    """A state, and what of the surroundings decides which events may come.

    Attributes:
        met: Whether the ranks have; None while that is open.
    """

    state: State
    met: bool | None = None


def possible(rank: Rank) -> Iterator[Event]:
    """What may happen to a rank, all at the time 0."""
    state = rank.state
    yield LauncherHasEnded(0.0, LAUNCHER)
    yield LauncherHasEnded(0.0, SIGNALLED)
    if isfinite(state.until):
        yield TimeIsOver(0.0)
    if rank.met is None:
        yield RanksHaveMet(0.0)
        yield RanksDoNotMeet(0.0, ERROR)
    if not state.worker_has_ended:
        if state.failure is None:
            yield RankHasFailed(0.0, BOOM)
            yield RankHasFailed(0.0, SIGNALLED)
        yield from (WorkerIsGone(0.0, status) for status in (0, 1, -15, None))
        yield WorkerIsGone(0.0, -15, signal_may_follow=True)
    if rank.met:
        all_terms = (OTHER, CULPRIT, FENCED, RESTART)
        for handles in HANDLES:
            yield from (
                VerdictIsKnown(0.0, each, handles) for each in all_terms if each != state.terms
            )
        yield MayLeave(0.0)
        yield NobodyNeedsUs(0.0)
        if not state.worker_has_ended:
            yield from (ScriptFailed(0.0, each) for each in (BOOM, STOPPED, SIGNALLED))
            yield ScriptSucceeded(0.0)


@dataclass(frozen=True)
class Taken:
    """One step: from where, by what, to where, and what is done."""

    rank: Rank
    event: Event
    following: Rank
    actions: tuple[Action, ...]


def steps(rank: Rank, event: Event, times: Times) -> Iterator[Taken]:
    """What follows an event, and then what the supervisor reports of itself at once: with each
    cause that the recorder may find.
    """
    met = {RanksHaveMet: True, RanksDoNotMeet: False}.get(type(event), rank.met)
    state, actions = advance(rank.state, event, times)
    following = Rank(state, met)
    yield Taken(rank, event, following, tuple(actions))
    if LookAtWorker() in actions:
        assert actions == [LookAtWorker()], "an event follows before the other actions"
        yield from steps(following, WorkerIsIdle(0.0), times)
    if any(isinstance(each, REPORTS) for each in actions):
        assert isinstance(actions[-1], REPORTS), "an event follows before the other actions"
        for failure in (CRASH, SIGNALLED):
            yield from steps(following, RankHasFailed(0.0, failure), times)


@cache
def all_steps(times: Times) -> list[Taken]:
    """All that can be reached, with all that may happen there."""
    found = []
    seen = {Rank(State())}
    todo = [Rank(State())]
    while todo:
        rank = todo.pop()
        for event in possible(rank):
            taken = list(steps(rank, event, times))
            found += taken
            # What is reported follows at once: nothing else happens before.
            ends = taken[1:] or taken
            new = {each.following for each in ends} - seen
            seen |= new
            todo += new
    return found


@pytest.fixture(params=[TIMES, ALONE], ids=["of several", "alone"])
def every(request: pytest.FixtureRequest) -> list[Taken]:
    """Each step that a supervisor can take."""
    return all_steps(request.param)


def test_a_worker_is_there_until_it_is_gone_and_is_made_to_go(every: list[Taken]) -> None:
    for taken in every:
        before = taken.rank.state
        state = taken.following.state
        ends = any(isinstance(each, EndWorker) for each in taken.actions)
        if state.phase in WITH_WORKER:
            assert not state.worker_has_ended, taken
        if state.phase in WITHOUT_WORKER:
            assert state.worker_has_ended, taken
        if state.phase is not before.phase and state.phase in (Phase.ENDING, Phase.UNMET):
            assert state.worker_has_ended or ends, taken
        if state.worker_has_ended:
            assert not ends, taken


def test_a_failure_is_told_once_and_written_when_the_others_know(every: list[Taken]) -> None:
    for taken in every:
        before = taken.rank.state
        kinds = [type(each) for each in taken.actions]
        told = kinds.count(TellFailure) + kinds.count(AbortRendezvous)
        if before.failure is None and taken.following.state.failure is not None:
            silent = taken.following.state.failure is SIGNALLED and not taken.rank.met
            in_vain = before.phase is Phase.UNMET  # the rendezvous has ended
            assert told == (0 if silent or in_vain else 1), taken
        elif before.failure is not None:
            # A failure that the rendezvous may have been too late for.
            late = isinstance(taken.event, RanksHaveMet) and before.phase is not Phase.OVER
            assert taken.following.state.failure == before.failure, taken
            assert told == (1 if late else 0), taken
        if told and WriteFailure in kinds:
            assert kinds.index(WriteFailure) == 1, taken


def test_no_failure_and_no_end_of_the_worker_is_ignored(every: list[Taken]) -> None:
    for taken in every:
        before = taken.rank.state
        state = taken.following.state
        if isinstance(taken.event, WorkerIsGone):
            assert state.worker_has_ended, taken
        leaves = before.phase in (Phase.UNMET, Phase.OVER)
        if isinstance(taken.event, FailureEvent) and not leaves:
            assert state.failure == (before.failure or taken.event.failure), taken
        # Who ends by itself has time for it, unless its launcher is gone.
        if isinstance(taken.event, ScriptFailed) and not leaves:
            assert state.script_ends_itself, taken
        if isinstance(taken.event, LauncherHasEnded) and taken.rank.met and not leaves:
            assert state.worker_has_ended or not state.script_ends_itself, taken


def test_nobody_is_told_who_is_not_there_and_a_worker_leaves_once(every: list[Taken]) -> None:
    for taken in every:
        if not taken.following.met:
            assert not any(isinstance(each, MONITOR) for each in taken.actions), taken
        if taken.rank.state.is_told_to_leave:
            assert LetLeave() not in taken.actions, taken


def test_what_a_worker_has_left_is_killed_once_where_its_supervisor_stays(
    every: list[Taken],
) -> None:
    for taken in every:
        stays = taken.following.state.phase is Phase.GONE
        ended_well = isinstance(taken.event, WorkerIsGone) and taken.event.status == 0
        count = taken.actions.count(KillLeftBehind())
        assert count == (1 if stays and ended_well else 0), taken


def test_what_has_a_time_has_something_that_follows(every: list[Taken]) -> None:
    for taken in every:
        state = taken.following.state
        if isfinite(state.until):
            assert (state.phase, TimeIsOver) in phases.TABLE, taken
        if state.phase is not taken.rank.state.phase and state.phase in UNTIMED:
            assert state.until == inf, "a time outlives its phase"
        if state.phase is Phase.ENDING:
            assert state.may_save or state.until == inf, taken


def test_who_may_save_is_told_once_and_looked_at(every: list[Taken]) -> None:
    """Only a worker that is ended with another, that has not failed, and before no restart."""
    for taken in every:
        state = taken.following.state
        told = TellMaySave() in taken.actions
        assert told == (state.may_save and not taken.rank.state.may_save), taken
        if told:
            assert isinstance(taken.event, VerdictIsKnown), taken
            assert taken.event.may_save, taken
            assert taken.event.terms == OTHER, taken
            assert taken.rank.state.failure is None, taken
            assert state.until == DEFAULT_LIMITS.saving_looks, taken


def test_the_last_phase_is_the_last(every: list[Taken]) -> None:
    for taken in every:
        if taken.rank.state.phase is Phase.OVER:
            assert (taken.following.state, taken.actions) == (taken.rank.state, ())


def test_the_table_names_all_phases_that_may_follow_and_no_other() -> None:
    found: dict[tuple[Phase, type[Event]], set[Phase]] = {}
    for taken in all_steps(TIMES) + all_steps(ALONE):
        key = (taken.rank.state.phase, type(taken.event))
        found.setdefault(key, set()).add(taken.following.state.phase)
    for row in phases.ROWS:
        reached = [found[phase, row.event] for phase in row.phases]
        assert set().union(*reached) == set(row.following), row


# Any sequence, with times: however a worker and the others behave, the supervisor ends.


@dataclass
class Play:
    """A supervisor whose worker, rendezvous and failure monitor are simulated.

    Attributes:
        kill_takes: Seconds from SIGKILL to the end of the worker; infinite for one that cannot be
            killed.
        dies_of_sigterm: Whether SIGTERM ends it.
        idle_after: How many looks later it does nothing any more.
        rendezvous_takes: Until it fails, if nothing else ends it.
        verdict_takes: From a failure that is told to the verdict.
        closes: Whether rank 0 closes in the end.
    """

    kill_takes: float
    dies_of_sigterm: bool
    idle_after: int
    rendezvous_takes: float
    verdict_takes: float
    closes: bool
    times: Times = TIMES
    state: State = field(default_factory=State)
    now: float = 0.0
    met: bool | None = None
    kill_at: float = inf
    alive: bool = True
    told: list[Action] = field(default_factory=list)
    coming: list[tuple[float, int, Event]] = field(default_factory=list)
    count: int = 0

    def happens(self, event: Event, after: float = 0.0) -> None:
        at = self.now + after
        # What comes at the same time comes in this order; events themselves have none.
        self.count += 1
        heapq.heappush(self.coming, (at, self.count, replace(event, at=at)))

    def run(self, until: float) -> None:
        """Let time pass, as a supervisor's loop does."""
        while self.state.phase is not Phase.OVER:
            following = min(
                self.state.until, self.kill_at, self.coming[0][0] if self.coming else inf
            )
            if following > until:
                break
            self.now = max(self.now, following)
            if self.now >= self.state.until:
                self.take(TimeIsOver(self.now))
            elif self.now >= self.kill_at:
                self.kill_at = inf
                takes = min(self.kill_takes, DEFAULT_LIMITS.gives_up_after)
                status = None if takes < self.kill_takes else -9
                self.happens(WorkerIsGone(0.0, status), takes)
            else:
                self.take(heapq.heappop(self.coming)[2])
        self.now = max(self.now, until)

    def take(self, event: Event) -> None:
        match event:
            case WorkerIsGone():
                if not self.alive:
                    return
                self.alive = False
            case ScriptFailed() | ScriptSucceeded() if not (self.alive and self.met):
                return
            case RanksHaveMet() | RanksDoNotMeet() if self.met is not None:
                return
            case VerdictIsKnown() | MayLeave() | NobodyNeedsUs() if not self.met:
                return
            case RanksHaveMet():
                self.met = True
            case RanksDoNotMeet():
                self.met = False
        self.state, actions = advance(self.state, event, self.times)
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action: Action) -> None:
        self.told.append(action)
        match action:
            case EndWorker(ask, within):
                if within is not None:
                    self.kill_at = min(self.kill_at, self.now + within)
                if ask and self.dies_of_sigterm:
                    self.happens(WorkerIsGone(0.0, -15))
            case AbortRendezvous():
                self.happens(RanksDoNotMeet(0.0, ERROR), self.rendezvous_takes)
            case TellFailure():
                self.happens(VerdictIsKnown(0.0, CULPRIT), self.verdict_takes)
            case TellEndAfterVerdict() | TellWorkerHasEnded():
                if self.closes:
                    self.happens(NobodyNeedsUs(0.0))
            case _:
                self.look(action)

    def look(self, action: Action) -> None:
        match action:
            case LookAtWorker():
                self.idle_after -= 1
                if self.idle_after < 0:
                    self.take(WorkerIsIdle(self.now))
            case ReportStatus() | ReportLingering():
                self.take(RankHasFailed(self.now, CRASH))


EVENTS = st.sampled_from(
    [
        RanksHaveMet(0.0),
        RanksHaveMet(0.0),
        RanksDoNotMeet(0.0, ERROR),
        RankHasFailed(0.0, BOOM),
        RankHasFailed(0.0, SIGNALLED),
        LauncherHasEnded(0.0, LAUNCHER),
        ScriptFailed(0.0, BOOM),
        ScriptFailed(0.0, STOPPED),
        ScriptSucceeded(0.0, waits=True),
        MayLeave(0.0),
        WorkerIsGone(0.0, 0),
        WorkerIsGone(0.0, 9),
        WorkerIsGone(0.0, -15, signal_may_follow=True),
        VerdictIsKnown(0.0, OTHER),
        VerdictIsKnown(0.0, OTHER, may_save=True),
        VerdictIsKnown(0.0, CULPRIT),
        VerdictIsKnown(0.0, FENCED),
        VerdictIsKnown(0.0, RESTART),
        NobodyNeedsUs(0.0),
    ]
)
SECONDS = st.sampled_from([0.0, 0.05, 0.1, 1.0, 7.0, 30.0, 100.0])
PLAYS = st.builds(
    Play,
    kill_takes=st.sampled_from([0.0, 0.5, 9.0, inf]),
    dies_of_sigterm=st.booleans(),
    idle_after=st.sampled_from([0, 1, 1000]),
    rendezvous_takes=st.sampled_from([0.0, 3.0, 20.0]),
    verdict_takes=st.sampled_from([0.0, 0.7, 300.0]),
    closes=st.booleans(),
)


@given(play=PLAYS, sequence=st.lists(st.tuples(SECONDS, EVENTS), max_size=12))
def test_however_a_rank_fares_its_supervisor_ends_without_its_worker(
    play: Play, sequence: list[tuple[float, Event]]
) -> None:
    for wait, event in sequence:
        play.run(play.now + wait)
        if play.state.phase is not Phase.OVER:
            play.take(replace(event, at=play.now))
    # What surely comes once: the ranks meet or do not, and somebody ends the run.
    play.happens(RanksDoNotMeet(0.0, ERROR), 20.0)
    play.happens(VerdictIsKnown(0.0, OTHER), 30.0)
    play.run(play.now + 1000.0)
    assert play.state.phase is Phase.OVER
    assert not play.alive
    kinds = [type(each) for each in play.told]
    assert all(
        kinds.count(kind) <= 1 for kind in (TellFailure, LetLeave, HandOverWorld, KillLeftBehind)
    )
    assert kinds.count(TellEndAfterVerdict) <= 1
    assert kinds.count(TellMaySave) <= 1


# How long a worker may take to end.

ENDS_ITSELF = State(failure=BOOM, script_ends_itself=True)
SOON = DEFAULT_LIMITS.kill_after
MAY_SAVE = State(may_save=True)


@pytest.mark.parametrize(
    ("state", "terms", "seconds"),
    [
        # Another rank has failed: there is nothing to save, also not where this one fails of that.
        (State(), OTHER, SOON),
        (ENDS_ITSELF, OTHER, SOON),
        # But one that handles SIGTERM may be saving.
        (MAY_SAVE, OTHER, GRACE),
        (MAY_SAVE, RESTART, TIMES.restart_grace),
        (MAY_SAVE, FENCED, 0.0),
        # The culprit, by its own word; and not where it is stopped, or hangs.
        (ENDS_ITSELF, CULPRIT, GRACE),
        (State(failure=BOOM), CULPRIT, SOON),
        # All that have agreed to stop, or that the launcher ends.
        (State(failure=STOPPED, script_ends_itself=True), OTHER, GRACE),
        (State(failure=SIGNALLED, script_ends_itself=True), OTHER, GRACE),
        # Before a restart all have the same time.
        (State(), RESTART, TIMES.restart_grace),
        (ENDS_ITSELF, VerdictTerms(is_culprit=True, restarts=True), TIMES.restart_grace),
        # Others may go on with these ranks.
        (ENDS_ITSELF, VerdictTerms(is_culprit=True, restarts=True, fenced=True), 0.0),
    ],
)
def test_the_time_to_end_is_what_is_left_to_do(
    state: State, terms: VerdictTerms, seconds: float
) -> None:
    assert time_to_end(state, terms, TIMES) == seconds


def test_without_a_grace_one_that_may_save_has_as_long_as_the_others() -> None:
    assert time_to_end(MAY_SAVE, OTHER, TIMES._replace(grace=0.0)) == SOON


def test_a_single_process_may_take_as_long_as_it_likes() -> None:
    assert time_to_end(ENDS_ITSELF, CULPRIT, ALONE) is None


# Events that cross each other, one test for each two.

RUNNING = State(Phase.RUNNING)
FINISHING = State(Phase.FINISHING, script_is_done=True)


def played(state: State, *events: Event, times: Times = TIMES) -> tuple[State, list[list[Action]]]:
    """The state after these events, and the actions of each."""
    done = []
    for event in events:
        state, actions = advance(state, event, times)
        done.append(actions)
    return state, done


def test_a_verdict_and_the_worker_s_end_cross() -> None:
    closes = 5.0 + DEFAULT_LIMITS.killed_within + GRACE
    for status, said in (
        (1, []),
        (None, []),
        (0, [TellScriptIsOver(), TellWorkerHasEnded()]),
    ):
        events = (VerdictIsKnown(4.0, OTHER), WorkerIsGone(5.0, status))
        state, (obeyed, ended) = played(RUNNING, *events)
        assert obeyed == [AnnounceEnd(), EndWorker(ask=True, within=SOON)]
        assert ended == [*said, TellEndAfterVerdict()]
        assert (state.phase, state.until, state.failure) == (Phase.CLOSING, closes, None)
    # The other way round.
    state, (left, told) = played(RUNNING, WorkerIsGone(4.0, 0), VerdictIsKnown(5.0, OTHER))
    assert left == [TellScriptIsOver(), TellWorkerHasEnded(), KillLeftBehind()]
    assert told == [TellEndAfterVerdict()]
    assert (state.phase, state.until) == (Phase.CLOSING, closes)


def test_a_worker_that_may_save_may_save_until_it_does_nothing() -> None:
    looks = DEFAULT_LIMITS.saving_looks
    state, (obeyed,) = played(RUNNING, VerdictIsKnown(4.0, OTHER, may_save=True))
    assert obeyed == [AnnounceEnd(), TellMaySave(), EndWorker(ask=True, within=GRACE)]
    assert (state.phase, state.until) == (Phase.ENDING, 4.0 + looks)
    state, (looked,) = played(state, TimeIsOver(4.0 + looks))
    assert (looked, state.until) == ([LookAtWorker()], 4.0 + 2 * looks)
    killed, (ended,) = played(state, WorkerIsIdle(6.0))
    assert (ended, killed.until) == ([EndWorker(ask=False, within=0.0)], inf)
    # When its script is done it may leave.
    _, (done,) = played(state, ScriptSucceeded(6.0))
    assert done == [TellScriptIsOver(), LetLeave()]
    # Its script's failure changes nothing: an exit handler may be what saves.
    failed, _ = played(state, ScriptFailed(6.0, BOOM))
    assert failed.until == state.until
    # The launcher's end is that of its ranks.
    _, (lost,) = played(state, LauncherHasEnded(6.0, LAUNCHER))
    assert lost[-1] == EndWorker(ask=False, within=SOON)


@pytest.mark.parametrize(
    ("state", "terms"),
    [
        (RUNNING, CULPRIT),
        (replace(RUNNING, failure=BOOM), OTHER),
        (RUNNING, RESTART),
        (RUNNING, FENCED),
    ],
)
def test_who_failed_or_starts_again_does_not_save_for_longer(
    state: State, terms: VerdictTerms
) -> None:
    handles, (actions,) = played(state, VerdictIsKnown(4.0, terms, may_save=True))
    assert (handles, [actions]) == played(state, VerdictIsKnown(4.0, terms))


def test_a_crash_that_crosses_the_verdict_is_told_after_it() -> None:
    events = (
        WorkerIsGone(4.0, -15, signal_may_follow=True),
        VerdictIsKnown(4.05, OTHER),
        RankHasFailed(4.05, CRASH),
        TimeIsOver(90.0),
    )
    state, (waits, told, failed, left) = played(RUNNING, *events)
    assert (waits, told) == ([], [TellEndAfterVerdict(), ReportStatus()])
    assert (failed, left) == ([TellFailure(CRASH), WriteFailure(CRASH)], [])
    assert state.phase is Phase.OVER


def test_a_crash_waits_for_the_launcher_s_signal_and_no_longer() -> None:
    state, _ = played(RUNNING, WorkerIsGone(4.0, -15, signal_may_follow=True))
    assert (state.phase, state.until) == (Phase.CRASHED, 4.0 + DEFAULT_LIMITS.signal_may_follow)
    state, _ = played(RUNNING, WorkerIsGone(4.0, -11))
    assert (state.phase, state.until) == (Phase.CRASHED, 4.0)
    state, (reports, told) = played(state, TimeIsOver(4.0), RankHasFailed(4.0, CRASH))
    assert (reports, told) == ([ReportStatus()], [TellFailure(CRASH), WriteFailure(CRASH)])
    assert (state.phase, state.until) == (Phase.GONE, inf)


@pytest.mark.parametrize("status", [7, -9])
def test_a_failure_that_the_script_has_told_is_not_told_of_its_end(status: int) -> None:
    events = (ScriptFailed(4.0, BOOM), WorkerIsGone(4.0, status), VerdictIsKnown(5.0, CULPRIT))
    state, (told, gone, known) = played(RUNNING, *events)
    assert told == [TellFailure(BOOM), WriteFailure(BOOM)]
    assert (gone, known) == ([], [TellEndAfterVerdict()])
    assert state.phase is Phase.CLOSING


def test_a_failure_and_the_verdict_cross() -> None:
    """Before: the worker is about to end, and is not asked. After: it has no more time than it
    had.
    """
    grace = EndWorker(ask=False, within=GRACE)
    _, (_, known) = played(RUNNING, ScriptFailed(4.0, BOOM), VerdictIsKnown(5.0, CULPRIT))
    assert known == [AnnounceEnd(), LetLeave(), grace]
    state, (_, told) = played(RUNNING, VerdictIsKnown(4.0, CULPRIT), ScriptFailed(5.0, BOOM))
    assert told == [TellFailure(BOOM), WriteFailure(BOOM), LetLeave()]
    _, (again,) = played(state, ScriptFailed(6.0, STOPPED))
    assert again == []


def test_the_script_s_end_and_the_verdict_cross() -> None:
    """It may not leave any more: the verdict ends it."""
    _, (_, done, leave) = played(
        RUNNING, VerdictIsKnown(4.0, OTHER), ScriptSucceeded(5.0, waits=True), MayLeave(6.0)
    )
    assert (done, leave) == ([TellScriptIsOver(waits=True)], [])
    state, (leave, known) = played(FINISHING, MayLeave(4.0), VerdictIsKnown(5.0, OTHER))
    assert leave == [LetLeave()]
    assert known == [AnnounceEnd(), EndWorker(ask=True, within=SOON)]
    assert (state.phase, state.until) == (Phase.ENDING, inf)
    _, (gone,) = played(state, WorkerIsGone(6.0, 0))
    assert gone == [TellWorkerHasEnded(), TellEndAfterVerdict()]


def test_the_launcher_s_end_takes_the_time_that_a_failed_script_had() -> None:
    _, (_, known, lost) = played(
        RUNNING,
        ScriptFailed(4.0, BOOM),
        VerdictIsKnown(5.0, CULPRIT),
        LauncherHasEnded(6.0, LAUNCHER),
    )
    assert known[-1] == EndWorker(ask=False, within=GRACE)
    assert lost == [EndWorker(ask=False, within=SOON)]
    _, (_, lost, known) = played(
        RUNNING,
        ScriptFailed(4.0, BOOM),
        LauncherHasEnded(5.0, LAUNCHER),
        VerdictIsKnown(6.0, CULPRIT),
    )
    assert (lost, known[-1]) == ([], EndWorker(ask=False, within=SOON))


def test_a_verdict_that_becomes_a_fence_ends_the_worker_at_once() -> None:
    _, (_, fenced, gone) = played(
        RUNNING, VerdictIsKnown(4.0, RESTART), VerdictIsKnown(5.0, FENCED), WorkerIsGone(5.0, -9)
    )
    assert fenced == [EndWorker(ask=True, within=0.0)]
    assert gone == [TellEndAfterVerdict()]


def test_the_launcher_s_end_after_the_worker_s_is_told() -> None:
    """The other ranks that it has started have lost it, too."""
    state, (_, lost, again) = played(
        FINISHING,
        WorkerIsGone(4.0, 0),
        LauncherHasEnded(5.0, LAUNCHER),
        LauncherHasEnded(6.0, LAUNCHER),
    )
    assert (lost, again) == ([TellFailure(LAUNCHER), WriteFailure(LAUNCHER)], [])
    assert state.phase is Phase.GONE


def test_a_failure_and_the_last_rank_cross() -> None:
    """The rendezvous was to be ended, and has been completed."""
    gone = WorkerIsGone(1.0, 9)
    reported = (TimeIsOver(1.0), RankHasFailed(1.0, CRASH))
    state, (_, reports, failed, met) = played(State(), gone, *reported, RanksHaveMet(2.0))
    assert reports == [ReportStatus()]
    assert failed == [AbortRendezvous(CRASH), WriteFailure(CRASH)]
    assert met == [HandOverWorld(), TellFailure(CRASH)]
    assert state.phase is Phase.GONE
    # A moment earlier: the failure monitor is told, and not the rendezvous.
    state, (_, met, _, failed) = played(State(), gone, RanksHaveMet(1.0), *reported)
    assert (met, failed) == ([HandOverWorld()], [TellFailure(CRASH), WriteFailure(CRASH)])
    assert state.phase is Phase.GONE
    # Too late: the worker is being ended.
    gives_up = DEFAULT_LIMITS.rendezvous_ends_within
    late = (TimeIsOver(1.0 + gives_up), RanksHaveMet(9.0))
    state, (_, (leaves, ends), met) = played(State(), RankHasFailed(1.0, BOOM), *late)
    assert isinstance(leaves, LeaveWith)
    assert isinstance(leaves.error, PeerError)
    assert (ends, met) == (EndWorker(ask=True, within=SOON), [TellFailure(BOOM)])
    assert state.phase is Phase.UNMET


def test_a_rank_that_has_failed_leaves_when_the_others_have_been_told() -> None:
    """At once, where its worker has ended meanwhile; else once it has. The rendezvous knows best
    why, also where it ends late.
    """
    failed = RankHasFailed(1.0, BOOM)
    told = RanksDoNotMeet(3.0, ERROR)
    state, (*_, left) = played(State(), failed, WorkerIsGone(2.0, 9), told)
    assert (left, state.phase) == ([LeaveWith(ERROR)], Phase.OVER)
    state, (_, left, _) = played(State(), failed, told, WorkerIsGone(4.0, 9))
    assert left == [LeaveWith(ERROR), EndWorker(ask=True, within=SOON)]
    assert state.phase is Phase.OVER
    gives_up = 1.0 + DEFAULT_LIMITS.rendezvous_ends_within
    _, (*_, late) = played(State(), failed, TimeIsOver(gives_up), RanksDoNotMeet(8.5, ERROR))
    assert late == [LeaveWith(ERROR)]


@pytest.mark.parametrize("first", ["the worker", "the rendezvous"])
def test_the_launcher_s_signal_outranks_what_the_rendezvous_says_of_it(first: str) -> None:
    """As of MPI_Init, which fails as the signal ends the worker in it."""
    ended = WorkerIsGone(1.0, -15, signal_may_follow=True)
    failed = RanksDoNotMeet(1.0, ERROR)
    if first == "the worker":
        state, (_, error) = played(State(), ended, failed)
        assert error == [LeaveWith(ERROR)]
        assert state.until == 1.0 + DEFAULT_LIMITS.signal_may_follow
        state, (reports, signalled) = played(state, TimeIsOver(1.1), RankHasFailed(1.1, SIGNALLED))
        assert reports == [ReportStatus()]
        assert isinstance(signalled[1], LeaveWith)
        assert isinstance(signalled[1].error, PeerError)
    else:
        # Then it is this supervisor that has ended it.
        state, (error, gone) = played(State(), failed, ended)
        assert (error, gone) == ([LeaveWith(ERROR), EndWorker(ask=True, within=SOON)], [])
    assert state.phase is Phase.OVER


def test_after_the_launcher_s_signal_a_rank_leaves_before_the_others_have_come() -> None:
    """With a worker that is stopped, and would stay until the rendezvous gives up."""
    state, ((leaves, *rest),) = played(State(), RankHasFailed(11.0, SIGNALLED))
    assert isinstance(leaves, LeaveWith)
    assert rest == [EndWorker(ask=True, within=SOON), WriteFailure(SIGNALLED)]
    # The others end as well, and for the rendezvous that is an error.
    state, (error,) = played(state, RanksDoNotMeet(11.1, ERROR))
    assert error == []
    assert state.phase is Phase.UNMET


def test_a_worker_that_lingers_is_named_and_then_a_failure() -> None:
    ends = 4.0 + DEFAULT_LIMITS.ends_within
    state, _ = played(FINISHING, MayLeave(4.0))
    assert (state.phase, state.until) == (Phase.LEAVING, ends)
    state, (named,) = played(state, TimeIsOver(ends))
    assert (named, state.until) == ([NameLingering(4.0)], ends + GRACE)
    state, (reported, told) = played(state, TimeIsOver(95.0), RankHasFailed(95.0, BOOM))
    assert reported == [ReportLingering(4.0)]
    assert told == [TellFailure(BOOM), WriteFailure(BOOM)]
    assert (state.phase, state.until) == (Phase.LINGERING, inf)


@pytest.mark.parametrize(
    ("state", "times"), [(FINISHING, ALONE), (replace(FINISHING, failure=BOOM), TIMES)]
)
def test_nobody_waits_for_one_that_lingers_alone_or_has_failed(state: State, times: Times) -> None:
    state, _ = played(state, MayLeave(4.0), times=times)
    assert (state.phase, state.until) == (Phase.LEAVING, inf)


def test_a_failure_ends_the_watch_of_a_worker_that_may_leave() -> None:
    """As of one that is stopped: the verdict ends it."""
    state, _ = played(FINISHING, MayLeave(4.0), RankHasFailed(20.0, BOOM))
    assert (state.phase, state.until) == (Phase.LEAVING, inf)
