"""What a worker and its supervisor tell each other, over the pipe between the two processes."""

from __future__ import annotations

from dataclasses import dataclass

from srunddp.supervisor.failure import FailureCategory, FailureKind
from srunddp.util.messages import Message


class WorkerMessage(Message):
    """What a worker and its supervisor tell each other.

    The world that the ranks have met as is one, too: see
    :class:`srunddp.bootstrap.rendezvous.messages.RendezvousInfo`.
    """


@dataclass(frozen=True)
class Unreadable(WorkerMessage, kind="unreadable"):
    """Stands for a line that is no message, so that it is not taken for the end of the pipe."""


# From the worker.


@dataclass(frozen=True)
class ScriptIsDone(WorkerMessage, kind="script_is_done"):
    """The script has ended with 0.

    Attributes:
        waits: The worker stays until the scripts of all ranks are over.
    """

    waits: bool


@dataclass(frozen=True)
class ScriptHasFailed(WorkerMessage, kind="script_has_failed"):
    """The script has failed or stopped, and the worker is about to end.

    Attributes:
        cause, traceback, exit_code, shown: As of a failure.
        weight: Its :class:`FailureKind`; category: its :class:`FailureCategory`.
    """

    cause: str
    exit_code: int
    weight: int
    category: str
    traceback: str
    shown: bool

    def __post_init__(self) -> None:
        FailureKind(self.weight)
        FailureCategory(self.category)


@dataclass(frozen=True)
class StartedMpi(WorkerMessage, kind="started_mpi"):
    """The script has imported ``mpi4py.MPI``."""


@dataclass(frozen=True)
class ReceivedOverMpi(WorkerMessage, kind="received_over_mpi"):
    """What rank 0 has broadcast over MPI.

    Attributes:
        text: Its message.
    """

    text: str


@dataclass(frozen=True)
class MpiHasNoWorld(WorkerMessage, kind="mpi_has_no_world"):
    """MPI has started, and knows nothing of the other ranks.

    Attributes:
        reason: Why.
    """

    reason: str


@dataclass(frozen=True)
class MpiHasFailed(WorkerMessage, kind="mpi_has_failed"):
    """The ranks could not meet over MPI.

    Attributes:
        reason: Why.
    """

    reason: str


# From the supervisor.


@dataclass(frozen=True)
class Leave(WorkerMessage, kind="leave"):
    """The worker may end: nobody needs it any more."""
