"""The messages between a rank's supervisor and rank 0's after the rendezvous.

All ranks of a run have the same version of srunddp, so the messages may change with a release.
"""

from __future__ import annotations

import socket

from srunddp.supervisor.failure import Failure, FailureCategory, FailureKind, GpuFault
from srunddp.util.messages import Message
from srunddp.util.quick_dataclass import dataclass

# Rank, address and port of a node that another node tries to reach. The rank is the node's lowest.
ProbeTarget = tuple[int, str, int]


class RankMessage(Message):
    """A message between a rank's supervisor and rank 0's after the rendezvous."""


# From a rank to rank 0.


@dataclass(frozen=True)
class ScriptIsOver(RankMessage, kind="script_is_over"):
    """The rank's script has ended with 0.

    Attributes:
        waits: Whether its worker stays until the scripts of all ranks are over, because MPI is
            initialised or a restart is possible.
        has_steps: Whether the rank has made a step in this start.
        ran_alone: Whether the script has used torch without ever being in a process group with
            other ranks.
    """

    waits: bool = False
    has_steps: bool = False
    ran_alone: bool = False


@dataclass(frozen=True)
class WorkerHasEnded(RankMessage, kind="worker_has_ended"):
    """The rank's worker has ended with 0."""


@dataclass(frozen=True)
class HasFailed(RankMessage, kind="has_failed"):
    """The rank has failed.

    Attributes:
        cause, traceback, exit_code, time, shown, failed_import: The fields of the :class:`Failure`
            with these names.
        weight: The number of the failure's :class:`FailureKind`, which says how likely the failure
            is the root cause.
        category: The value of the failure's :class:`FailureCategory`, which says what the failure
            means for another start.
        has_steps: Whether the rank has made a step in this start. It may have made its first one
            since the last ping.
    """

    cause: str
    exit_code: int
    weight: int = FailureKind.PRIMARY
    traceback: str = ""
    time: str = ""
    shown: bool = False
    category: str = FailureCategory.OTHER.value
    failed_import: str = ""
    has_steps: bool = False

    def __post_init__(self) -> None:
        FailureKind(self.weight)
        FailureCategory(self.category)
        _check_exit_code(self.exit_code)

    @classmethod
    def about(cls, failure: Failure, *, has_steps: bool = False) -> HasFailed:
        """Return the message about a failure of this rank.

        Args:
            failure: The failure.
            has_steps: Whether this rank has made a step in this start.
        """
        return cls(
            cause=failure.cause,
            exit_code=failure.exit_code,
            weight=int(failure.weight),
            traceback=failure.traceback,
            time=failure.time,
            shown=failure.shown,
            category=failure.category.value,
            failed_import=failure.failed_import,
            has_steps=has_steps,
        )

    def failure(self, rank: int, node: str) -> Failure:
        """Return the failure that the message is about.

        Args:
            rank, node: The rank at the other end of the connection, and its node.
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
            failed_import=self.failed_import,
        )


@dataclass(frozen=True)
class Ping(RankMessage, kind="ping"):
    """A sign of life that a rank sends regularly, with its count of steps.

    Attributes:
        step: How many steps its worker has made; 0 while none is expected.
        paused: Whether the worker has said that no step is expected of it for now.
        sent_at: With spare nodes, when the rank sent this, by the rank's clock.
        echo: With spare nodes, the last ``sent_at`` that the rank has received from rank 0.
    """

    step: int
    sent_at: float | None = None
    echo: float | None = None
    paused: bool = False


@dataclass(frozen=True)
class LeaseHasEnded(RankMessage, kind="lease_has_ended"):
    """The rank has had no answer from rank 0 for ``--lost-after``. It ends its worker, and ignores
    what rank 0 sends from now on.
    """


@dataclass(frozen=True)
class EndRequested(RankMessage, kind="end_requested"):
    """A signal to the rank asks for an end of the run, so from now on no restart follows a failure.

    Attributes:
        by: The signal's name.
    """

    by: str


@dataclass(frozen=True)
class UsesMpi(RankMessage, kind="uses_mpi"):
    """The rank's script has imported ``mpi4py.MPI``, so from now on no restart is possible."""


@dataclass(frozen=True)
class SavesAfterVerdict(RankMessage, kind="saves_after_verdict"):
    """The rank's worker handles SIGTERM, so it may be saving although the verdict is known. It ends
    within ``--grace``, and rank 0 waits for its end.
    """


@dataclass(frozen=True)
class EndedAfterVerdict(RankMessage, kind="ended_after_verdict"):
    """The rank's worker has ended, after this rank got the verdict."""


@dataclass(frozen=True)
class Stacks(RankMessage, kind="stacks"):
    """The answer to ``stacks_wanted``: where in the script the rank's worker is.

    Attributes:
        text: The Python stack of the worker's main thread; empty if it gave none in time.
    """

    text: str


@dataclass(frozen=True)
class ProbeResult(RankMessage, kind="probe_result"):
    """The answer to ``probe_wanted``: which of the requested nodes this rank's node reaches by TCP.

    Attributes:
        reached: The ranks whose node has answered, or has refused the connection.
        missed: The ranks whose node has not answered within 5 s.
        number: The number of the ``probe_wanted``.
    """

    reached: tuple[int, ...]
    missed: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class GpuFaults(RankMessage, kind="gpu_faults"):
    """The faults of the GPUs of the rank's node.

    Attributes:
        faults: The faults, the surest first.
        is_answer: Whether this is the answer to ``gpu_faults_wanted``. If False, the rank reports
            it unasked because the hardware of a GPU has just failed.
    """

    faults: tuple[GpuFault, ...]
    is_answer: bool = False


# From rank 0 to a rank.


@dataclass(frozen=True)
class Pong(RankMessage, kind="pong"):
    """A sign of life of rank 0, so that a kernel that does not acknowledge it is noticed. With
    spare nodes, it is the answer to a ping.

    Attributes:
        asked_by: The signal that asks for an end of the run, as text; empty for none.
        sent_at: With spare nodes, when rank 0 sent this, by rank 0's clock.
        echo: With spare nodes, the last ``sent_at`` that rank 0 has received from the rank.
    """

    asked_by: str = ""
    sent_at: float | None = None
    echo: float | None = None


@dataclass(frozen=True)
class StacksWanted(RankMessage, kind="stacks_wanted"):
    """Rank 0 asks for the Python stack of the rank's worker."""


@dataclass(frozen=True)
class ProbeWanted(RankMessage, kind="probe_wanted"):
    """Rank 0 asks which nodes the rank's node reaches by TCP.

    Attributes:
        source: The address from which to connect.
        targets: The lowest rank of each of these nodes, with the address and the port to try.
        number: How many times rank 0 has asked in this start, including this time. The answer to an
            earlier question may still be on the way.
    """

    source: str
    targets: tuple[ProbeTarget, ...]
    number: int

    def __post_init__(self) -> None:
        if not all(map(is_numeric, (self.source, *(host for _, host, _ in self.targets)))):
            raise ValueError("not a numeric address")
        if not all(0 < port < 65536 for _, _, port in self.targets):
            raise ValueError("not a port")


@dataclass(frozen=True)
class GpuFaultsWanted(RankMessage, kind="gpu_faults_wanted"):
    """Rank 0 asks what is wrong with the GPUs of the rank's node."""


@dataclass(frozen=True)
class AllScriptsAreOver(RankMessage, kind="all_scripts_are_over"):
    """The scripts of all ranks are over, so a worker that has waited for this may leave."""


@dataclass(frozen=True)
class RunIsOver(RankMessage, kind="run_is_over"):
    """The workers of all ranks have ended with 0, and rank 0 closes the connections. Without this
    message, the end of a connection means that rank 0's supervisor has ended.
    """


@dataclass(frozen=True)
class Verdict(RankMessage, kind="verdict"):
    """The run, or this start of it, is over, and all ranks end now.

    Attributes:
        culprits: The ranks of the root cause.
        exit_code: The exit code of all ranks, from 1 to 255.
        restart_at: The text that says where the ranks meet for the next start; None if none
            follows for this rank.
        node_is_given_up: Whether the ranks of this node move to another node. If so, this rank's
            worker ends at once. With ``restart_at`` the task comes back as a task of a spare node;
            otherwise it ends with 0.
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
    SavesAfterVerdict,
    EndedAfterVerdict,
    Stacks,
    ProbeResult,
    GpuFaults,
)
FROM_RANK_ZERO = (
    Pong,
    StacksWanted,
    ProbeWanted,
    GpuFaultsWanted,
    AllScriptsAreOver,
    RunIsOver,
    Verdict,
)


def is_numeric(address: str) -> bool:
    """Return whether a text is a numeric IPv4 or IPv6 address, which needs no name look-up."""
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    except (OSError, ValueError):
        return False
    return True


def _check_exit_code(code: int) -> None:
    if not 0 < code < 256:
        raise ValueError(f"exit code {code}")
