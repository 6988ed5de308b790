"""How the ranks meet. A process alone meets nobody; of several, rank 0 is the server, and every
other rank a client.

The modules of server and client are imported when needed: a rank needs one of them, and a single
process neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.rendezvous import discovery
from srunddp.bootstrap.rendezvous.auth import Authenticator
from srunddp.bootstrap.rendezvous.discovery import Broadcast, Say
from srunddp.bootstrap.rendezvous.messages import Hello, RendezvousInfo
from srunddp.bootstrap.rendezvous.protocol import Address, CancelToken, RendezvousResult
from srunddp.bootstrap.rendezvous.rank_setup import RankSetup, Rejoin, SpareNodeTerms

# So many seconds later than another one a rank may see that rank 0 is gone.
_SEEN_LATER = 20.0


class Role(Enum):
    """A process's part in the rendezvous."""

    ALONE = auto()  # the world is this process
    RANK_ZERO = auto()  # listens, and tells all when the last has come
    OTHER = auto()  # looks for rank 0


def role_of(setup: RankSetup) -> Role:
    """The part of a process, by what it holds: only rank 0 has listening sockets."""
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
    on_quorum: Callable[[], None] = lambda: None,
) -> RendezvousResult:
    """Wait until the rendezvous of all ranks is complete.

    Args:
        setup: with the sockets that :func:`srunddp.bootstrap.rendezvous.rank_setup.bind` left.
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
    role = role_of(setup)
    if role is Role.ALONE:
        return _alone(setup)
    deadline = time.monotonic() + setup.options.timeout
    introduction = _introduce(setup, over_mpi, say)
    if role is Role.RANK_ZERO:
        return _as_rank_zero(setup, introduction, deadline, say, interrupt, on_quorum)
    return _as_other(setup, introduction, deadline, interrupt)


def _alone(setup: RankSetup) -> RendezvousResult:
    """The result for a process that is the whole world, and meets nobody."""
    assert setup.held
    setup.held.rendezvous.close()
    environment = setup.environment
    store = setup.held.store_address
    meeting = RendezvousInfo(
        master_addr=store.host,
        master_port=store.port,
        run=discovery.token(environment),
        master_node=environment.node,
    )
    return RendezvousResult(meeting=meeting, connections={}, nodes={0: environment.node})


@dataclass(frozen=True)
class _Introduction:
    """What a rank says of itself, and what it has learnt of rank 0 so far.

    Attributes:
        channel: over which rank 0 is found.
        hello: this rank's.
        trust: this rank's kind of proof.
        published: where rank 0 has published that it listens; None where it publishes nothing, and
            each rank works it out.
    """

    channel: str
    hello: Hello
    trust: Authenticator
    published: list[Address] | None


def _introduce(setup: RankSetup, over_mpi: Broadcast, say: Say) -> _Introduction:
    """Learn what rank 0 has published: from the start before, or over the launcher's channel.

    Raises:
        SrunddpError: no channel works, or rank 0 has failed.
    """
    environment = setup.environment
    if setup.options.rejoin:
        channel = setup.options.rejoin.channel
        text = setup.options.rejoin.published
    else:
        channel, text = discovery.discover(
            environment, setup.published, setup.options.timeout, over_mpi, say
        )
    hello, trust, addresses = discovery.introduce(environment, text, setup.interface.address)
    if setup.deputy:
        hello = replace(hello, deputy_port=setup.deputy.getsockname()[1])
    return _Introduction(channel, hello, trust, addresses if text else None)


def _as_rank_zero(
    setup: RankSetup,
    introduction: _Introduction,
    deadline: float,
    say: Say,
    interrupt: CancelToken | None,
    on_quorum: Callable[[], None],
) -> RendezvousResult:
    """Wait for the other ranks, and tell them where the store is; after a restart with spare nodes,
    replace those that do not come.
    """
    assert setup.held
    if introduction.published is None:
        check_that_others_can_find_us(setup.environment)
    rejoin = setup.options.rejoin
    if rejoin and rejoin.spare_nodes:
        return _replacing_lost_nodes(
            setup, introduction, deadline, rejoin, rejoin.spare_nodes, say, interrupt, on_quorum
        )
    from srunddp.bootstrap.rendezvous.server import RendezvousServer

    environment = setup.environment
    server = RendezvousServer(
        own=introduction.hello,
        held=setup.held,
        channel=introduction.channel,
        layout=environment.step.layout() if environment.step else {},
        trust=introduction.trust,
        say=say,
        interrupt=interrupt,
        spares=environment.spares,
    )
    return server.accept_all(deadline)


def _replacing_lost_nodes(
    setup: RankSetup,
    introduction: _Introduction,
    deadline: float,
    rejoin: Rejoin,
    terms: SpareNodeTerms,
    say: Say,
    interrupt: CancelToken | None,
    on_quorum: Callable[[], None],
) -> RendezvousResult:
    """Rank 0's part after a restart with spare nodes: it waits for the tasks that are alive, and
    gives the ranks of the others to spare nodes.
    """
    from srunddp.bootstrap.rendezvous.spare_node_server import SpareNodeServer

    assert setup.held
    environment = setup.environment
    server = SpareNodeServer(
        own=introduction.hello,
        held=setup.held,
        channel=introduction.channel,
        trust=introduction.trust,
        say=say,
        interrupt=interrupt,
        spares=environment.spares,
        sizes=environment.node_sizes,
        expected={*terms.expected},
        within=terms.within,
        not_before=terms.not_before,
        quorum=terms.quorum,
        lost_after=terms.lost_after,
        # Only a new rank 0 may be on the smaller side of a network that is split.
        on_quorum=on_quorum if rejoin.takes_over else lambda: None,
    )
    return server.accept_all(deadline)


def check_that_others_can_find_us(environment: Environment) -> None:
    """On rank 0, which publishes nothing: refuse a step in which the others cannot work out its
    address.

    Nobody comes then; it is better said now than when rank 0 has waited for the others in vain.

    Raises:
        ConfigError: the variables do not tell where rank 0 is.
    """
    discovery.working_out(environment).rank_zero(environment)


def _as_other(
    setup: RankSetup,
    introduction: _Introduction,
    deadline: float,
    interrupt: CancelToken | None,
) -> RendezvousResult:
    """Find rank 0, say hello, and wait for its answer."""
    from srunddp.bootstrap.rendezvous import client

    environment = setup.environment
    addresses = introduction.published
    if addresses is None:
        addresses = discovery.candidate_addresses(
            environment, setup.interface, setup.entries, setup.options.ports
        )
    lost_after = None
    if setup.options.rejoin and (terms := setup.options.rejoin.spare_nodes):
        lost_after = terms.lost_after
        # Rank 0 listens already, or another one soon: nobody starts late after a restart.
        deadline = min(deadline, time.monotonic() + terms.within + _SEEN_LATER)
    connection, meeting = client.join(
        addresses, introduction.hello, deadline, introduction.trust, interrupt, lost_after
    )
    return RendezvousResult(
        meeting=meeting,
        connections={0: connection},
        nodes={0: meeting.master_node, environment.rank: environment.node},
    )
