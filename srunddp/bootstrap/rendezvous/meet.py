"""How a rank meets the others: it chooses its interface, binds, and waits until all have come.

``run`` does so under a supervisor, and ``srunddp.init()`` without one. A rank that fails before
that lets the others know, so that none waits for it until the time is over.

A rank is either the server or a client, and a single process neither: their modules are imported
when needed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network import ifaces_conf, ifaces_entry, interface
from srunddp.bootstrap.network.interface import SelectedInterface
from srunddp.bootstrap.rendezvous import discovery, protocol
from srunddp.bootstrap.rendezvous.discovery import Broadcast, Say
from srunddp.bootstrap.rendezvous.messages import AbortReason, Hello, RendezvousInfo
from srunddp.bootstrap.rendezvous.protocol import BoundSockets, CancelToken, RendezvousResult
from srunddp.errors import ConfigError, Scope, SrunddpError

if TYPE_CHECKING:
    from srunddp.bootstrap.rendezvous.auth import Authenticator
    from srunddp.bootstrap.rendezvous.server import RendezvousServer

DEFAULT_TIMEOUT = 300.0
_LATER = 20.0  # so many seconds later than another one a rank may see that rank 0 is gone


@dataclass(frozen=True, kw_only=True)
class Rejoin:
    """How the ranks of a run meet again after a restart, without the launcher's help.

    Attributes:
        generation: the number of restarts so far.
        published: by rank 0, as over PMI; channel, run: of the first rendezvous.
        descriptor: of the socket on which rank 0 listens already; None on the others.
        rank: of this process; None for the launcher's. A spare node's task has a number behind all
            ranks.
        takes_over: whether this process is rank 0 from now on, as the one before is gone; lost: its
            node and the cause where it was lost.
        lost_after: with spare nodes, seconds without an answer after which a node is lost; None
            without them. The attributes that follow are of runs with spare nodes.
        within: seconds until the ranks that do not come are replaced.
        expected: the tasks that are known to be alive, and will come.
        not_before: time of :func:`time.monotonic` before which a worker of a lost node may be
            running.
        quorum: how many must come before a new rank 0 may go on; fewer mean that this side is the
            one that is cut off.
    """

    generation: int
    published: str = field(repr=False)
    channel: str
    run: str
    descriptor: int | None = None
    rank: int | None = None
    takes_over: bool = False
    lost: tuple[str, ...] = ()
    lost_after: float | None = None
    within: float = 0.0
    expected: tuple[int, ...] = ()
    not_before: float = 0.0
    quorum: int = 1


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
    entries: ifaces_entry.Entries
    interface: SelectedInterface
    held: BoundSockets | None = None
    published: str | None = field(default=None, repr=False)
    deputy: socket.socket | None = None


def prepare(options: RendezvousOptions, environment: Environment) -> RankSetup:
    """Choose and check the interface.

    Raises:
        ConfigError: ifaces.conf or the interface is wrong.
    """
    loaded = ifaces_conf.load(options.ifaces, os.environ)
    chosen = interface.select_interface(
        loaded.entries, environment, os.environ, interface.list_interfaces()
    )
    return RankSetup(options, environment, loaded.entries, chosen)


def bind(prepared: RankSetup) -> RankSetup:
    """On rank 0, bind the sockets of the rendezvous and of the store on the interface; nothing on
    the others.

    Raises:
        SrunddpError: no port is free, or the others would not find this address.
    """
    environment = prepared.environment
    forced = prepared.options.ports
    if environment.rank != 0:
        return prepared
    alone = environment.world_size == 1
    rejoin = prepared.options.rejoin
    entry = ifaces_entry.entry_for(prepared.entries, environment.node, or_default=alone)
    if not (
        environment.world_size == 1
        or environment.discovery.publishes
        or environment.one_node
        or rejoin
    ):
        discovery.check_reachable(
            environment, prepared.interface, entry, interface.list_interfaces()
        )
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
    return replace(prepared, held=held, published=rejoin.published if rejoin else published)


def listen_as_deputy(prepared: RankSetup) -> RankSetup:
    """On one rank of each node that may act for rank 0 when it is gone: listen, where a port is
    free.
    """
    environment = prepared.environment
    if environment.rank == 0 or (environment.local_rank and environment.rank > 1):
        return prepared
    entry = ifaces_entry.entry_for(prepared.entries, environment.node, or_default=True)
    allowed = prepared.options.ports or entry.ports
    # The first two are for a rank 0, of this run or of another, and its store.
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
    """On rank 0, listen for the rendezvous of the next start.

    Returns:
        The socket's descriptor, and what tells the other ranks where it is.

    Raises:
        RendezvousError: no port is free.
    """
    entry = ifaces_entry.entry_for(prepared.entries, prepared.environment.node, or_default=True)
    listening = protocol.listen(
        prepared.interface.address, list(prepared.options.ports or entry.ports or [0])
    )
    address = protocol.Address(*listening.getsockname()[:2])
    return listening.detach(), protocol.encode_advertisement(
        discovery.token(prepared.environment), [address]
    )


def rendezvous(
    prepared: RankSetup,
    over_mpi: Broadcast,
    say: Say = lambda _: None,
    interrupt: CancelToken | None = None,
    on_quorum: Callable[[], None] = lambda: None,
) -> RendezvousResult:
    """Wait until the rendezvous of all ranks is complete.

    Args:
        prepared: with the sockets that :func:`bind` left.
        over_mpi: broadcasts rank 0's message over MPI; see
            :func:`srunddp.bootstrap.rendezvous.discovery.discover`.
        say: takes rank 0's lines on who is waited for and who was refused.
        interrupt: ends the rendezvous when this rank fails.
        on_quorum: called on a new rank 0 when more than half of the tasks have come; may raise.

    Returns:
        What all know then, and the connections that stay open.

    Raises:
        SrunddpError: they did not meet.
        PeerError: a rank failed during the rendezvous; this one where the interrupt said so.
        ReassignedError: this is a task of a spare node, and gets a rank.
    """
    environment = prepared.environment
    if environment.world_size == 1:
        assert prepared.held
        prepared.held.rendezvous.close()
        store = prepared.held.store_address
        run = discovery.token(environment)
        node = environment.node
        single = RendezvousInfo(
            master_addr=store.host, master_port=store.port, run=run, master_node=node
        )
        return RendezvousResult(meeting=single, connections={}, nodes={0: node})
    deadline = time.monotonic() + prepared.options.timeout
    if rejoin := prepared.options.rejoin:
        channel = rejoin.channel
        published = rejoin.published
    else:
        timeout = prepared.options.timeout
        channel, published = discovery.discover(
            environment, prepared.published, timeout, over_mpi, say
        )
    hello, own, addresses = discovery.introduce(environment, published, prepared.interface.address)
    if prepared.deputy:
        hello = replace(hello, deputy_port=prepared.deputy.getsockname()[1])
    if prepared.held:
        if not published:
            discovery.working_out(environment).rank_zero(environment)
        server = _server(
            prepared,
            held=prepared.held,
            hello=hello,
            channel=channel,
            trust=own,
            say=say,
            interrupt=interrupt,
            on_quorum=on_quorum,
        )
        return server.accept_all(deadline)
    from srunddp.bootstrap.rendezvous import client

    if not published:
        forced = prepared.options.ports
        addresses = discovery.candidate_addresses(
            environment, prepared.interface, prepared.entries, forced
        )
    lost_after = rejoin.lost_after if rejoin else None
    if rejoin and lost_after is not None:  # rank 0 listens already, or soon
        deadline = min(deadline, time.monotonic() + rejoin.within + _LATER)
    connection, meeting = client.join(addresses, hello, deadline, own, interrupt, lost_after)
    nodes = {0: meeting.master_node, environment.rank: environment.node}
    return RendezvousResult(meeting=meeting, connections={0: connection}, nodes=nodes)


def _server(
    prepared: RankSetup,
    *,
    held: BoundSockets,
    hello: Hello,
    channel: str,
    trust: Authenticator,
    say: Say,
    interrupt: CancelToken | None,
    on_quorum: Callable[[], None],
) -> RendezvousServer:
    """Rank 0's side of the rendezvous; after a restart with spare nodes, that which replaces ranks.

    The modules of the two are imported here, as the other ranks need neither.
    """
    environment = prepared.environment
    rejoin = prepared.options.rejoin
    if rejoin is None or rejoin.lost_after is None:
        from srunddp.bootstrap.rendezvous.server import RendezvousServer

        return RendezvousServer(
            own=hello,
            held=held,
            channel=channel,
            layout=environment.step.layout() if environment.step else {},
            trust=trust,
            say=say,
            interrupt=interrupt,
            spares=environment.spares,
        )
    from srunddp.bootstrap.rendezvous.spare_node_server import SpareNodeServer

    return SpareNodeServer(
        own=hello,
        held=held,
        channel=channel,
        trust=trust,
        say=say,
        interrupt=interrupt,
        spares=environment.spares,
        sizes=environment.node_sizes,
        expected={*rejoin.expected},
        within=rejoin.within,
        not_before=rejoin.not_before,
        quorum=rejoin.quorum,
        lost_after=rejoin.lost_after,
        on_quorum=on_quorum if rejoin.takes_over else lambda: None,
    )


def report_early_failure(
    environment: Environment,
    options: RendezvousOptions,
    error: SrunddpError,
    chosen: SelectedInterface | None = None,
) -> bool:
    """Tell the other ranks of a failure from before the rendezvous, within about 5 s.

    Rank 0 answers the others where they look for it, or publishes it as it would its address;
    another rank tells rank 0. Nothing is sent over MPI, which blocks.

    Args:
        chosen: this rank's interface, where that was chosen before.

    Returns:
        Whether rank 0 knows of the failure, and so is the one to print it.
    """
    if (
        environment.world_size == 1
        or not environment.discoveries
        or environment.discovery.starts_mpi
    ):
        return False
    way = environment.discovery
    within = min(protocol.TELL_FOR, options.timeout)
    rejoin = options.rejoin
    deadline = time.monotonic() + within
    failure = AbortReason(str(error.args[0]), error.exit_code)
    try:
        if environment.rank == 0:
            said = AbortReason(str(failure.error_of(0, environment.node)), failure.exit_code)
            if way.publishes and not rejoin:
                way.exchange(protocol.encode_abort(said), environment, within)
            else:
                _answer_others(environment, options, chosen, said)
            return True
        if rejoin:
            published = rejoin.published
        else:
            published = ""
        if way.publishes and not rejoin:
            published = way.exchange(None, environment, within)
        hello, own, addresses = discovery.introduce(environment, published)
        if not published:
            addresses = discovery.candidate_addresses(
                environment, chosen, _entries(options), options.ports
            )
        from srunddp.bootstrap.rendezvous import client

        return client.report_failure(addresses, hello, own, failure, deadline)
    except (SrunddpError, OSError):
        return False


def _answer_others(
    environment: Environment,
    options: RendezvousOptions,
    chosen: SelectedInterface | None,
    failure: AbortReason,
) -> None:
    """On rank 0: answer whoever looks for it with the failure, until all others know or the time is
    over.
    """
    from srunddp.bootstrap.rendezvous.listener import AuthenticatedListener
    from srunddp.bootstrap.rendezvous.server import tell_all

    entries = _entries(options)
    rejoin = options.rejoin
    if rejoin and rejoin.descriptor is not None:
        listening = [socket.socket(fileno=rejoin.descriptor)]
    else:
        entry = ifaces_entry.entry_for(entries, environment.node, or_default=True)
        ports = discovery.rendezvous_ports(environment, entry, options.ports)
        listening = protocol.listen_where_possible(
            discovery.resolve_node(environment, chosen, entries), ports
        )
    own, trust, _ = discovery.introduce(environment, rejoin.published if rejoin else "")
    within = min(protocol.TELL_FOR, options.timeout) if listening else 0.0
    with AuthenticatedListener(
        listening=listening, own=own, trust=trust, say=lambda _: None
    ) as listener:
        tell_all(listener, failure, {0}, within)
        for each in (*listening, *listener.known):
            each.close()


def _entries(options: RendezvousOptions) -> ifaces_entry.Entries:
    """Those of ifaces.conf; where it is what is wrong, all ranks look at the default's ports."""
    try:
        return ifaces_conf.load(options.ifaces, os.environ).entries
    except SrunddpError:
        return (ifaces_entry.DEFAULT,)
