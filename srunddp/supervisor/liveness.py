"""Who is still there, as rank 0 knows it: pings, silence, and which node is lost.

A node is lost when its kernel no longer answers: its connection ends, and says so. Two more things
show here, which no connection says: a supervisor that is stopped or starved sends no pings although
its kernel answers, and Slurm may know that a node is down long before a connection ends.
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
    """When rank 0 last heard of each other task. All times are of the supervisor's clock, which a
    suspension stops: after it nobody has been silent.

    Attributes:
        next_look: when :meth:`look` is due again. The clock begins at 0, and the first look is one
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
        """Something has come from a rank, or from a task of a spare node."""
        self._heard_at[rank] = now

    def look(self, now: float) -> None:
        """Begin to expect pings of who has said nothing yet, and say when to look again."""
        self.next_look = now + self._context.ping_every
        # A long rendezvous is no silence: nothing is expected before the first look.
        for rank in self._connections:
            self._heard_at.setdefault(rank, now)

    def ping(self, ranks: Iterable[int]) -> None:
        """Send a ping to these ranks, where their connection is open.

        Each side's kernel notices the loss of the other only if something that was sent goes
        without an answer.
        """
        for rank in ranks:
            connection = self._connections.get(rank)
            if connection and connection.open:
                connection.send(Pong())

    def silent_supervisors(self, now: float) -> set[int]:
        """Return the tasks whose kernel answers, and whose supervisor has sent no ping for too
        long.
        """
        return self._silent(now, self._context.silent_after)

    def node_that_is_down(self, now: float, ranks: Collection[int]) -> str | None:
        """Return a silent node of these ranks that Slurm takes for down; None where there is none.

        Slurm is asked in a thread, so that its answer is there at a later look.
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
        """Return which node is lost, as the connection to a rank is: its node, or our own.

        Args:
            rank: Whose kernel no longer answers.
            now: The time.
            is_cut_off: Most of the tasks no longer answer, which only spare nodes tell.
        """
        own = self._context.node
        # The link is looked at last, as that asks the kernel for all interfaces.
        if is_cut_off or self._nobody_answers(now) or not self._context.link_is_up():
            return own
        return self._context.nodes[rank]

    def _nobody_answers(self, now: float) -> bool:
        """Whether none of several other nodes does; with a single one either side may be cut off.

        The connections to several nodes that are cut off at once end one after the other. When the
        first one ends, the others have been silent for some time: half of what ends them is enough
        to tell.
        """
        nodes = self._context.nodes
        others = {rank for rank in self._connections if nodes[rank] != self._context.node}
        silent = self._silent(now, self._context.lost_after / 2)
        lost = {rank for rank, connection in self._connections.items() if connection.lost}
        return others <= silent | lost and len({nodes[rank] for rank in others}) > 1

    def _silent(self, now: float, seconds: float) -> set[int]:
        """Return the tasks with an open connection of which nothing has come for so long."""
        return {
            rank
            for rank, heard_at in self._heard_at.items()
            if now - heard_at > seconds and self._connections[rank].open
        }


class DownNodes:
    """The nodes that Slurm itself takes for down: it is asked for those of which nothing has been
    received for a while.

    Attributes:
        names: of the last answer; empty outside a job step, and where there is no ``sinfo``.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.names: frozenset[str] = frozenset()
        self._limits = limits
        self._thread = threading.Thread()

    def ask(self, nodes: set[str]) -> None:
        """Ask for these in a thread, unless one does so already."""
        if "SLURM_STEP_ID" in os.environ and not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._ask, args=(",".join(sorted(nodes)),), daemon=True
            )
            self._thread.start()

    def _ask(self, nodes: str) -> None:
        # Most runs need none of it, and here it delays nobody.
        from srunddp.util import slurm_command

        command = ("sinfo", "--noheader", "--Node", "--nodes", nodes, "--format", "%N %t")
        shown = slurm_command.output(*command, timeout=self._limits.sinfo_within, any_status=True)
        self.names = frozenset(re.findall(r"^(\S+) down", shown, re.MULTILINE))
