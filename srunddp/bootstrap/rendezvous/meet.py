"""How a rank meets the others: it chooses its interface, binds, and waits until all have come.

``run`` does so below a supervisor, and ``srunddp.init()`` without one. A rank that fails before that lets the others
know, so that none waits for it until the time is over.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from srunddp.bootstrap.environment.detect import Environment
from srunddp.bootstrap.network import ifaces_conf, interface
from srunddp.bootstrap.rendezvous import auth, client, discovery, protocol
from srunddp.bootstrap.rendezvous.abort import AbortReason, CancelToken
from srunddp.bootstrap.rendezvous.listener import AuthenticatedListener
from srunddp.bootstrap.rendezvous.protocol import (
    Advertisement,
    BoundSockets,
    RendezvousInfo,
    RendezvousResult,
    bind_sockets,
    decode_advertisement,
    listen,
)
from srunddp.bootstrap.rendezvous.server import MOURN, RendezvousServer, tell_all
from srunddp.errors import SrunddpError

DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True)
class RendezvousOptions:
    """What the command line says; its defaults are those of ``srunddp.init()``."""

    backend: str = "auto"
    ifaces: str | None = None
    timeout: float = DEFAULT_TIMEOUT
    ports: range | None = None


@dataclass(frozen=True)
class RankSetup:
    """All that a rank knows of itself before it meets the others.

    Attributes:
        held: rank 0's listening sockets; told: what it tells over PMI or MPI, its token, where its line is and the
            secret. None on the others.
    """

    options: RendezvousOptions
    environment: Environment
    entries: tuple[ifaces_conf.IfacesEntry, ...]
    interface: interface.SelectedInterface
    held: BoundSockets | None = None
    told: str | None = field(default=None, repr=False)


def prepare(options: RendezvousOptions, environment: Environment) -> RankSetup:
    """Choose and check the interface.

    Raises:
        ConfigError: ifaces.conf or the interface is wrong.
    """
    loaded = ifaces_conf.load(options.ifaces, os.environ)
    chosen = interface.select_interface(loaded.entries, environment, os.environ, interface.list_interfaces())
    return RankSetup(options, environment, loaded.entries, chosen)


def bind(prepared: RankSetup) -> RankSetup:
    """On rank 0, bind the line's and the store's sockets on the interface; nothing on the others.

    Raises:
        SrunddpError: no port is free, or the others would not find this address.
    """
    environment, forced = prepared.environment, prepared.options.ports
    if environment.rank != 0:
        return prepared
    alone = environment.world_size == 1
    entry = ifaces_conf.entry_for(prepared.entries, environment.node, alone=alone)
    if environment.world_size > 1 and not environment.discovery.publishes and not environment.one_node:
        discovery.check_reachable(environment, prepared.interface, entry, interface.list_interfaces())
    line_ports = [0] if alone else discovery.line_ports(environment, entry, forced)
    held = bind_sockets(prepared.interface.address, line_ports, discovery.store_ports(entry, forced))
    return replace(
        prepared, held=held, told=protocol.encode_advertisement(discovery.token(environment), [held.line_address])
    )


def rendezvous(
    prepared: RankSetup,
    over_mpi: discovery.Broadcast,
    say: Callable[[str], None] = lambda _: None,
    interrupt: CancelToken | None = None,
) -> RendezvousResult:
    """Wait until all ranks have met.

    Args:
        prepared: with the sockets that :func:`bind` left.
        over_mpi: broadcasts rank 0's message over MPI; see :func:`srunddp.bootstrap.rendezvous.discovery.discover`.
        say: takes rank 0's lines on who is waited for and who was refused.
        interrupt: ends the meeting when this rank fails.

    Returns:
        What all know then, and the lines that stay open.

    Raises:
        SrunddpError: they did not meet.
        PeerError: a rank failed before all had met; this one where the interrupt said so.
    """
    environment = prepared.environment
    if environment.world_size == 1:
        assert prepared.held
        prepared.held.line.close()
        store, node = prepared.held.store_address, environment.node
        single = RendezvousInfo.of_single_process(store, discovery.token(environment), node)
        return RendezvousResult(meeting=single, lines={}, nodes={0: node})
    deadline = time.monotonic() + prepared.options.timeout
    channel, told = discovery.discover(environment, prepared.told, prepared.options.timeout, over_mpi, say)
    heard = decode_advertisement(told) if told else None
    token = heard.token if heard else discovery.token(environment)
    hello = discovery.hello(environment, token, prepared.interface.address)
    own = auth.choose_authenticator(heard.secret if heard else "")
    if prepared.held:
        if not heard:
            discovery.working_out(environment).rank_zero(environment)
        return RendezvousServer(
            own=hello,
            held=prepared.held,
            channel=channel,
            layout=environment.step.layout() if environment.step else {},
            trust=own,
            say=say,
            interrupt=interrupt,
        ).gather(deadline)
    candidates = _candidates(environment, prepared.interface, prepared.entries, prepared.options, heard)
    line, meeting = client.join(candidates, hello, deadline, own, interrupt)
    return RendezvousResult(
        meeting=meeting, lines={0: line}, nodes={0: meeting.master_node, environment.rank: environment.node}
    )


def _candidates(
    environment: Environment,
    chosen: interface.SelectedInterface | None,
    entries: tuple[ifaces_conf.IfacesEntry, ...],
    options: RendezvousOptions,
    heard: Advertisement | None,
) -> list[protocol.Address]:
    """Where rank 0 may be: what it published, or else the addresses that this rank works out."""
    if heard:
        return list(heard.addresses)
    return discovery.candidate_addresses(environment, chosen, entries, options.ports)


def report_early_failure(
    environment: Environment,
    options: RendezvousOptions,
    error: SrunddpError,
    chosen: interface.SelectedInterface | None = None,
) -> bool:
    """Tell the other ranks of a failure from before the meeting, within about 5 s.

    Rank 0 answers the others where they look for it, or publishes it as it would its address; another rank tells
    rank 0. Nothing is told over MPI, which blocks.

    Args:
        environment: who this rank is.
        options: of the command line.
        error: why it fails.
        chosen: its interface, where that was chosen before.

    Returns:
        Whether rank 0 knows of the failure, and so is the one to print it.
    """
    if environment.world_size == 1 or not environment.discoveries or environment.discovery.starts_mpi:
        return False
    failure = AbortReason(str(error), error.exit_code)
    within = min(MOURN, options.timeout)
    try:
        if environment.rank == 0:
            _answer_with_failure(environment, options, failure, chosen, within)
            return True
        return _tell_rank_zero(environment, options, failure, chosen, within)
    except (SrunddpError, OSError):
        return False


def _answer_with_failure(
    environment: Environment,
    options: RendezvousOptions,
    failure: AbortReason,
    chosen: interface.SelectedInterface | None,
    within: float,
) -> None:
    """On rank 0: answer whoever looks for it with the failure, until all others know or the time is over."""
    failure = AbortReason(str(failure.of(0, environment.node)), failure.code)
    if environment.discovery.publishes:
        environment.discovery.exchange(protocol.encode_abort(failure), environment, timeout=within)
        return
    listening = _listen_where_looked_for(environment, options, chosen)
    token, own = discovery.token(environment), auth.choose_authenticator()
    with AuthenticatedListener(
        listening=listening, token=token, trust=own, world_size=environment.world_size, say=lambda _: None
    ) as listener:
        tell_all(listener, failure.message(), {0}, within if listening else 0.0)
        for each in (*listening, *listener.known):
            each.close()


def _listen_where_looked_for(
    environment: Environment, options: RendezvousOptions, chosen: interface.SelectedInterface | None
) -> list[socket.socket]:
    entries = _entries_or_default(options)
    ports = discovery.line_ports(environment, ifaces_conf.entry_or_default(entries, environment.node), options.ports)
    listening = []
    for host in discovery.resolve_node(environment, chosen, entries):
        with contextlib.suppress(SrunddpError):
            listening.append(listen(host, ports))
    return listening


def _tell_rank_zero(
    environment: Environment,
    options: RendezvousOptions,
    failure: AbortReason,
    chosen: interface.SelectedInterface | None,
    within: float,
) -> bool:
    deadline, way = time.monotonic() + within, environment.discovery
    heard = decode_advertisement(way.exchange(None, environment, timeout=within)) if way.publishes else None
    candidates = _candidates(environment, chosen, _entries_or_default(options), options, heard)
    hello = discovery.hello(environment, heard.token if heard else discovery.token(environment))
    own = auth.choose_authenticator(heard.secret if heard else "")
    return client.report_failure(candidates, hello, own, failure, deadline)


def _entries_or_default(options: RendezvousOptions) -> tuple[ifaces_conf.IfacesEntry, ...]:
    """Those of ifaces.conf; where it is what is wrong, all ranks look at the default's ports."""
    try:
        return ifaces_conf.load(options.ifaces, os.environ).entries
    except SrunddpError:
        return (ifaces_conf.DEFAULT,)
