"""The line after the meeting: messages without waiting, and the difference between an end and a loss.

A process that ends closes its line, and so does the kernel of one that is killed; a node that was started again
resets it. A node that is lost does nothing: then what is sent and the kernel's probes go unanswered, for so long as
``lost_after`` says. A process that is merely stopped or busy is none: it is the other kernel that answers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import socket
import struct
from typing import Any

from srunddp.util.json_lines import parse

LOST_AFTER = 60.0
_PROBES = 6  # in this time
# Linux's TCP_THIN_LINEAR_TIMEOUTS: what is lost is sent again every second or so, and not after 1, 3, 7 and 15 s,
# or a network that loses one packet of twenty would now and then look like none.
_THIN_LINEAR_TIMEOUTS = 16
_UNSENT = 0x894B  # Linux's SIOCOUTQNSD: bytes that have not even been sent
_LONGEST = 1 << 20

_MISSING = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


class SupervisorConnection:
    """One line, between rank 0's supervisor and another's.

    Attributes:
        open: False once it has ended; lost: it ended because nothing answered any more; reset: the other end's
            kernel took it back.
    """

    def __init__(self, line: socket.socket, lost_after: float = LOST_AFTER) -> None:
        """Take a connection.

        Args:
            lost_after: seconds without an answer of the other end's kernel, after which it is lost.
        """
        self.line = line
        self.open, self.lost, self.reset = True, False, False
        self._text, self._unsent = bytearray(), bytearray()
        line.setblocking(False)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        seconds = max(1, round(lost_after / _PROBES))
        for option, value in (
            (socket.TCP_KEEPIDLE, seconds),
            (socket.TCP_KEEPINTVL, seconds),
            (socket.TCP_KEEPCNT, _PROBES),
            (socket.TCP_USER_TIMEOUT, round(1000 * lost_after)),
            (socket.TCP_NODELAY, 1),
            (_THIN_LINEAR_TIMEOUTS, 1),
        ):
            line.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: dict[str, Any]) -> None:
        """Send without waiting: what the kernel does not take now goes with the next message."""
        self._unsent += json.dumps(message).encode() + b"\n"
        try:
            sent = self.line.send(self._unsent, socket.MSG_DONTWAIT)
            self._unsent = self._unsent[sent:]
        except OSError as error:
            self._note(error)  # the kernel says it once, and afterwards that the line has ended

    def end(self) -> None:
        """Say no more."""
        with contextlib.suppress(OSError):
            self.line.shutdown(socket.SHUT_WR)

    @property
    def sent(self) -> bool:
        """Whether all is on its way: what a network that is away for some seconds holds back gets lost if we leave."""
        with contextlib.suppress(OSError):
            waiting = struct.unpack("=i", fcntl.ioctl(self.line, _UNSENT, bytes(4)))[0]
            return not (self.open and (waiting or self._unsent))
        return True

    def read(self) -> list[dict[str, Any]]:
        """The messages that are there; afterwards ``open`` says whether the line still is."""
        try:
            piece = self.line.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            self._note(error)
            piece = b""
        self.open = bool(piece) and len(self._text) < _LONGEST
        self._text += piece
        *lines, rest = self._text.split(b"\n")
        self._text = rest
        return [parse(bytes(line)) for line in lines]

    def _note(self, error: OSError) -> None:
        self.lost = self.lost or error.errno in _MISSING
        self.reset = self.reset or error.errno == errno.ECONNRESET
