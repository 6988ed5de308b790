"""Rank 0's side of the rendezvous of a restart with spare nodes: who does not come is lost, and
replaced.
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
    """Waits for those that are expected, and gives the ranks of a node from which one is missing to
    a spare node.

    Ranks move by whole nodes, and the others keep theirs. A task of a spare node is told its rank,
    and comes again as that one, so that it is expected under another number.

    Attributes:
        sizes: the ranks of each node.
        expected: the numbers of those that may still come, or have come. Who is given up leaves it,
            and a rank joins it when it is given to a task of a spare node.
        within: seconds after which who has not come is lost, and has ended its worker.
        not_before: time of :func:`time.monotonic` before which the workers of a lost node may be
            running.
        quorum: how many must come, rank 0 included: others that were cut off may have a rank 0 of
            their own.
        lost_after: seconds without an answer after which one that has come is lost.
        on_quorum: called when so many have come, and may raise.
    """

    sizes: tuple[int, ...]
    expected: set[int]
    within: float
    not_before: float
    quorum: int
    lost_after: float
    on_quorum: Callable[[], None] = lambda: None
    # The node of each rank that has been on another.
    _moved: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Where rank 0 is new, others of its old node may come.
        self._moved |= dict.fromkeys(range(self.sizes[0]), self.own.node)

    def _await_all(self, listener: AuthenticatedListener, deadline: float) -> None:
        # The deadline is that of a first start, whose ranks may come late. After a restart who does
        # not come within `within` is lost.
        self._await_expected(listener)
        # Once, and before any rank moves: on the smaller side of a split network nothing may begin.
        self._check_quorum()
        # Each turn gives the vacant ranks to spare nodes, or raises. A rank that has moved may not
        # come, or may be lost again: only a turn that finds nothing to do ends the loop.
        while True:
            self.expected &= {*self._here}  # the others are given up
            vacant = {*range(sum(self.sizes))} - {*self._here}
            if vacant:
                self._replace(vacant)
                self._await_expected(listener)  # those that were moved come again
            elif time.monotonic() < self.not_before:
                # One that has come may be lost meanwhile, and its ranks vacant again.
                self._take_what_comes(listener, self.not_before)
            else:
                return

    def _await_expected(self, listener: AuthenticatedListener) -> None:
        """Wait until all that are expected are here, or will not come any more."""
        give_up = time.monotonic() + self.within
        while self.expected - {*self._here} and time.monotonic() < give_up:
            self._take_what_comes(listener, give_up)

    def _take(
        self, hello: Hello, connection: socket.socket, message: RendezvousMessage | None
    ) -> None:
        if message is None:  # the connection has ended
            # A rank that lost patience has come again over another one by now.
            if self.connections.get(hello.rank) is connection:
                del self.connections[hello.rank], self._here[hello.rank]
                self.expected.discard(hello.rank)
            return
        if self._moved.get(hello.rank, hello.node) != hello.node:
            # It was cut off, and its rank is somebody else's by now: two must not share it.
            self._dismiss(connection, hello)
            return
        is_failure = isinstance(message, AbortReason | CannotCome)
        if is_failure and hello.rank >= sum(self.sizes):
            # The failure of a rank ends the rendezvous. A task of a spare node is not needed yet.
            self.expected.discard(hello.rank)
            send(connection, Told())
            return
        super()._take(hello, connection, message)
        # The kernel then ends the connection of one whose node is lost while the others come.
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
                # A new rank 0 is on a spare node, whose other tasks take the other ranks of the old
                # rank 0's node. Beside an old rank 0 no task waits, and the run ends.
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
        """The tasks of each spare node that are here, in the order of their local ranks."""
        found = defaultdict(list)
        for number, hello in sorted(self._here.items()):
            if number >= sum(self.sizes):
                found[hello.node].append(hello)
        return found

    def _dismiss(self, connection: socket.socket, hello: Hello) -> None:
        found = f"the ranks of {hello.node} have gone to another node"
        send(connection, AbortReason(found, RendezvousError.exit_code))
