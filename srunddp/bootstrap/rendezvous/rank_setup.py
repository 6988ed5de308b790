"""What a rank knows and holds before it meets the others: options, its interface, its sockets.

``run`` makes it under a supervisor, and ``srunddp.init()`` without one: :func:`prepare`, then
:func:`bind`, and under a supervisor :func:`listen_as_deputy`.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, replace

from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network import ifaces_conf, interface
from srunddp.bootstrap.network.ifaces_entry import Entries, entry_for
from srunddp.bootstrap.network.interface import SelectedInterface
from srunddp.bootstrap.rendezvous import discovery, protocol
from srunddp.bootstrap.rendezvous.protocol import BoundSockets
from srunddp.errors import ConfigError, Scope

DEFAULT_TIMEOUT = 300.0
"""The default of ``--timeout``: seconds that the ranks wait for each other."""


@dataclass(frozen=True, kw_only=True)
class SpareNodeTerms:
    """What a restart with spare nodes goes by, as the start before has left it.

    Attributes:
        rank: of this process in the start that follows; the launcher's variables still have the
            rank from before a node was replaced. A spare node's task has a number behind all ranks.
        lost_after: seconds without an answer after which a node is lost.
        within: seconds until the ranks that do not come are replaced.
        expected: the tasks that are known to be alive, and will come.
        not_before: time of :func:`time.monotonic` before which a worker of a lost node may be
            running.
        quorum: how many must come before a new rank 0 may go on; fewer mean that this side is the
            one that is cut off.
        takes_over: whether this process is rank 0 from now on, because the one before is gone.
        lost: the node of the rank 0 before and the cause, if that node was lost.
    """

    rank: int
    lost_after: float
    within: float
    expected: tuple[int, ...]
    not_before: float
    quorum: int
    takes_over: bool = False
    lost: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Rejoin:
    """How the ranks of a run meet again after a restart, without the launcher's help.

    Attributes:
        generation: the number of restarts so far.
        published: by rank 0, as over PMI; channel, run: of the first rendezvous.
        descriptor: of the socket on which rank 0 listens already; None on the others.
        spare_nodes: how lost ranks are replaced; None in a run without spare nodes, where all have
            to come.
    """

    generation: int
    published: str = field(repr=False)
    channel: str
    run: str
    descriptor: int | None = None
    spare_nodes: SpareNodeTerms | None = None


@dataclass(frozen=True)
class RendezvousOptions:
    """What the command line says, and the start before; its defaults are those of
    ``srunddp.init()``.
    """

    backend: str = "auto"
    ifaces: str | None = None
    timeout: float = DEFAULT_TIMEOUT
    ports: range | None = None
    max_restarts: int = 0
    rejoin: Rejoin | None = None

    @property
    def generation(self) -> int:
        """The number of restarts so far."""
        return self.rejoin.generation if self.rejoin else 0


@dataclass(frozen=True)
class RankSetup:
    """All that a rank knows of itself before it meets the others.

    Attributes:
        deputy: the socket on which this rank listens for the time when rank 0 is gone, where it
            does.
        held: rank 0's listening sockets; published: what it publishes over PMI or MPI, its token,
            its address and the secret. Both are None on the others.
    """

    options: RendezvousOptions
    environment: Environment
    entries: Entries
    interface: SelectedInterface
    held: BoundSockets | None = None
    published: str | None = field(default=None, repr=False)
    deputy: socket.socket | None = None


def prepare(options: RendezvousOptions, environment: Environment) -> RankSetup:
    """Choose and check the interface.

    Args:
        options: what the command line says.
        environment: this rank's.

    Raises:
        ConfigError: ifaces.conf or the interface is wrong.
    """
    loaded = ifaces_conf.load(options.ifaces, os.environ)
    chosen = interface.select_interface(
        loaded.entries, environment, os.environ, interface.list_interfaces()
    )
    return RankSetup(options, environment, loaded.entries, chosen)


def bind(prepared: RankSetup) -> RankSetup:
    """Bind the sockets of the rendezvous and of the store on rank 0's interface; the other ranks
    bind none.

    Raises:
        SrunddpError: no port is free, or the others would not find this address.
    """
    environment = prepared.environment
    forced = prepared.options.ports
    if environment.rank != 0:
        return prepared
    alone = environment.world_size == 1
    rejoin = prepared.options.rejoin
    entry = entry_for(prepared.entries, environment.node, or_default=alone)
    # In all these cases no other rank looks up a name to find this one.
    if not (
        environment.world_size == 1
        or environment.discovery.publishes
        or environment.one_node
        or rejoin
    ):
        discovery.check_reachable(
            environment, prepared.interface, entry, interface.list_interfaces()
        )
    # The start before has left it listening across execve: others may be in its queue already.
    if rejoin and rejoin.descriptor is not None:
        listening = socket.socket(fileno=rejoin.descriptor)
    else:
        if alone:
            ports = [0]
        else:
            ports = discovery.rendezvous_ports(environment, entry, forced)
        listening = protocol.listen(prepared.interface.address, ports)
    # Any for the store, too, unless a firewall leaves only some.
    held = protocol.bind_store(prepared.interface.address, listening, forced or entry.ports or [0])
    published = protocol.encode_advertisement(
        discovery.token(environment), [held.rendezvous_address]
    )
    # After a restart the others have been told address and secret by the verdict, and not these.
    return replace(prepared, held=held, published=rejoin.published if rejoin else published)


def listen_as_deputy(prepared: RankSetup) -> RankSetup:
    """Listen for the time when rank 0 is gone, if this rank is one that may act for it and a port
    is free.
    """
    environment = prepared.environment
    # The first rank of each node, and rank 1 as well: on rank 0's own node another has to be there
    # if rank 0 alone is killed.
    if environment.rank == 0 or (environment.local_rank and environment.rank > 1):
        return prepared
    entry = entry_for(prepared.entries, environment.node, or_default=True)
    allowed = prepared.options.ports or entry.ports
    # The first two are for a rank 0, of this run or of another, and its store.
    # From the last one down, as a rank 0 takes them from the first up.
    ports = [0] if allowed is None else [*allowed][:1:-1]
    if environment.is_spare and not ports:
        raise ConfigError(
            f"{len(allowed or ())} ports with --spare-nodes",
            expected="3 or more",
            hint="name more with --port or `ports:` in ifaces.conf",
            where=entry.where,
            scope=Scope.JOB,
        )
    if allowed and environment.local_rank:
        return prepared
    if ports:
        listening = protocol.listen_where_possible([prepared.interface.address], ports)
    else:
        listening = []
    return replace(prepared, deputy=listening[0]) if listening else prepared


def listen_again(prepared: RankSetup) -> tuple[int, str]:
    """Listen for the rendezvous of the next start; for rank 0.

    Returns:
        The socket's descriptor, and what tells the other ranks where it is.

    Raises:
        RendezvousError: no port is free.
    """
    entry = entry_for(prepared.entries, prepared.environment.node, or_default=True)
    listening = protocol.listen(
        prepared.interface.address, list(prepared.options.ports or entry.ports or [0])
    )
    address = protocol.Address(*listening.getsockname()[:2])
    # The descriptor has to outlive this object until execve.
    return listening.detach(), protocol.encode_advertisement(
        discovery.token(prepared.environment), [address]
    )
