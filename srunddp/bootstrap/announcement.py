"""What rank 0 tells over PMI or MPI: token, address and secret, or that it has failed; without blanks, as PMI wants."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from srunddp.bootstrap import trust
from srunddp.bootstrap.failure import Failure
from srunddp.bootstrap.line import Address
from srunddp.errors import PeerError, RendezvousError

_FAILED = "failed"
_LONGEST = 700  # PMI-1's lines have at most 1024 bytes


@dataclass(frozen=True)
class Announcement:
    """The token of this run, where rank 0's line is, and the secret that the launcher's channel carries."""

    token: str
    address: Address
    secret: str = field(repr=False)


def make(token: str, address: Address) -> str:
    """The text that announces rank 0, with a new secret."""
    return f"{token}@{address}@{os.urandom(trust.SECRET_BYTES).hex()}"


def make_failed(failure: Failure) -> str:
    """The text that announces rank 0's failure."""
    from urllib.parse import quote

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
        from urllib.parse import unquote

        raise PeerError(unquote(last), code=int(where))
    host, _, port = where.rpartition(":")
    try:
        if len(bytes.fromhex(last)) != trust.SECRET_BYTES:
            raise ValueError
        return Announcement(first, Address(host.strip("[]"), int(port)), last)
    except ValueError:
        raise RendezvousError(
            f"rank 0 told {text[:80]!r}", expected="where its line is", cure="start all ranks with one srunddp"
        ) from None
