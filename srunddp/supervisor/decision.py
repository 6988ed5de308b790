"""Rank 0's decision on why the run ends: its states, its events and the table of transitions.

Rank 0 decides once and never changes the decision, because all ranks end with one exit code and
people read one cause. So if another failure is likely to have caused the first one that arrives,
rank 0 waits for that other failure; :data:`TIME` says for how long. Then rank 0 finds the cause,
most often by :func:`find_root_cause`. If a GPU may be the reason, rank 0 asks what is wrong with
the GPUs before it tells the ranks, and nothing that happens meanwhile changes the cause.

Rank 0 uses three clocks and never mixes them:

- ``now``, here and wherever a supervisor waits, is the time of :class:`ActiveClock`, which stands
  still while this process is suspended. So after ``scontrol suspend`` no rank counts as silent, and
  no time limit has passed.
- The clock of the leases of spare nodes goes on during a suspension, because the other nodes may
  have gone on without this one. See :class:`srunddp.spare_nodes.rank_zero.RankZeroSpareNodes`.
- The time of day is only for texts that people read. The clocks of nodes differ, so failures are
  ordered by their arrival at rank 0 and not by the time of day at which they happened.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from srunddp.supervisor.failure import Failure, FailureKind
from srunddp.supervisor.limits import DEFAULT_LIMITS, GRACE, SIGNAL_GRACE, Limits
from srunddp.supervisor.stall import may_be_of_a_hang


class DecisionState(Enum):
    """How far the decision has come; the value describes the state in words."""

    UNDECIDED = "no rank has failed"
    WAITING_FOR_CAUSE = (
        "a rank has failed, likely because of another failure that has not reached rank 0 yet"
    )
    WAITING_FOR_SILENT = "a rank has failed, and one that cannot be reached may be the cause"
    WAITING_FOR_ALL = "ranks have ended by the launcher's signal, or have agreed to stop"
    ASKING_STALLED = "no rank makes a step, and all ranks at work have been asked for their stacks"
    ASKING_OTHERS = (
        "a rank that hangs may be the cause, and all ranks at work have been asked for their stacks"
    )
    PROBING_STALLED = (
        "all ranks at work wait for others, and the nodes try to reach each other by TCP"
    )
    PROBING_OTHERS = (
        "no failure is known to be the cause, and the nodes try to reach each other by TCP"
    )
    CAUSE_IS_FOUND = "the cause is found; rank 0 leaves this state at once"
    ASKING_GPUS = "a GPU may be the reason, and ranks have been asked what is wrong with GPUs"
    DECIDED = "the cause is known, and all ranks have been told"
    CLOSING = "no rank has anything left to do, and the connections have been ended"
    OVER = "rank 0 waits for nobody any more"


class DecisionEvent(Enum):
    """What changes the decision's state; the value describes the event in words."""

    CAUSE = "a primary failure: no other rank's failure has caused it"
    DOUBTFUL = "an aborted, network or secondary failure: another's may have caused it"
    ORDERLY_END = "a rank stops, or ends by the launcher's signal"
    NODE_IS_LOST = "a node is lost, rank 0's own included"
    SOMEONE_IS_SILENT = "the state's time is over, and a rank's kernel has not answered the ping"
    NOBODY_IS_SILENT = "each rank whose kernel did not answer has sent something, or has ended"
    NO_STEP = "no step of any rank for `--stall-timeout`"
    STEP = "a rank makes a step after all, or no rank is expected to make one any more"
    WAITED = "the state's time is over, or no worker is left that could fail"
    MAY_BE_A_HANG = (
        "the state's time is over, or no worker is left that could fail; and one rank that hangs"
        " may have caused all failures"
    )
    IS_NO_HANG = "a failure that a hanging rank cannot have caused"
    ANSWERED = "all ranks that were asked have answered, or the state's time is over"
    UNEXPLAINED = (
        "the answers are there or their time is over, but no failure and no stack tells the cause,"
        " and there are three nodes or more"
    )
    PROBED = "all nodes have said which others they reach, or the state's time is over"
    GPUS_MAY_TELL = "a GPU may be the reason, and a rank is there that may know of it"
    NOBODY_TO_ASK = "no GPU can be the reason, or no rank is there that may know of it"
    GPUS_ARE_KNOWN = (
        "all ranks that were asked have answered or are gone, or the state's time is over"
    )
    ALL_HAVE_ENDED = "the ranks that may have something left to do have ended"
    TIME_IS_OVER = "the state's time is over"


class RankZeroAction(Enum):
    """What rank 0 does at a transition; the value describes the action in words."""

    PING_ALL = "send all ranks a ping, which their kernels answer"
    NOTE_SILENT_RANKS = "note the ranks whose kernel has not answered"
    ASK_FOR_STACKS = "ask the ranks at work for their stacks"
    PROBE_NETWORK = "let a rank on each node try to reach the others"
    FIND_FIRST_FAILURE = "find the likeliest cause among the failures so far"
    FIND_STALLED_RANK = "find the rank that the others wait for"
    FIND_HANGING_RANK = (
        "find the rank that hangs; if that is not clear, the likeliest cause among the failures"
    )
    FIND_CUT = (
        "find the nodes that do not reach each other; if there are none, the first failure, or"
        " where all wait, with a note that says so"
    )
    ASK_ABOUT_GPUS = "ask these ranks what is wrong with the GPUs of their nodes"
    NAME_CAUSE = "end the run, and name the cause, with what is known to be wrong with GPUs"
    NAME_LOST_NODE = "end the run, and name the node, with what is known to be wrong with GPUs"
    END_CONNECTIONS = "end the connections, so that all may leave"


FINDINGS = frozenset(
    {
        RankZeroAction.FIND_FIRST_FAILURE,
        RankZeroAction.FIND_STALLED_RANK,
        RankZeroAction.FIND_HANGING_RANK,
        RankZeroAction.FIND_CUT,
    }
)
"""The actions that find the cause. Each transition to CAUSE_IS_FOUND has one of them, and no other
transition has one. When the caller has carried out such an action, it applies GPUS_MAY_TELL or
NOBODY_TO_ASK.
"""

VERDICTS = frozenset({RankZeroAction.NAME_CAUSE, RankZeroAction.NAME_LOST_NODE})
"""The actions that end the run. Each transition to DECIDED has one of them, and no other transition
has one.
"""


class DecisionTimes(NamedTuple):
    """The times on which the decision depends, in seconds.

    Attributes:
        limits: The times that no option changes.
        signal_grace: How long the other ranks may save after one has ended by the launcher's signal
            or has agreed to stop.
        ends_within: How long a worker may take to end after the verdict before it is killed.
    """

    limits: Limits = DEFAULT_LIMITS
    signal_grace: float = SIGNAL_GRACE
    ends_within: float = GRACE


DEFAULT_TIMES = DecisionTimes()


TIME: Mapping[DecisionState, Callable[[DecisionTimes], float]] = {
    # WAITING_FOR_SILENT has no limit here: if nothing comes from a rank, the kernel gives up the
    # rank's connection, about --lost-after after the first ping that was not answered.
    # 0.7 s. When a rank dies, its peers' errors may arrive before the message of its own
    # supervisor, which first has to see that its worker has ended. The time is short because all
    # ranks wait.
    DecisionState.WAITING_FOR_CAUSE: lambda times: times.limits.secondary_waits,
    # --signal-grace. A rank that handles the launcher's signal may be saving a checkpoint, and must
    # not be ended because other ranks save nothing. Most launchers kill all ranks sooner, as Slurm
    # does after KillWait.
    DecisionState.WAITING_FOR_ALL: lambda times: times.signal_grace,
    # 3 s. Rank 0 does not wait longer for a worker that cannot answer, or whose supervisor is
    # stopped: that it does not answer is a hint as well.
    DecisionState.ASKING_STALLED: lambda times: times.limits.stalled_answer_within,
    DecisionState.ASKING_OTHERS: lambda times: times.limits.stalled_answer_within,
    # 6.5 s. The kernels of nodes that can be reached answer at once.
    DecisionState.PROBING_STALLED: lambda times: times.limits.probe_answers_within,
    DecisionState.PROBING_OTHERS: lambda times: times.limits.probe_answers_within,
    # 3 s. After a fault the driver may not answer, and all ranks wait.
    DecisionState.ASKING_GPUS: lambda times: times.limits.gpus_told_within,
    # --grace and 12 s. By then the workers of all ranks that can be reached have ended.
    DecisionState.DECIDED: lambda times: times.ends_within + times.limits.killed_within,
    # 1.2 s. The other supervisors close their side first: rank 0's kernel can send a lost message
    # again only while rank 0 keeps its side of the connection open.
    DecisionState.CLOSING: lambda times: times.limits.last_word,
}
"""The longest time in seconds that each state lasts; a state that is not here has no limit. The
time begins again with every transition to the state, including one from the state to itself.
"""


@dataclass(frozen=True)
class Transition:
    """What follows an event in one state.

    Attributes:
        to: The next state.
        action: What rank 0 does when it has entered that state; None for nothing.
    """

    to: DecisionState
    action: RankZeroAction | None = None


_CAUSE_IS_FOUND = Transition(DecisionState.CAUSE_IS_FOUND, RankZeroAction.FIND_FIRST_FAILURE)
_CAUSE_IS_KNOWN = Transition(DecisionState.DECIDED, RankZeroAction.NAME_CAUSE)
_NODE_IS_LOST = Transition(DecisionState.DECIDED, RankZeroAction.NAME_LOST_NODE)
_WAIT_FOR_CAUSE = Transition(DecisionState.WAITING_FOR_CAUSE, RankZeroAction.PING_ALL)
_WAIT_FOR_ALL = Transition(DecisionState.WAITING_FOR_ALL)
_PROBE_OTHERS = Transition(DecisionState.PROBING_OTHERS, RankZeroAction.PROBE_NETWORK)
_CUT_IS_FOUND = Transition(DecisionState.CAUSE_IS_FOUND, RankZeroAction.FIND_CUT)
_FIND_SILENT = Transition(DecisionState.WAITING_FOR_SILENT, RankZeroAction.NOTE_SILENT_RANKS)

TRANSITIONS: Mapping[tuple[DecisionState, DecisionEvent], Transition] = {
    (DecisionState.UNDECIDED, DecisionEvent.CAUSE): _CAUSE_IS_FOUND,
    (DecisionState.UNDECIDED, DecisionEvent.DOUBTFUL): _WAIT_FOR_CAUSE,
    (DecisionState.UNDECIDED, DecisionEvent.ORDERLY_END): _WAIT_FOR_ALL,
    (DecisionState.UNDECIDED, DecisionEvent.NODE_IS_LOST): _NODE_IS_LOST,
    (DecisionState.UNDECIDED, DecisionEvent.NO_STEP): Transition(
        DecisionState.ASKING_STALLED, RankZeroAction.ASK_FOR_STACKS
    ),
    # A second doubtful failure does not delay the decision: each peer of a dead rank reports one.
    (DecisionState.WAITING_FOR_CAUSE, DecisionEvent.CAUSE): _CAUSE_IS_FOUND,
    (DecisionState.WAITING_FOR_CAUSE, DecisionEvent.ORDERLY_END): _WAIT_FOR_ALL,
    (DecisionState.WAITING_FOR_CAUSE, DecisionEvent.NODE_IS_LOST): _NODE_IS_LOST,
    (DecisionState.WAITING_FOR_CAUSE, DecisionEvent.WAITED): _CAUSE_IS_FOUND,
    (DecisionState.WAITING_FOR_CAUSE, DecisionEvent.MAY_BE_A_HANG): Transition(
        DecisionState.ASKING_OTHERS, RankZeroAction.ASK_FOR_STACKS
    ),
    (DecisionState.WAITING_FOR_CAUSE, DecisionEvent.UNEXPLAINED): _PROBE_OTHERS,
    # If the network to a node fails, the errors of that node's peers may arrive long before rank 0
    # has waited --lost-after for the node. And if the network is repaired before then, the node's
    # kernel resets the peers' connections before the node's supervisor can say that it has ended
    # its rank.
    (DecisionState.WAITING_FOR_CAUSE, DecisionEvent.SOMEONE_IS_SILENT): _FIND_SILENT,
    (DecisionState.WAITING_FOR_SILENT, DecisionEvent.CAUSE): _CAUSE_IS_FOUND,
    (DecisionState.WAITING_FOR_SILENT, DecisionEvent.ORDERLY_END): _WAIT_FOR_ALL,
    (DecisionState.WAITING_FOR_SILENT, DecisionEvent.NODE_IS_LOST): _NODE_IS_LOST,
    # This cannot repeat for ever: the silent ranks are noted only once, and their number only
    # falls.
    (DecisionState.WAITING_FOR_SILENT, DecisionEvent.NOBODY_IS_SILENT): Transition(
        DecisionState.WAITING_FOR_CAUSE
    ),
    # The time begins again when another rank ends in order, because the ranks may save one after
    # the other. A doubtful failure does not extend it: the rank that reports it misses a rank that
    # has ended, which says nothing about the ranks that are still saving.
    (DecisionState.WAITING_FOR_ALL, DecisionEvent.CAUSE): _CAUSE_IS_FOUND,
    (DecisionState.WAITING_FOR_ALL, DecisionEvent.ORDERLY_END): _WAIT_FOR_ALL,
    (DecisionState.WAITING_FOR_ALL, DecisionEvent.NODE_IS_LOST): _NODE_IS_LOST,
    (DecisionState.WAITING_FOR_ALL, DecisionEvent.WAITED): _CAUSE_IS_FOUND,
    # A failure says more about the cause than a missing step.
    (DecisionState.ASKING_STALLED, DecisionEvent.CAUSE): _CAUSE_IS_FOUND,
    (DecisionState.ASKING_STALLED, DecisionEvent.DOUBTFUL): _WAIT_FOR_CAUSE,
    (DecisionState.ASKING_STALLED, DecisionEvent.ORDERLY_END): _WAIT_FOR_ALL,
    (DecisionState.ASKING_STALLED, DecisionEvent.NODE_IS_LOST): _NODE_IS_LOST,
    (DecisionState.ASKING_STALLED, DecisionEvent.STEP): Transition(DecisionState.UNDECIDED),
    (DecisionState.ASKING_STALLED, DecisionEvent.ANSWERED): Transition(
        DecisionState.CAUSE_IS_FOUND, RankZeroAction.FIND_STALLED_RANK
    ),
    (DecisionState.ASKING_OTHERS, DecisionEvent.CAUSE): _CAUSE_IS_FOUND,
    (DecisionState.ASKING_OTHERS, DecisionEvent.ORDERLY_END): _WAIT_FOR_ALL,
    (DecisionState.ASKING_OTHERS, DecisionEvent.NODE_IS_LOST): _NODE_IS_LOST,
    (DecisionState.ASKING_OTHERS, DecisionEvent.IS_NO_HANG): _CAUSE_IS_FOUND,
    (DecisionState.ASKING_OTHERS, DecisionEvent.ANSWERED): Transition(
        DecisionState.CAUSE_IS_FOUND, RankZeroAction.FIND_HANGING_RANK
    ),
    # A cut between two nodes that both reach rank 0 shows neither in failures nor in stacks.
    (DecisionState.ASKING_STALLED, DecisionEvent.UNEXPLAINED): Transition(
        DecisionState.PROBING_STALLED, RankZeroAction.PROBE_NETWORK
    ),
    (DecisionState.ASKING_OTHERS, DecisionEvent.UNEXPLAINED): _PROBE_OTHERS,
    (DecisionState.PROBING_STALLED, DecisionEvent.CAUSE): _CAUSE_IS_FOUND,
    (DecisionState.PROBING_STALLED, DecisionEvent.DOUBTFUL): _WAIT_FOR_CAUSE,
    (DecisionState.PROBING_STALLED, DecisionEvent.ORDERLY_END): _WAIT_FOR_ALL,
    (DecisionState.PROBING_STALLED, DecisionEvent.NODE_IS_LOST): _NODE_IS_LOST,
    (DecisionState.PROBING_STALLED, DecisionEvent.STEP): Transition(DecisionState.UNDECIDED),
    (DecisionState.PROBING_STALLED, DecisionEvent.PROBED): _CUT_IS_FOUND,
    (DecisionState.PROBING_OTHERS, DecisionEvent.CAUSE): _CAUSE_IS_FOUND,
    (DecisionState.PROBING_OTHERS, DecisionEvent.ORDERLY_END): _WAIT_FOR_ALL,
    (DecisionState.PROBING_OTHERS, DecisionEvent.NODE_IS_LOST): _NODE_IS_LOST,
    # That a node is cut off from rank 0 as well may show only now.
    (DecisionState.PROBING_OTHERS, DecisionEvent.SOMEONE_IS_SILENT): _FIND_SILENT,
    (DecisionState.PROBING_OTHERS, DecisionEvent.PROBED): _CUT_IS_FOUND,
    # No failure or loss is handled in these states, because what happens to other ranks and nodes
    # after the cause is found most often follows from it.
    (DecisionState.CAUSE_IS_FOUND, DecisionEvent.GPUS_MAY_TELL): Transition(
        DecisionState.ASKING_GPUS, RankZeroAction.ASK_ABOUT_GPUS
    ),
    (DecisionState.CAUSE_IS_FOUND, DecisionEvent.NOBODY_TO_ASK): _CAUSE_IS_KNOWN,
    (DecisionState.ASKING_GPUS, DecisionEvent.GPUS_ARE_KNOWN): _CAUSE_IS_KNOWN,
    # The ranks that end by themselves, or handle SIGTERM, may still be saving. If rank 0 ended the
    # connections before they have ended, the other supervisors would leave with an error, and the
    # launcher would kill these ranks.
    (DecisionState.DECIDED, DecisionEvent.ALL_HAVE_ENDED): Transition(
        DecisionState.CLOSING, RankZeroAction.END_CONNECTIONS
    ),
    (DecisionState.DECIDED, DecisionEvent.TIME_IS_OVER): Transition(
        DecisionState.CLOSING, RankZeroAction.END_CONNECTIONS
    ),
    (DecisionState.CLOSING, DecisionEvent.TIME_IS_OVER): Transition(DecisionState.OVER),
}
"""An event that is not in the table changes nothing. In particular, no failure changes a cause that
has been found.
"""

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
    """The facts on which the decision depends at one moment, in addition to the failures and the
    time.

    Attributes:
        steps_are_overdue: No rank has made a step for ``--stall-timeout``, though one is expected.
        someone_may_fail: The worker of some rank is still there and has not failed.
        someone_is_silent: A rank's kernel has not acknowledged what was sent, and nothing has come
            from the rank since.
        stacks_are_there: All ranks that were asked for their stacks have answered, or their time to
            answer is over.
        stacks_name_a_rank: One of these stacks shows a rank for which the others may be waiting.
        network_can_be_tried: The nodes can try to reach each other, see :mod:`network_cut`.
        network_is_tried: All nodes have said which others they reach.
        gpus_are_known: All ranks that were asked what is wrong with GPUs have answered or are gone.
        all_have_ended: All ranks that may have something to do after the verdict have ended.
    """

    steps_are_overdue: bool = False
    someone_may_fail: bool = True
    someone_is_silent: bool = False
    stacks_are_there: bool = False
    stacks_name_a_rank: bool = False
    network_can_be_tried: bool = False
    network_is_tried: bool = False
    gpus_are_known: bool = False
    all_have_ended: bool = False

    @property
    def silent_may_be_cause(self) -> bool:
        """Whether a silent rank may be the cause of the failures so far."""
        return self.someone_is_silent and self.someone_may_fail


class Decision:
    """The state of rank 0's decision. Only :meth:`apply` changes it, by :data:`TRANSITIONS`, except
    for ``finished_before``, which the caller sets.

    Attributes:
        state: How far the decision has come.
        ends_at: The time at which the state ends, on the clock of :meth:`apply`'s ``now``; None if
            the state has no limit.
        failures: All failures in the order of their arrival, including those after the decision.
        finished_before: The node of each rank whose script was over, without an error, before the
            first failure. The caller sets it before it hands in the first failure.
    """

    def __init__(self, times: DecisionTimes = DEFAULT_TIMES) -> None:
        self.state = DecisionState.UNDECIDED
        self.ends_at: float | None = None
        self.failures = list[Failure]()
        self.finished_before: Mapping[int, str] = {}
        self._times = times

    def apply(self, event: DecisionEvent, now: float) -> RankZeroAction | None:
        """Change the state as :data:`TRANSITIONS` says.

        Args:
            event: What has happened.
            now: The time, from which the new state's limit counts.

        Returns:
            The action for rank 0 to carry out now; None for none.
        """
        transition = TRANSITIONS.get((self.state, event))
        if transition is None:
            return None
        self.state = transition.to
        time = TIME.get(self.state)
        self.ends_at = None if time is None else now + time(self._times)
        return transition.action

    def fail(self, failure: Failure, now: float) -> RankZeroAction | None:
        """Record a failure, apply the event that its kind stands for, and return the action for
        rank 0 to carry out, as :meth:`apply` does.
        """
        self.failures.append(failure)
        return self.apply(_EVENTS[failure.weight], now)

    def time_is_over(self, now: float) -> bool:
        """Return whether the state has a limit and that limit has passed."""
        return self.ends_at is not None and now >= self.ends_at

    def due(self, now: float, facts: Facts) -> DecisionEvent | None:
        """Return the event that follows from the time and the facts; None if none does."""
        time_is_over = self.time_is_over(now)
        match self.state:
            case DecisionState.UNDECIDED if facts.steps_are_overdue:
                return DecisionEvent.NO_STEP
            case DecisionState.WAITING_FOR_CAUSE | DecisionState.WAITING_FOR_ALL if (
                time_is_over or not facts.someone_may_fail
            ):
                return self._after_the_wait(facts)
            case DecisionState.WAITING_FOR_SILENT if not facts.silent_may_be_cause:
                return DecisionEvent.NOBODY_IS_SILENT
            case DecisionState.ASKING_STALLED | DecisionState.PROBING_STALLED if (
                not facts.steps_are_overdue
            ):
                return DecisionEvent.STEP
            case DecisionState.ASKING_OTHERS if not self._may_be_a_hang:
                return DecisionEvent.IS_NO_HANG
            case DecisionState.ASKING_STALLED | DecisionState.ASKING_OTHERS if (
                time_is_over or facts.stacks_are_there
            ):
                return self._after_the_stacks(facts)
            case DecisionState.PROBING_STALLED | DecisionState.PROBING_OTHERS if (
                time_is_over or facts.network_is_tried
            ):
                return self._after_the_probe(facts)
        return self._once_found(facts, time_is_over=time_is_over)

    def _once_found(self, facts: Facts, *, time_is_over: bool) -> DecisionEvent | None:
        """Return the event that follows once the cause is found; None if no event follows, or if
        the cause is not found yet.
        """
        match self.state:
            case DecisionState.ASKING_GPUS if time_is_over or facts.gpus_are_known:
                return DecisionEvent.GPUS_ARE_KNOWN
            case DecisionState.DECIDED if facts.all_have_ended:
                return DecisionEvent.ALL_HAVE_ENDED
            case DecisionState.DECIDED | DecisionState.CLOSING if time_is_over:
                return DecisionEvent.TIME_IS_OVER
        return None

    def _after_the_wait(self, facts: Facts) -> DecisionEvent:
        """Return the event that follows when the wait for a cause, or for all ranks, is over."""
        if self.state is DecisionState.WAITING_FOR_ALL:
            return DecisionEvent.WAITED
        if facts.silent_may_be_cause:
            return DecisionEvent.SOMEONE_IS_SILENT
        if self._may_be_a_hang:
            return DecisionEvent.MAY_BE_A_HANG
        # Try the network only if no rank had finished before: otherwise the ranks that failed may
        # miss the rank that had finished.
        if facts.network_can_be_tried and not self.finished_before:
            return DecisionEvent.UNEXPLAINED
        return DecisionEvent.WAITED

    def _after_the_stacks(self, facts: Facts) -> DecisionEvent:
        if facts.network_can_be_tried and not facts.stacks_name_a_rank:
            return DecisionEvent.UNEXPLAINED
        return DecisionEvent.ANSWERED

    def _after_the_probe(self, facts: Facts) -> DecisionEvent:
        if self.state is DecisionState.PROBING_OTHERS and facts.silent_may_be_cause:
            return DecisionEvent.SOMEONE_IS_SILENT
        return DecisionEvent.PROBED

    @property
    def is_over(self) -> bool:
        """Whether rank 0's supervisor no longer has to wait for any other rank."""
        return self.state is DecisionState.OVER

    @property
    def ended_in_order(self) -> set[int]:
        """The ranks that have agreed to stop or ended by the launcher's signal so far."""
        return {each.rank for each in self.failures if each.weight >= FailureKind.STOPPED}

    @property
    def _may_be_a_hang(self) -> bool:
        # If a rank had finished before the first failure, the others may have failed because they
        # waited for that rank. Then their failures do not show that some rank hangs.
        return not self.finished_before and may_be_of_a_hang(self.failures)
