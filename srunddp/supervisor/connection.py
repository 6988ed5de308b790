"""The connection between two supervisors after the rendezvous: messages without waiting, its end
and its loss.

A process that ends closes its connection, and so does the kernel of one that is killed; a node that
was started again resets it. A node that is lost does nothing: then what is sent and the kernel's
probes go unanswered, for so long as ``lost_after`` says. A process that is merely stopped or busy
is none: it is the other kernel that answers.
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

_UNSENT = 0x894B  # Linux's SIOCOUTQNSD: bytes that have not even been sent
_LONGEST = 1 << 20
_NO_ANSWER = (
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.EHOSTDOWN,
)


class SupervisorConnection:
    """A connection between rank 0's supervisor and another's.

    Attributes:
        open: False once it has ended; lost: it ended because nothing answered any more; reset: the
            other end's kernel took it back.
    """

    def __init__(self, connection: socket.socket, lost_after: float = LOST_AFTER) -> None:
        """Take a TCP connection; it is lost after so many seconds without an answer of the other
        end's kernel.
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
        """The descriptor, to wait for messages."""
        return self._socket.fileno()

    def send(self, message: RankMessage) -> None:
        """Send without waiting: what the kernel does not take now goes with the next message."""
        self._unsent += message.encode()
        try:
            sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
            self._unsent = self._unsent[sent:]
        except OSError as error:
            # The kernel says it once, and afterwards that the connection has ended.
            self._note(error)

    def end(self) -> None:
        """Send no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    @property
    def sent(self) -> bool:
        """Whether all is on its way: what a network that is away for some seconds holds back gets
        lost if we leave.
        """
        with contextlib.suppress(OSError):
            waiting = struct.unpack("=i", fcntl.ioctl(self._socket, _UNSENT, bytes(4)))[0]
            return not (self.open and (waiting or self._unsent))
        return True

    def read(self) -> list[RankMessage]:
        """The messages that are there; afterwards ``open`` says whether more may come.

        Lines that are no messages are left out.
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
