"""Runs the rendezvous: rank 0 is the server, and every other rank is a client. A single process
does not wait for anything.

The modules ``server`` and ``client`` are imported when needed: a rank needs only one of them, and a
single process neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.rendezvous import discovery
from srunddp.bootstrap.rendezvous.discovery import Broadcast, Introduction, Say
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.bootstrap.rendezvous.protocol import (
    BoundSockets,
    CancelToken,
    RendezvousResult,
    port_of,
)
from srunddp.bootstrap.rendezvous.rank_setup import RankSetup, SpareNodeTerms

if TYPE_CHECKING:
    from srunddp.bootstrap.rendezvous.client import SearchReport
    from srunddp.bootstrap.rendezvous.server import RendezvousServer

# Seconds by which a rank may notice later than another rank that rank 0 is gone.
_SEEN_LATER = 20.0
# The most nodes on which a rank prints that it does not reach rank 0. Ranks of further nodes would
# only repeat the reason.
_NODES_THAT_SAY_SO = 4


class Role(Enum):
    """A process's part in the rendezvous."""

    ALONE = auto()  # there are no other ranks
    RANK_ZERO = auto()  # waits for the other ranks, and tells all when the last has come
    OTHER = auto()  # looks for rank 0, and waits for its answer


def role_of(setup: RankSetup) -> Role:
    """Return the role of a process, by its world size and whether it has listening sockets."""
    if setup.environment.world_size == 1:
        return Role.ALONE
    if setup.held:
        return Role.RANK_ZERO
    return Role.OTHER


def rendezvous(
    setup: RankSetup,
    over_mpi: Broadcast,
    say: Say = lambda _: None,
    interrupt: CancelToken | None = None,
    replacing_server: ReplacingServer | None = None,
    *,
    return_to_run: ReturnToRun | None = None,
    agent_store: bool = False,
) -> RendezvousResult:
    """Wait until the rendezvous of all ranks is complete.

    Args:
        setup: what this rank knows and holds, with the sockets that
            :func:`srunddp.bootstrap.rendezvous.rank_setup.bind` has opened.
        over_mpi: broadcasts rank 0's message over MPI; see
            :func:`srunddp.bootstrap.rendezvous.discovery.discover`.
        say: takes rank 0's lines about missing ranks and refused connections, and lines of other
            ranks that do not reach rank 0.
        interrupt: ends the rendezvous when this rank fails.
        replacing_server: with spare nodes, makes rank 0's server after a restart.
        return_to_run: with spare nodes, waits in a task whose node was given up until the run takes
            the task back.
        agent_store: whether rank 0 listens for an agent store, which its supervisor starts.

    Returns:
        What rank 0 has told this rank, and the connections that stay open.

    Raises:
        SrunddpError: the rendezvous failed.
        PeerError: a rank failed during the rendezvous; if ``interrupt`` has ended the rendezvous,
            it is this rank.
        ReassignedError: this task has been given another number.
        NotNeededError: this task was to come back, and the run is over.
    """
    role = role_of(setup)
    if role is Role.ALONE:
        return _alone(setup, agent_store=agent_store)
    # Set the deadline before using the channel, so that the wait in its barrier counts too.
    deadline = time.monotonic() + setup.options.timeout
    channel, published = _learn_from_rank_zero(setup, over_mpi, say)
    introduction = _introduce(setup, published)
    if setup.environment.is_returning:
        assert return_to_run, "a start that gives nodes up brings their tasks back"
        return_to_run(introduction, interrupt)
    if role is Role.OTHER:
        return _as_other(setup, introduction, deadline, say, interrupt)
    if not introduction.addresses:
        check_that_others_can_find_us(setup.environment)
    assert setup.held
    parts = ServerParts(
        setup=setup,
        held=setup.held,
        introduction=introduction,
        channel=channel,
        say=say,
        interrupt=interrupt,
        agent_store=agent_store,
    )
    terms = setup.options.rejoin.spare_nodes if setup.options.rejoin else None
    if terms:
        assert replacing_server, "a start that leaves terms has a server to replace ranks"
        server = replacing_server(parts, terms)
    else:
        server = parts.server()
    return server.accept_all(deadline)


def _alone(setup: RankSetup, *, agent_store: bool) -> RendezvousResult:
    """Return the result for a process that is the whole world, without waiting for anything."""
    assert setup.held
    # No other rank will come. The store's socket stays open for the worker.
    setup.held.rendezvous.close()
    environment = setup.environment
    store = setup.held.store_address
    listening = setup.held.listen_for_agent_store() if agent_store else None
    agent_store_port = port_of(listening)
    meeting = RendezvousInfo(
        master_addr=store.host,
        master_port=agent_store_port or store.port,
        store_port=store.port if agent_store_port else 0,
        run=discovery.token(environment),
        master_node=environment.node,
    )
    return RendezvousResult(
        meeting=meeting, connections={}, nodes={0: environment.node}, agent_store=listening
    )


def _learn_from_rank_zero(setup: RankSetup, over_mpi: Broadcast, say: Say) -> tuple[str, str]:
    """Learn what rank 0 has published: after a restart from the previous start, else over the
    channel.

    Returns:
        The channel's name, and the published text; the text is empty if each rank works out where
        rank 0 is.

    Raises:
        SrunddpError: no channel works.
    """
    if setup.options.rejoin:
        return setup.options.rejoin.channel, setup.options.rejoin.published
    return discovery.discover(
        setup.environment, setup.published, setup.options.timeout, over_mpi, say
    )


def _introduce(setup: RankSetup, published: str) -> Introduction:
    """Return this rank's introduction, with its port if it listens as a deputy."""
    introduction = discovery.introduce(
        setup.environment, published, setup.interface.address, setup.options.generation
    )
    if setup.deputy is None:
        return introduction
    port = setup.deputy.getsockname()[1]
    return introduction._replace(hello=replace(introduction.hello, deputy_port=port))


class ServerParts(NamedTuple):
    """The values from which every kind of rank 0's server is made.

    Attributes:
        setup: what rank 0 knows and holds.
        held: rank 0's listening sockets.
        introduction: what rank 0 says of itself, and how it proves itself.
        channel: the name of the way by which the others find rank 0.
        say: takes lines about missing ranks and refused connections.
        interrupt: ends the rendezvous when rank 0 itself fails.
        agent_store: whether rank 0 listens for an agent store.
    """

    setup: RankSetup
    held: BoundSockets
    introduction: Introduction
    channel: str
    say: Say
    interrupt: CancelToken | None
    agent_store: bool

    def server(self) -> RendezvousServer:
        """Return a server that waits for every rank."""
        from srunddp.bootstrap.rendezvous.server import RendezvousServer

        step = self.setup.environment.step
        return RendezvousServer(
            own=self.introduction.hello,
            held=self.held,
            channel=self.channel,
            layout=step.layout() if step else {},
            trust=self.introduction.trust,
            say=self.say,
            interrupt=self.interrupt,
            spares=self.setup.environment.spares,
            may_shrink=self.setup.environment.may_shrink,
            names_nodes=self.setup.environment.nodes_may_change,
            agent_store=self.agent_store,
            returns_at=self.setup.returns_at,
            network_hint=_network_hint(self.setup),
        )


ReplacingServer = Callable[[ServerParts, SpareNodeTerms], "RendezvousServer"]
"""Makes rank 0's server for a restart that gives lost ranks to spare nodes. Its arguments are the
values for every kind of server, and the terms that the previous start has passed on.
"""

ReturnToRun = Callable[[Introduction, CancelToken | None], NoReturn]
"""Waits until the run takes this task back, and then raises :class:`ReassignedError`. Its arguments
are the task's introduction, and the token that ends the wait if the task fails.
"""


def check_that_others_can_find_us(environment: Environment) -> None:
    """Check, on a rank 0 that publishes nothing, that the other ranks can work out its address.

    If they cannot, none of them will come. Without this check, rank 0 would wait for them until the
    timeout.

    Raises:
        ConfigError: the variables do not determine where rank 0 is.
    """
    discovery.working_out(environment).rank_zero(environment)


def _as_other(
    setup: RankSetup,
    introduction: Introduction,
    deadline: float,
    say: Say,
    interrupt: CancelToken | None,
) -> RendezvousResult:
    """Find rank 0, say hello, and wait for its answer."""
    from srunddp.bootstrap.rendezvous import client

    environment = setup.environment
    addresses = introduction.addresses or discovery.candidate_addresses(
        environment, setup.interface, setup.entries, setup.options.ports
    )
    lost_after = None
    if setup.options.rejoin and (terms := setup.options.rejoin.spare_nodes):
        lost_after = terms.lost_after
        # After a restart no rank starts late: rank 0 already listens, or its successor soon will.
        deadline = min(deadline, time.monotonic() + terms.within + _SEEN_LATER)
    connection, meeting = client.join(
        addresses,
        introduction.hello,
        deadline,
        introduction.trust,
        interrupt,
        lost_after,
        search_report(setup, say),
    )
    return RendezvousResult(
        meeting=meeting,
        connections={0: connection},
        nodes={0: meeting.master_node, environment.rank: environment.node},
    )


def search_report(setup: RankSetup, say: Say) -> SearchReport:
    """Return how a rank that does not find rank 0 reports this to the user.

    While the search lasts, one rank on each of a few nodes prints lines.

    Args:
        setup: what this rank knows.
        say: takes lines for the user.
    """
    from srunddp.bootstrap.rendezvous.client import SearchReport

    environment = setup.environment
    speaks = environment.leads_node and environment.likely_node_index < _NODES_THAT_SAY_SO
    return SearchReport(
        interface=setup.interface.name,
        network_hint=_network_hint(setup),
        say=say if speaks else None,
    )


def _network_hint(setup: RankSetup) -> str:
    """Return how the user finds a network over which the nodes reach each other; empty after a
    restart, because the network has worked.
    """
    if setup.options.rejoin:
        return ""
    return discovery.network_hint(setup.environment)
