"""From who I am to the world: prepare, bind, meet, and this rank's place after it.

The steps that ``launch``, below a supervisor, and ``inside``, without one, have in common.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from srunddp.bootstrap.environment.detect import Environment
from srunddp.bootstrap.network import ifaces_conf, interface
from srunddp.bootstrap.rendezvous import auth, discovery, protocol
from srunddp.bootstrap.rendezvous.abort import CancelToken
from srunddp.bootstrap.rendezvous.client import join
from srunddp.bootstrap.rendezvous.protocol import BoundSockets, RendezvousInfo, RendezvousResult, bind_sockets
from srunddp.bootstrap.rendezvous.server import RendezvousServer

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
    if environment.channels[:1] in (("slurm",), ("env",)) and not environment.one_node:
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
        alone = RendezvousInfo(store.host, store.port, 1, 0, 1, discovery.token(environment), "none", node)
        return RendezvousResult(alone, {}, {0: node})
    deadline = time.monotonic() + prepared.options.timeout
    channel, told = discovery.discover(environment, prepared.told, prepared.options.timeout, over_mpi, say)
    heard = protocol.decode_advertisement(told) if told else None
    token = heard.token if heard else discovery.token(environment)
    hello = discovery.hello(environment, token, prepared.interface.address)
    own = auth.choose_authenticator(heard.secret if heard else "")
    if not heard and environment.step:
        discovery.rank_zero_node(environment.step)
    if prepared.held:
        layout = environment.step.layout() if environment.step else {}
        return RendezvousServer(hello, prepared.held, channel, layout, own, say, interrupt).gather(deadline)
    if heard:
        candidates = list(heard.addresses)
    else:
        candidates = discovery.candidate_addresses(
            environment, prepared.interface, prepared.entries, prepared.options.ports
        )
    line, meeting = join(candidates, hello, deadline, own, interrupt)
    return RendezvousResult(meeting, {0: line}, {0: meeting.master_node, environment.rank: environment.node})
