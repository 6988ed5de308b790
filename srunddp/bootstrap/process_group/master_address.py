"""Decides whether a script that joins a process group means the agent store, by its address.

A process that joins at ``MASTER_ADDR`` and ``MASTER_PORT`` of the run connects to the agent store,
because of ``TORCHELASTIC_USE_AGENT_STORE``. A process that joins at another address has to serve a
store there itself, so this variable is hidden from torch meanwhile.
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
    """A rank's place in a process group, as torch's environment variables describe it."""

    rank: str
    world_size: str
    host: str
    port: str

    def is_at(self, other: Place) -> bool:
        """Whether two places have the same store."""
        return (self.host, self.port) == (other.host, other.port)

    def with_address_of(self, other: Place) -> Place:
        """Return the same place, with the host of the other place if both are one address."""
        # A script may set MASTER_ADDR to the name of rank 0's node. Only the equal port is a reason
        # to look the name up, which may take long.
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
        run: ``TORCHELASTIC_RUN_ID``. A launcher that the script starts gives its ranks another one.
    """

    host: str
    port: str
    run: str

    def is_meant(self, asked: Place) -> bool:
        """Tell whether the store of a place is the agent store."""
        return asked.port == self.port and has_address(asked.host, self.host)


def asked_for(url: str, variables: Mapping[str, str]) -> Place:
    """Return the place that a url of ``init_process_group`` means, together with the environment
    variables.
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
    """Yield what torch's handler yields. If the script means another store, hide the variable of
    the agent store from torch meanwhile.

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
    """Hide the variable of the agent store from torch, unless another launcher has set it: that
    launcher serves its own store.
    """
    is_from_us = os.environ.get(RUN_ID) == master.run
    value = os.environ.pop(USE_AGENT_STORE, None) if is_from_us else None
    try:
        yield
    finally:
        if value is not None:
            os.environ[USE_AGENT_STORE] = value
