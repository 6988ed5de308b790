"""Provides connections between supervisors: real ones, and some without a socket, over which a test
sends and reads the messages itself.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from srunddp.spare_nodes.spare_nodes import spare_nodes_of_start
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.coordinator import Coordinator
from srunddp.supervisor.deputies import Deputies
from srunddp.supervisor.failure_monitor import RankContext
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.messages import Ping, Pong, RankMessage
from srunddp.supervisor.participant import Participant
from srunddp.supervisor.restart import RestartPolicy, Starts
from srunddp.supervisor.root_cause import RootCause

M = TypeVar("M", bound=RankMessage)
IMPATIENT = Limits(deputy_answers_within=0.2)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of one connection over the loopback interface, our end first."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    with ours, theirs:
        yield ours, theirs


@contextmanager
def listening(*hosts: str) -> Iterator[list[socket.socket]]:
    """Yield listening sockets on these addresses, as deputies have them."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_server((host, 0))) for host in hosts]


@contextmanager
def silent(host: str) -> Iterator[socket.socket]:
    """Yield a listening socket that does not answer, because its queue is full."""
    with (
        socket.create_server((host, 0), backlog=0) as full,
        socket.create_connection(full.getsockname()),
    ):
        yield full


def deputies(
    *sockets: socket.socket,
    rank: int = 0,
    master: str = "127.0.0.1",
    limits: Limits = DEFAULT_LIMITS,
) -> Deputies:
    """Return the deputies that listen on these sockets: rank 1 on the first, and so on.

    Args:
        sockets: The listening sockets.
        rank: The rank of this process.
        master: The address of rank 0's node.
        limits: The supervisor's times.
    """
    listening = [(number, *each.getsockname()) for number, each in enumerate(sockets, 1)]
    own = sockets[rank - 1] if 0 < rank <= len(sockets) else None
    return Deputies(listening, rank, master, limits, own)


class FakeConnection(SupervisorConnection):
    """A connection without a socket.

    Attributes:
        messages: All messages that were sent, as the other end would read them.
        arrived: The messages from the other end that the next :meth:`read` returns.
        ended: Whether this end has been closed for sending.
        answers: Whether the kernel of the other end answers.
    """

    def __init__(self) -> None:
        self.open = True
        self.lost = False
        self.reset = False
        self.ended = False
        self.answers = True
        self.messages: list[RankMessage] = []
        self.arrived: list[RankMessage] = []

    def send(self, message: RankMessage) -> None:
        decoded = RankMessage.decode(message.encode())
        assert decoded == message
        if not self.ended:  # a socket that is closed for sending takes no more messages
            self.messages.append(decoded)

    def read(self) -> list[RankMessage]:
        arrived = self.arrived
        self.arrived = []
        if arrived:
            self.open = True  # as in a real connection, after a read that returns messages
        return arrived

    def end(self) -> None:
        self.ended = True

    @property
    def is_answered(self) -> bool:
        return self.answers


def context_of(rank: int, size: int, **changes: Any) -> RankContext:
    """Return the context of a rank. Unless ``changes`` say otherwise, each rank is on a separate
    node.
    """
    nodes = {number: f"node0{number + 1}" for number in range(size)}
    known: dict[str, Any] = {
        "rank": rank,
        "node": nodes[rank],
        "nodes": nodes,
        "stall_timeout": 0.0,
    }
    known |= {"step": lambda: 0, "stacks": lambda: "", "link_is_up": lambda: True}
    return RankContext(**{**known, **changes})


class Scene:
    """A failure monitor, and the connections to its peers, whose messages a test writes.

    Attributes:
        monitor: The coordinator of rank 0, or the participant of another rank.
        connections: The connections by the peer's rank.
        clock: The clock of the monitor, and of the leases with spare nodes.
    """

    def __init__(self, rank: int = 0, size: int = 3, **changes: Any) -> None:
        self.clock = changes.pop("clock", None) or Clock()
        context = context_of(rank, size, clock=self.clock, **changes)
        self.connections = {peer: FakeConnection() for peer in ([0] if rank else range(1, size))}
        self.monitor: Coordinator | Participant
        if rank:
            self.monitor = Participant(context, self.connections[0])
        else:
            self.monitor = Coordinator(context, self.connections)

    @property
    def root_cause(self) -> RootCause:
        """Why this start ends. It must be known already."""
        assert self.monitor.root_cause is not None
        return self.monitor.root_cause

    def say(self, peer: int, message: RankMessage | bytes, now: float = 0.0) -> None:
        """Let a peer send a message, or a line that may not be a message."""
        decoded = message if isinstance(message, RankMessage) else RankMessage.decode(message)
        if decoded:
            self.connections[peer].arrived.append(decoded)
        self.monitor.on_readable(self.connections[peer], now)

    def close(
        self, peer: int, now: float = 0.0, *, lost: bool = False, reset: bool = False
    ) -> None:
        """Let the connection to a peer end."""
        connection = self.connections[peer]
        connection.open = False
        connection.lost = lost
        connection.reset = reset
        self.monitor.on_readable(connection, now)

    def messages_to(self, peer: int, kind: type[M]) -> list[M]:
        """Return the messages of one kind that were sent to a peer."""
        return [each for each in self.connections[peer].messages if isinstance(each, kind)]


TAKEOVER = "t@127.0.0.1:1@00"
LEASE = 9.0


def spared(
    rank: int = 0,
    size: int = 5,
    ranks: int = 3,
    last: Starts | None = None,
    takeover: str = TAKEOVER,
    comes_back: Mapping[str, tuple[int, ...]] | None = None,
    **changes: Any,
) -> Scene:
    """Return a scene with spare nodes.

    Args:
        rank: The number of the task whose monitor it is.
        size: The number of all tasks.
        ranks: The number of ranks; the tasks from this number on wait on spare nodes.
        last: What is known of the earlier starts.
        takeover: The text that says where the deputies listen; empty if no rank can move.
        comes_back: By node, the numbers with which its tasks come back after the node was given
            up; None if they do not come back.
        changes: Fields of the context that differ from those of :func:`context_of`.
    """
    policy = RestartPolicy(3, last or Starts(), lambda: "where", lambda: True)
    clock = Clock()
    known: dict[str, Any] = {"restarts": policy, "lost_after": LEASE, "clock": clock} | changes
    nodes = changes.get("nodes") or {number: f"node0{number + 1}" for number in range(size)}
    known["spare_nodes"] = spare_nodes_of_start(
        nodes, ranks, takeover, LEASE, clock=clock, returning_numbers=comes_back
    )
    return Scene(rank, size, **known)


def fold(size: int, per_node: int, rank: int = 0) -> dict[str, Any]:
    """Return arguments of a scene with ``per_node`` tasks on each node."""
    nodes = {number: f"node0{number // per_node + 1}" for number in range(size)}
    return {"size": size, "nodes": nodes, "node": nodes[rank]}


class Clock:
    """A clock that a test sets, in place of :func:`time.monotonic`.

    Attributes:
        now: The time, in seconds.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def ping(self) -> Ping:
        """Return the ping of a rank that has just received a message from us."""
        return Ping(1, self.now, self.now)

    def pong(self) -> Pong:
        """Return the answer of a rank 0 that has just received a message from us."""
        return Pong("", self.now, self.now)
