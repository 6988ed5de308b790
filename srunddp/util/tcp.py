"""When a connection is lost: Linux's options of TCP."""

import socket

_PROBES = 6  # in the time
# Linux's TCP_THIN_LINEAR_TIMEOUTS: what is lost is sent again every second or so, and not after 1,
# 3, 7 and 15 s, or a network that loses one packet of twenty would now and then look like none.
_THIN_LINEAR_TIMEOUTS = 16


def limit_silence(connection: socket.socket, seconds: float) -> None:
    """Let a connection fail when the other end's kernel has not answered for some seconds.

    Args:
        connection: A connected TCP socket.
        seconds: The limit. Keepalive's probes are whole seconds apart.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, round(seconds / _PROBES))
    # Keepalive finds a silent peer while nothing is under way, TCP_USER_TIMEOUT one that does not
    # acknowledge what was sent. Where both are set the latter decides when to give up (tcp(7)), so
    # the seven intervals until the last probe do not make it later.
    for option, value in (
        (socket.TCP_KEEPIDLE, every),
        (socket.TCP_KEEPINTVL, every),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, round(1000 * seconds)),
        # Nagle's algorithm would hold a short message back until the one before is acknowledged.
        (socket.TCP_NODELAY, 1),
        (_THIN_LINEAR_TIMEOUTS, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
