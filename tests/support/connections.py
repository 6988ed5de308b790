"""Connections between supervisors: real ones, and some whose other end is a list of messages that a
test writes.
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
    """Both ends of one connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    with ours, theirs:
        yield ours, theirs


@contextmanager
def listening(*hosts: str) -> Iterator[list[socket.socket]]:
    """Sockets that accept on these addresses, as those of deputies do."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_server((host, 0))) for host in hosts]


@contextmanager
def silent(host: str) -> Iterator[socket.socket]:
    """One that does not answer, as its queue is full."""
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
    """Those that listen there: rank 1 on the first, and so on."""
    listening = [(number, *each.getsockname()) for number, each in enumerate(sockets, 1)]
    own = sockets[rank - 1] if 0 < rank <= len(sockets) else None
    return Deputies(listening, rank, master, limits, own)


class FakeConnection(SupervisorConnection):
    """One without a socket.

    Attributes:
        messages: All that was sent over it, as the other end would read it.
        ended: Whether no more is sent.
        answers: Whether the other end's kernel does.
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
        if not self.ended:  # a socket takes nothing after its end
            self.messages.append(decoded)

    def read(self) -> list[RankMessage]:
        arrived = self.arrived
        self.arrived = []
        if arrived:
            self.open = True  # as a real one is after each read that brings something
        return arrived

    def end(self) -> None:
        self.ended = True

    @property
    def is_answered(self) -> bool:
        return self.answers


def context_of(rank: int, size: int, **changes: Any) -> RankContext:
    """Of a rank, each on a node of its own, if nothing else is said."""
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
    """A failure monitor, the connections to its peers, and what they say.

    Attributes:
        monitor: Of rank 0, or of another rank; connections: by the peer's rank.
        clock: That of its leases, with spare nodes.
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
        """Why all ranks leave, which is known by now."""
        assert self.monitor.root_cause is not None
        return self.monitor.root_cause

    def say(self, peer: int, message: RankMessage | bytes, now: float = 0.0) -> None:
        """The peer sends a message, or a line that may be none."""
        decoded = message if isinstance(message, RankMessage) else RankMessage.decode(message)
        if decoded:
            self.connections[peer].arrived.append(decoded)
        self.monitor.on_readable(self.connections[peer], now)

    def close(
        self, peer: int, now: float = 0.0, *, lost: bool = False, reset: bool = False
    ) -> None:
        """The connection to a peer ends."""
        connection = self.connections[peer]
        connection.open = False
        connection.lost = lost
        connection.reset = reset
        self.monitor.on_readable(connection, now)

    def messages_to(self, peer: int, kind: type[M]) -> list[M]:
        """What the peer was sent of one kind."""
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
    """A scene with spare nodes: the numbers from ``ranks`` on are theirs; ``last``: what went
    before this start; ``comes_back``: the numbers with which a given-up node's tasks do.
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
    """For a scene: so many tasks on each node."""
    nodes = {number: f"node0{number // per_node + 1}" for number in range(size)}
    return {"size": size, "nodes": nodes, "node": nodes[rank]}


class Clock:
    """In place of :func:`time.monotonic`.

    Attributes:
        now: What it says.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def ping(self) -> Ping:
        """The ping of a rank that has heard of us just now."""
        return Ping(1, self.now, self.now)

    def pong(self) -> Pong:
        """The answer of a rank 0 that has heard of us just now."""
        return Pong("", self.now, self.now)
