"""The ranks meet: each says hello to rank 0, and all are told the store's address when the last has come.

A hello carries a token of job and step, so that a stranger's socket, or another step's rank 0, is
recognised and passed over. The line that said it stays open. Rank 0's side is in ``roster``.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict

from srunddp.bootstrap.line import Address, Hello, Meeting, receive, send
from srunddp.errors import RendezvousError, Scope

_ANSWER_WITHIN = 1.0


def find(candidates: list[Address], hello: Hello, deadline: float) -> tuple[socket.socket, Meeting]:
    """The other ranks' side: find rank 0 among the candidates, say hello, wait to be told.

    Strangers that refuse, stay mute or answer something else are passed over. Rank 0 may come later
    than this rank, so the candidates are tried again until the deadline.

    Args:
        candidates: addresses, the likeliest first; a single one where a channel told it.
        hello: what this rank says of itself.
        deadline: of :func:`time.monotonic`.

    Raises:
        RendezvousError: rank 0 was not found in time, refused, or has addresses of another family only.
    """
    reachable = [address for address in candidates if address.family == Address(hello.address, 0).family]
    if not reachable:
        raise _other_family(candidates, hello)
    patience, last = _ANSWER_WITHIN, "nothing tried"
    while True:
        for address in reachable:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise _not_found(candidates, hello, last)
            try:
                return _say_hello(address, hello, min(patience, remaining), deadline)
            except _PassedOverError as reason:
                last = f"{address} {reason}"
        patience = min(2 * patience, 8.0)
        time.sleep(min(0.05 * patience, max(0.0, deadline - time.monotonic())))


class _PassedOverError(Exception):
    """This address is not rank 0's line, or not yet."""


def _say_hello(address: Address, hello: Hello, patience: float, deadline: float) -> tuple[socket.socket, Meeting]:
    connection = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        connection.settimeout(patience)
        connection.bind((hello.address, 0))
        connection.connect((address.host, address.port))
        send(connection, {"hello": asdict(hello)})
        greeting = receive(connection, time.monotonic() + patience)
    except OSError as error:
        connection.close()
        raise _PassedOverError(os.strerror(error.errno) if error.errno else "did not answer") from None
    if "failed" in greeting:
        raise RendezvousError(str(greeting["failed"]), scope=Scope.JOB)
    if "seen" not in greeting:
        connection.close()
        raise _PassedOverError("belongs to somebody else")
    return connection, _await_others(connection, address, hello, deadline)


def _await_others(connection: socket.socket, address: Address, hello: Hello, deadline: float) -> Meeting:
    send(connection, {"here": True})
    # Rank 0 keeps the deadline, and names the ranks that are missing; it is given a moment to say so.
    try:
        answer = receive(connection, max(deadline, time.monotonic()) + _ANSWER_WITHIN)
    except OSError:
        raise RendezvousError(
            f"rank {hello.rank} on {hello.node} lost rank 0 at {address} before all ranks had met",
            expected="rank 0 to stay",
            cure="see rank 0's own message",
        ) from None
    if "failed" in answer:
        raise RendezvousError(str(answer["failed"]), scope=Scope.JOB)
    connection.settimeout(None)
    return Meeting(**answer["meeting"])


def _other_family(candidates: list[Address], hello: Hello) -> RendezvousError:
    hosts = ", ".join(dict.fromkeys(address.host for address in candidates))
    return RendezvousError(
        f"rank 0 has {hosts}, rank {hello.rank} on {hello.node} has {hello.address}",
        expected="IPv4 on all nodes or IPv6 on all",
        cure="correct ifaces.conf so that all interfaces have addresses of one family",
    )


def _not_found(candidates: list[Address], hello: Hello, last: str) -> RendezvousError:
    tried = str(candidates[0]) if len(candidates) == 1 else f"{candidates[0]} and {len(candidates) - 1} more"
    return RendezvousError(
        f"rank {hello.rank} on {hello.node} ({hello.address}) did not reach rank 0 at {tried}: {last}",
        expected="rank 0 to answer there",
        cure="see whether rank 0 started, and whether both nodes' interfaces are on one network",
    )
