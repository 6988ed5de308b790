"""The line after the meeting: messages without waiting, and the difference between an end and a loss.

A process that ends closes its line, and so does the kernel of one that is killed. A node that is lost closes
nothing: then the kernel's probes go unanswered, also where the process at the other end is merely stopped or busy,
for it is the other kernel that answers them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import struct
from typing import Any

from srunddp.bootstrap.line import parse

LOST_AFTER = 12.0
CHECK_EVERY = 4.0
SILENT_AFTER = LOST_AFTER - CHECK_EVERY
_PROBE_AFTER = 4
_PROBE_EVERY = 2
_LONGEST = 1 << 20

_MISSING = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_LAST_ACK_RECEIVED = struct.Struct("=I")  # of Linux's struct tcp_info, in milliseconds
_LAST_ACK_OFFSET = 56


class Wire:
    """One line, between rank 0's supervisor and another's.

    Attributes:
        open: False once it has ended; lost: it ended because nothing answered any more.
    """

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.open, self.lost = True, False
        self._text = bytearray()
        self._was_silent = False
        line.setblocking(False)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _PROBE_AFTER),
            (socket.TCP_KEEPINTVL, _PROBE_EVERY),
            (socket.TCP_USER_TIMEOUT, int(1000 * LOST_AFTER)),
            (socket.TCP_NODELAY, 1),
        ):
            line.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: dict[str, Any]) -> None:
        """Send without waiting; a line that is broken or full is noticed by what does not come from it."""
        with contextlib.suppress(OSError):
            self.line.send(json.dumps(message).encode() + b"\n", socket.MSG_DONTWAIT)

    def read(self) -> list[dict[str, Any]]:
        """The messages that are there; afterwards ``open`` says whether the line still is."""
        try:
            piece = self.line.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            self.lost = error.errno in _MISSING
            piece = b""
        self.open = bool(piece) and len(self._text) < _LONGEST
        self._text += piece
        *lines, rest = self._text.split(b"\n")
        self._text = rest
        return [parse(bytes(line)) for line in lines]

    def silence(self) -> float:
        """Seconds since the other end's kernel last answered."""
        try:
            told = self.line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_OFFSET + 4)
        except OSError:
            return 0.0
        return float(_LAST_ACK_RECEIVED.unpack_from(told, _LAST_ACK_OFFSET)[0]) / 1000

    def check(self) -> bool:
        """Whether it is lost, to be asked every ``CHECK_EVERY`` seconds: silent now, and when it was asked before.

        The kernel's own limit begins anew with each message that is sent into the void. Asked twice, since a machine
        that was paused finds everybody silent at first.
        """
        before, self._was_silent = self._was_silent, self.open and self.silence() > SILENT_AFTER
        self.lost = self.lost or (before and self._was_silent)
        return self.lost
