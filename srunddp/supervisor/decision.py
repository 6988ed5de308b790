"""When rank 0 decides why the run ends: the states of the decision, the events and the table of
transitions.

The decision falls once, and nothing takes it back: all ranks end with one exit code, and people
read one cause. So what another failure has likely caused waits for that one, and this table says
for how long. Which failure is the cause then, :func:`find_root_cause` says.

Rank 0 has three clocks, and they are never mixed:

- ``now``, here and wherever a supervisor waits, is :class:`ActiveClock`: the time in which it could
  run. After ``scontrol suspend`` nobody has been silent, and no time is over.
- The clock of the leases of spare nodes goes on meanwhile: other nodes may, too, and may have gone
  on without this one. See :class:`srunddp.spare_nodes.rank_zero.RankZeroSpareNodes`.
- The time of day stands in texts, for people. Clocks of nodes differ, so nothing is ordered by it:
  the order of failures is that of their arrival at rank 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from srunddp.supervisor.failure import Failure, FailureKind
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.stall import may_be_of_a_hang


class DecisionState(Enum):
    """How far the decision is; the value says it in words."""

    UNDECIDED = "no rank has failed"
    WAITING_FOR_CAUSE = (
        "a rank has failed, likely because of another that rank 0 has yet to hear of"
    )
    WAITING_FOR_ALL = "ranks have ended by the launcher's signal, or have agreed to stop"
    ASKING_STALLED = "no rank makes a step, and all ranks at work have been asked for their stacks"
    ASKING_OTHERS = "a rank that hangs may be the cause, and all at work have been asked for theirs"
    DECIDED = "the cause is known, and all ranks have been told"
    CLOSING = "no rank has anything left to do, and the connections have been ended"
    OVER = "rank 0 waits for nobody any more"


class DecisionEvent(Enum):
    """What moves the decision on; the value says it in words."""

    CAUSE = "a primary failure: no other rank's failure has caused it"
    DOUBTFUL = "an aborted, network or secondary failure: another's may have caused it"
    ORDERLY_END = "a rank stops, or ends by the launcher's signal"
    NODE_IS_LOST = "a node is lost, rank 0's own included"
    NO_STEP = "no step of any rank for `--stall-timeout`"
    STEP = "a rank makes a step after all, or none is to be expected any more"
    WAITED = "its time is over, or no worker is left that could fail"
    MAY_BE_A_HANG = "as before, and one rank that hangs may have caused all failures"
    IS_NO_HANG = "a failure that no rank which hangs can have caused"
    ANSWERED = "all have answered, or its time is over"
    ALL_HAVE_ENDED = "the ranks that may have something left to do have ended"
    TIME_IS_OVER = "its time is over"


class RankZeroAction(Enum):
    """What rank 0 does at a transition; the value says it in words."""

    ASK_FOR_STACKS = "ask the ranks at work for their stacks"
    NAME_FIRST_FAILURE = "end the run, and name the likeliest of the failures so far"
    NAME_LOST_NODE = "end the run, and name the node"
    NAME_STALLED_RANK = "end the run, and name the rank that the others wait for"
    NAME_HANGING_RANK = "end the run, and name the rank that hangs, else the likeliest failure"
    END_CONNECTIONS = "end the connections, so that all may leave"


VERDICTS = frozenset(
    {
        RankZeroAction.NAME_FIRST_FAILURE,
        RankZeroAction.NAME_LOST_NODE,
        RankZeroAction.NAME_STALLED_RANK,
        RankZeroAction.NAME_HANGING_RANK,
    }
)
"""The actions that end the run: each transition to DECIDED has one, and no other transition has."""

TIME: Mapping[DecisionState, Callable[[Limits], float]] = {
    # 0.7 s. The errors of a dead rank's peers may be faster than the word of its supervisor, which
    # first has to see the end of its worker. All ranks wait for the decision meanwhile.
    DecisionState.WAITING_FOR_CAUSE: lambda limits: limits.secondary_waits,
    # 300 s. Who handles the launcher's signal may be saving a checkpoint, and must not be ended
    # for those that save nothing. Most launchers end all sooner, as by Slurm's KillWait.
    DecisionState.WAITING_FOR_ALL: lambda limits: limits.signalled_waits,
    # 3 s. Where a worker cannot answer, or its supervisor is stopped, that says something as well.
    DecisionState.ASKING_STALLED: lambda limits: limits.stalled_answer_within,
    DecisionState.ASKING_OTHERS: lambda limits: limits.stalled_answer_within,
    # 1.2 s. The others close first: what is lost on the way to them can be sent again only while
    # rank 0's end is there.
    DecisionState.CLOSING: lambda limits: limits.last_word,
}
"""For how long a state lasts at most. A transition to a state begins its time, also one from the
state to itself.
"""


@dataclass(frozen=True)
class Transition:
    """Where an event leads.

    Attributes:
        to: The state from then on.
        action: What rank 0 does once it is in that state.
    """

    to: DecisionState
    action: RankZeroAction | None = None


_CAUSE_IS_KNOWN = Transition(DecisionState.DECIDED, RankZeroAction.NAME_FIRST_FAILURE)
_NODE_IS_LOST = Transition(DecisionState.DECIDED, RankZeroAction.NAME_LOST_NODE)
_WAIT_FOR_CAUSE = Transition(DecisionState.WAITING_FOR_CAUSE)
_WAIT_FOR_ALL = Transition(DecisionState.WAITING_FOR_ALL)

TRANSITIONS: Mapping[tuple[DecisionState, DecisionEvent], Transition] = {
    (DecisionState.UNDECIDED, DecisionEvent.CAUSE): _CAUSE_IS_KNOWN,
    (DecisionState.UNDECIDED, DecisionEvent.DOUBTFUL): _WAIT_FOR_CAUSE,
    (DecisionState.UNDECIDED, DecisionEvent.ORDERLY_END): _WAIT_FOR_ALL,
    (DecisionState.UNDECIDED, DecisionEvent.NODE_IS_LOST): _NODE_IS_LOST,
    (DecisionState.UNDECIDED, DecisionEvent.NO_STEP): Transition(
        DecisionState.ASKING_STALLED, RankZeroAction.ASK_FOR_STACKS
    ),
    # A second doubtful failure does not put the decision off: each peer of a dead rank sends one.
    (DecisionState.WAITING_FOR_CAUSE, DecisionEvent.CAUSE): _CAUSE_IS_KNOWN,
    (DecisionState.WAITING_FOR_CAUSE, DecisionEvent.ORDERLY_END): _WAIT_FOR_ALL,
    (DecisionState.WAITING_FOR_CAUSE, DecisionEvent.NODE_IS_LOST): _NODE_IS_LOST,
    (DecisionState.WAITING_FOR_CAUSE, DecisionEvent.WAITED): _CAUSE_IS_KNOWN,
    (DecisionState.WAITING_FOR_CAUSE, DecisionEvent.MAY_BE_A_HANG): Transition(
        DecisionState.ASKING_OTHERS, RankZeroAction.ASK_FOR_STACKS
    ),
    # The time begins again with each rank that ends in order: they may save one after the other.
    # It does not with a doubtful failure. That one misses a rank that has ended, and says nothing
    # of those that are still saving.
    (DecisionState.WAITING_FOR_ALL, DecisionEvent.CAUSE): _CAUSE_IS_KNOWN,
    (DecisionState.WAITING_FOR_ALL, DecisionEvent.ORDERLY_END): _WAIT_FOR_ALL,
    (DecisionState.WAITING_FOR_ALL, DecisionEvent.NODE_IS_LOST): _NODE_IS_LOST,
    (DecisionState.WAITING_FOR_ALL, DecisionEvent.WAITED): _CAUSE_IS_KNOWN,
    # A failure says more than a step that is not made.
    (DecisionState.ASKING_STALLED, DecisionEvent.CAUSE): _CAUSE_IS_KNOWN,
    (DecisionState.ASKING_STALLED, DecisionEvent.DOUBTFUL): _WAIT_FOR_CAUSE,
    (DecisionState.ASKING_STALLED, DecisionEvent.ORDERLY_END): _WAIT_FOR_ALL,
    (DecisionState.ASKING_STALLED, DecisionEvent.NODE_IS_LOST): _NODE_IS_LOST,
    (DecisionState.ASKING_STALLED, DecisionEvent.STEP): Transition(DecisionState.UNDECIDED),
    (DecisionState.ASKING_STALLED, DecisionEvent.ANSWERED): Transition(
        DecisionState.DECIDED, RankZeroAction.NAME_STALLED_RANK
    ),
    (DecisionState.ASKING_OTHERS, DecisionEvent.CAUSE): _CAUSE_IS_KNOWN,
    (DecisionState.ASKING_OTHERS, DecisionEvent.ORDERLY_END): _WAIT_FOR_ALL,
    (DecisionState.ASKING_OTHERS, DecisionEvent.NODE_IS_LOST): _NODE_IS_LOST,
    (DecisionState.ASKING_OTHERS, DecisionEvent.IS_NO_HANG): _CAUSE_IS_KNOWN,
    (DecisionState.ASKING_OTHERS, DecisionEvent.ANSWERED): Transition(
        DecisionState.DECIDED, RankZeroAction.NAME_HANGING_RANK
    ),
    # Who has failed of its own accord, and all after a stop, may have something left to do: if its
    # connection ended before, its launcher would kill it.
    (DecisionState.DECIDED, DecisionEvent.ALL_HAVE_ENDED): Transition(
        DecisionState.CLOSING, RankZeroAction.END_CONNECTIONS
    ),
    (DecisionState.CLOSING, DecisionEvent.TIME_IS_OVER): Transition(DecisionState.OVER),
}
"""What is not in the table changes nothing. In particular no failure changes what is decided."""

_EVENTS = {
    FailureKind.PRIMARY: DecisionEvent.CAUSE,
    FailureKind.ABORTED: DecisionEvent.DOUBTFUL,
    FailureKind.NETWORK: DecisionEvent.DOUBTFUL,
    FailureKind.SECONDARY: DecisionEvent.DOUBTFUL,
    FailureKind.STOPPED: DecisionEvent.ORDERLY_END,
    FailureKind.SIGNALLED: DecisionEvent.ORDERLY_END,
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the decision depends on besides failures and time, at one moment.

    Attributes:
        steps_are_overdue: No rank has made a step for ``--stall-timeout``.
        someone_may_fail: The worker of some rank is still there and has not failed.
        stacks_are_there: All that were asked for their stacks have answered.
        all_have_ended: Of those that end by themselves after the decision.
    """

    steps_are_overdue: bool = False
    someone_may_fail: bool = True
    stacks_are_there: bool = False
    all_have_ended: bool = False


class Decision:
    """The state of rank 0's decision. It changes by :meth:`apply` alone, by the table.

    Attributes:
        state: How far it is.
        ends_at: When the state's time is over; None where it has none.
        failures: In the order of their arrival, those after the decision included.
        finished_before: The nodes of the ranks whose script was over, without an error, before the
            first failure. Whoever hands in the first failure sets it.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.state = DecisionState.UNDECIDED
        self.ends_at: float | None = None
        self.failures = list[Failure]()
        self.finished_before: Mapping[int, str] = {}
        self._limits = limits

    def apply(self, event: DecisionEvent, now: float) -> RankZeroAction | None:
        """Move on by the table.

        Returns:
            What rank 0 has to do now; None for nothing.
        """
        transition = TRANSITIONS.get((self.state, event))
        if transition is None:
            return None
        self.state = transition.to
        time = TIME.get(self.state)
        self.ends_at = None if time is None else now + time(self._limits)
        return transition.action

    def fail(self, failure: Failure, now: float) -> RankZeroAction | None:
        """Note that a rank has failed, and move on; see :meth:`apply`."""
        self.failures.append(failure)
        return self.apply(_EVENTS[failure.weight], now)

    def due(self, now: float, facts: Facts) -> DecisionEvent | None:
        """Return the event that time or the facts have brought; None where there is none."""
        time_is_over = self.ends_at is not None and now >= self.ends_at
        match self.state:
            case DecisionState.UNDECIDED if facts.steps_are_overdue:
                return DecisionEvent.NO_STEP
            case DecisionState.WAITING_FOR_CAUSE if time_is_over or not facts.someone_may_fail:
                return DecisionEvent.MAY_BE_A_HANG if self._may_be_a_hang else DecisionEvent.WAITED
            case DecisionState.WAITING_FOR_ALL if time_is_over or not facts.someone_may_fail:
                return DecisionEvent.WAITED
            case DecisionState.ASKING_STALLED if not facts.steps_are_overdue:
                return DecisionEvent.STEP
            case DecisionState.ASKING_OTHERS if not self._may_be_a_hang:
                return DecisionEvent.IS_NO_HANG
            case DecisionState.ASKING_STALLED | DecisionState.ASKING_OTHERS if (
                time_is_over or facts.stacks_are_there
            ):
                return DecisionEvent.ANSWERED
            case DecisionState.DECIDED if facts.all_have_ended:
                return DecisionEvent.ALL_HAVE_ENDED
            case DecisionState.CLOSING if time_is_over:
                return DecisionEvent.TIME_IS_OVER
        return None

    @property
    def is_over(self) -> bool:
        """Whether rank 0 has waited long enough for the others to close."""
        return self.state is DecisionState.OVER

    @property
    def ended_in_order(self) -> set[int]:
        """The ranks that have stopped or ended by the launcher's signal, to this moment."""
        return {each.rank for each in self.failures if each.weight >= FailureKind.STOPPED}

    @property
    def _may_be_a_hang(self) -> bool:
        # What the others miss may also be a rank that had finished.
        return not self.finished_before and may_be_of_a_hang(self.failures)
