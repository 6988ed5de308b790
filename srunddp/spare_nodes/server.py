"""Rank 0's side of the rendezvous after a restart in which nodes may change: a rank that does not
come is lost, and its node is replaced or left out.
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

# Seconds for which a task that has connected may still prove itself when no other task is missing.
_PROVEN_WITHIN = 2.0


@dataclass(kw_only=True)
class SpareNodeServer(RendezvousServer):
    """Waits for the expected tasks. If a rank is missing, all ranks of its node move to a spare
    node, or are left out; :mod:`srunddp.spare_nodes.choice` chooses.

    The ranks of the other nodes stay where they are. A task that gets another number is told so and
    connects again with the new number, so it is then expected under that number. If nodes are left
    out, the ranks are renumbered: then all tasks, including rank 0's, begin the start again,
    because everything that they have opened so far belongs to another rank.

    A task whose node was given up comes back with a number above all others. It does not count for
    the quorum, because it had no part in the last start. It gets the number of a spare node's task,
    and connects again with this number.

    Attributes:
        sizes: How many ranks each node has.
        number: The number of this task in the start before; not 0 if it takes over from rank 0.
        min_nodes: The smallest number of nodes with which the run goes on; 0 if it needs all.
        expected: The numbers of the tasks that have come or may still come. A task that is given
            up is removed, and a rank is added when a task of a spare node gets it.
        within: Seconds after which a task that has not come counts as lost. By then it has ended
            its worker.
        not_before: The time of :func:`time.monotonic` until which the workers of a lost node may
            still run.
        quorum: How many tasks must come, rank 0 included. If fewer come, the others may have a
            rank 0 of their own.
        lost_after: Seconds without an answer after which a task that has come counts as lost.
        left: The nodes that the start before has given up.
        on_quorum: Called when the quorum has come. It may raise.
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
        # If this rank 0 is new, ranks of the old rank 0's node may still connect. Their ranks now
        # belong to this node.
        self._moved |= dict.fromkeys(range(self.sizes[0]), self.own.node)

    def _await_all(self, listener: AuthenticatedListener, deadline: float) -> None:
        # `deadline` is not used: it is meant for the first start, whose ranks may come late. After
        # a restart a rank that does not come within `within` is lost.
        self._await_expected(listener)
        # Before any rank moves: the smaller side of a split network must not start anything.
        self._check_quorum()
        # Each turn gives the vacant ranks to spare nodes, or raises. A rank that has moved may not
        # come, or may be lost again: only a turn that finds nothing to do ends the loop.
        while True:
            self.expected &= {*self._here}  # tasks that have not come are given up
            choice = self._choose()
            if choice.sizes != self.sizes:
                self._number_anew(choice)
            if self._move(choice):
                self._await_expected(listener)  # the tasks that have got a rank connect again
            elif time.monotonic() < self.not_before:
                # A task that has come may be lost while we wait; then its rank is vacant again.
                self._take_what_comes(listener, self.not_before)
            else:
                return

    def _await_expected(self, listener: AuthenticatedListener) -> None:
        """Wait until all expected tasks have come, for ``within`` seconds at most."""
        give_up = time.monotonic() + self.within
        while self.expected - {*self._here} and time.monotonic() < give_up:
            self._take_what_comes(listener, give_up)
        # A task that comes back, and has waited for this start, may still have to prove itself.
        give_up = time.monotonic() + _PROVEN_WITHIN
        while listener.is_proving and time.monotonic() < give_up:
            self._take_what_comes(listener, give_up)

    def _take(
        self, hello: Hello, connection: socket.socket, message: RendezvousMessage | None
    ) -> None:
        if message is None:  # the connection has ended
            # A rank that stopped waiting may have connected again; only the end of its newest
            # connection counts.
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
            # The failure of a rank would end the rendezvous. This is a task of a spare node, which
            # has no rank yet and can be missed.
            self.expected.discard(hello.rank)
            send(connection, Told())
            return
        if self._returns(hello):
            # The task's former connection may have ended unseen.
            self._here.pop(hello.rank, None)
        super()._take(hello, connection, message)
        # If this task's node is lost while the others are still coming, the kernel then ends the
        # connection.
        limit_silence(connection, self.lost_after)

    def _returns(self, hello: Hello) -> bool:
        """Return whether a task comes back after its node was given up."""
        return hello.rank >= self.own.world_size

    def _has_stale_number(self, hello: Hello) -> bool:
        """Return whether a task's number is from an earlier start, and may be another task's by
        now.
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
        """Choose the nodes of the next start, and dismiss the tasks that have no place on them.

        Raises:
            RendezvousError: There are too few nodes.
        """
        self._dismiss_incomplete_nodes()
        here = {number: hello.node for number, hello in self._here.items()}
        # This task came as rank 0, which is not its number if it takes over.
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
        """Send away the tasks that come back without all other tasks of their node: the node could
        take no ranks.
        """
        back = [hello for hello in self._here.values() if self._returns(hello)]
        tasks = Counter(hello.node for hello in back)
        for hello in back:
            if tasks[hello.node] < hello.local_world_size:
                self._send_back(hello.rank)

    def _send_back(self, number: int) -> None:
        """Close the connection of a task that comes back in vain: it connects again, and waits for
        the next start. If none can follow, the task is not needed.
        """
        del self._here[number]
        connection = self.connections.pop(number)
        if not self.returns_at:
            send(connection, RunHasEnded())
        connection.close()

    def _move(self, choice: NodeChoice) -> bool:
        """Tell the tasks that have another number from now on; return whether there are any.

        A spare node may have more tasks than the lost one had ranks; the others go on waiting.
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

        All tasks, including rank 0's, begin the start again as other ranks, and meet here again.

        Raises:
            ReassignedError: Always.
        """
        sizes = choice.sizes
        # No rank is left out if the rank that takes over is on a node of another size than rank
        # 0's.
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
