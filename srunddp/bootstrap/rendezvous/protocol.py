"""What goes over a connection: addresses, rank 0's two held sockets, and messages of one line of
JSON each; among them the failure of one rank before all have met, how its own process learns of it,
and how it is put into words.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from srunddp.bootstrap.rendezvous import auth
from srunddp.errors import PeerError, RendezvousError, Scope, SrunddpError
from srunddp.supervisor.worker_messages import WorkerMessage

_FAILED = "failed"
_LONGEST = 700  # PMI-1's lines have at most 1024 bytes
_MOST_ADDRESSES = 8
_LONGEST_REASON = 2000
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


@dataclass(frozen=True)
class Hello:
    """What a rank says of itself: who it is, where, which process, and on which CPUs it may run.

    Attributes:
        rank, world_size: with spare nodes their tasks count, too, with the numbers behind all
            ranks.
        local_world_size: as the launcher told it; 0 where it did not. version: srunddp's.
        deputy_port: on which it listens for the time when rank 0 is gone; 0 where it does not.
    """

    token: str
    rank: int
    world_size: int
    local_rank: int
    node: str
    address: str
    pid: int
    cpus: str = ""
    local_world_size: int = 0
    version: str = ""
    deputy_port: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


# The rank, the address and the port of each that may act for rank 0 when it is gone.
Deputies = tuple[tuple[int, str, int], ...]


@dataclass(frozen=True, kw_only=True)
class RendezvousInfo(WorkerMessage, kind="world"):
    """What every rank knows after the rendezvous; the defaults are those of a process that meets no
    others.

    Attributes:
        master_addr, master_port: of the store.
        nnodes, node_rank, local_world_size: torch's terms, counted from the hellos.
        run: the job and step, for ``TORCHELASTIC_RUN_ID``; channel: over which the ranks met.
        master_node: rank 0's.
        sharers: ranks of this node with this rank's affinity mask, itself included.
        deputies: rank, address and port of those that may act for rank 0 when it is gone, the first
            one first.
        takeover: with spare nodes, what rank 0 would publish of them then; vacant: numbers of tasks
            that are gone.
    """

    master_addr: str
    master_port: int
    nnodes: int = 1
    node_rank: int = 0
    local_world_size: int = 1
    run: str
    channel: str = "none"
    master_node: str
    sharers: int = 1
    deputies: tuple[tuple[int, str, int], ...] = ()  # not by its name: see util/messages.py
    takeover: str = field(default="", repr=False)
    vacant: tuple[int, ...] = ()


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
    """Rank 0's two sockets: that of the store is bound to the first port that is free, on this
    address alone.

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

    Raises:
        RendezvousError: none of them is.
    """
    for port in ports:
        try:
            return socket.create_server(
                (host, port), family=Address(host, port).family, backlog=_BACKLOG
            )
        except OSError as error:
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
    """Listen on each of these addresses where one of the ports is free."""
    listening = []
    for host in hosts:
        with contextlib.suppress(RendezvousError):
            listening.append(listen(host, ports))
    return listening


@dataclass(frozen=True)
class AbortReason:
    """Why a rank failed, as its own message says it, and its exit code."""

    text: str
    code: int

    def message(self) -> dict[str, Any]:
        """What goes over the connection."""
        return {"failed": self.text[:_LONGEST_REASON], "code": self.code}

    def of(self, rank: int, node: str, scope: Scope = Scope.JOB) -> PeerError:
        """The error that all ranks raise."""
        return PeerError(f"rank {rank} on {node} failed: {self.text}", code=self.code, scope=scope)


def failure_in(message: Mapping[str, Any]) -> AbortReason | None:
    """The failure that a rank's message tells of; None where it tells of none."""
    if "failed" not in message:
        return None
    code = message.get("code")
    return AbortReason(
        str(message["failed"])[:_LONGEST_REASON],
        code if type(code) is int and 0 < code < 256 else 1,
    )


def error_from_message(message: Mapping[str, Any]) -> SrunddpError:
    """The error that rank 0's message ``failed`` stands for: a rank's own failure, or that they did
    not meet.
    """
    if failure := failure_in(message) if "code" in message else None:
        return PeerError(failure.text, code=failure.code)
    return RendezvousError(str(message["failed"])[:_LONGEST_REASON], scope=Scope.JOB)


def message_of(error: SrunddpError) -> dict[str, Any]:
    """What rank 0 tells the others when it raises this error."""
    text = str(error)
    if isinstance(error, PeerError):
        return AbortReason(text, error.exit_code).message()
    return {"failed": text}


class CancelToken:
    """Ends this rank's meeting from another thread, such as the one that sees its worker die.

    On rank 0 all present ranks are told; another rank tells rank 0. Then the meeting raises
    PeerError.

    Attributes:
        failure: what :meth:`fail` was told.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = socket.socketpair()
        self.failure: AbortReason | None = None

    def fail(self, text: str, code: int) -> None:
        """End the meeting, now or as soon as it begins, by this rank's failure; only the first call
        counts.
        """
        if not self.failure:
            self.failure = AbortReason(text, code)
            with contextlib.suppress(OSError):  # the meeting is over
                self._write_end.send(b"!")

    def fileno(self) -> int:
        """A descriptor that becomes readable, and stays so, when it has failed."""
        return self._read_end.fileno()

    def wait(self, deadline: float, connection: socket.socket | None = None) -> bool:
        """Wait, until a time of :func:`time.monotonic`, for something to read from the connection.

        Returns:
            Whether there is; False when this rank has failed or the time is over.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            if connection:
                selector.register(connection, selectors.EVENT_READ)
            ready = selector.select(max(0.0, deadline - time.monotonic()))
        return any(key.fileobj is connection for key, _ in ready) and not self.failure

    def close(self) -> None:
        """Give the descriptors back."""
        self._read_end.close()
        self._write_end.close()


@dataclass(frozen=True)
class Advertisement:
    """The token of this run, where rank 0 listens, and the secret that the launcher's channel
    carries.
    """

    token: str
    addresses: list[Address]
    secret: str = field(repr=False)


def encode_advertisement(token: str, addresses: Sequence[Address]) -> str:
    """The text that announces rank 0 at the first few of these addresses, with a new secret."""
    where = ",".join(map(str, addresses[:_MOST_ADDRESSES]))
    return f"{token}@{where}@{os.urandom(auth.SECRET_BYTES).hex()}"


def encode_abort(failure: AbortReason) -> str:
    """The text that announces rank 0's failure."""
    return f"{_FAILED}@{failure.code}@{quote(failure.text)[:_LONGEST]}"


def decode_advertisement(text: str) -> Advertisement:
    """Read what rank 0 announced.

    Raises:
        PeerError: that it has failed.
        RendezvousError: this is no announcement.
    """
    first, _, rest = text.partition("@")
    where, _, last = rest.partition("@")
    if first == _FAILED and where.isdecimal():
        raise PeerError(unquote(last), code=int(where))
    parts = [part.rpartition(":") for part in where.split(",")]
    try:
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
