"""The connection between two supervisors after the rendezvous. Sending and reading never block, and
a lost node can be told apart from a process that has ended.

When a process ends or is killed, its kernel closes the connection. A node that has rebooted resets
the connection. A lost node acknowledges neither data nor keepalive probes, and after ``lost_after``
seconds the connection counts as lost. A process that is stopped or busy does not count as lost,
because its node's kernel goes on answering.
"""

import contextlib
import errno
import fcntl
import socket
import struct

from srunddp.supervisor.limits import LOST_AFTER
from srunddp.supervisor.messages import RankMessage
from srunddp.util.json_lines import LineBuffer
from srunddp.util.tcp import limit_silence

_UNACKNOWLEDGED = 0x5411  # Linux's SIOCOUTQ: bytes that the other kernel has not acknowledged yet
_LONGEST = 1 << 20
_NO_ANSWER = (
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.EHOSTDOWN,
)


class SupervisorConnection:
    """A connection between rank 0's supervisor and another rank's.

    Attributes:
        open: False once the connection has ended.
        lost: Whether it ended because the other node no longer answered.
        reset: Whether it ended because the other node's kernel reset it, as after a reboot.
    """

    def __init__(self, connection: socket.socket, lost_after: float = LOST_AFTER) -> None:
        """Take over a connected TCP socket.

        Args:
            connection: The socket; it becomes non-blocking.
            lost_after: Seconds without an answer from the other node's kernel after which the
                connection is lost.
        """
        self.open = True
        self.lost = False
        self.reset = False
        self._socket = connection
        self._received = LineBuffer()
        self._unsent = bytearray()
        connection.setblocking(False)
        limit_silence(connection, lost_after)

    def fileno(self) -> int:
        """Return the socket's descriptor, so that a selector can wait for messages."""
        return self._socket.fileno()

    def send(self, message: RankMessage) -> None:
        """Send a message without blocking. Bytes that the kernel does not accept now are kept, and
        sent with the next message.
        """
        self._unsent += message.encode()
        try:
            sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
            self._unsent = self._unsent[sent:]
        except OSError as error:
            # The kernel reports the reason only once, so note it here. :meth:`read` reports the
            # end.
            self._note(error)

    def end(self) -> None:
        """Close the sending side. Messages can still be read."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    @property
    def is_answered(self) -> bool:
        """Whether the other node's kernel has acknowledged everything that was sent. A kernel does
        so even if the process that owns the connection is stopped or busy. False if this cannot be
        read.
        """
        with contextlib.suppress(OSError):
            waiting = struct.unpack("=i", fcntl.ioctl(self._socket, _UNACKNOWLEDGED, bytes(4)))[0]
            return not (waiting or self._unsent)
        return False

    def read(self) -> list[RankMessage]:
        """Return the messages that have arrived. Lines that are not messages are dropped.

        Afterwards :attr:`open` is False if the connection has ended, or if a line is too long to be
        a message.
        """
        try:
            piece = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            self._note(error)
            piece = b""
        self.open = bool(piece) and len(self._received) < _LONGEST
        messages = [RankMessage.decode(line) for line in self._received.feed(piece)]
        return [message for message in messages if message is not None]

    def _note(self, error: OSError) -> None:
        self.lost = self.lost or error.errno in _NO_ANSWER
        self.reset = self.reset or error.errno == errno.ECONNRESET
