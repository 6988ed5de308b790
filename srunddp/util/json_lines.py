"""Messages between processes: one JSON object a line."""

import errno
import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

_LONGEST = 8192


class LineBuffer:
    """Cuts what arrives in pieces into lines."""

    def __init__(self) -> None:
        self._unfinished = b""

    def __len__(self) -> int:
        """Return how many bytes have come of the line that has no end yet."""
        return len(self._unfinished)

    def feed(self, piece: bytes) -> list[bytes]:
        """Take what has arrived, and return the lines that it completes, without their ends."""
        *lines, self._unfinished = (self._unfinished + piece).split(b"\n")
        return lines


def send(line: socket.socket, message: dict[str, Any]) -> None:
    """Send one message; a broken line is noticed by whoever reads from it."""
    with suppress(OSError):
        line.sendall(json.dumps(message).encode() + b"\n")


def receive(line: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    """Read one message, before a time of :func:`time.monotonic`, or within the socket's own time
    limit.

    Raises:
        OSError: the time is over, or the connection broke.
    """
    text = bytearray()
    while not text.endswith(b"\n"):
        if deadline is not None:
            line.settimeout(max(0.001, deadline - time.monotonic()))
        # One byte at a time, so that the next message stays in the socket.
        if not (piece := line.recv(1)) or len(text) > _LONGEST:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        text += piece
    return parse(bytes(text))


def parse(text: bytes | str) -> dict[str, Any]:
    """The message in a line of text; empty for whatever is none of ours."""
    with suppress(ValueError, RecursionError):
        message = json.loads(text)
        if isinstance(message, dict):
            return message
        return {}
    return {}
