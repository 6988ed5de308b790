"""Rank 0's view of which ranks are still there: pings, silence, and which node is lost.

When a node's kernel no longer answers, the connection ends and is marked as lost. Rank 0 notices
two more cases without the end of a connection: a supervisor that is stopped or starved sends no
pings although its kernel answers, and Slurm may know that a node is down long before the connection
ends.
"""

import os
import re
import threading
from collections.abc import Collection, Iterable, Mapping

from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.failure_monitor import RankContext
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.messages import Pong


class Liveness:
    """Keeps when rank 0 last heard from each other task, and tells which tasks are silent and which
    node is lost.

    All times are those of the supervisor's clock, which stands still during a suspension, so that
    afterwards no task counts as silent.

    Attributes:
        next_look: When :meth:`look` is due again. The clock begins at 0, and the first look is one
            interval later.
    """

    def __init__(
        self, context: RankContext, connections: Mapping[int, SupervisorConnection]
    ) -> None:
        self._context = context
        self._connections = connections
        self._down = DownNodes(context.limits)
        self._heard_at = dict[int, float]()
        self.next_look = context.ping_every

    def note(self, rank: int, now: float) -> None:
        """Note that something has come from a rank, or from a task of a spare node."""
        self._heard_at[rank] = now

    def look(self, now: float) -> None:
        """Set the time of the next look, and treat tasks that have sent nothing yet as if something
        had come from them now.
        """
        self.next_look = now + self._context.ping_every
        # No ping is expected before the first look, because the rendezvous may have taken long.
        for rank in self._connections:
            self._heard_at.setdefault(rank, now)

    def ping(self, ranks: Iterable[int]) -> None:
        """Send a ping to each of these ranks whose connection is open.

        Rank 0's kernel notices that another node is lost only if it has sent that node something
        that the node does not acknowledge.
        """
        for rank in ranks:
            connection = self._connections.get(rank)
            if connection and connection.open:
                connection.send(Pong())

    def silent_supervisors(self, now: float) -> set[int]:
        """Return the tasks whose supervisor has sent nothing for too long although its kernel
        answers.
        """
        return self._silent(now, self._context.silent_after)

    def unreachable(self, ranks: Iterable[int]) -> set[int]:
        """Return those of the given ranks whose kernel has not acknowledged what was sent to them.

        Call this some time after :meth:`ping`. A rank on this node is always reachable.
        """
        return {
            rank
            for rank in ranks
            if self._context.nodes[rank] != self._context.node
            and self._connections[rank].open
            and not self._connections[rank].is_answered
        }

    def was_cut_off(self, rank: int, now: float) -> bool:
        """Return whether the connection to a rank was reset because the rank's node was cut off.

        This can be told only with spare nodes, where each ping is answered. A rank that gets no
        answer for ``--lost-after`` ends its worker and leaves, and cannot tell rank 0 while its
        node is cut off. When the network is back, the node's kernel resets the connection. If
        instead a supervisor was killed, rank 0 has heard from it shortly before.
        """
        context = self._context
        silence = now - self._heard_at.get(rank, now)
        return (
            self._connections[rank].reset
            and context.nodes[rank] != context.node
            and silence > context.lease_may_be_over_after
        )

    def node_that_is_down(self, now: float, ranks: Collection[int]) -> str | None:
        """Return a silent node that Slurm says is down; None if there is none.

        A separate thread asks Slurm, so the answer counts only at a later call.

        Args:
            now: The time.
            ranks: Only nodes of these ranks count.
        """
        silent = self._silent(now, self._context.limits.slurm_is_asked_after)
        nodes = {self._context.nodes[rank] for rank in silent if rank in ranks}
        down = nodes & self._down.names
        if down:
            return min(down)
        if nodes:
            self._down.ask(nodes)
        return None

    def lost_node(self, rank: int, now: float, *, is_cut_off: bool) -> str:
        """Return which node is lost when the connection to a rank is lost: the rank's node or our
        own.

        Args:
            rank: The rank whose kernel no longer answers.
            now: The time.
            is_cut_off: Whether most of the tasks no longer answer; known only with spare nodes.
        """
        own = self._context.node
        # The link is checked last, because this asks the kernel for all interfaces.
        if is_cut_off or self._nobody_answers(now) or not self._context.link_is_up():
            return own
        return self._context.nodes[rank]

    def _nobody_answers(self, now: float) -> bool:
        """Return whether all other nodes are silent or lost, and there are at least two of them, so
        that this node is the one that is cut off.

        With a single other node, either of the two may be cut off. If this node is cut off, the
        connections to the others end one after the other. When the first one ends, the others have
        been silent for nearly as long, so half of ``--lost-after`` is enough here.
        """
        nodes = self._context.nodes
        others = {rank for rank in self._connections if nodes[rank] != self._context.node}
        silent = self._silent(now, self._context.lost_after / 2)
        lost = {rank for rank, connection in self._connections.items() if connection.lost}
        return others <= silent | lost and len({nodes[rank] for rank in others}) > 1

    def _silent(self, now: float, seconds: float) -> set[int]:
        """Return the tasks whose connection is open, but from which nothing has come for more than
        ``seconds``.
        """
        return {
            rank
            for rank, heard_at in self._heard_at.items()
            if now - heard_at > seconds and self._connections[rank].open
        }


class DownNodes:
    """The nodes that Slurm says are down, among the silent nodes that it was asked about.

    Attributes:
        names: The nodes that are down by the last answer; empty outside a job step, and if
            there is no ``sinfo``.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.names: frozenset[str] = frozenset()
        self._limits = limits
        self._thread = threading.Thread()

    def ask(self, nodes: set[str]) -> None:
        """Ask Slurm about these nodes in a thread, unless an earlier thread still asks."""
        if "SLURM_STEP_ID" in os.environ and not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._ask, args=(",".join(sorted(nodes)),), daemon=True
            )
            self._thread.start()

    def _ask(self, nodes: str) -> None:
        # Imported here because most runs never need it, and in this thread the import delays
        # nothing else.
        from srunddp.util import slurm_command

        command = ("sinfo", "--noheader", "--Node", "--nodes", nodes, "--format", "%N %t")
        shown = slurm_command.output(*command, timeout=self._limits.sinfo_within, any_status=True)
        self.names = frozenset(re.findall(r"^(\S+) down", shown, re.MULTILINE))
