"""Rank 0's side of the rendezvous after a restart, in a run whose nodes may change: a rank that
does not connect is lost, and its node is replaced or left out.
"""

import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from srunddp.bootstrap.environment.slurm import fold_counts
from srunddp.bootstrap.rendezvous.listener import AuthenticatedListener
from srunddp.bootstrap.rendezvous.messages import (
    AbortReason,
    CannotCome,
    Hello,
    Moved,
    NotMet,
    RendezvousMessage,
    RunHasEnded,
    Told,
)
from srunddp.bootstrap.rendezvous.server import RendezvousServer
from srunddp.errors import CutOffError, ReassignedError, Scope
from srunddp.spare_nodes.choice import NodeChoice, choose_nodes
from srunddp.util.hostlist import fold_ranks
from srunddp.util.messages import send
from srunddp.util.tcp import limit_silence

# Seconds for which the server, when all expected tasks are known, still waits for the proofs of
# tasks that have connected.
_PROVEN_WITHIN = 2.0


@dataclass(kw_only=True)
class SpareNodeServer(RendezvousServer):
    """Waits for the expected tasks. If a rank is missing, all ranks of its node move to a spare
    node or are left out, as :mod:`srunddp.spare_nodes.choice` decides.

    The ranks of the other nodes stay where they are. A task whose number changes is told the new
    number, and then connects again under it. If nodes are left out, the ranks are renumbered. Then
    all tasks, including rank 0, repeat the start, because what they have opened so far belongs to
    their old ranks.

    A task whose node was given up comes back with a number above the numbers of all other tasks. It
    does not count for the quorum, because it had no part in the last start. It gets the number of a
    spare node's task, and connects again under this number.

    Attributes:
        sizes: How many ranks each node has.
        number: The number of this task in the previous start; not 0 if it takes over from rank 0.
        min_nodes: The smallest number of nodes with which the run goes on; 0 if it needs as many
            nodes as before.
        expected: The numbers of the tasks that have connected or may still connect. A task that is
            given up is removed, and a rank is added when a task of a spare node gets it.
        within: Seconds after which a task that has not connected counts as lost. By then it has
            ended its worker.
        not_before: The time of :func:`time.monotonic` until which the workers of a lost node may
            still run.
        quorum: How many tasks must connect, rank 0 included. If fewer connect, the missing tasks
            may have gone on with a different rank 0.
        lost_after: Seconds without an answer after which a task that has connected counts as lost.
        left: The nodes that the previous start has given up.
        on_quorum: Called when the quorum is reached. If it raises, the rendezvous fails.
    """

    sizes: tuple[int, ...]
    number: int = 0
    min_nodes: int = 0
    expected: set[int]
    within: float
    not_before: float
    quorum: int
    lost_after: float
    left: tuple[str, ...] = ()
    on_quorum: Callable[[], None] = lambda: None
    # The new node of each rank that has moved.
    _moved: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The ranks of rank 0's place belong to this node. If this task is a new rank 0, a task of
        # the old rank 0's node may still connect with such a rank, and is then sent away.
        self._moved |= dict.fromkeys(range(self.sizes[0]), self.own.node)

    def _await_all(self, listener: AuthenticatedListener, deadline: float) -> None:
        # `deadline` is not used: it is meant for the first start, whose ranks may connect late.
        # After a restart, a rank that does not connect within `self.within` seconds is lost.
        self._await_expected(listener)
        # Check this before any rank moves: on the smaller side of a split network, nothing must
        # start.
        self._check_quorum()
        # Each pass of the loop gives the vacant ranks to spare nodes, or raises. The new task of a
        # rank may fail to connect, or may be lost again, so only a pass with nothing to do ends the
        # loop.
        while True:
            self.expected &= {*self._here}  # tasks that have not connected are given up
            choice = self._choose()
            if choice.sizes != self.sizes:
                self._number_anew(choice)
            if self._move(choice):
                self._await_expected(listener)  # the tasks with a new number connect again
            elif time.monotonic() < self.not_before:
                # A connected task may be lost during this wait. Then its rank is vacant again.
                self._take_what_comes(listener, self.not_before)
            else:
                return

    def _await_expected(self, listener: AuthenticatedListener) -> None:
        """Wait until all expected tasks have connected, for ``within`` seconds at most."""
        give_up = time.monotonic() + self.within
        while self.expected - {*self._here} and time.monotonic() < give_up:
            self._take_what_comes(listener, give_up)
        # A task that comes back may have connected during the last start. It is not among the
        # expected tasks, so give it time to send its proof.
        give_up = time.monotonic() + _PROVEN_WITHIN
        while listener.is_proving and time.monotonic() < give_up:
            self._take_what_comes(listener, give_up)

    def _take(
        self, hello: Hello, connection: socket.socket, message: RendezvousMessage | None
    ) -> None:
        if message is None:  # the connection has ended
            # A task may have given up an older connection and connected again, so only the end of
            # its newest connection counts.
            if self.connections.get(hello.rank) is connection:
                del self.connections[hello.rank], self._here[hello.rank]
                self.expected.discard(hello.rank)
            return
        if self._has_stale_number(hello):
            # The task was cut off, and meanwhile its rank has moved to another node, or the ranks
            # were renumbered. Two tasks must not have the same rank.
            self._dismiss(connection, hello)
            return
        is_failure = isinstance(message, AbortReason | CannotCome)
        if is_failure and hello.rank >= sum(self.sizes):
            # Do without this task of a spare node, which has no rank yet. Only the failure of a
            # rank ends the rendezvous.
            self.expected.discard(hello.rank)
            send(connection, Told())
            return
        if self._returns(hello):
            # An earlier connection of this task may have ended without notice. Forget its hello.
            self._here.pop(hello.rank, None)
        super()._take(hello, connection, message)
        # Make the kernel end this connection if the task's node is lost while the server still
        # waits for other tasks.
        limit_silence(connection, self.lost_after)

    def _returns(self, hello: Hello) -> bool:
        """Return whether a task comes back after its node was given up."""
        return hello.rank >= self.own.world_size

    def _has_stale_number(self, hello: Hello) -> bool:
        """Return whether a task's number is from before the ranks were moved or renumbered, so that
        a different task may have the number by now.
        """
        if self._returns(hello):
            return False
        has_moved = self._moved.get(hello.rank, hello.node) != hello.node
        of_this_start = (self.own.layout, self.own.generation)
        return has_moved or (hello.layout, hello.generation) != of_this_start

    def _has_room_for(self, hello: Hello) -> bool:
        return self._returns(hello) or super()._has_room_for(hello)

    def _check_quorum(self) -> None:
        there = sum(number < self.own.world_size for number in self._here)
        if there < self.quorum:
            raise CutOffError(
                f"{there} tasks have met after the loss of a node",
                expected=f"{self.quorum} or more",
                hint=(
                    "this side is cut off from the others, which may have gone on: see their output"
                ),
                scope=Scope.JOB,
            )
        self.on_quorum()

    def _choose(self) -> NodeChoice:
        """Choose the nodes of the start that this rendezvous begins. Dismiss the tasks that get no
        number in it, and tell the user which ranks move.

        Raises:
            RendezvousError: There are too few nodes.
        """
        self._dismiss_incomplete_nodes()
        here = {number: hello.node for number, hello in self._here.items()}
        # This task has connected as rank 0. If it takes over from rank 0, it had a different number
        # in the last start.
        here[self.number] = here.pop(0)
        choice = choose_nodes(
            self.sizes,
            here,
            own=self.number,
            min_nodes=self.min_nodes,
            tasks=self.own.world_size,
            left=self.left,
        )
        for number in here.keys() - choice.numbers.keys():
            self._dismiss(self.connections.pop(number), self._here.pop(number))
        for place in choice.places:
            moved = [
                rank
                for rank, task in zip(place.ranks, place.tasks, strict=True)
                if task not in (rank, self.number)
            ]
            if moved:
                verb = "go" if len(moved) > 1 else "goes"
                self.say(f"{fold_ranks(moved, {})} {verb} to {place.node}")
        return choice

    def _say_who_is_back(self, choice: NodeChoice) -> None:
        used = {place.node for place in choice.places}
        back = {hello.node for hello in self._here.values() if self._returns(hello)}
        for node in sorted(back - used):
            self.say(f"{node} is a spare node from now on")

    def _dismiss_incomplete_nodes(self) -> None:
        """Send away each task that comes back while other tasks of its node are missing, because
        the node could take no ranks.
        """
        back = [hello for hello in self._here.values() if self._returns(hello)]
        tasks = Counter(hello.node for hello in back)
        for hello in back:
            if tasks[hello.node] < hello.local_world_size:
                self._send_back(hello.rank)

    def _send_back(self, number: int) -> None:
        """Close the connection of a task that cannot come back in this start, so that it connects
        again and waits for the next start. If no start can follow, tell the task that the run has
        ended for it.
        """
        del self._here[number]
        connection = self.connections.pop(number)
        if not self.returns_at:
            send(connection, RunHasEnded())
        connection.close()

    def _move(self, choice: NodeChoice) -> bool:
        """Tell each task whose number changes the new number, so that it connects again under it.

        Returns:
            Whether the number of any task changes.
        """
        self._say_who_is_back(choice)
        told = {task: new for task, new in choice.numbers.items() if task not in (new, self.number)}
        for number, rank in told.items():
            send(self.connections.pop(number), self._moved_to(rank, self.own.layout))
            self._moved[rank] = self._here.pop(number).node
        self.expected = (self.expected - told.keys()) | {*told.values()}
        self.number = 0
        return bool(told)

    def _number_anew(self, choice: NodeChoice) -> NoReturn:
        """Tell all tasks that the ranks are renumbered, and end this rendezvous.

        All tasks, including rank 0, repeat the start under their new numbers, with a second
        rendezvous on the same socket.

        Raises:
            ReassignedError: Always.
        """
        sizes = choice.sizes
        # Ranks are also renumbered without one being left out: if the task that takes over from
        # rank 0 is on a node with a different number of ranks, which becomes the first node.
        why = "the ranks are numbered anew"
        if choice.left_out:
            why = f"no spare node is left for {fold_ranks(choice.left_out, {})}"
        self.say(
            f"{why}: the run goes on with {sum(sizes)} ranks on {len(sizes)}"
            f" {'nodes' if len(sizes) > 1 else 'node'}"
        )
        self._say_who_is_back(choice)
        self.sizes = sizes
        layout = self.own.layout + 1
        numbers = {task: new for task, new in choice.numbers.items() if task != self.number}
        for number, new in numbers.items():
            send(self.connections[number], self._moved_to(new, layout))
        raise ReassignedError(
            0, fold_counts(sizes), layout, self.own.generation, tuple(sorted(numbers.values()))
        )

    def _moved_to(self, number: int, layout: int) -> Moved:
        return Moved(number, fold_counts(self.sizes), layout, self.own.generation)

    def _dismiss(self, connection: socket.socket, hello: Hello) -> None:
        found = f"the ranks of {hello.node} have gone to another node"
        send(connection, NotMet(found, is_cut_off=True))
