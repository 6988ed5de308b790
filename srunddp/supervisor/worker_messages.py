"""The messages between a worker and its supervisor, over the pipe between the two processes."""

from __future__ import annotations

from srunddp.supervisor.failure import FailureCategory, FailureKind
from srunddp.util.messages import Message
from srunddp.util.quick_dataclass import dataclass


class WorkerMessage(Message):
    """A message between a worker and its supervisor.

    The world that the supervisor hands to the worker is such a message too, see
    :class:`srunddp.bootstrap.rendezvous.messages.RendezvousInfo`.
    """


@dataclass(frozen=True)
class Unreadable(WorkerMessage, kind="unreadable"):
    """Stands for data that is not a message, so that the reader does not take it for the end of the
    pipe.
    """


# From the worker.


@dataclass(frozen=True)
class ScriptIsDone(WorkerMessage, kind="script_is_done"):
    """The script has ended with 0.

    Attributes:
        waits: Whether the worker stays until the scripts of all ranks are over.
    """

    waits: bool


@dataclass(frozen=True)
class ScriptHasFailed(WorkerMessage, kind="script_has_failed"):
    """The script has failed or stopped, and the worker is about to end.

    Attributes:
        cause, traceback, exit_code, shown, failed_import: The fields of the :class:`Failure` with
            these names.
        weight: The number of the failure's :class:`FailureKind`.
        category: The value of the failure's :class:`FailureCategory`.
        is_interrupt: Whether a KeyboardInterrupt has ended the script.
    """

    cause: str
    exit_code: int
    weight: int
    category: str
    traceback: str
    shown: bool
    failed_import: str = ""
    is_interrupt: bool = False

    def __post_init__(self) -> None:
        FailureKind(self.weight)
        FailureCategory(self.category)


@dataclass(frozen=True)
class StartedMpi(WorkerMessage, kind="started_mpi"):
    """The script has imported ``mpi4py.MPI``."""


@dataclass(frozen=True)
class NotesSignals(WorkerMessage, kind="notes_signals"):
    """The worker is about to note the signals that would end a script without handlers for them."""


@dataclass(frozen=True)
class SignalsNoted(WorkerMessage, kind="signals_noted"):
    """The worker has stopped noting signals, and reports those that have come meanwhile.

    Attributes:
        numbers: The signals.
    """

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class ReceivedOverMpi(WorkerMessage, kind="received_over_mpi"):
    """The worker has received rank 0's broadcast over MPI.

    Attributes:
        text: The text that rank 0 has broadcast.
    """

    text: str


@dataclass(frozen=True)
class MpiHasNoWorld(WorkerMessage, kind="mpi_has_no_world"):
    """MPI has started, but does not know the other ranks.

    Attributes:
        reason: What is wrong, for the user.
    """

    reason: str


@dataclass(frozen=True)
class MpiHasFailed(WorkerMessage, kind="mpi_has_failed"):
    """The ranks could not meet over MPI.

    Attributes:
        reason: What has failed, for the user.
    """

    reason: str


# From the supervisor.


@dataclass(frozen=True)
class Leave(WorkerMessage, kind="leave"):
    """The worker may end, because no rank needs it any more."""
