"""Rank 0's decisions with spare nodes: which nodes are given up, and whether this side of a split
network may go on.

The states of the waiting tasks are in :mod:`srunddp.supervisor.rank_table`, as are the states of
the ranks.
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
    """Rank 0's view of the nodes, in a run whose nodes may change.

    All times here are times of the lease clock, which goes on while this process is suspended: the
    other nodes are not suspended, and may go on without rank 0's worker when rank 0's lease is
    over.

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
        """Keep what the decisions need. Create this object when all tasks have connected.

        Args:
            nodes: The node of each task, by the task's number.
            numbers: The numbers of the tasks that wait on spare nodes.
            connections: The connection to each task other than rank 0.
            leases: Rank 0's lease on each of these connections.
            clock: The clock of the leases.
            can_move: Whether the run can go on without a node; see the class.
            min_nodes: The smallest number of nodes with which the run goes on when no spare node is
                left; 0 if it needs as many nodes as before.
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
        # The spare nodes of which a task is given up. Such a node can take no ranks, even if its
        # other tasks still wait.
        self._nodes_without_a_task = set[str]()
        # note_end() sets the next two attributes at the end of the start.
        self._nodes_left = frozenset[str]()
        self._next_start = NextStart()
        # The number of open connections at the last computation in majority_ends(), and its result.
        self._open: int | None = None
        self._ends = 0.0

    def drop(self, number: int) -> bool:
        """Give up a task of a spare node: from now on the task's node can take no ranks.

        If the task's supervisor still runs, it is told to end with exit code 0.

        Args:
            number: The task's number.

        Returns:
            Whether this is the first task of the node that is given up.
        """
        node = self._nodes[number]
        is_news = node not in self._nodes_without_a_task
        self._nodes_without_a_task.add(node)
        connection = self._connections[number]
        # The task may still run: perhaps it was only silent, or it has reported a failure. It has
        # to end with 0, because the run goes on without it.
        connection.send(Verdict((number,), LOST, node_is_given_up=True))
        connection.end()
        connection.open = False
        return is_news

    def cut_off_in(self, still_open: int) -> float:
        """Return in how many seconds rank 0 will be cut off if no more tasks answer its pings.

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
        # Leases are only ever extended, so an earlier result may be too early, but never too late.
        # Compute it again only when that time has come, or when a connection has ended.
        if still_open != self._open or self._clock() >= self._ends:
            # Count the tasks that may be on one of the sides of a split network. A task whose
            # connection is lost may be on the other side; a task that has ended is on neither.
            known = [rank for rank, each in self._connections.items() if each.open or each.lost]
            ends = sorted((self._leases[rank].ends for rank in known), reverse=True)
            needed = (len(known) + 1) // 2
            self._open = still_open
            self._ends = ends[needed - 1] if needed else math.inf
        return self._ends

    @property
    def quorum(self) -> int:
        """The smallest majority of the tasks that may still run, rank 0 included.

        If the network is split, both sides may try to go on, but only one of them can have a
        majority.
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
        """Return why the run cannot go on if these nodes are given up; empty if it can.

        Args:
            left: The nodes to give up, all of which have ranks.
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
        """Return how many of the nodes that were given up can take ranks again. Their waiting tasks
        are counted as if each node had as many tasks as the largest one.
        """
        largest = max(Counter(self._nodes.values()).values())
        return self._waiting() // largest

    @property
    def _nodes_with_ranks(self) -> set[str]:
        return {node for rank, node in self._nodes.items() if rank not in self._numbers}

    def left(self, root_cause: RootCause, suspect: str) -> set[str]:
        """Return the nodes whose ranks have to move, even if no ranks can move now:

        - the lost node, and the nodes on which the supervisor of a rank has ended;
        - the nodes that do not reach others, if the run can go on without all of these nodes;
        - the suspect, if it was the first to fail, and the run can go on without it;
        - each node with a GPU whose hardware has failed, if the run can go on without the node.

        Args:
            root_cause: Why this start ends.
            suspect: The node that likely is itself the cause of its failure, because it was also
                the first to fail in the previous start, or lacks what the script imports. Empty if
                there is no such node.
        """
        ended = {rank for rank, connection in self._connections.items() if not connection.open}
        left = {self._nodes[rank] for rank in ended - self._numbers}
        if root_cause.ending is Ending.LOST:
            left.add(root_cause.node)
        without_way = {*root_cause.without_way} - left
        # Give up all nodes that do not reach others, or none of them: if some stayed, they would
        # still not reach each other.
        if not self.shortage(left | without_way):
            left |= without_way
        is_suspect = bool(suspect) and root_cause.suspect == suspect and not root_cause.without_way
        # If only the suspect has ranks, no other node could fail first, so its failure proves
        # nothing.
        others = self._nodes_with_ranks - {suspect}
        if is_suspect and others and not self.shortage(left | {suspect}):
            left.add(suspect)
        # A GPU that has to be reset or repaired would make the next start fail as well.
        for faulty in root_cause.faulty_nodes:
            is_needed = not self._nodes_with_ranks - left - {faulty}
            has_ranks = faulty in self._nodes_with_ranks
            if has_ranks and not is_needed and not self.shortage(left | {faulty}):
                left.add(faulty)
        return left

    def free(self, without: Collection[str]) -> int:
        """Return how many spare nodes still have all their tasks, and have taken no ranks.

        Args:
            without: The nodes that do not count.
        """
        gone = {
            self._nodes[number] for number in self._numbers if not self._connections[number].open
        }
        spare = {self._nodes[number] for number in self._numbers}
        return len(spare - gone - self._nodes_with_ranks - {*without})

    def ended_by(self, left: Collection[str]) -> float:
        """Return the time by which all workers on these nodes have ended, and also the workers of
        tasks whose connection is lost; 0 if no such worker can still run.

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
        """Return those of the given-up nodes whose tasks come back, so that they are spare nodes.

        A node with a task that has ended does not come back, because it can take no ranks. Nor does
        a node with a fault that will not be gone in the next start: a hardware fault of a GPU, or a
        failed import.

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
        """Keep what :meth:`next_start` returns. Call this after the ranks have been told that this
        start is over.

        Args:
            left: The nodes that are given up.
            returning: The nodes of ``left`` whose tasks come back.
            there: The numbers of the tasks that still run, including those on the nodes of
                ``left``.
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
        # Compute `not_before` here and not in note_end(): since then a node that is given up may
        # have sent another message, which lets its worker run longer.
        return replace(self._next_start, not_before=self.ended_by(self._nodes_left))

    def answer(self, rank: int, ping: Ping, asked_by: str) -> None:
        """Answer a ping. The answer extends the lease of the task that sent the ping.

        Args:
            rank: The number of the task that sent the ping: its rank, if it has one.
            ping: The ping. Its times extend rank 0's lease.
            asked_by: The text that says which signal asks for an end of the run; empty if none has
                come.
        """
        lease = self._leases[rank]
        lease.note(ping.sent_at, ping.echo)
        times = lease.stamp()
        self._connections[rank].send(Pong(asked_by, times.sent_at, times.echo))
