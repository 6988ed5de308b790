"""What a rank's supervisor and rank 0's tell each other after the rendezvous.

All ranks of a run have one version of srunddp, so that what is said may change with a release.
"""

from __future__ import annotations

from dataclasses import dataclass

from srunddp.supervisor.failure import Failure, FailureCategory, FailureKind
from srunddp.util.messages import Message


class RankMessage(Message):
    """What rank 0's supervisor and another's tell each other."""


# From a rank to rank 0.


@dataclass(frozen=True)
class ScriptIsOver(RankMessage, kind="script_is_over"):
    """The rank's script has ended with 0.

    Attributes:
        waits: Its worker stays until the scripts of all ranks are over, as MPI is initialised or a
            restart is possible.
    """

    waits: bool = False


@dataclass(frozen=True)
class WorkerHasEnded(RankMessage, kind="worker_has_ended"):
    """The rank's worker has ended with 0."""


@dataclass(frozen=True)
class HasFailed(RankMessage, kind="has_failed"):
    """How the rank has failed.

    Attributes:
        cause, traceback, exit_code, time, shown: As of a failure.
        weight: Its :class:`FailureKind`, which says how likely it is the cause of the others.
        category: Its :class:`FailureCategory`, which says what it means for another start.
    """

    cause: str
    exit_code: int
    weight: int = FailureKind.PRIMARY
    traceback: str = ""
    time: str = ""
    shown: bool = False
    category: str = FailureCategory.OTHER.value

    def __post_init__(self) -> None:
        FailureKind(self.weight)
        FailureCategory(self.category)
        _check_exit_code(self.exit_code)

    @classmethod
    def about(cls, failure: Failure) -> HasFailed:
        """Return the message about a failure of this rank."""
        return cls(
            cause=failure.cause,
            exit_code=failure.exit_code,
            weight=int(failure.weight),
            traceback=failure.traceback,
            time=failure.time,
            shown=failure.shown,
            category=failure.category.value,
        )

    def failure(self, rank: int, node: str) -> Failure:
        """Return the failure that the message is about.

        Args:
            rank, node: Whose it is: of the rank at the other end of the connection, whatever the
                message says.
        """
        return Failure(
            rank=rank,
            node=node,
            cause=self.cause,
            exit_code=self.exit_code,
            weight=FailureKind(self.weight),
            traceback=self.traceback,
            time=self.time,
            shown=self.shown,
            category=FailureCategory(self.category),
        )


@dataclass(frozen=True)
class Ping(RankMessage, kind="ping"):
    """The rank is still there.

    Attributes:
        step: How many steps its worker has made.
        sent_at: With spare nodes, the rank's time; echo: the last time of rank 0 that it has seen.
    """

    step: int
    sent_at: float | None = None
    echo: float | None = None


@dataclass(frozen=True)
class LeaseHasEnded(RankMessage, kind="lease_has_ended"):
    """The rank has had no answer for ``--lost-after``. It ends its worker, and hears no more."""


@dataclass(frozen=True)
class EndRequested(RankMessage, kind="end_requested"):
    """A signal asks the rank for an end of the run: no failure is a restart from now on.

    Attributes:
        by: The signal's name.
    """

    by: str


@dataclass(frozen=True)
class UsesMpi(RankMessage, kind="uses_mpi"):
    """The rank's script has imported ``mpi4py.MPI``: no restart from now on."""


@dataclass(frozen=True)
class EndedAfterVerdict(RankMessage, kind="ended_after_verdict"):
    """The rank's worker has ended since the verdict."""


@dataclass(frozen=True)
class Stacks(RankMessage, kind="stacks"):
    """Where the rank's worker is, as rank 0 has asked.

    Attributes:
        text: Python's stacks of its threads.
    """

    text: str


# From rank 0 to a rank.


@dataclass(frozen=True)
class Pong(RankMessage, kind="pong"):
    """Rank 0 is still there. With spare nodes it answers each ping.

    Attributes:
        asked_by: Who wants an end of the run; empty where nobody does.
        sent_at: With spare nodes, rank 0's time; echo: the last time of the rank that it has seen.
    """

    asked_by: str = ""
    sent_at: float | None = None
    echo: float | None = None


@dataclass(frozen=True)
class StacksWanted(RankMessage, kind="stacks_wanted"):
    """Rank 0 asks where the rank's worker is."""


@dataclass(frozen=True)
class AllScriptsAreOver(RankMessage, kind="all_scripts_are_over"):
    """The scripts of all ranks have ended: who has waited for that may leave."""


@dataclass(frozen=True)
class StayUntilClosed(RankMessage, kind="stay_until_closed"):
    """After a restart for memory: end when this connection ends, as soon as all workers have.

    Else srun ends the step with the first task that ends on the node that was short of memory.
    """


@dataclass(frozen=True)
class Verdict(RankMessage, kind="verdict"):
    """The run, or this start of it, is over: all end now.

    Attributes:
        culprits: The ranks of the root cause.
        exit_code: What all end with, from 1 to 255.
        restart_at: What rank 0 has published for the next start; None where there is none.
        node_is_given_up: The ranks of this node go to another. It ends with 0, and at once.
    """

    culprits: tuple[int, ...]
    exit_code: int
    restart_at: str | None = None
    node_is_given_up: bool = False

    def __post_init__(self) -> None:
        _check_exit_code(self.exit_code)


FROM_A_RANK = (
    ScriptIsOver,
    WorkerHasEnded,
    HasFailed,
    Ping,
    LeaseHasEnded,
    EndRequested,
    UsesMpi,
    EndedAfterVerdict,
    Stacks,
)
FROM_RANK_ZERO = (Pong, StacksWanted, AllScriptsAreOver, StayUntilClosed, Verdict)


def _check_exit_code(code: int) -> None:
    if not 0 < code < 256:
        raise ValueError(f"exit code {code}")
