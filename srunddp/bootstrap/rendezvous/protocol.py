"""Addresses, rank 0's two held sockets, what rank 0 publishes of itself, and how a rank's own
process ends its rendezvous.

Rank 0 binds first and tells then: both of its sockets, for the rendezvous and for the store, are
held from the moment their address is known to anyone, so no port is looked for, closed and taken
again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from srunddp.bootstrap.rendezvous import auth
from srunddp.bootstrap.rendezvous.messages import AbortReason, RendezvousInfo
from srunddp.errors import PeerError, RendezvousError

_FAILED = "failed"
_LONGEST = 700  # PMI-1's lines have at most 1024 bytes
_MOST_ADDRESSES = 8
_BACKLOG = 65535  # at most, as far as net.core.somaxconn allows it
# Seconds for which a rank tells rank 0 that it has failed, and rank 0 those that come later.
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
        """AF_INET or AF_INET6."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


@dataclass(frozen=True, kw_only=True)
class BoundSockets:
    """Rank 0's two listening sockets and where they listen; the store's is ``MASTER_ADDR`` and
    ``MASTER_PORT``.
    """

    rendezvous: socket.socket
    store: socket.socket
    rendezvous_address: Address
    store_address: Address


@dataclass(frozen=True, kw_only=True)
class RendezvousResult:
    """What a meeting leaves on one rank.

    Attributes:
        connections: on rank 0 that to each other rank, on the others that to rank 0.
        nodes: on rank 0 the node of each rank, on the others their own and rank 0's.
    """

    meeting: RendezvousInfo
    connections: dict[int, socket.socket]
    nodes: dict[int, str]


def bind_store(host: str, rendezvous: socket.socket, ports: Iterable[int]) -> BoundSockets:
    """Bind the store's socket to the first port that is free, on this address alone, beside that of
    the rendezvous.

    Args:
        host: the numeric address of rank 0's interface; rendezvous: listens there.
        ports: to try in turn; 0 lets the kernel choose.

    Raises:
        RendezvousError: none of the ports is free.
    """
    store = listen(host, list(ports))
    return BoundSockets(
        rendezvous=rendezvous,
        store=store,
        rendezvous_address=Address(*rendezvous.getsockname()[:2]),
        store_address=Address(*store.getsockname()[:2]),
    )


def listen(host: str, ports: list[int]) -> socket.socket:
    """Listen on the first of these ports that is free, on this address alone.

    Args:
        host: a numeric address of this node.
        ports: to try in turn; 0 lets the kernel choose.

    Raises:
        RendezvousError: none of them is.
    """
    for port in ports:
        try:
            # Python sets SO_REUSEADDR here. So connections of an earlier start in TIME_WAIT do not
            # block the port, but somebody who listens there does.
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


def listen_where_possible(hosts: Iterable[str], ports: list[int]) -> list[socket.socket]:
    """Listen on each of these addresses where one of the ports is free.

    Args:
        hosts: numeric addresses of this node; one that cannot be bound is left out.
        ports: to try in turn on each of them.
    """
    listening = []
    for host in hosts:
        with contextlib.suppress(RendezvousError):
            listening.append(listen(host, ports))
    return listening


class CancelToken:
    """Ends this rank's meeting from another thread, such as the one that sees its worker die.

    On rank 0 all present ranks are told; another rank tells rank 0. Then the meeting raises
    PeerError.

    Attributes:
        failure: what :meth:`fail` was told.
    """

    def __init__(self) -> None:
        # A socket and not a threading.Event: selectors wait for it together with the connections.
        self._read_end, self._write_end = socket.socketpair()
        self.failure: AbortReason | None = None

    def fail(self, text: str, code: int) -> None:
        """End the meeting, now or as soon as it begins, by this rank's failure; only the first call
        counts.

        Args:
            text: why it has failed, in the words of its error.
            code: its exit code.
        """
        if not self.failure:
            # Before the byte: whoever wakes up by it finds the failure here.
            self.failure = AbortReason(text, code)
            with contextlib.suppress(OSError):  # the meeting is over
                self._write_end.send(b"!")

    def fileno(self) -> int:
        """Return a descriptor that becomes readable, and stays so, when this rank has failed."""
        return self._read_end.fileno()

    def wait(self, deadline: float, connection: socket.socket | None = None) -> bool:
        """Wait for something to read from a connection.

        Args:
            deadline: a time of :func:`time.monotonic`.
            connection: None to wait for nothing but this rank's failure.

        Returns:
            Whether there is; False when this rank has failed or the time is over.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            if connection:
                selector.register(connection, selectors.EVENT_READ)
            ready = selector.select(max(0.0, deadline - time.monotonic()))
        # Also when both are ready: this rank's own failure comes first.
        return any(key.fileobj is connection for key, _ in ready) and not self.failure

    def close(self) -> None:
        """Give the descriptors back."""
        self._read_end.close()
        self._write_end.close()


@dataclass(frozen=True)
class Advertisement:
    """The token of this run, where rank 0 listens, and the secret that the channel
    carries.
    """

    token: str
    addresses: list[Address]
    secret: str = field(repr=False)


def encode_advertisement(token: str, addresses: Sequence[Address]) -> str:
    """Return the text that announces rank 0, with a new secret.

    Args:
        token: the run's name.
        addresses: where it listens, the likeliest first; only the first few are told.
    """
    where = ",".join(map(str, addresses[:_MOST_ADDRESSES]))
    return f"{token}@{where}@{os.urandom(auth.SECRET_BYTES).hex()}"


def encode_abort(failure: AbortReason) -> str:
    """Return the text that announces rank 0's failure."""
    # No token reads `failed`. A value of PMI-1 must not have blanks, which quote() replaces.
    return f"{_FAILED}@{failure.exit_code}@{quote(failure.text)[:_LONGEST]}"


def decode_advertisement(text: str) -> Advertisement:
    """Read what rank 0 announced.

    Raises:
        PeerError: that it has failed.
        RendezvousError: this is no announcement.
    """
    # For example `4711.0.0@10.0.0.1:21234,[fd00::1]:21234@` and 64 hexadecimal digits, or
    # `failed@1@rank%200%20on%20node01%20failed`.
    first, _, rest = text.partition("@")
    where, _, last = rest.partition("@")
    if first == _FAILED and where.isdecimal():
        raise PeerError(unquote(last), code=int(where))
    # From the right: a host of IPv6 has colons of its own.
    parts = [part.rpartition(":") for part in where.split(",")]
    try:
        # A text that was cut on its way must not become a short key.
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
