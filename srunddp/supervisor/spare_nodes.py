"""What rank 0 decides with spare nodes: which nodes are left, and whether this side may go on."""

from collections.abc import Collection, Mapping

from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.failure_monitor import RankContext
from srunddp.supervisor.lease import Lease
from srunddp.supervisor.messages import Ping, Pong
from srunddp.supervisor.root_cause import Ending, RootCause


class SpareNodes:
    """Rank 0's view of the nodes of a run that has spare ones.

    Attributes:
        numbers: of the tasks of spare nodes; leases: by rank or such a number.
    """

    def __init__(
        self, context: RankContext, connections: Mapping[int, SupervisorConnection]
    ) -> None:
        self._nodes = context.nodes
        self._connections = connections
        self._clock = context.clock
        self.numbers = {number for number in context.nodes if number >= context.world_size}
        self.leases = {
            rank: Lease(context.lost_after, context.clock, context.limits) for rank in connections
        }
        self._open = -1
        self._ends = 0.0

    def majority_ends(self, still_open: int) -> float:
        """When less than half of the tasks will have heard of rank 0, by the context's clock.

        ``still_open``: how many connections are.
        """
        # Leases only become longer: that figure holds.
        if still_open != self._open or self._clock() >= self._ends:
            # Who has ended is on no other side.
            known = [rank for rank, each in self._connections.items() if each.open or each.lost]
            ends = sorted((self.leases[rank].ends for rank in known), reverse=True)
            needed = (len(known) + 1) // 2
            self._open = still_open
            self._ends = ends[needed - 1] if needed else float("inf")
        return self._ends

    @property
    def quorum(self) -> int:
        """More than half of those that may be there still."""
        return (1 + sum(each.open or each.lost for each in self._connections.values())) // 2 + 1

    def left(self, root_cause: RootCause, last_node: str) -> set[str]:
        """The nodes whose ranks go to others; ``last_node``: that of the failure before this
        one.
        """
        ended = {rank for rank, connection in self._connections.items() if not connection.open}
        left = {self._nodes[rank] for rank in ended - self.numbers}
        if root_cause.ending is Ending.LOST:
            left.add(root_cause.node)
        others = {node for rank, node in self._nodes.items() if rank not in self.numbers} - {
            last_node
        }
        if root_cause.node == last_node and others and self.free(left) > len(left):
            left.add(last_node)  # twice in a row, and no other's
        return left

    def free(self, without: Collection[str]) -> int:
        """How many whole spare nodes are there, but for these; one that has ranks by now is
        none.
        """
        gone = {
            self._nodes[number] for number in self.numbers if not self._connections[number].open
        }
        ranks = {node for number, node in self._nodes.items() if number not in self.numbers}
        return len({self._nodes[number] for number in self.numbers} - gone - ranks - {*without})

    def ended_by(self, left: Collection[str]) -> float:
        """When the workers of the nodes that are left have ended in any case, by the context's
        clock.
        """
        connections = self._connections.items()
        last = [
            rank
            for rank, each in connections
            if each.lost or (each.open and self._nodes[rank] in left)
        ]
        return max((self.leases[rank].other_ended for rank in last), default=0.0)

    def answer(self, rank: int, ping: Ping, asked_by: str) -> None:
        """Answer a rank's ping.

        Args:
            rank: Whose it is, or the number of a spare node's task.
            ping: The message.
            asked_by: Who wants an end of the run; empty where nobody does.
        """
        lease = self.leases[rank]
        lease.note(ping.sent_at, ping.echo)
        times = lease.stamp()
        self._connections[rank].send(Pong(asked_by, times.sent_at, times.echo))
