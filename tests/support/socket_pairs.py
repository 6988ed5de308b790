"""Real TCP connections between a guard and a test that plays the other supervisors."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from srunddp.supervisor.participant import RankContext


class Listener(Protocol):
    def lines(self) -> Any: ...
    def on_line(self, line: socket.socket, now: float) -> bool: ...


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of one connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    with ours, theirs:
        yield ours, theirs


@contextmanager
def pairs(ranks: range) -> Iterator[tuple[dict[int, socket.socket], dict[int, socket.socket]]]:
    """A connection to each rank: our ends, and theirs."""
    with ExitStack() as stack:
        both = {rank: stack.enter_context(pair()) for rank in ranks}
        yield {rank: ends[0] for rank, ends in both.items()}, {rank: ends[1] for rank, ends in both.items()}


def post(rank: int = 0, size: int = 3, **changes: Any) -> RankContext:
    """What the guard of a rank knows, where each rank has a node of its own."""
    nodes = {number: f"node0{number + 1}" for number in range(size)}
    known = {
        "rank": rank,
        "node": nodes[rank],
        "nodes": nodes,
        "stall_timeout": 0.0,
        "step": lambda: 0,
        "stacks": lambda: "",
        "link_is_up": lambda: True,
    }
    return RankContext(**{**known, **changes})


def tell(line: socket.socket, **message: object) -> None:
    line.sendall(json.dumps(message).encode() + b"\n")


def hear(listener: Listener, now: float = 0.0, until: Callable[[], object] | None = None) -> None:
    """Let it read, as a supervisor does, until the condition holds; without one, until nothing is left to read."""
    open_lines = list(listener.lines())
    end = time.monotonic() + 20.0
    while open_lines and not (until and until()):
        readable = select.select(open_lines, [], [], 1.0 if until else 0.0)[0]
        if not readable and not until:
            return
        assert time.monotonic() < end, "it never happened"
        for line in readable:
            if not listener.on_line(line, now):
                open_lines.remove(line)


def told(line: socket.socket) -> list[dict[str, Any]]:
    """The messages that have come over a line so far."""
    text = b""
    while select.select([line], [], [], 0.05 if not text else 0.0)[0]:
        if not (piece := line.recv(1 << 16)):
            break
        text += piece
    return [dict(json.loads(part)) for part in text.splitlines()]
