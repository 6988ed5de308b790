"""A rank that fails before the meeting lets the others know, so that none waits for it until the time is over."""

from __future__ import annotations

import os
import socket
import time

from srunddp.bootstrap.environment.detect import Environment
from srunddp.bootstrap.environment.slurm import parse_uint
from srunddp.bootstrap.network import ifaces_conf
from srunddp.bootstrap.network.interface import SelectedInterface
from srunddp.bootstrap.rendezvous import auth, client, discovery, pmi, protocol
from srunddp.bootstrap.rendezvous.abort import AbortReason
from srunddp.bootstrap.rendezvous.listener import AuthenticatedListener
from srunddp.bootstrap.rendezvous.meet import RendezvousOptions
from srunddp.bootstrap.rendezvous.protocol import listen
from srunddp.bootstrap.rendezvous.server import MOURN, tell_all
from srunddp.errors import SrunddpError


def report_early_failure(
    environment: Environment,
    options: RendezvousOptions,
    error: SrunddpError,
    interface: SelectedInterface | None = None,
) -> bool:
    """Tell the other ranks of a failure from before the meeting, within about 5 s.

    Rank 0 answers the others where they look for it, or tells them over PMI; another rank tells rank 0. Nothing is
    told over MPI, which blocks.

    Args:
        environment: who this rank is.
        options: of the command line.
        error: why it fails.
        interface: where it was chosen before.

    Returns:
        Whether rank 0 knows of the failure, and so is the one to print it.
    """
    if environment.world_size == 1 or not environment.channels or environment.channels[0] == "mpi":
        return False
    failure = AbortReason(str(error), error.exit_code)
    within = min(MOURN, options.timeout)
    try:
        if environment.rank == 0:
            _answer(environment, options, failure, interface, within)
            return True
        return _tell(environment, options, failure, interface, within)
    except (SrunddpError, OSError):
        return False


def _answer(
    environment: Environment,
    options: RendezvousOptions,
    failure: AbortReason,
    interface: SelectedInterface | None,
    within: float,
) -> None:
    """On rank 0: answer whoever looks for it with the failure, until all others know or the time is over."""
    failure = AbortReason(str(failure.of(0, environment.node)), failure.code)
    if environment.channels[0] == "pmi":
        pmi.broadcast(protocol.encode_abort(failure), descriptor=_descriptor(), timeout=within)
        return
    entries = _entries(options)
    listening = _listen(environment, options, interface, entries)
    token = discovery.token(environment)
    with AuthenticatedListener(
        listening, token, auth.choose_authenticator(), environment.world_size, lambda _: None
    ) as door:
        tell_all(door, failure.message(), {0}, within if listening else 0.0)
        for each in (*listening, *door.known):
            each.close()


def _listen(
    environment: Environment,
    options: RendezvousOptions,
    interface: SelectedInterface | None,
    entries: tuple[ifaces_conf.IfacesEntry, ...],
) -> list[socket.socket]:
    entry = ifaces_conf.entry_or_default(entries, environment.node)
    ports, listening = discovery.line_ports(environment, entry, options.ports), []
    for host in discovery.resolve_node(environment, interface, entries):
        try:
            listening.append(listen(host, ports))
        except SrunddpError:
            continue
    return listening


def _tell(
    environment: Environment,
    options: RendezvousOptions,
    failure: AbortReason,
    interface: SelectedInterface | None,
    within: float,
) -> bool:
    """On another rank: tell rank 0."""
    deadline = time.monotonic() + within
    token, secret = discovery.token(environment), ""
    if environment.channels[0] == "pmi":
        heard = protocol.decode_advertisement(pmi.broadcast(None, descriptor=_descriptor(), timeout=within))
        token, secret, candidates = heard.token, heard.secret, list(heard.addresses)
    else:
        candidates = discovery.candidate_addresses(environment, interface, _entries(options), options.ports)
    hello = discovery.hello(environment, token)
    return client.report_failure(candidates, hello, auth.choose_authenticator(secret), failure, deadline)


def _entries(options: RendezvousOptions) -> tuple[ifaces_conf.IfacesEntry, ...]:
    """Those of ifaces.conf; where it is what is wrong, all ranks look at the default's ports."""
    try:
        return ifaces_conf.load(options.ifaces, os.environ).entries
    except SrunddpError:
        return (ifaces_conf.DEFAULT,)


def _descriptor() -> int:
    return parse_uint(os.environ, "PMI_FD")
