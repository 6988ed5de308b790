"""TCP options of Linux that decide when a connection counts as lost."""

import socket
import struct

_PROBES = 6  # keepalive probes within the time limit
# Linux's option TCP_THIN_LINEAR_TIMEOUTS, with which lost data is sent again about every second,
# and not after 1, 3, 7 and 15 s. Without it, a peer behind a network that loses one packet in
# twenty could sometimes count as lost.
_THIN_LINEAR_TIMEOUTS = 16

# Linux's struct tcp_info up to the field tcpi_unacked. For a listening socket, this field is the
# number of connections that wait to be accepted.
_TCP_INFO = struct.Struct("=24xI")


def waiting_at(listening: socket.socket) -> int:
    """Return how many connections wait at a listening socket until they are accepted, including
    those that the other side has already closed.
    """
    info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    (waiting,) = _TCP_INFO.unpack(info)
    return int(waiting)


def limit_silence(connection: socket.socket, seconds: float) -> None:
    """Make a connection fail if the other end's kernel does not answer for some seconds.

    Args:
        connection: A connected TCP socket.
        seconds: The limit. Keepalive probes are sent at intervals of whole seconds.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, round(seconds / _PROBES))
    # Keepalive detects a silent peer on an idle connection, and TCP_USER_TIMEOUT detects a peer
    # that does not acknowledge sent data. If both are set, TCP_USER_TIMEOUT decides when the kernel
    # closes the connection (tcp(7)), so that keepalive's intervals do not extend the limit.
    for option, value in (
        (socket.TCP_KEEPIDLE, every),
        (socket.TCP_KEEPINTVL, every),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, round(1000 * seconds)),
        # Nagle's algorithm would hold back a short message until the previous one is acknowledged.
        (socket.TCP_NODELAY, 1),
        (_THIN_LINEAR_TIMEOUTS, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
