"""Decides, by the address at which a script joins a process group, whether it means the agent
store.

If a process joins at the ``MASTER_ADDR`` and ``MASTER_PORT`` of the run, torch connects it to the
agent store, because ``TORCHELASTIC_USE_AGENT_STORE`` is set. If a process joins at another address,
torch has to serve a store there itself, so the variable is hidden from torch during the call.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from srunddp.util.quick_dataclass import dataclass

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
RUN_ID = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class Place:
    """A rank's place in a process group, as torch's environment variables describe it.

    Attributes:
        rank: the text of ``RANK``; empty if it is not known.
        world_size: the text of ``WORLD_SIZE``; empty if it is not known.
        host: the host of the group's store, ``MASTER_ADDR``.
        port: the port of the group's store, ``MASTER_PORT``.
    """

    rank: str
    world_size: str
    host: str
    port: str

    def is_at(self, other: Place) -> bool:
        """Whether two places have the same host and port, and so the same store."""
        return (self.host, self.port) == (other.host, other.port)

    def with_address_of(self, other: Place) -> Place:
        """Return this place with the host as the other place writes it, if both have the same port
        and this place's host resolves to the other's; else this place unchanged.
        """
        # A script may set MASTER_ADDR to the name of rank 0's node. To look up this name may take
        # long, so compare the ports first.
        if self.port != other.port or not has_address(self.host, other.host):
            return self
        return replace(self, host=other.host)


def has_address(name: str, address: str) -> bool:
    """Tell whether a host's name or address resolves to a numeric address."""
    if name == address:
        return True
    try:
        found = socket.getaddrinfo(name, None)
    except OSError:
        return False
    return any(where[0] == address for *_, where in found)


@dataclass(frozen=True)
class MasterAddress:
    """The variables that tell a rank where its agent store is.

    Attributes:
        host, port: ``MASTER_ADDR`` and ``MASTER_PORT``.
        run: ``TORCHELASTIC_RUN_ID``. If the script starts another launcher, the ranks of that
            launcher have another value.
    """

    host: str
    port: str
    run: str

    def is_meant(self, asked: Place) -> bool:
        """Tell whether the store of a place is the agent store."""
        return asked.port == self.port and has_address(asked.host, self.host)


def asked_for(url: str, variables: Mapping[str, str]) -> Place:
    """Return the place that ``init_process_group`` joins.

    Args:
        url: its ``init_method``, beginning with ``env://`` or ``tcp://``.
        variables: the environment variables, which give what the url does not.
    """
    from urllib.parse import parse_qs, urlsplit

    parts = urlsplit(url)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    host = variables.get("MASTER_ADDR", "")
    port = variables.get("MASTER_PORT", "")
    if parts.scheme == "tcp":
        host = parts.hostname or ""
        port = str(parts.port)
    return Place(
        rank=query.get("rank", variables.get("RANK", "")),
        world_size=query.get("world_size", variables.get("WORLD_SIZE", "")),
        host=host,
        port=port,
    )


def join(
    master: MasterAddress, asked: Place, rendezvous: Iterator[Any]
) -> Iterator[tuple[Store, int, int]]:
    """Yield what torch's handler yields. If the script means another store than the agent store,
    hide ``TORCHELASTIC_USE_AGENT_STORE`` from torch until the handler has made its store.

    Args:
        master: the address of the agent store.
        asked: the place that the script asks for.
        rendezvous: torch's handler for that place.
    """
    if not master.is_meant(asked):
        with _without_agent_store(master):
            found = next(rendezvous)
        yield found
    yield from rendezvous


@contextlib.contextmanager
def _without_agent_store(master: MasterAddress) -> Iterator[None]:
    """Remove ``TORCHELASTIC_USE_AGENT_STORE`` from the environment inside the ``with`` block. Keep
    it if another launcher has set it, because that launcher serves an agent store itself.
    """
    is_from_us = os.environ.get(RUN_ID) == master.run
    value = os.environ.pop(USE_AGENT_STORE, None) if is_from_us else None
    try:
        yield
    finally:
        if value is not None:
            os.environ[USE_AGENT_STORE] = value
