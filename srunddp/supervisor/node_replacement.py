"""What a failure monitor asks of spare nodes, in a run that has some.

The package :mod:`srunddp.spare_nodes` answers. A run without ``--spare-nodes`` has none of these
objects, and imports nothing of that package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.messages import Ping
from srunddp.supervisor.restart import Starts
from srunddp.supervisor.root_cause import RootCause


@dataclass(frozen=True)
class NextStart:
    """What the rendezvous of a next start has to know.

    Attributes:
        expected: The numbers of the tasks that are known to be alive, and will come.
        quorum: How many tasks must come before a new rank 0 may go on. If fewer do, this is the
            side that is cut off.
        not_before: By the clock of the leases, when the workers of all nodes that are lost have
            ended in any case.
    """

    expected: tuple[int, ...] = ()
    quorum: int = 1
    not_before: float = 0.0


class LeaseTimes(NamedTuple):
    """The times that a message carries.

    Attributes:
        sent_at: Its sender's time.
        echo: The last time of the receiver's that the sender has seen.
    """

    sent_at: float
    echo: float


class WorkerLease(Protocol):
    """Until when a worker may run without an answer of rank 0."""

    @property
    def ends(self) -> float:
        """When the lease is over, by the clock of the leases."""

    @property
    def other_ended(self) -> float:
        """When rank 0's worker has ended at the latest, if rank 0 has heard nothing of this side
        since its last message here.
        """

    def stamp(self) -> LeaseTimes:
        """Return the times that a message to rank 0 carries."""

    def note(self, sent_at: float | None, echo: float | None) -> None:
        """Take in the times of a message of rank 0's."""


class NodeReplacement(Protocol):
    """Rank 0's part: which nodes are left after a failure, and whether this side may go on."""

    @property
    def can_move(self) -> bool:
        """Whether ranks can go to a spare node: not in the last start, which no restart follows,
        and not if no task of a spare node can take over from rank 0.
        """

    def drop(self, number: int) -> bool:
        """A task of a spare node has ended: its node can take no rank any more.

        Returns:
            Whether the node could until now.
        """

    def cut_off_in(self, still_open: int) -> float:
        """Return in how many seconds rank 0 has had no answer of most of the tasks for too long.

        Args:
            still_open: To how many tasks there is a connection.
        """

    def nodes_to_leave(self, root_cause: RootCause, before: Starts) -> set[str]:
        """Return the nodes whose ranks go to others in the next start.

        Args:
            root_cause: Of this one's end.
            before: What the starts before have come to.
        """

    def are_too_few_for(self, left: Collection[str]) -> bool:
        """Whether the ranks of these nodes have no others to go to."""

    def note_end(self, left: Collection[str], there: Iterable[int]) -> None:
        """The ranks have been told of the end of this start: note what the next one has to know.

        Args:
            left: The nodes whose ranks go to others.
            there: The tasks that are still there, on whatever node.
        """

    def next_start(self) -> NextStart:
        """Return what the rendezvous of the next start has to know."""

    def answer(self, rank: int, ping: Ping, asked_by: str) -> None:
        """Answer a ping, which makes the lease of its sender longer.

        Args:
            rank: Whose it is, or the number of a spare node's task.
            ping: The message.
            asked_by: Who wants an end of the run; empty where nobody does.
        """


@dataclass(frozen=True, kw_only=True)
class SpareNodesOfStart:
    """The spare nodes of one start, as the failure monitor of any task has them.

    Attributes:
        numbers: Of the tasks that wait on spare nodes, as far as this task knows them.
        takeover: What stands for rank 0's publication when rank 0 is gone: where the deputies
            listen. It is empty if no rank moves: in the last start, which no restart follows, and
            where no task of a spare node can take over.
        replacement: Returns rank 0's part, for its connections to the other tasks.
        lease: Begins the lease of a task other than rank 0; returns None if no rank moves.
    """

    numbers: frozenset[int]
    takeover: str = field(repr=False)
    replacement: Callable[[Mapping[int, SupervisorConnection]], NodeReplacement]
    lease: Callable[[], WorkerLease | None]
