"""Connections between supervisors: real ones, and some whose other end is a list of messages that a test writes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from srunddp.supervisor.coordinator import Coordinator
from srunddp.supervisor.failure_monitor import RankContext
from srunddp.supervisor.participant import Participant


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of one connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    with ours, theirs:
        yield ours, theirs


class FakeConnection:
    """As a SupervisorConnection, without a socket.

    Attributes:
        messages: all that was sent over it, as the other end would read it.
    """

    def __init__(self, rank: int) -> None:
        self.open, self.lost, self.reset, self.sent = True, False, False, True
        self.peer_address = f"10.0.0.{rank}"
        self.messages: list[dict[str, Any]] = []
        self.arrived: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.messages.append(json.loads(json.dumps(message)))

    def read(self) -> list[dict[str, Any]]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def end(self) -> None:
        self.messages.append({"end": True})


class Scene:
    """A failure monitor, the connections to its peers, and what they say.

    Attributes:
        monitor: of rank 0, or of another rank; connections: by the peer's rank.
    """

    def __init__(self, rank: int = 0, size: int = 3, **changes: Any) -> None:
        nodes = {number: f"node0{number + 1}" for number in range(size)}
        known: dict[str, Any] = {"rank": rank, "node": nodes[rank], "nodes": nodes, "stall_timeout": 0.0}
        known |= {"step": lambda: 0, "stacks": lambda: "", "link_is_up": lambda: True}
        context = RankContext(**{**known, **changes})
        self.connections = {peer: FakeConnection(peer) for peer in ([0] if rank else range(1, size))}
        self.monitor = Participant(context, self.connections[0]) if rank else Coordinator(context, self.connections)

    def say(self, peer: int, now: float = 0.0, **message: Any) -> None:
        """The peer sends a message."""
        self.connections[peer].arrived.append(message)
        self.monitor.on_readable(self.connections[peer], now)

    def close(self, peer: int, now: float = 0.0, *, lost: bool = False, reset: bool = False) -> None:
        """The connection to a peer ends."""
        connection = self.connections[peer]
        connection.open, connection.lost, connection.reset = False, lost, reset
        self.monitor.on_readable(connection, now)

    def messages_to(self, peer: int, key: str) -> list[Any]:
        """What the peer was sent of one kind."""
        return [message[key] for message in self.connections[peer].messages if key in message]
