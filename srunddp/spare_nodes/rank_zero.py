"""What rank 0 decides with spare nodes: which nodes are left, and whether this side may go on.

The states of their tasks are in the table of all ranks, :mod:`srunddp.supervisor.rank_table`.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from srunddp.spare_nodes.lease import Lease
from srunddp.supervisor.clock import Clock
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.messages import Ping, Pong, Verdict
from srunddp.supervisor.node_replacement import NextStart
from srunddp.supervisor.restart import Starts
from srunddp.supervisor.root_cause import LOST, Ending, RootCause


class RankZeroSpareNodes:
    """Rank 0's view of the nodes of a run that has spare ones.

    Its times are of a clock that goes on while this process is suspended: what a lease bounds is
    for how long a worker may run before others go on without it, and they may be on nodes that run
    meanwhile.

    Attributes:
        can_move: Whether ranks can go to spare nodes. Not in the last start, which no restart
            follows, and not if no task of a spare node can take over: then nobody goes on without a
            node, and no lease is in force.
    """

    def __init__(
        self,
        nodes: Mapping[int, str],
        numbers: frozenset[int],
        connections: Mapping[int, SupervisorConnection],
        leases: Mapping[int, Lease],
        clock: Clock,
        *,
        can_move: bool,
    ) -> None:
        """Begin with all of these tasks at work or waiting.

        Args:
            nodes: Of each task.
            numbers: Of the tasks that wait on spare nodes.
            connections: Of each task but rank 0's own.
            leases: Of the same tasks.
            clock: That of the leases.
            can_move: See the class.
        """
        self._numbers = numbers
        self.can_move = can_move
        self._nodes = nodes
        self._connections = connections
        self._leases = leases
        self._clock = clock
        # A spare node is lost with the first of its tasks.
        self._nodes_without_a_task = set[str]()
        # Of the end of the run.
        self._nodes_left = frozenset[str]()
        self._next_start = NextStart()
        # When the lease of most tasks ends, as computed last, and for how many connections.
        self._open: int | None = None
        self._ends = 0.0

    def drop(self, number: int) -> bool:
        """A task of a spare node has ended: its node can take no rank any more.

        Its supervisor, if it is still there, ends with 0.

        Returns:
            Whether the node could until now.
        """
        node = self._nodes[number]
        is_news = node not in self._nodes_without_a_task
        self._nodes_without_a_task.add(node)
        connection = self._connections[number]
        # The task may still be there: it was only silent, or has told of a failure. It has to end
        # with 0, because the run goes on without it.
        connection.send(Verdict((number,), LOST, node_is_given_up=True))
        connection.end()
        connection.open = False
        return is_news

    def cut_off_in(self, still_open: int) -> float:
        """Return in how many seconds rank 0 has had no answer of most of the tasks for too long.

        Args:
            still_open: To how many tasks there is a connection.
        """
        if not self.can_move:
            return math.inf
        return self.majority_ends(still_open) - self._clock()

    def majority_ends(self, still_open: int) -> float:
        """When less than half of the tasks will have heard of rank 0, by the clock of the leases.

        Args:
            still_open: To how many tasks there is a connection.
        """
        # Leases only become longer: what was computed may be too early, and never too late. So it
        # is computed again only when it is over, or when a connection has ended.
        if still_open != self._open or self._clock() >= self._ends:
            # Who may be on the other side of a network that is cut: a task that has ended is on
            # neither side, and one whose connection is lost may be there.
            known = [rank for rank, each in self._connections.items() if each.open or each.lost]
            ends = sorted((self._leases[rank].ends for rank in known), reverse=True)
            needed = (len(known) + 1) // 2
            self._open = still_open
            self._ends = ends[needed - 1] if needed else math.inf
        return self._ends

    @property
    def quorum(self) -> int:
        """More than half of the tasks that may still be there, rank 0 among them.

        Both sides of a network that is cut may try to go on. Only one of them has more than half.
        """
        return (1 + sum(each.open or each.lost for each in self._connections.values())) // 2 + 1

    def nodes_to_leave(self, root_cause: RootCause, before: Starts) -> set[str]:
        """Return the nodes whose ranks go to others in the next start.

        Args:
            root_cause: Of this one's end.
            before: What the starts before have come to.
        """
        if not self.can_move or root_cause.ending is Ending.STOPPED:
            return set()
        return self.left(root_cause, before.node if before.count else "")

    def are_too_few_for(self, left: Collection[str]) -> bool:
        """Whether the ranks of these nodes have no others to go to."""
        return bool(left) and self.free(left) < len(left)

    def left(self, root_cause: RootCause, last_node: str) -> set[str]:
        """Return the nodes whose ranks go to others.

        These are the nodes where srunddp has ended on a rank, a lost node, and one that was the
        first to fail twice in a row.

        Args:
            root_cause: Of this start's end.
            last_node: The one that was the first to fail in the start before; empty where there is
                none.
        """
        ended = {rank for rank, connection in self._connections.items() if not connection.open}
        left = {self._nodes[rank] for rank in ended - self._numbers}
        if root_cause.ending is Ending.LOST:
            left.add(root_cause.node)
        has_failed_twice = root_cause.node == last_node
        # Where no other node has ranks, that proves nothing about this one.
        others = {node for rank, node in self._nodes.items() if rank not in self._numbers}
        if has_failed_twice and others - {last_node} and self.free(left) > len(left):
            left.add(last_node)
        return left

    def free(self, without: Collection[str]) -> int:
        """How many whole spare nodes are there, but for these; one that has ranks by now is
        none.
        """
        gone = {
            self._nodes[number] for number in self._numbers if not self._connections[number].open
        }
        ranks = {node for number, node in self._nodes.items() if number not in self._numbers}
        return len({self._nodes[number] for number in self._numbers} - gone - ranks - {*without})

    def ended_by(self, left: Collection[str]) -> float:
        """When the workers of the nodes that are left have ended in any case, by the clock of the
        leases.
        """
        connections = self._connections.items()
        last = [
            rank
            for rank, each in connections
            if each.lost or (each.open and self._nodes[rank] in left)
        ]
        return max((self._leases[rank].other_ended for rank in last), default=0.0)

    def note_end(self, left: Collection[str], there: Iterable[int]) -> None:
        """The ranks have been told of the end of this start: note what the next one has to know.

        Args:
            left: The nodes whose ranks go to others.
            there: The tasks that are still there, on whatever node.
        """
        self._nodes_left = frozenset(left)
        self._next_start = NextStart(
            expected=tuple(rank for rank in sorted(there) if self._nodes[rank] not in left),
            quorum=self.quorum,
        )

    def next_start(self) -> NextStart:
        """Return what the rendezvous of the next start has to know."""
        # Not when the ranks were told: more may have been heard of a lost node since.
        return replace(self._next_start, not_before=self.ended_by(self._nodes_left))

    def answer(self, rank: int, ping: Ping, asked_by: str) -> None:
        """Answer a rank's ping.

        Args:
            rank: Whose it is, or the number of a spare node's task.
            ping: The message.
            asked_by: Who wants an end of the run; empty where nobody does.
        """
        lease = self._leases[rank]
        lease.note(ping.sent_at, ping.echo)
        times = lease.stamp()
        self._connections[rank].send(Pong(asked_by, times.sent_at, times.echo))
