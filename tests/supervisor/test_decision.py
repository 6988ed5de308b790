"""When rank 0 decides: every state with every event, and random sequences of failures and times."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.supervisor.decision import (
    FINDINGS,
    TIME,
    TRANSITIONS,
    VERDICTS,
    Decision,
    DecisionEvent,
    DecisionState,
    DecisionTimes,
    Facts,
    RankZeroAction,
)
from srunddp.supervisor.failure import Failure, FailureKind

BEFORE = [
    *itertools.takewhile(lambda state: state is not DecisionState.CAUSE_IS_FOUND, DecisionState)
]
AFTERWARDS = [state for state in DecisionState if state not in BEFORE]
ASKING_GPUS = DecisionState.ASKING_GPUS
FOUND_AND_NAMED = [RankZeroAction.FIND_FIRST_FAILURE, RankZeroAction.NAME_CAUSE]
FACTS = [field.name for field in fields(Facts)]
DOUBTFUL = (FailureKind.ABORTED, FailureKind.NETWORK, FailureKind.SECONDARY)
ORDERLY = (FailureKind.STOPPED, FailureKind.SIGNALLED)


def failure(kind: FailureKind, rank: int = 1, cause: str = "boom") -> Failure:
    return Failure(rank, f"node0{rank}", cause, 1, kind)


def timed_out(rank: int = 1) -> Failure:
    """One that a rank which hangs may have caused."""
    return failure(FailureKind.SECONDARY, rank, "RuntimeError: Timed out waiting")


def carry_out(
    decision: Decision, action: RankZeroAction | None, now: float, *, gpus_may_tell: bool = False
) -> list[RankZeroAction]:
    """An action, with the one that follows from it at once, as rank 0 does."""
    if action is None:
        return []
    if action not in FINDINGS:
        return [action]
    event = DecisionEvent.GPUS_MAY_TELL if gpus_may_tell else DecisionEvent.NOBODY_TO_ASK
    return [action, *carry_out(decision, decision.apply(event, now), now)]


def move_on(
    decision: Decision, now: float, facts: Facts, *, gpus_may_tell: bool = False
) -> list[RankZeroAction]:
    """As rank 0 does at each turn."""
    actions = []
    while event := decision.due(now, facts):
        action = decision.apply(event, now)
        actions += carry_out(decision, action, now, gpus_may_tell=gpus_may_tell)
    return actions


# The table.


@pytest.mark.parametrize("state", DecisionState)
@pytest.mark.parametrize("event", DecisionEvent)
def test_the_end_of_the_run_is_said_once_whatever_happens(
    state: DecisionState, event: DecisionEvent
) -> None:
    """The cause is found once, and said on the way to DECIDED: from both none leads back."""
    transition = TRANSITIONS.get((state, event))
    if transition is None:
        return
    assert (transition.action in FINDINGS) == (transition.to is DecisionState.CAUSE_IS_FOUND)
    assert (transition.action in VERDICTS) == (transition.to is DecisionState.DECIDED)
    if state in AFTERWARDS:
        assert transition.to in AFTERWARDS[AFTERWARDS.index(state) + 1 :]
    elif transition.to in AFTERWARDS:
        assert transition.action in FINDINGS | VERDICTS


@pytest.mark.parametrize("state", BEFORE)
def test_a_primary_failure_and_a_lost_node_decide_at_once_in_every_state(
    state: DecisionState,
) -> None:
    cause = TRANSITIONS[state, DecisionEvent.CAUSE]
    lost = TRANSITIONS[state, DecisionEvent.NODE_IS_LOST]
    assert cause.to is DecisionState.CAUSE_IS_FOUND
    assert cause.action is RankZeroAction.FIND_FIRST_FAILURE
    assert (lost.to, lost.action) == (DecisionState.DECIDED, RankZeroAction.NAME_LOST_NODE)


@pytest.mark.parametrize("state", AFTERWARDS)
def test_what_happens_to_ranks_and_nodes_changes_no_cause_that_is_found(
    state: DecisionState,
) -> None:
    """Also while rank 0 asks about GPUs."""
    for event in (
        DecisionEvent.CAUSE,
        DecisionEvent.DOUBTFUL,
        DecisionEvent.ORDERLY_END,
        DecisionEvent.NODE_IS_LOST,
        DecisionEvent.STEP,
    ):
        assert (state, event) not in TRANSITIONS


def test_ranks_are_asked_about_gpus_only_if_these_may_tell_why() -> None:
    """A run without GPUs never enters that state."""
    entering = [event for (_, event), each in TRANSITIONS.items() if each.to is ASKING_GPUS]
    assert entering == [DecisionEvent.GPUS_MAY_TELL]


@pytest.mark.parametrize("state", BEFORE)
def test_who_saves_after_a_signal_has_time_in_every_state(state: DecisionState) -> None:
    assert TRANSITIONS[state, DecisionEvent.ORDERLY_END].to is DecisionState.WAITING_FOR_ALL


@pytest.mark.parametrize("state", DecisionState)
def test_every_state_is_reached_and_leads_to_the_end(state: DecisionState) -> None:
    assert state in reached_from(DecisionState.UNDECIDED)
    assert DecisionState.OVER in reached_from(state)


def reached_from(start: DecisionState) -> set[DecisionState]:
    reached = {start}
    while True:
        following = {each.to for (state, _), each in TRANSITIONS.items() if state in reached}
        if following <= reached:
            return reached
        reached |= following


@pytest.mark.parametrize("state", DecisionState)
def test_what_time_and_facts_bring_leads_out_of_every_state(state: DecisionState) -> None:
    """Else rank 0 would be busy with it for ever."""
    for facts in itertools.product((False, True), repeat=len(FACTS)):
        for failures in ([], [timed_out()], [failure(FailureKind.NETWORK)]):
            decision = Decision()
            decision.state = state
            decision.ends_at = 10.0 if state in TIME else None
            decision.failures = failures
            event = decision.due(10.0, Facts(**dict(zip(FACTS, facts, strict=True))))
            assert event is None or TRANSITIONS[state, event].to is not state


@pytest.mark.parametrize("state", TIME)
def test_a_state_with_a_time_ends_with_it(state: DecisionState) -> None:
    decision = Decision()
    decision.state = state
    decision.ends_at = 10.0
    decision.failures = [timed_out()]
    facts = Facts(steps_are_overdue=True)
    assert decision.due(9.9, facts) is None
    assert decision.due(10.0, facts)


# Failures and times.


def test_the_stacks_of_a_stall_are_waited_for_and_a_step_ends_it() -> None:
    decision = Decision()
    stalls = Facts(steps_are_overdue=True)
    assert move_on(decision, 10.0, stalls) == [RankZeroAction.ASK_FOR_STACKS]
    assert move_on(decision, 12.9, stalls) == []
    assert move_on(decision, 12.9, Facts()) == []
    assert decision.state is DecisionState.UNDECIDED
    assert move_on(decision, 20.0, stalls) == [RankZeroAction.ASK_FOR_STACKS]
    assert move_on(decision, 22.9, stalls) == []
    assert move_on(decision, 23.0, stalls) == [
        RankZeroAction.FIND_STALLED_RANK,
        RankZeroAction.NAME_CAUSE,
    ]


@pytest.mark.parametrize(("facts", "until"), [(Facts(), 13.0), (Facts(gpus_are_known=True), 10.0)])
def test_the_cause_is_named_when_the_gpus_are_known_or_after_three_seconds(
    facts: Facts, until: float
) -> None:
    decision = Decision()
    action = decision.fail(failure(FailureKind.PRIMARY), 10.0)
    asked = [RankZeroAction.FIND_FIRST_FAILURE, RankZeroAction.ASK_ABOUT_GPUS]
    assert carry_out(decision, action, 10.0, gpus_may_tell=True) == asked
    for kind in FailureKind:
        assert decision.fail(failure(kind, 2), 10.0) is None, "found is found"
    assert decision.apply(DecisionEvent.NODE_IS_LOST, 10.0) is None
    nothing_else = replace(facts, steps_are_overdue=True, someone_may_fail=False)
    if until > 10.0:
        assert move_on(decision, until - 0.1, nothing_else) == []
    assert move_on(decision, until, nothing_else) == [RankZeroAction.NAME_CAUSE]
    assert decision.ends_at == until + 42.0, "what follows the verdict has its whole time"


@pytest.mark.parametrize("kind", DOUBTFUL)
def test_a_failure_says_more_than_a_step_that_is_not_made(kind: FailureKind) -> None:
    """It comes while the ranks are asked for their stacks, and its own cause may follow."""
    decision = Decision()
    answered = Facts(steps_are_overdue=True, stacks_are_there=True)
    decision.finished_before = {3: "node03"}
    assert move_on(decision, 10.0, replace(answered, stacks_are_there=False))
    decision.fail(failure(kind), 11.0)
    assert move_on(decision, 11.6, answered) == []
    assert move_on(decision, 11.7, answered) == FOUND_AND_NAMED


@pytest.mark.parametrize("kind", DOUBTFUL)
def test_a_second_doubtful_failure_does_not_put_the_decision_off(kind: FailureKind) -> None:
    decision = Decision()
    decision.fail(failure(FailureKind.SECONDARY), 10.0)
    decision.fail(failure(kind), 10.6)
    assert move_on(decision, 10.65, Facts()) == []
    assert move_on(decision, 10.7, Facts()) == FOUND_AND_NAMED


@pytest.mark.parametrize("kind", ORDERLY)
def test_ranks_may_save_one_after_the_other(kind: FailureKind) -> None:
    """Each that ends in order begins the 300 s again, and a doubtful failure does not: it misses a
    rank that has ended.
    """
    decision = Decision()
    decision.fail(failure(kind), 10.0)
    decision.fail(failure(kind, 2), 200.0)
    for rank, doubtful in enumerate(DOUBTFUL, 3):
        decision.fail(failure(doubtful, rank), 400.0)
    assert move_on(decision, 499.9, Facts()) == []
    assert move_on(decision, 500.0, Facts()) == FOUND_AND_NAMED


@pytest.mark.parametrize("kind", ORDERLY)
def test_they_may_save_as_long_as_the_user_says(kind: FailureKind) -> None:
    decision = Decision(DecisionTimes(signal_grace=1000.0))
    decision.fail(failure(kind), 10.0)
    assert move_on(decision, 1009.9, Facts()) == []
    assert move_on(decision, 1010.0, Facts()) == FOUND_AND_NAMED


def test_nobody_is_waited_for_when_no_worker_is_left() -> None:
    for kind in (*DOUBTFUL, *ORDERLY):
        decision = Decision()
        decision.fail(failure(kind), 10.0)
        actions = move_on(decision, 10.0, Facts(someone_may_fail=False, stacks_are_there=True))
        assert actions[-1] in VERDICTS


def test_a_hang_is_looked_for_unless_a_rank_had_finished_or_a_failure_speaks_against_it() -> None:
    decision = Decision()
    decision.fail(timed_out(), 10.0)
    assert move_on(decision, 10.7, Facts()) == [RankZeroAction.ASK_FOR_STACKS]
    decision.fail(timed_out(2), 11.0)
    assert move_on(decision, 11.0, Facts()) == [], "another of its victims"
    decision.fail(failure(FailureKind.NETWORK, 3), 11.1)
    assert move_on(decision, 11.1, Facts()) == FOUND_AND_NAMED
    decision = Decision()
    decision.finished_before = {2: "node02"}
    decision.fail(timed_out(), 10.0)
    assert move_on(decision, 10.7, Facts()) == FOUND_AND_NAMED


def test_a_question_that_no_longer_matters_wakes_nobody() -> None:
    decision = Decision()
    decision.fail(timed_out(), 10.0)
    move_on(decision, 10.7, Facts())
    decision.fail(failure(FailureKind.SIGNALLED, 2), 12.0)
    assert decision.state is DecisionState.WAITING_FOR_ALL
    assert decision.ends_at == 312.0


@dataclass(frozen=True)
class Turn:
    """What happens in one turn of rank 0's."""

    seconds: float
    kind: FailureKind | None
    times_out: bool
    node_is_lost: bool
    gpus_may_tell: bool
    facts: Facts


turns = st.builds(
    Turn,
    st.sampled_from([0.0, 0.1, 0.6, 0.8, 2.0, 5.0, 290.0, 310.0]),
    st.none() | st.sampled_from(FailureKind),
    st.booleans(),
    st.integers(0, 19).map(lambda number: number == 0),
    st.booleans(),
    st.builds(
        Facts,
        steps_are_overdue=st.booleans(),
        someone_may_fail=st.integers(0, 9).map(bool),
        someone_is_silent=st.booleans(),
        stacks_are_there=st.booleans(),
        gpus_are_known=st.booleans(),
        all_have_ended=st.booleans(),
    ),
)


class Run:
    """A decision, and what a sequence of turns has shown of it.

    Attributes:
        found: How often a cause was.
        verdicts: All that were said.
    """

    def __init__(self) -> None:
        self.decision = Decision()
        self.found = 0
        self.verdicts: list[RankZeroAction] = []
        self._now = 1.0
        self._earliest = float("inf")
        # Since when rank 0 asks about GPUs.
        self._asks_since = float("inf")

    def play(self, turn: Turn) -> None:
        """One turn, in which nothing is decided too early."""
        self._now += turn.seconds
        was_asking = self.decision.state is ASKING_GPUS
        actions: list[RankZeroAction] = []
        if turn.node_is_lost:
            lost = self.decision.apply(DecisionEvent.NODE_IS_LOST, self._now)
            actions += carry_out(self.decision, lost, self._now)
        if turn.kind is not None:
            self._expect(turn.kind)
            timed = turn.times_out and turn.kind is FailureKind.SECONDARY
            each = timed_out() if timed else failure(turn.kind)
            failed = self.decision.fail(each, self._now)
            may_tell = turn.gpus_may_tell
            actions += carry_out(self.decision, failed, self._now, gpus_may_tell=may_tell)
        actions += move_on(self.decision, self._now, turn.facts, gpus_may_tell=turn.gpus_may_tell)
        if self._earliest != float("inf") and not turn.facts.someone_may_fail:
            # The cause cannot come any more: now the ranks may be asked, which may take some turns.
            self._earliest = min(self._earliest, self._now)
        found = [action for action in actions if action in FINDINGS]
        if found not in ([], [RankZeroAction.FIND_STALLED_RANK]):
            assert self._now >= self._earliest or not self.decision.failures
        self.found += len(found)
        self.verdicts += [action for action in actions if action in VERDICTS]
        if RankZeroAction.ASK_ABOUT_GPUS in actions:
            self._asks_since = self._now
        if was_asking:
            is_over = turn.facts.gpus_are_known or self._now >= self._asks_since + 3.0
            assert actions[:1] == ([RankZeroAction.NAME_CAUSE] if is_over else [])

    def _expect(self, kind: FailureKind) -> None:
        """Until when the cause may come at least."""
        if kind is FailureKind.PRIMARY:
            self._earliest = self._now
        elif kind in ORDERLY:
            self._earliest = self._now + 300.0
        elif self._earliest == float("inf"):
            self._earliest = self._now + 0.7


@given(st.lists(turns, max_size=15))
def test_no_sequence_decides_twice_or_too_early_or_never(sequence: list[Turn]) -> None:
    run = Run()
    for turn in sequence:
        run.play(turn)
    for _ in range(6):
        run.play(Turn(301.0, None, False, False, False, Facts(all_have_ended=True)))
    assert len(run.verdicts) == run.decision.is_over
    named = run.verdicts.count(RankZeroAction.NAME_CAUSE)
    assert run.found == named, "each cause that is found is named"
    assert run.decision.is_over or not run.decision.failures
