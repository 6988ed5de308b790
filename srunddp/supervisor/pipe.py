"""Messages between a supervisor and its worker, over a pair of sockets made before the fork."""

from __future__ import annotations

import json
import socket
from typing import Any

from srunddp.util.json_lines import parse

LONGEST = 1 << 16


class Pipe:
    """One end; a message is one JSON object of at most ``LONGEST`` bytes, about half of what Linux takes at once."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def send(self, message: dict[str, Any]) -> None:
        """Send; a peer that is gone is noticed by whoever waits for it."""
        try:
            self.end.send(json.dumps(message).encode())
        except OSError:
            return

    def receive(self) -> dict[str, Any] | None:
        """The next message, empty where it is none; None when the other side has closed or ended."""
        try:
            data = self.end.recv(LONGEST)
        except OSError:
            return None
        return parse(data) if data else None


def pipe() -> tuple[Pipe, Pipe]:
    """The supervisor's end and the worker's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Pipe(ours), Pipe(theirs)
