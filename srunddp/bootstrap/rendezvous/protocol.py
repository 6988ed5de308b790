"""Defines addresses, rank 0's listening sockets, the text that rank 0 publishes, and the token by
which another thread ends a rank's rendezvous.

Rank 0 binds its sockets, for the rendezvous and for the store, before it tells anybody their
addresses, and keeps them open. So no other process can take a port in between.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import field
from urllib.parse import quote, unquote

from srunddp.bootstrap.rendezvous import auth
from srunddp.bootstrap.rendezvous.messages import AbortReason, RendezvousInfo
from srunddp.errors import PeerError, RendezvousError
from srunddp.util.quick_dataclass import dataclass

_FAILED = "failed"
_LONGEST = 700  # PMI-1's lines have at most 1024 bytes
_MOST_ADDRESSES = 8
_BACKLOG = 65535  # the kernel lowers this to net.core.somaxconn
# Seconds for which a failed rank tries to tell rank 0 of its failure, and for which rank 0 tells
# the ranks that come after a failure.
TELL_FOR = 5.0


@dataclass(frozen=True)
class Address:
    """A numeric address and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """The family of the host's address, ``AF_INET`` or ``AF_INET6``."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


@dataclass(frozen=True, kw_only=True)
class BoundSockets:
    """Rank 0's two listening sockets and their addresses: for the rendezvous, and for the store of
    the ranks.

    Attributes:
        rendezvous: the socket to which the other ranks say hello.
        store: the socket of the store of the ranks.
        rendezvous_address: where ``rendezvous`` listens.
        store_address: where ``store`` listens.
        ports: the ports on which the ranks' store and the agent store may listen; 0 lets the kernel
            choose.
    """

    rendezvous: socket.socket
    store: socket.socket
    rendezvous_address: Address
    store_address: Address
    ports: tuple[int, ...] = (0,)

    def listen_for_agent_store(self) -> socket.socket | None:
        """Listen for the agent store, which is for processes that are no ranks. Call this after the
        socket of the rendezvous has been closed.

        Returns:
            The listening socket; None if no port is free.
        """
        # The port that the rendezvous has used is free again. Try it last, because ranks of other
        # jobs may look for their rank 0 there.
        used = self.rendezvous_address.port
        ports = sorted(self.ports, key=lambda port: port == used)
        try:
            return listen(self.store_address.host, ports)
        except RendezvousError:
            return None

    def port_for_probes(self, agent_store: socket.socket | None) -> int:
        """Return the port to which nodes connect later, to test whether they reach each other. A
        firewall lets this port through, and on rank 0's node a connection starts no agent store.

        Args:
            agent_store: the result of :meth:`listen_for_agent_store`.
        """
        used = self.rendezvous_address.port
        if port_of(agent_store) != used:
            return used
        # The agent store has the port of the rendezvous, because all other allowed ports are in use
        # on this node, perhaps by strangers. So use the port of the ranks' store, which accepts
        # connections that send nothing.
        return self.store_address.port


@dataclass(frozen=True, kw_only=True)
class RendezvousResult:
    """The result of the rendezvous on one rank.

    Attributes:
        meeting: what rank 0 has told this rank.
        connections: by rank: on rank 0 the connection to each other rank, on another rank the one
            to rank 0.
        nodes: by rank: on rank 0 the node of each rank, on another rank its own and rank 0's.
        addresses: on rank 0 the address of each rank's interface, by rank.
        port: on rank 0 the port by which the nodes test whether they reach each other, see
            :meth:`BoundSockets.port_for_probes`.
        agent_store: on rank 0 the socket that listens at ``MASTER_PORT``; None if there is no agent
            store.
    """

    meeting: RendezvousInfo
    connections: dict[int, socket.socket]
    nodes: dict[int, str]
    addresses: dict[int, str] = field(default_factory=dict)
    port: int = 0
    agent_store: socket.socket | None = None


def bind_store(host: str, rendezvous: socket.socket, ports: Iterable[int]) -> BoundSockets:
    """Listen for the store on the first port that is free, and return this socket together with
    that of the rendezvous.

    Args:
        host: the numeric address of rank 0's interface, the only one on which to listen.
        rendezvous: the socket that already listens there.
        ports: to try in turn; 0 lets the kernel choose.

    Raises:
        RendezvousError: none of the ports is free, or the address cannot be bound for the store.
    """
    allowed = tuple(ports)
    store = listen(host, list(allowed))
    return BoundSockets(
        rendezvous=rendezvous,
        store=store,
        rendezvous_address=Address(*rendezvous.getsockname()[:2]),
        store_address=Address(*store.getsockname()[:2]),
        ports=allowed,
    )


def listen(host: str, ports: list[int]) -> socket.socket:
    """Listen on the first of these ports that is free, on this address only.

    Args:
        host: a numeric address of this node.
        ports: to try in turn; 0 lets the kernel choose.

    Raises:
        RendezvousError: none of the ports is free, or the address cannot be bound.
    """
    for port in ports:
        try:
            # create_server() sets SO_REUSEADDR. So connections of an earlier start in TIME_WAIT do
            # not block the port, but a process that listens on it does.
            return socket.create_server(
                (host, port), family=Address(host, port).family, backlog=_BACKLOG
            )
        except OSError as error:
            # Any other error, such as EADDRNOTAVAIL, is about the address: the next port would not
            # help.
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(
                    f"{Address(host, port)} cannot be bound: {os.strerror(error.errno or 0)}",
                    expected="an address of this node",
                    hint="correct this node's interface in ifaces.conf",
                ) from None
    if len(ports) == 1:
        shown = f"port {ports[0]}"
    else:
        shown = f"all {len(ports)} ports from {min(ports)} to {max(ports)}"
    raise RendezvousError(
        f"{shown} on {host} taken by others",
        expected="a free port",
        hint=(
            "name other ports with --port or `ports:` in ifaces.conf; with --channel env, another"
            " MASTER_PORT"
        ),
    )


def port_of(listening: socket.socket | None) -> int | None:
    """Return the port of a listening socket; None if there is no socket."""
    if listening is None:
        return None
    port: int = listening.getsockname()[1]
    return port


def listen_where_possible(hosts: Iterable[str], ports: list[int]) -> list[socket.socket]:
    """Listen on each of these addresses, on the first port that is free there.

    Args:
        hosts: numeric addresses of this node; one that cannot be bound, or has no free port, is
            left out.
        ports: to try in turn on each address.
    """
    listening = []
    for host in hosts:
        with contextlib.suppress(RendezvousError):
            listening.append(listen(host, ports))
    return listening


class CancelToken:
    """Lets another thread end this rank's rendezvous, for example when this rank's worker has
    ended.

    Rank 0 then tells all ranks that have come; any other rank tells rank 0. After that the
    rendezvous raises PeerError.

    Attributes:
        failure: the failure that was given to :meth:`fail`; None before.
    """

    def __init__(self) -> None:
        # A socket and not a threading.Event: selectors wait for it together with the connections.
        self._read_end, self._write_end = socket.socketpair()
        self.failure: AbortReason | None = None

    def fail(self, text: str, code: int) -> None:
        """End the rendezvous, now or as soon as it begins, because this rank has failed. Only the
        first call has an effect.

        Args:
            text: the text of this rank's error.
            code: this rank's exit code.
        """
        if not self.failure:
            # Set the failure before sending the byte, because a thread that the byte wakes up reads
            # the failure.
            self.failure = AbortReason(text, code)
            with contextlib.suppress(OSError):  # the rendezvous is over
                self._write_end.send(b"!")

    def fileno(self) -> int:
        """Return a descriptor that becomes readable, and stays so, when this rank has failed."""
        return self._read_end.fileno()

    def wait(self, deadline: float, connection: socket.socket | None = None) -> bool:
        """Wait until a connection has something to read, this rank fails, or the deadline comes.

        Args:
            deadline: a time of :func:`time.monotonic`.
            connection: None to wait only for a failure or the deadline.

        Returns:
            Whether the connection has something to read; always False after a failure of this rank.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            if connection:
                selector.register(connection, selectors.EVENT_READ)
            ready = selector.select(max(0.0, deadline - time.monotonic()))
        # If both are ready, only this rank's failure counts.
        return any(key.fileobj is connection for key, _ in ready) and not self.failure

    def close(self) -> None:
        """Close the socket pair; call this when the rendezvous is over."""
        self._read_end.close()
        self._write_end.close()


@dataclass(frozen=True)
class Advertisement:
    """The text that rank 0 publishes, decoded: the run's token, addresses, a hexadecimal secret."""

    token: str
    addresses: list[Address]
    secret: str = field(repr=False)


def encode_advertisement(token: str, addresses: Sequence[Address], secret: str = "") -> str:
    """Return the text by which rank 0 publishes where it listens.

    Args:
        token: the run's token.
        addresses: where rank 0 listens, the likeliest first; the text has only the first
            ``_MOST_ADDRESSES``.
        secret: in hexadecimal; empty for a new one.
    """
    where = ",".join(map(str, addresses[:_MOST_ADDRESSES]))
    return f"{token}@{where}@{secret or os.urandom(auth.SECRET_BYTES).hex()}"


def encode_abort(failure: AbortReason) -> str:
    """Return the text by which rank 0 publishes that it has failed."""
    # The text begins with `failed` where an advertisement has the token; no token is `failed`.
    # quote() replaces spaces, which a value of PMI-1 must not contain.
    return f"{_FAILED}@{failure.exit_code}@{quote(failure.text)[:_LONGEST]}"


def decode_advertisement(text: str) -> Advertisement:
    """Read the text that rank 0 published.

    Raises:
        PeerError: it says that rank 0 has failed.
        RendezvousError: it is not a text of :func:`encode_advertisement` or :func:`encode_abort`.
    """
    # For example `4711.0.0@10.0.0.1:21234,[fd00::1]:21234@` and 64 hexadecimal digits, or
    # `failed@1@rank%200%20on%20node01%20failed`.
    first, _, rest = text.partition("@")
    where, _, last = rest.partition("@")
    if first == _FAILED and where.isdecimal():
        raise PeerError(unquote(last), code=int(where))
    # Split at the last colon: an IPv6 address has colons itself.
    parts = [part.rpartition(":") for part in where.split(",")]
    try:
        # A text that was cut on its way must not give a short key.
        if len(bytes.fromhex(last)) != auth.SECRET_BYTES:
            raise ValueError
        return Advertisement(
            first, [Address(host.strip("[]"), int(port)) for host, _, port in parts], last
        )
    except ValueError:
        raise RendezvousError(
            f"rank 0 published {text[:80]!r}",
            expected="its address",
            hint="start all ranks with one srunddp",
        ) from None
