"""What rank 0 tells over PMI or MPI: token, addresses, secret, or that it has failed; without blanks, as PMI wants."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from srunddp.bootstrap.rendezvous import auth
from srunddp.bootstrap.rendezvous.abort import Failure
from srunddp.bootstrap.rendezvous.protocol import Address
from srunddp.errors import PeerError, RendezvousError

_FAILED = "failed"
_LONGEST = 700  # PMI-1's lines have at most 1024 bytes
_MOST_ADDRESSES = 8


@dataclass(frozen=True)
class Announcement:
    """The token of this run, where rank 0's line is, and the secret that the launcher's channel carries."""

    token: str
    addresses: tuple[Address, ...]
    secret: str = field(repr=False)


def make(token: str, addresses: Sequence[Address]) -> str:
    """The text that announces rank 0 at the first few of these addresses, with a new secret."""
    where = ",".join(map(str, addresses[:_MOST_ADDRESSES]))
    return f"{token}@{where}@{os.urandom(auth.SECRET_BYTES).hex()}"


def make_failed(failure: Failure) -> str:
    """The text that announces rank 0's failure."""
    return f"{_FAILED}@{failure.code}@{quote(failure.text)[:_LONGEST]}"


def read(text: str) -> Announcement:
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
        return Announcement(first, tuple(Address(host.strip("[]"), int(port)) for host, _, port in parts), last)
    except ValueError:
        raise RendezvousError(
            f"rank 0 told {text[:80]!r}", expected="where its line is", cure="start all ranks with one srunddp"
        ) from None
