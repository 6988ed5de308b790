"""Rank 0's side of the rendezvous after a restart with spare nodes: a rank that does not come is
lost, and its node is replaced.
"""

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from srunddp.bootstrap.rendezvous.listener import AuthenticatedListener
from srunddp.bootstrap.rendezvous.messages import (
    AbortReason,
    CannotCome,
    Hello,
    Moved,
    RendezvousMessage,
    Told,
)
from srunddp.bootstrap.rendezvous.server import RendezvousServer
from srunddp.errors import RendezvousError, Scope
from srunddp.spare_nodes.layout import ranks_of_nodes
from srunddp.util.hostlist import fold_ranks
from srunddp.util.messages import send
from srunddp.util.tcp import limit_silence


@dataclass(kw_only=True)
class SpareNodeServer(RendezvousServer):
    """Waits for the expected tasks. If a rank is missing, all ranks of its node move to a spare
    node.

    The ranks of the other nodes stay where they are. A task of a spare node that gets a rank is
    told so and connects again as that rank, so it is then expected under its new number.

    Attributes:
        sizes: How many ranks each node has.
        expected: The numbers of the tasks that have come or may still come. A task that is given
            up is removed, and a rank is added when a task of a spare node gets it.
        within: Seconds after which a task that has not come counts as lost. By then it has ended
            its worker.
        not_before: The time of :func:`time.monotonic` until which the workers of a lost node may
            still run.
        quorum: How many tasks must come, rank 0 included. If fewer come, the others may have a
            rank 0 of their own.
        lost_after: Seconds without an answer after which a task that has come counts as lost.
        on_quorum: Called when the quorum has come. It may raise.
    """

    sizes: tuple[int, ...]
    expected: set[int]
    within: float
    not_before: float
    quorum: int
    lost_after: float
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
            vacant = {*range(sum(self.sizes))} - {*self._here}
            if vacant:
                self._replace(vacant)
                self._await_expected(listener)  # the tasks that have got a rank connect again
            elif time.monotonic() < self.not_before:
                # A task that has come may be lost while we wait; then its rank is vacant again.
                self._take_what_comes(listener, self.not_before)
            else:
                return

    def _await_expected(self, listener: AuthenticatedListener) -> None:
        """Wait until no expected task is missing any more, for ``within`` seconds at most."""
        give_up = time.monotonic() + self.within
        while self.expected - {*self._here} and time.monotonic() < give_up:
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
        if self._moved.get(hello.rank, hello.node) != hello.node:
            # The task was cut off, and its rank has moved to another node meanwhile. Two tasks
            # must not have the same rank.
            self._dismiss(connection, hello)
            return
        is_failure = isinstance(message, AbortReason | CannotCome)
        if is_failure and hello.rank >= sum(self.sizes):
            # The failure of a rank would end the rendezvous. This is a task of a spare node, which
            # has no rank yet and can be missed.
            self.expected.discard(hello.rank)
            send(connection, Told())
            return
        super()._take(hello, connection, message)
        # If this task's node is lost while the others are still coming, the kernel then ends the
        # connection.
        limit_silence(connection, self.lost_after)

    def _check_quorum(self) -> None:
        if len(self._here) < self.quorum:
            raise RendezvousError(
                f"{len(self._here)} tasks have met after the loss of a node",
                expected=f"{self.quorum} or more",
                hint=(
                    "this side is cut off from the others, which may have gone on: see their output"
                ),
                scope=Scope.JOB,
            )
        self.on_quorum()

    def _replace(self, vacant: Collection[int]) -> None:
        for ranks in ranks_of_nodes(self.sizes):
            if not {*vacant} & {*ranks}:
                continue
            if 0 in ranks:
                # A new rank 0 runs on a spare node, and the other tasks of that node take the other
                # ranks of the old rank 0's node. If rank 0 is not new, no task waits on its node,
                # and the run ends with the error below.
                wanted = [*ranks][1:]
                spare = self._spare_nodes().get(self.own.node, [])
            else:
                for rank in {*ranks} & {*self._here}:
                    self._dismiss(self.connections.pop(rank), self._here.pop(rank))
                others = [
                    each for node, each in self._spare_nodes().items() if node != self.own.node
                ]
                wanted = [*ranks]
                spare = next((each for each in others if len(each) >= len(ranks)), [])
            if len(spare) < len(wanted):
                raise RendezvousError(
                    f"no spare node is left for {fold_ranks(wanted, {})}",
                    expected="one for each node that is lost",
                    hint="give the job more with --spare-nodes",
                    scope=Scope.JOB,
                )
            self._assign(wanted, spare)

    def _assign(self, ranks: Collection[int], spare: Collection[Hello]) -> None:
        self.say(
            f"{fold_ranks(ranks, {})} {'go' if len(ranks) > 1 else 'goes'} to"
            f" {next(iter(spare)).node}"
        )
        # A spare node may have more tasks than the lost one had ranks; the others go on waiting.
        for rank, hello in zip(ranks, spare, strict=False):
            send(self.connections.pop(hello.rank), Moved(rank))
            del self._here[hello.rank]
            self.expected = (self.expected - {hello.rank}) | {rank}
            self._moved[rank] = hello.node

    def _spare_nodes(self) -> dict[str, list[Hello]]:
        """Return the waiting tasks that have come, by node, in the order of their local ranks."""
        found = defaultdict(list)
        for number, hello in sorted(self._here.items()):
            if number >= sum(self.sizes):
                found[hello.node].append(hello)
        return found

    def _dismiss(self, connection: socket.socket, hello: Hello) -> None:
        found = f"the ranks of {hello.node} have gone to another node"
        send(connection, AbortReason(found, RendezvousError.exit_code))
