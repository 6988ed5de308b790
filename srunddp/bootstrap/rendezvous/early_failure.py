"""Tells the other ranks that this rank has failed before the rendezvous, so that they do not wait
for it until the timeout.
"""

from __future__ import annotations

import os
import socket
import time
from enum import Enum, auto

from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network import ifaces_conf
from srunddp.bootstrap.network.ifaces_entry import DEFAULT, Entries, entry_for
from srunddp.bootstrap.network.interface import SelectedInterface
from srunddp.bootstrap.rendezvous import discovery, protocol
from srunddp.bootstrap.rendezvous.messages import AbortReason
from srunddp.bootstrap.rendezvous.rank_setup import RendezvousOptions
from srunddp.errors import SrunddpError


class RankZeroIs(Enum):
    """How the ranks that look for rank 0 learn where it is."""

    KNOWN = auto()  # after a restart: rank 0 listens already, and all ranks know where
    PUBLISHED = auto()  # rank 0 publishes it over PMI
    WORKED_OUT = auto()  # each rank works it out from variables and ifaces.conf


def _rank_zero_is(environment: Environment, options: RendezvousOptions) -> RankZeroIs:
    if options.rejoin:
        return RankZeroIs.KNOWN
    if environment.discovery.publishes:
        return RankZeroIs.PUBLISHED
    return RankZeroIs.WORKED_OUT


def report_early_failure(
    environment: Environment,
    options: RendezvousOptions,
    error: SrunddpError,
    interface: SelectedInterface | None = None,
) -> bool:
    """Tell the other ranks that this rank fails before the rendezvous. This takes hardly longer
    than ``TELL_FOR`` seconds.

    Rank 0 publishes its failure instead of its address, or answers the ranks that look for it.
    Another rank tells rank 0. Nothing is sent over MPI, because that would block.

    Args:
        environment: this rank's environment.
        options: the options of the rendezvous.
        error: why this rank fails.
        interface: this rank's interface; None if it could not be chosen.

    Returns:
        Whether rank 0 knows of the failure, so that rank 0 prints it and this rank need not.
    """
    if environment.world_size == 1 or not environment.discoveries:
        return False
    if environment.discovery.starts_mpi:
        return False
    # Not str(error), which has several lines if a file has several errors.
    reason = AbortReason(str(error.args[0]), error.exit_code)
    try:
        if environment.rank == 0:
            _let_others_know(environment, options, reason, interface)
            return True
        return _tell_rank_zero(environment, options, reason, interface)
    except (SrunddpError, OSError):
        # This rank prints its failure itself then. The others notice it at their timeout.
        return False


def _let_others_know(
    environment: Environment,
    options: RendezvousOptions,
    reason: AbortReason,
    interface: SelectedInterface | None,
) -> None:
    """Publish rank 0's failure, or tell it to the ranks that look for rank 0. Call it on rank 0.

    Raises:
        SrunddpError: the launcher does not publish it.
        OSError: rank 0 cannot listen.
    """
    error = reason.error_of(0, environment.node)
    told = AbortReason(str(error), reason.exit_code)
    within = min(protocol.TELL_FOR, options.timeout)
    match _rank_zero_is(environment, options):
        case RankZeroIs.PUBLISHED:
            environment.discovery.exchange(protocol.encode_abort(told), environment, within)
        case RankZeroIs.KNOWN | RankZeroIs.WORKED_OUT:
            listening = _listen_where_others_look(environment, options, interface)
            _answer_others(environment, options, listening, told, within)


def _listen_where_others_look(
    environment: Environment, options: RendezvousOptions, interface: SelectedInterface | None
) -> list[socket.socket]:
    """Listen at all addresses of rank 0's node at which the others may look for it."""
    if options.rejoin and options.rejoin.descriptor is not None:
        return [socket.socket(fileno=options.rejoin.descriptor)]
    entries = _entries(options)
    entry = entry_for(entries, environment.node, or_default=True)
    return protocol.listen_where_possible(
        discovery.resolve_node(environment, interface, entries),
        discovery.rendezvous_ports(environment, entry, options.ports),
    )


def _answer_others(
    environment: Environment,
    options: RendezvousOptions,
    listening: list[socket.socket],
    reason: AbortReason,
    seconds: float,
) -> None:
    """Tell rank 0's failure to each rank that connects, until all ranks know it or ``seconds`` have
    passed.
    """
    from srunddp.bootstrap.rendezvous.listener import AuthenticatedListener
    from srunddp.bootstrap.rendezvous.server import tell_all

    published = options.rejoin.published if options.rejoin else ""
    # The introduction has no address of this rank: the failure may be that there is none.
    introduction = discovery.introduce(environment, published, generation=options.generation)
    with AuthenticatedListener(
        listening=listening,
        own=introduction.hello,
        trust=introduction.trust,
        say=lambda _: None,
    ) as listener:
        # If no address could be bound, no rank can come, so do not wait.
        tell_all(listener, reason, {0}, seconds if listening else 0.0)
        for each in (*listening, *listener.known):
            each.close()


def _tell_rank_zero(
    environment: Environment,
    options: RendezvousOptions,
    reason: AbortReason,
    interface: SelectedInterface | None,
) -> bool:
    """Tell rank 0 of this rank's failure, and return whether rank 0 has confirmed it.

    Raises:
        SrunddpError: it is not known where rank 0 is, or rank 0 has published its own failure.
        OSError: rank 0 cannot be reached.
    """
    from srunddp.bootstrap.rendezvous import client

    within = min(protocol.TELL_FOR, options.timeout)
    deadline = time.monotonic() + within
    published = ""
    match _rank_zero_is(environment, options):
        case RankZeroIs.KNOWN:
            assert options.rejoin
            published = options.rejoin.published
        case RankZeroIs.PUBLISHED:
            published = environment.discovery.exchange(None, environment, within)
        case RankZeroIs.WORKED_OUT:
            pass
    introduction = discovery.introduce(environment, published, generation=options.generation)
    addresses = introduction.addresses or discovery.candidate_addresses(
        environment, interface, _entries(options), options.ports
    )
    return client.report_failure(
        addresses, introduction.hello, introduction.trust, reason, deadline
    )


def _entries(options: RendezvousOptions) -> Entries:
    """Read ifaces.conf; if it has an error, return the default entry, as all ranks then do."""
    try:
        return ifaces_conf.load(options.ifaces, os.environ).entries
    except SrunddpError:
        return (DEFAULT,)
