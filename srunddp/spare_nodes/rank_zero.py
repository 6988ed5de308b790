"""Rank 0's decisions with spare nodes: which nodes are given up, and whether this side of a split
network may go on.

:mod:`srunddp.supervisor.rank_table` has the states of the waiting tasks, with those of the ranks.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from srunddp.spare_nodes.choice import fewest_nodes
from srunddp.spare_nodes.lease import Lease
from srunddp.supervisor.clock import Clock
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.failure import FailureCategory
from srunddp.supervisor.messages import Ping, Pong, Verdict
from srunddp.supervisor.node_replacement import NextStart
from srunddp.supervisor.restart import Starts
from srunddp.supervisor.root_cause import LOST, Ending, RootCause


class RankZeroSpareNodes:
    """Rank 0's view of the nodes of a run in which they may change.

    All times here are those of the lease clock, which goes on while this process is suspended. The
    other nodes are not suspended with it: when its lease is over, they may go on without this
    worker.

    Attributes:
        can_move: Whether the run can go on without a node. It is False in the last start, which no
            restart follows, and if no task can take over from rank 0. Then no lease is in force.
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
        min_nodes: int = 0,
        returning_numbers: Mapping[str, tuple[int, ...]] | None = None,
        waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        """Keep what the decisions need. Create this object when all tasks have met.

        Args:
            nodes: The node of each task, by the task's number.
            numbers: The numbers of the tasks that wait on spare nodes.
            connections: The connection to each task other than rank 0.
            leases: Rank 0's lease on each of these connections.
            clock: The clock of the leases.
            can_move: Whether the run can go on without a node, see the class.
            min_nodes: The smallest number of nodes with which the run goes on when no spare node is
                left; 0 if it needs all.
            returning_numbers: By node, the numbers with which its tasks come back after the node
                was given up; None if they do not come back.
            waiting: Returns how many tasks of given-up nodes wait for the next start.
        """
        self._min_nodes = min_nodes
        self._returning_numbers = returning_numbers or {}
        self._waiting = waiting
        self._numbers = numbers
        self.can_move = can_move
        self._nodes = nodes
        self._connections = connections
        self._leases = leases
        self._clock = clock
        # The spare nodes that have lost a task: one lost task makes the whole node unusable.
        self._nodes_without_a_task = set[str]()
        # note_end() sets these two at the end of the start.
        self._nodes_left = frozenset[str]()
        self._next_start = NextStart()
        # The last result of majority_ends(), and the number of open connections it was computed
        # for.
        self._open: int | None = None
        self._ends = 0.0

    def drop(self, number: int) -> bool:
        """Give up a task of a spare node: from now on its node can take no ranks.

        If the supervisor of the task is still there, it is told to end with 0.

        Args:
            number: The task's number.

        Returns:
            Whether this is the first task of its node that is given up.
        """
        node = self._nodes[number]
        is_news = node not in self._nodes_without_a_task
        self._nodes_without_a_task.add(node)
        connection = self._connections[number]
        # The task may still be there: perhaps it was only silent, or it has reported a failure. It
        # has to end with 0, because the run goes on without it.
        connection.send(Verdict((number,), LOST, node_is_given_up=True))
        connection.end()
        connection.open = False
        return is_news

    def cut_off_in(self, still_open: int) -> float:
        """Return in how many seconds rank 0 is cut off unless more tasks answer.

        The result is 0 or less if rank 0 is cut off already, and infinite if no lease is in force.

        Args:
            still_open: How many connections to other tasks are open.
        """
        if not self.can_move:
            return math.inf
        return self.majority_ends(still_open) - self._clock()

    def majority_ends(self, still_open: int) -> float:
        """Return the time at which so many leases have ended that rank 0 no longer has a majority.

        Args:
            still_open: How many connections to other tasks are open.
        """
        # Leases only become longer, so an earlier result may be too early but never too late. It
        # is computed again only when that time has come, or when a connection has ended.
        if still_open != self._open or self._clock() >= self._ends:
            # Count the tasks that may be on the other side of a split network. A task whose
            # connection is lost may be there; a task that has ended is on neither side.
            known = [rank for rank, each in self._connections.items() if each.open or each.lost]
            ends = sorted((self._leases[rank].ends for rank in known), reverse=True)
            needed = (len(known) + 1) // 2
            self._open = still_open
            self._ends = ends[needed - 1] if needed else math.inf
        return self._ends

    @property
    def quorum(self) -> int:
        """The smallest majority of the tasks that may still be there, rank 0 included.

        Both sides of a split network may try to go on, but only one of them can have a majority.
        """
        return (1 + sum(each.open or each.lost for each in self._connections.values())) // 2 + 1

    def nodes_to_leave(self, root_cause: RootCause, before: Starts) -> set[str]:
        """Return the nodes whose ranks have to move to other nodes in the next start.

        Args:
            root_cause: Why this start ends. If the ranks agreed to stop, no node is given up.
            before: What is known of the earlier starts.
        """
        if not self.can_move or root_cause.ending is Ending.STOPPED:
            return set()
        suspect = before.node if before.count else ""
        if before.is_of_node(root_cause):
            suspect = root_cause.node
        return self.left(root_cause, suspect)

    def shortage(self, left: Collection[str]) -> str:
        """Return why the next start cannot do without these nodes; empty if it can.

        Args:
            left: The nodes that are given up, all of which have ranks.
        """
        places = len(self._nodes_with_ranks)
        free = self.free(left)
        if free < len(left):
            free += self._waiting_nodes()
        remaining = places - len(left) + min(free, len(left))
        if remaining >= fewest_nodes(places, self._min_nodes):
            return ""
        if not self._min_nodes:
            return "no spare node is left"
        nodes = "1 node is" if remaining == 1 else f"{remaining} nodes are"
        return f"{nodes} left, and --min-nodes is {self._min_nodes}"

    def _waiting_nodes(self) -> int:
        """Return how many given-up nodes can be back at most, if each has as many tasks as the
        largest node.
        """
        largest = max(Counter(self._nodes.values()).values())
        return self._waiting() // largest

    @property
    def _nodes_with_ranks(self) -> set[str]:
        return {node for rank, node in self._nodes.items() if rank not in self._numbers}

    def left(self, root_cause: RootCause, suspect: str) -> set[str]:
        """Return the nodes whose ranks have to move, even if no ranks can move now.

        These are the lost node, the nodes on which the supervisor of a rank has ended, those that
        do not reach others if the run can do without all of them, the suspect if it was the first
        to fail, and those with a GPU whose hardware has failed, as far as the run can do without
        them.

        Args:
            root_cause: Why this start ends.
            suspect: The node whose own fault its failure likely is: the first that failed in the
                previous start, or one that lacks what the script imports. Empty if there is none.
        """
        ended = {rank for rank, connection in self._connections.items() if not connection.open}
        left = {self._nodes[rank] for rank in ended - self._numbers}
        if root_cause.ending is Ending.LOST:
            left.add(root_cause.node)
        without_way = {*root_cause.without_way} - left
        # If only some of them were given up, the rest would still not reach each other.
        if not self.shortage(left | without_way):
            left |= without_way
        is_suspect = bool(suspect) and root_cause.suspect == suspect and not root_cause.without_way
        # If no other node has ranks, a failure proves nothing about this node.
        others = self._nodes_with_ranks - {suspect}
        if is_suspect and others and not self.shortage(left | {suspect}):
            left.add(suspect)
        # A GPU that has to be reset or repaired fails the next start as well.
        for faulty in root_cause.faulty_nodes:
            is_needed = not self._nodes_with_ranks - left - {faulty}
            has_ranks = faulty in self._nodes_with_ranks
            if has_ranks and not is_needed and not self.shortage(left | {faulty}):
                left.add(faulty)
        return left

    def free(self, without: Collection[str]) -> int:
        """Return how many spare nodes have all their tasks and no ranks yet.

        Args:
            without: Nodes that do not count.
        """
        gone = {
            self._nodes[number] for number in self._numbers if not self._connections[number].open
        }
        spare = {self._nodes[number] for number in self._numbers}
        return len(spare - gone - self._nodes_with_ranks - {*without})

    def ended_by(self, left: Collection[str]) -> float:
        """Return the time by which the workers of these nodes have ended, and also the workers
        whose connection is lost; 0 if no such worker can still run.

        Args:
            left: The nodes that are given up.
        """
        connections = self._connections.items()
        last = [
            rank
            for rank, each in connections
            if each.lost or (each.open and self._nodes[rank] in left)
        ]
        return max((self._leases[rank].other_ended for rank in last), default=0.0)

    def returning(self, root_cause: RootCause, left: Collection[str]) -> set[str]:
        """Return those of the given-up nodes whose tasks come back, to be a spare node.

        A node with a task that has ended does not come back, because it can take no ranks. Nor does
        a node with a fault that will still be there in the next start: a hardware fault of a GPU,
        or a failed import.

        Args:
            root_cause: Why this start ends.
            left: The nodes that are given up.
        """
        ended = {self._nodes[rank] for rank, each in self._connections.items() if not each.open}
        returning = {*left} & self._returning_numbers.keys() - ended - {*root_cause.faulty_nodes}
        if root_cause.category is FailureCategory.IMPORT_FAILED:
            returning.discard(root_cause.node)
        return returning

    def note_end(
        self, left: Collection[str], returning: Collection[str], there: Iterable[int]
    ) -> None:
        """Note what the next start has to know, once the ranks have been told that this one is
        over.

        Args:
            left: The nodes whose ranks move to other nodes.
            returning: Those of them whose tasks come back.
            there: The tasks that are still there, those on ``left`` included.
        """
        back = [number for node in returning for number in self._returning_numbers[node]]
        staying = [rank for rank in there if self._nodes[rank] not in left]
        self._nodes_left = frozenset(left)
        self._next_start = NextStart(
            expected=tuple(sorted([*staying, *back])),
            quorum=self.quorum,
            left=tuple(sorted(left)),
        )

    def next_start(self) -> NextStart:
        """Return which tasks the next rendezvous expects, its quorum, and when it may complete."""
        # Computed now and not in note_end(): since then another message may have come from a node
        # that is given up, and its worker may run until later.
        return replace(self._next_start, not_before=self.ended_by(self._nodes_left))

    def answer(self, rank: int, ping: Ping, asked_by: str) -> None:
        """Answer a ping. The answer extends the lease of the worker that sent the ping.

        Args:
            rank: The sender: a rank, or the number of a spare node's task.
            ping: The ping, whose times extend rank 0's own lease.
            asked_by: The signal that asks for an end of the run, as text; empty for none.
        """
        lease = self._leases[rank]
        lease.note(ping.sent_at, ping.echo)
        times = lease.stamp()
        self._connections[rank].send(Pong(asked_by, times.sent_at, times.echo))
