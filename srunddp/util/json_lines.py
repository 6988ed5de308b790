"""Lines of JSON: receive them over a connection, and parse one."""

import errno
import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

_LONGEST = 8192  # bytes of a line that receive_line() accepts


class LineBuffer:
    """Collects pieces of a byte stream and cuts them into lines."""

    def __init__(self) -> None:
        self._unfinished = b""

    def __len__(self) -> int:
        """Return how many bytes of the unfinished line have arrived."""
        return len(self._unfinished)

    def feed(self, piece: bytes) -> list[bytes]:
        """Add a piece; return the lines that it completes, without line ends."""
        *lines, self._unfinished = (self._unfinished + piece).split(b"\n")
        return lines


def receive_line(connection: socket.socket, deadline: float | None = None) -> bytes:
    """Read one line from a socket.

    Args:
        connection: The socket; bytes after the line stay in it.
        deadline: A time of :func:`time.monotonic`; None to keep the socket's own timeout.

    Raises:
        OSError: The deadline has passed, the connection broke or was closed before the end of the
            line, or the line has more than 8 KiB.
    """
    text = bytearray()
    while not text.endswith(b"\n"):
        if deadline is not None:
            # Set at least a millisecond, because 0 would make the socket non-blocking, and a
            # negative timeout is a ValueError.
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(1)  # a single byte, because the next line must stay in the socket
        if not piece or len(text) > _LONGEST:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        text += piece
    return bytes(text)


def parse(text: bytes | str) -> dict[str, Any]:
    """Return the JSON object in a line; empty if the line is not a JSON object."""
    with suppress(ValueError, RecursionError):
        message = json.loads(text)
        if isinstance(message, dict):
            return message
        return {}
    return {}
