"""Lines of JSON: how they arrive over a connection, and what is in one."""

import errno
import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

_LONGEST = 8192  # bytes


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


def receive_line(connection: socket.socket, deadline: float | None = None) -> bytes:
    """Read one line.

    Args:
        connection: The next line stays in the socket.
        deadline: A time of :func:`time.monotonic`; None for the socket's own limit.

    Raises:
        OSError: The time is over, the connection broke, or the line is longer than any of ours.
    """
    text = bytearray()
    while not text.endswith(b"\n"):
        if deadline is not None:
            # Not 0, which would make the socket non-blocking, nor less, which is a ValueError.
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(1)  # no more, as the next line stays in the socket
        if not piece or len(text) > _LONGEST:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        text += piece
    return bytes(text)


def parse(text: bytes | str) -> dict[str, Any]:
    """Return the object in a line of a file; empty where there is none."""
    with suppress(ValueError, RecursionError):
        message = json.loads(text)
        if isinstance(message, dict):
            return message
        return {}
    return {}
