"""Whether TCP goes from an address of this node to an address of another, found by trying."""

import contextlib
import os
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from srunddp.bootstrap.network.interface import shares_subnet

WITHIN = 2.0  # seconds for one connection
BRIEFLY = 0.1  # where no answer is expected, and the packet has only to arrive
AT_ONCE = 64
NO_ANSWER = "no answer"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One connection to try.

    Attributes:
        source: the address of this node that it comes from.
        host, port: where the other node listens.
        interface: the interface of this node that it is bound to; empty for the one that the kernel
            routes it over.
        brief: no answer is expected.
    """

    source: str
    host: str
    port: int
    interface: str = ""
    brief: bool = False


def connect(probe: Probe) -> str:
    """Try a connection; return why it fails, empty where it is made.

    An interface is bound as well as its address: with the address alone the kernel sends over the
    interface that has the route. Bound to an interface, the kernel sends to any address as to a
    neighbour's, and Linux answers for all addresses of a node on all its interfaces. So only
    addresses in its own subnet count, and what is routed from it.
    """
    if probe.interface and not (
        shares_subnet(probe.source, probe.host) or _routed_from(probe.host) == probe.source
    ):
        return "routed over another interface"
    with socket.socket(_family(probe.host), socket.SOCK_STREAM) as connection:
        connection.settimeout(BRIEFLY if probe.brief else WITHIN)
        try:
            if probe.interface:
                # Kernels before 5.7 let root alone do it.
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
    """Try them at once; for each why it fails, as :func:`connect` says it."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(connect, probes))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _routed_from(host: str) -> str:
    """Return the address that this node would send from. Connecting a UDP socket looks up the
    route, and sends nothing.
    """
    with (
        socket.socket(_family(host), socket.SOCK_DGRAM) as connection,
        contextlib.suppress(OSError),
    ):
        # Any port would do; 9 is that of discard.
        connection.connect((host, 9))
        return str(connection.getsockname()[0])
    return ""


@dataclass
class Prober:
    """A rank that listens on addresses of its node, and connects to those of other nodes, as rank 0
    asks it to.

    Connections stay in the listener's queue, which holds 128 before Linux 5.4: nobody is asked to
    make more to one.

    Attributes:
        listeners: by address.
    """

    listeners: dict[str, socket.socket] = field(default_factory=dict)

    def listen(self, address: str) -> int:
        """Listen with an empty queue; the port that the kernel chose, 0 where the address cannot be
        bound.
        """
        # Only closing drops what waits in the queue of a listener.
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
    """Return the addresses whose connections to these sockets came through, but not the answer, by
    what the kernel knows.
    """
    import psutil

    ports = {listener.getsockname()[1] for listener in listeners}
    # In this state the kernel has got a SYN and sent its answer, and the other end has not
    # confirmed it.
    waiting = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_SYN_RECV]
    return [one.raddr.ip for one in waiting if one.laddr and one.raddr and one.laddr.port in ports]
