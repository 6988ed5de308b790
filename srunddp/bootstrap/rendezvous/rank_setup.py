"""Prepares a rank for the rendezvous: its options, its network interface, its listening sockets.

:func:`prepare` makes the setup, and :func:`bind` adds rank 0's sockets. In a run with supervisors,
``run`` calls these two and :func:`listen_as_deputy`. Without a supervisor, ``srunddp.init()`` calls
only these two.
"""

from __future__ import annotations

import os
import socket
from dataclasses import field, replace

from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network import ifaces_conf, interface
from srunddp.bootstrap.network.ifaces_entry import Entries, entry_for
from srunddp.bootstrap.network.interface import SelectedInterface
from srunddp.bootstrap.rendezvous import discovery, protocol
from srunddp.bootstrap.rendezvous.protocol import BoundSockets
from srunddp.errors import ConfigError, Scope
from srunddp.util.quick_dataclass import dataclass

DEFAULT_TIMEOUT = 300.0
"""The default of ``--timeout``: seconds that the ranks wait for each other."""


@dataclass(frozen=True, kw_only=True)
class SpareNodeTerms:
    """The facts that a start of a run with spare nodes passes on to the next start.

    Attributes:
        rank: the rank of this process in the next start; the launcher's variables still have the
            rank from before a node was replaced or left out. A task of a spare node has a number
            after all ranks.
        ranks_per_node: how many ranks each node has, as Slurm writes counts; empty if as in the
            first start.
        layout: how often the ranks have been renumbered in this run.
        lost_after: seconds without an answer after which a node is lost.
        within: seconds after which the ranks that have not come are replaced.
        expected: the tasks that are known to be alive, and will come.
        not_before: the time of :func:`time.monotonic` until which a worker of a lost node may still
            be running.
        quorum: how many tasks must come before a new rank 0 may go on; if fewer come, this side of
            a split network is cut off.
        takes_over: whether this process becomes rank 0, because the previous rank 0 is gone.
        number: the number of this process in the previous start, if it takes over; else 0.
        lost: the node of the previous rank 0 and the cause, if the node was lost; else None.
        returns_at: where this task comes back if its node is given up, as in
            :class:`RendezvousInfo`.
        left: the nodes that the previous start has given up: they take ranks in the next one only
            if there are too few others.
        is_awaited: whether this task, whose node was given up, was told to come back, so that the
            next start waits for it.
    """

    rank: int
    ranks_per_node: str = ""
    layout: int = 0
    lost_after: float
    within: float
    expected: tuple[int, ...]
    not_before: float
    quorum: int
    takes_over: bool = False
    number: int = 0
    lost: tuple[str, str] | None = None
    returns_at: str = field(default="", repr=False)
    left: tuple[str, ...] = ()
    is_awaited: bool = False


@dataclass(frozen=True, kw_only=True)
class Rejoin:
    """How the ranks of a run find each other after a restart, without the launcher's help.

    Attributes:
        generation: the number of restarts so far.
        published: the text that says where rank 0 listens, as rank 0 would publish it over PMI.
        channel: the way over which the ranks found rank 0 in the first rendezvous.
        run: the run's token in the first rendezvous.
        descriptor: the descriptor of the socket on which rank 0 already listens; None on the other
            ranks.
        spare_nodes: how lost ranks are replaced or left out; None in a run in which all ranks have
            to come, each to its own node.
    """

    generation: int
    published: str = field(repr=False)
    channel: str
    run: str
    descriptor: int | None = None
    spare_nodes: SpareNodeTerms | None = None


@dataclass(frozen=True)
class RendezvousOptions:
    """The options of the rendezvous, from the command line and the previous start; the defaults are
    those of ``srunddp.init()``.

    Attributes:
        backend: the backend of ``srunddp.init()`` if the script does not choose one.
        ifaces: the file that ``--ifaces`` names; None without the option.
        timeout: seconds that the ranks wait for each other.
        ports: the ports of ``--port``, which replace those of ifaces.conf; None without the option.
        max_restarts: how many restarts the run may have; 0 without ``--restarts``.
        rejoin: how the ranks find each other after a restart; None in the first start.
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
    """Everything that a rank knows and holds before the rendezvous.

    Attributes:
        options: the options of the rendezvous.
        environment: who this process is, and how it finds rank 0.
        entries: the entries of ifaces.conf.
        interface: this rank's network interface.
        held: rank 0's listening sockets; None on the other ranks.
        published: the text with token, address and secret that rank 0 publishes over PMI or MPI;
            None on the other ranks.
        deputy: the socket on which this rank listens for the time when rank 0 is gone; None if it
            is no deputy.
        standing: on rank 0, if nodes may change, the socket to which tasks connect that come back
            during this start. The kernel queues the connections, and the next start accepts them.
            None on the other ranks, in a start that no restart may follow, and if no port is free.
        returns_at: the text that says where ``standing`` listens; empty without it.
    """

    options: RendezvousOptions
    environment: Environment
    entries: Entries
    interface: SelectedInterface
    held: BoundSockets | None = None
    published: str | None = field(default=None, repr=False)
    deputy: socket.socket | None = None
    standing: socket.socket | None = None
    returns_at: str = field(default="", repr=False)


def prepare(options: RendezvousOptions, environment: Environment) -> RankSetup:
    """Read ifaces.conf, and choose and check this rank's network interface.

    Args:
        options: the options of the command line.
        environment: this rank's environment.

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
    # Check whether rank 0's name leads to its interface, but not in these cases, in which no other
    # rank looks up the name.
    if not (
        environment.world_size == 1
        or environment.discovery.publishes
        or environment.one_node
        or rejoin
    ):
        discovery.check_reachable(
            environment, prepared.interface, entry, interface.list_interfaces()
        )
    # After a restart the socket has listened since before execve, and other ranks may be in its
    # queue already.
    if rejoin and rejoin.descriptor is not None:
        listening = socket.socket(fileno=rejoin.descriptor)
    else:
        if alone:
            ports = [0]
        else:
            ports = discovery.rendezvous_ports(environment, entry, forced)
            # If all other ports are taken, let the kernel choose one (0). The others can find any
            # port over PMI, because rank 0 publishes it.
            way = environment.discovery
            if way.publishes and not way.starts_mpi and not (forced or entry.ports):
                ports = [*ports, 0]
        listening = protocol.listen(prepared.interface.address, ports)
    # The store may have any port, unless a firewall leaves only some open.
    held = protocol.bind_store(prepared.interface.address, listening, forced or entry.ports or [0])
    published = protocol.encode_advertisement(
        discovery.token(environment), [held.rendezvous_address]
    )
    # After a restart, the other ranks know an address and a secret already, from the message that
    # announced the restart. Keep these instead of the new ones.
    return replace(prepared, held=held, published=rejoin.published if rejoin else published)


def listen_as_deputy(prepared: RankSetup) -> RankSetup:
    """Listen as a deputy, to which the other ranks connect when rank 0 is gone, if this rank may be
    a deputy and a port is free.

    Returns:
        The setup with the socket; the setup unchanged if this rank does not listen.

    Raises:
        ConfigError: this task may have to take over from rank 0, but only two ports are allowed,
            which are reserved for rank 0.
    """
    environment = prepared.environment
    # Only the first rank of each node and rank 1 may be deputies. Rank 1, which is most often on
    # rank 0's node, is one because rank 0 may be killed although its node is not lost.
    if not environment.leads_node or environment.is_returning:
        return prepared
    entry = entry_for(prepared.entries, environment.node, or_default=True)
    allowed = prepared.options.ports or entry.ports
    # Leave the first two ports to a rank 0, of this run or of another, and its store. Try the rest
    # from the last one down, because a rank 0 tries them from the first one up.
    ports = [0] if allowed is None else [*allowed][:1:-1]
    if (environment.is_spare or environment.may_shrink) and not ports:
        option = "--spare-nodes" if environment.is_spare else "--min-nodes"
        raise ConfigError(
            f"{len(allowed or ())} ports with {option}",
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


def listen_for_next_start(prepared: RankSetup) -> RankSetup:
    """Begin to listen for tasks that come back after their node was given up. This is done on rank
    0, if nodes may change, a restart may follow, and a port is free.

    Such tasks connect while this start runs. The kernel queues their connections, and the next
    start accepts them. A task must find rank 0 however long it was cut off. So the address stays as
    long as rank 0 stays, also after a restart, and the secret stays the same in the whole run.

    Returns:
        The setup with ``standing`` and ``returns_at``; the setup unchanged if rank 0 does not
        listen, and on other ranks.
    """
    environment = prepared.environment
    options = prepared.options
    if environment.rank or not environment.nodes_may_change or prepared.held is None:
        return prepared
    if options.generation >= options.max_restarts:
        return prepared
    secret = ""
    if options.rejoin and options.rejoin.descriptor is not None:
        standing = prepared.held.rendezvous.dup()
        secret = protocol.decode_advertisement(options.rejoin.published).secret
    else:
        entry = entry_for(prepared.entries, environment.node, or_default=True)
        allowed = options.ports or entry.ports
        # Try the ports from the last one down, because a rank 0, of this run or of another, tries
        # them from the first one up.
        ports = [0] if allowed is None else [*allowed][::-1]
        found = protocol.listen_where_possible([prepared.interface.address], ports)
        if not found:
            return prepared
        standing = found[0]
    address = protocol.Address(*standing.getsockname()[:2])
    text = protocol.encode_advertisement(discovery.token(environment), [address], secret)
    return replace(prepared, standing=standing, returns_at=text)


def listen_again(prepared: RankSetup) -> tuple[int, str]:
    """Listen for the rendezvous of the next start. Called on rank 0.

    Returns:
        The socket's file descriptor, and the text that tells the other ranks its address.

    Raises:
        RendezvousError: no port is free.
    """
    entry = entry_for(prepared.entries, prepared.environment.node, or_default=True)
    listening = protocol.listen(
        prepared.interface.address, list(prepared.options.ports or entry.ports or [0])
    )
    address = protocol.Address(*listening.getsockname()[:2])
    # detach(), because the descriptor must stay open until execve, longer than this object.
    return listening.detach(), protocol.encode_advertisement(
        discovery.token(prepared.environment), [address]
    )
