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
from dataclasses import dataclass
from typing import Any

from srunddp.bootstrap.line import parse

CHECK_EVERY = 3.0
LOST_AFTER = 9.0
_SILENT_AFTER = LOST_AFTER - CHECK_EVERY
_PROBE_AFTER = 4
_PROBE_EVERY = 2
_KERNEL_GIVES_UP = 30.0  # later than we do: where only one direction is lost, the verdict still has to get through
# Linux's TCP_THIN_LINEAR_TIMEOUTS: what is lost is sent again every second or so, and not after 1, 3, 7 and 15 s,
# or a network that loses one packet of twenty would now and then look like none.
_THIN_LINEAR_TIMEOUTS = 16
_LONGEST = 1 << 20

_MISSING = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
# Of Linux's struct tcp_info: packets not acknowledged, milliseconds since the last acknowledgement came, bytes
# acknowledged so far, and bytes not even sent, as where a firewall of our own stops them.
_TCP_INFO = struct.Struct("=24xI28xI60xQ16xI")


@dataclass(frozen=True)
class _Kernel:
    """What this kernel knows of the other end's."""

    waits: bool = False  # for an acknowledgement of what we sent
    silent_for: float = 0.0
    acknowledged: int = 0


class Wire:
    """One line, between rank 0's supervisor and another's.

    Attributes:
        open: False once it has ended; lost: it ended because nothing answered any more; reset: the other end's
            kernel took it back.
    """

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.open, self.lost, self.reset = True, False, False
        self._text, self._unsent = bytearray(), bytearray()
        self._last = _Kernel()
        self._stuck = 0
        line.setblocking(False)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _PROBE_AFTER),
            (socket.TCP_KEEPINTVL, _PROBE_EVERY),
            (socket.TCP_KEEPCNT, int(_KERNEL_GIVES_UP / _PROBE_EVERY)),
            (socket.TCP_USER_TIMEOUT, int(1000 * _KERNEL_GIVES_UP)),
            (socket.TCP_NODELAY, 1),
            (_THIN_LINEAR_TIMEOUTS, 1),
        ):
            line.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: dict[str, Any]) -> None:
        """Send without waiting: what the kernel does not take now goes with the next message."""
        self._unsent += json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            sent = self.line.send(self._unsent, socket.MSG_DONTWAIT)
            self._unsent = self._unsent[sent:]

    def read(self) -> list[dict[str, Any]]:
        """The messages that are there; afterwards ``open`` says whether the line still is."""
        try:
            piece = self.line.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            self.lost, self.reset = error.errno in _MISSING, error.errno == errno.ECONNRESET
            piece = b""
        self.open = bool(piece) and len(self._text) < _LONGEST
        self._text += piece
        *lines, rest = self._text.split(b"\n")
        self._text = rest
        return [parse(bytes(line)) for line in lines]

    @property
    def silent(self) -> bool:
        """Whether the other end's kernel has not answered for longer than it takes to ask it."""
        return self.open and (self._stuck > 0 or self._kernel().silent_for > _SILENT_AFTER)

    def _kernel(self) -> _Kernel:
        try:
            told = _TCP_INFO.unpack(self.line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        except (OSError, struct.error):
            return _Kernel()
        return _Kernel(bool(told[0] or told[3]), told[1] / 1000, told[2])

    def check(self) -> bool:
        """Whether it is lost, to be asked every ``CHECK_EVERY`` seconds.

        The kernel's own limits would do where both directions are lost. Where only ours is, what comes in still
        counts as an answer for them; then it is what we have sent that is never acknowledged. Never after one look:
        a machine that was paused finds everybody silent at first.
        """
        last, self._last = self._last, self._kernel()
        stuck = last.waits and self._last.waits and last.acknowledged == self._last.acknowledged
        self._stuck = self._stuck + 1 if stuck else 0
        silent = min(last.silent_for + CHECK_EVERY, self._last.silent_for) > LOST_AFTER
        self.lost = self.lost or (self.open and (silent or self._stuck * CHECK_EVERY >= LOST_AFTER))
        return self.lost
