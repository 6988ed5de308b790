"""The interfaces through which a failure monitor uses spare nodes, in a run that has some.

The package :mod:`srunddp.spare_nodes` implements them. A run without ``--spare-nodes`` has none of
these objects and does not import that package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field
from typing import NamedTuple, Protocol

from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.messages import Ping
from srunddp.supervisor.restart import Starts
from srunddp.supervisor.root_cause import RootCause
from srunddp.util.quick_dataclass import dataclass


@dataclass(frozen=True)
class NextStart:
    """What the rendezvous of the next start has to know.

    Attributes:
        expected: The numbers of the tasks that are known to be alive and will come.
        quorum: How many tasks must come before a new rank 0 may go on. If fewer come, this side of
            a split network is cut off.
        not_before: The time, by the clock of the leases, by which the workers of all lost nodes
            have ended.
        left: The nodes that are given up.
    """

    expected: tuple[int, ...] = ()
    quorum: int = 1
    not_before: float = 0.0
    left: tuple[str, ...] = ()


class LeaseTimes(NamedTuple):
    """The times that extend a lease; a ping and its answer carry them.

    Attributes:
        sent_at: When the message was sent, by the sender's clock.
        echo: The last ``sent_at`` that the sender has received from the other side; 0 for none yet.
    """

    sent_at: float
    echo: float


class WorkerLease(Protocol):
    """How long the worker of a rank other than 0 may run without an answer from rank 0."""

    @property
    def ends(self) -> float:
        """When the lease is over, by this side's clock."""

    @property
    def other_ended(self) -> float:
        """The time, by the clock of this rank's node, by which rank 0's worker has ended if no
        further message arrives from rank 0.
        """

    def stamp(self) -> LeaseTimes:
        """Return the times to send with the next message to rank 0."""

    def note(self, sent_at: float | None, echo: float | None) -> None:
        """Extend the lease by the times of a message from rank 0; without times, do nothing."""


class NodeReplacement(Protocol):
    """Rank 0's decisions with spare nodes: which nodes are given up after a failure, and whether
    this side of a split network may go on.
    """

    @property
    def can_move(self) -> bool:
        """Whether the run can go on without a node. It cannot in the last start, which no restart
        follows, nor if no task can take over from rank 0.
        """

    def drop(self, number: int) -> bool:
        """Give up a task of a spare node: from now on its node can take no ranks.

        Args:
            number: The task's number.

        Returns:
            Whether this is the first task of its node that is given up.
        """

    def cut_off_in(self, still_open: int) -> float:
        """Return in how many seconds rank 0 is cut off unless more tasks answer.

        The result is 0 or less if rank 0 is cut off already, and infinite if no lease is in force.

        Args:
            still_open: How many connections to other tasks are open.
        """

    def nodes_to_leave(self, root_cause: RootCause, before: Starts) -> set[str]:
        """Return the nodes whose ranks have to move to other nodes in the next start.

        Args:
            root_cause: Why this start ends.
            before: What is known of the earlier starts.
        """

    def shortage(self, left: Collection[str]) -> str:
        """Return why the next start cannot do without these nodes; empty if it can.

        Args:
            left: The nodes that are given up, all of which have ranks.
        """

    def returning(self, root_cause: RootCause, left: Collection[str]) -> set[str]:
        """Return those of the given-up nodes whose tasks come back, to be a spare node.

        Args:
            root_cause: Why this start ends.
            left: The nodes that are given up.
        """

    def note_end(
        self, left: Collection[str], returning: Collection[str], there: Iterable[int]
    ) -> None:
        """Note what the next start has to know. Call this once the ranks have been told that the
        present start is over.

        Args:
            left: The nodes whose ranks move to other nodes.
            returning: The nodes among them whose tasks come back.
            there: The tasks whose connection is still open, including those on the nodes in
                ``left``.
        """

    def next_start(self) -> NextStart:
        """Return which tasks the next rendezvous expects, its quorum, and when it may complete."""

    def answer(self, rank: int, ping: Ping, asked_by: str) -> None:
        """Answer a ping. The answer extends the lease of the worker that sent the ping.

        Args:
            rank: The sender: a rank, or the number of a spare node's task.
            ping: The ping, whose times extend rank 0's own lease.
            asked_by: The signal that asks for an end of the run, as text; empty for none.
        """


@dataclass(frozen=True, kw_only=True)
class SpareNodesOfStart:
    """The facts about the spare nodes in one start that the failure monitor of any task has to
    know.

    Attributes:
        numbers: The numbers of the tasks that wait on spare nodes, as far as this task knows them.
        takeover: The text that says where the deputies listen. The ranks meet there when rank 0 is
            gone. It is empty if no rank can move, see :attr:`NodeReplacement.can_move`.
        replacement: Makes the :class:`NodeReplacement` of rank 0. Its argument is rank 0's
            connections to the other tasks, by the tasks' numbers.
        lease: Begins the lease of the worker of a task other than rank 0, and returns it; returns
            None if no rank can move.
    """

    numbers: frozenset[int]
    takeover: str = field(repr=False)
    replacement: Callable[[Mapping[int, SupervisorConnection]], NodeReplacement]
    lease: Callable[[], WorkerLease | None]
