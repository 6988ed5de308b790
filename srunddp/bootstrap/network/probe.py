"""Tests whether TCP connects an address of this node to an address of another node."""

import contextlib
import os
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from srunddp.bootstrap.network.interface import shares_subnet

WITHIN = 2.0  # seconds for one connection
BRIEFLY = 0.1  # seconds for a probe that needs no answer, because its packet only has to arrive
AT_ONCE = 64  # how many connections connect_all() tries in parallel
NO_ANSWER = "no answer"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One connection to try.

    Attributes:
        source: the address of this node from which to connect.
        host, port: where the other node listens.
        interface: the interface of this node over which to connect; empty to let the kernel's
            routes decide.
        brief: whether to wait only ``BRIEFLY``, because no answer is expected.
    """

    source: str
    host: str
    port: int
    interface: str = ""
    brief: bool = False


def connect(probe: Probe) -> str:
    """Try a connection, and return why it fails; empty if it succeeds.

    The socket is bound to the interface as well as to its address, because with the address alone
    the kernel would send over whichever interface has the route. But a socket that is bound to an
    interface treats every host as if it were on that interface's link, and a Linux node answers on
    any of its interfaces for all its addresses. So a connection could succeed that the routes do
    not allow. To avoid this, a host is tried only if it is in the subnet of ``source``, or if the
    kernel would route to it from ``source``.
    """
    if probe.interface and not (
        shares_subnet(probe.source, probe.host) or _routed_from(probe.host) == probe.source
    ):
        return "routed over another interface"
    with socket.socket(_family(probe.host), socket.SOCK_STREAM) as connection:
        connection.settimeout(BRIEFLY if probe.brief else WITHIN)
        try:
            if probe.interface:
                # Before Linux 5.7 only root may bind a socket to an interface.
                with contextlib.suppress(PermissionError):
                    connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_BINDTODEVICE, probe.interface.encode()
                    )
            connection.bind((probe.source, 0))
            connection.connect((probe.host, probe.port))
        except TimeoutError:
            return NO_ANSWER
        except OSError as error:
            if error.errno:
                return os.strerror(error.errno).lower()
            return str(error)
    return ""


def connect_all(probes: Sequence[Probe]) -> list[str]:
    """Try all these connections, ``AT_ONCE`` of them in parallel; return for each the text of
    :func:`connect`.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(connect, probes))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _routed_from(host: str) -> str:
    """Return the address from which this node would send to a host; empty without a route."""
    with (
        socket.socket(_family(host), socket.SOCK_DGRAM) as connection,
        contextlib.suppress(OSError),
    ):
        # Connecting a UDP socket looks up the route, and sends nothing. Any port would do; 9 is
        # that of the discard service.
        connection.connect((host, 9))
        return str(connection.getsockname()[0])
    return ""


@dataclass
class Prober:
    """The sockets on which a rank listens, at rank 0's request, for the probes of other ranks.

    The listeners never accept: a connection stays in its listener's queue. Before Linux 5.4 a queue
    holds 128 connections, so rank 0 must not ask for more to one listener.

    Attributes:
        listeners: the listening sockets, by address.
    """

    listeners: dict[str, socket.socket] = field(default_factory=dict)

    def listen(self, address: str) -> int:
        """Listen on an address of this node, with an empty queue.

        Returns:
            The port that the kernel chose; 0 if the address cannot be bound.
        """
        # Only closing a listener drops the connections in its queue.
        if address in self.listeners:
            self.listeners.pop(address).close()
        try:
            listener = socket.create_server(
                (address, 0), family=_family(address), backlog=socket.SOMAXCONN
            )
        except OSError:
            return 0
        self.listeners[address] = listener
        return int(listener.getsockname()[1])


def half_open(listeners: Iterable[socket.socket]) -> list[str]:
    """Return the addresses from which packets reach these sockets, but which do not get the
    answers, according to the kernel's table of connections.
    """
    import psutil

    ports = {listener.getsockname()[1] for listener in listeners}
    # In the state SYN_RECV the kernel has received a SYN and answered it, but the other end has not
    # confirmed the answer.
    waiting = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_SYN_RECV]
    return [one.raddr.ip for one in waiting if one.laddr and one.raddr and one.laddr.port in ports]
