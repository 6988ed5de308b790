"""Finds out whether this node reaches others by TCP, when rank 0 asks for it after a failure.

Any answer of the other node's kernel counts, even a refusal of the connection, so no process there
has to listen on the port. The port is one that rank 0 has used, most often for the rendezvous,
because a firewall that has let the ranks meet lets this port through. Nothing here blocks, so the
supervisor can read messages and send pings meanwhile.
"""

import contextlib
import errno
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.messages import ProbeResult, ProbeTarget, ProbeWanted

_REFUSED = (errno.ECONNREFUSED, errno.ECONNRESET)
# Linux's IP_RECVERR and IPV6_RECVERR. If the option is set, the kernel also tells which host has
# sent an ICMP error.
_RECEIVE_ERRORS: Mapping[int, tuple[int, int]] = {
    socket.AF_INET: (socket.IPPROTO_IP, 11),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 25),
}
# struct sock_extended_err, 16 bytes, followed by the address of the sender of the ICMP error: in a
# struct sockaddr_in from its 4th byte on, in a struct sockaddr_in6 from its 8th.
_SENDER: Mapping[int, slice] = {socket.AF_INET: slice(20, 24), socket.AF_INET6: slice(24, 40)}
_LONGEST_ERROR = 512


@dataclass
class _Peer:
    """A node that has not answered yet.

    Attributes:
        target: The node's lowest rank, with the address and the port to connect to.
        attempts: The sockets of the attempts to connect that may still be answered.
        was_tried: Whether at least one attempt could be made.
    """

    target: ProbeTarget
    attempts: list[socket.socket] = field(default_factory=list)
    was_tried: bool = False


class NodeProbe:
    """One round of attempts to reach other nodes, as rank 0 has requested it.

    A node counts as missed if none of several attempts was answered within ``probe_within``. The
    kernel makes the attempts and notes the answers, so no node counts as missed only because this
    supervisor gets no CPU time for a while.
    """

    def __init__(self, wanted: ProbeWanted, now: float, limits: Limits = DEFAULT_LIMITS) -> None:
        """Make the first attempts.

        Args:
            wanted: The request of rank 0.
            now: The time.
            limits: How long the attempts may take, and when they are repeated.
        """
        self._wanted = wanted
        self._limits = limits
        self._began = now
        self._missing = {target[0]: _Peer(target) for target in wanted.targets}
        self._reached = list[int]()
        self._starts = [now + after for after in limits.probe_attempts]
        self.look(now)

    def look(self, now: float) -> ProbeResult | None:
        """Note which nodes have answered so far, and make the attempts that are due.

        Returns:
            The result, when all nodes have answered or the time is over; None before.
        """
        self._note_answers()
        is_over = now >= self._began + self._limits.probe_within
        if self._missing and not is_over:
            if self._starts and now >= self._starts[0]:
                self._starts = [start for start in self._starts if start > now]
                self._attempt()
            return None
        missed = sorted(rank for rank, peer in self._missing.items() if peer.was_tried)
        self.close()
        return ProbeResult(tuple(sorted(self._reached)), tuple(missed), self._wanted.number)

    def close(self) -> None:
        """Close the attempts that have not been answered."""
        for peer in self._missing.values():
            _close(peer)

    def _attempt(self) -> None:
        for peer in self._missing.values():
            connection = self._connect(peer)
            if connection is not None:
                peer.was_tried = True
                peer.attempts.append(connection)

    def _connect(self, peer: _Peer) -> socket.socket | None:
        """Begin to connect to a node; return None if this node cannot even try."""
        _, host, port = peer.target
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            connection = socket.socket(family)
        except OSError:  # too many open files: there may be fewer at the next attempt
            return None
        connection.setblocking(False)
        try:
            connection.setsockopt(*_RECEIVE_ERRORS[family], 1)
            connection.bind((self._wanted.source, 0))
        except OSError:  # the interface has lost its address
            connection.close()
            return None
        # _note_answers() finds the result. An error that the kernel reports at once, such as
        # ENETUNREACH, does not count as an answer, and the next attempt may get one.
        connection.connect_ex((host, port))
        return connection

    def _note_answers(self) -> None:
        poll = select.poll()
        tried_by = dict[int, tuple[_Peer, socket.socket]]()
        for peer in self._missing.values():
            for connection in peer.attempts:
                tried_by[connection.fileno()] = (peer, connection)
                poll.register(connection, select.POLLOUT)
        for descriptor, _ in poll.poll(0):
            peer, connection = tried_by[descriptor]
            if connection.fileno() < 0:
                continue  # closed just now, because another attempt has been answered
            if _is_answered(connection, peer.target[1]):
                self._reached.append(peer.target[0])
                _close(peer)
                del self._missing[peer.target[0]]
            else:
                connection.close()
                peer.attempts.remove(connection)


def _close(peer: _Peer) -> None:
    for connection in peer.attempts:
        connection.close()
    peer.attempts.clear()


def _is_answered(connection: socket.socket, host: str) -> bool:
    """Return whether the other node's kernel has answered an attempt that is over."""
    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error in _REFUSED:
        return True
    if error == 0:
        # If connect() has failed at once, the socket is ready too, and SO_ERROR is 0: ask for its
        # peer.
        with contextlib.suppress(OSError):
            connection.getpeername()
            return True
        return False
    # A firewall on the other node may answer with an ICMP error such as EHOSTUNREACH. But this
    # node's kernel, or a router, does so too if the other node is not there.
    return _sender_of_error(connection) == socket.inet_pton(connection.family, host)


def _sender_of_error(connection: socket.socket) -> bytes:
    """Return the address of the host whose ICMP error has ended an attempt; empty if there is
    none.
    """
    try:
        _, messages, _, _ = connection.recvmsg(1, _LONGEST_ERROR, socket.MSG_ERRQUEUE)
    except OSError:
        return b""
    for level, kind, data in messages:
        if (level, kind) == _RECEIVE_ERRORS[connection.family]:
            return data[_SENDER[connection.family]]
    return b""
