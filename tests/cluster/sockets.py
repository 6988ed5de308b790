"""Reads the TCP sockets of a node from the output of ``ss``."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

STATES = {"ESTAB": "established", "LISTEN": "listening"}
LIST_COMMAND = ("ss", "--tcp", "--all", "--numeric", "--processes", "--no-header")

_OWNER = re.compile(r'\("(?P<name>[^"]*)",pid=(?P<pid>\d+),fd=\d+\)')


@dataclass(frozen=True)
class Owner:
    """A process that holds a socket open."""

    name: str
    pid: int


@dataclass(frozen=True)
class Socket:
    """A TCP socket that listens or is connected.

    Attributes:
        state: ``established`` or ``listening``.
        local_address, local_port: The socket's own end.
        peer_address, peer_port: The other end; the port of a listening socket is 0.
        owners: The processes that hold the socket open.
    """

    state: str
    local_address: str
    local_port: int
    peer_address: str
    peer_port: int
    owners: tuple[Owner, ...]


def parse(output: str) -> list[Socket]:
    """Return the established and listening sockets in the output of `LIST_COMMAND`."""
    return list(_parse_lines(output.splitlines()))


def _parse_lines(lines: Iterable[str]) -> Iterable[Socket]:
    for line in lines:
        state, _, _, local, peer, *rest = line.split(maxsplit=5)
        if state in STATES:
            owners = [
                Owner(found["name"], int(found["pid"])) for found in _OWNER.finditer(" ".join(rest))
            ]
            # One process may hold the same socket under several descriptors.
            unique = tuple(dict.fromkeys(owners))
            yield Socket(STATES[state], *_endpoint(local), *_endpoint(peer), unique)


def _endpoint(text: str) -> tuple[str, int]:
    """Split texts such as "10.0.0.1:80", "[fd88::11]:80", "[fe80::1%eth0]:80" and "0.0.0.0:*" into
    address and port. The port ``*`` becomes 0.
    """
    address, _, port = text.rpartition(":")
    # A socket for IPv6 and IPv4 shows the addresses of IPv4 peers as IPv6 addresses.
    return address.strip("[]").removeprefix("::ffff:"), 0 if port == "*" else int(port)
