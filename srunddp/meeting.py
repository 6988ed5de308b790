"""From who I am to the world: prepare, bind, meet, and this rank's place after it.

The steps that ``launch``, below a supervisor, and ``inside``, without one, have in common.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from srunddp.bootstrap import channels, ifaces, interface, mpi, pmi, process_group
from srunddp.bootstrap.environment import Environment
from srunddp.bootstrap.line import Address, Held, Hello, Meeting, hold
from srunddp.bootstrap.rendezvous import find
from srunddp.bootstrap.roster import Roster
from srunddp.bootstrap.slurm import whole_number
from srunddp.errors import ConfigError, Scope

DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True)
class Options:
    """What the command line says; its defaults are those of ``srunddp.init()``."""

    backend: str = "auto"
    ifaces: str | None = None
    timeout: float = DEFAULT_TIMEOUT
    ports: range | None = None


@dataclass(frozen=True)
class Prepared:
    """All that a rank knows of itself before it meets the others.

    Attributes:
        held: rank 0's listening sockets; told: what it tells over PMI or MPI, its token and where its line is.
            None on the others.
    """

    options: Options
    environment: Environment
    entries: tuple[ifaces.Entry, ...]
    interface: interface.Interface
    held: Held | None = None
    told: str | None = None


def prepare(options: Options, environment: Environment) -> Prepared:
    """Choose and check the interface.

    Raises:
        ConfigError: ifaces.conf or the interface is wrong.
    """
    entries = ifaces.load(options.ifaces, os.environ)
    chosen = interface.choose(entries, environment, os.environ, interface.links_here())
    return Prepared(options, environment, entries, chosen)


def bind(prepared: Prepared) -> Prepared:
    """On rank 0, bind the line's and the store's sockets on the interface; nothing on the others.

    Raises:
        SrunddpError: no port is free, or the others would not find this address.
    """
    environment, forced = prepared.environment, prepared.options.ports
    if environment.rank != 0:
        return prepared
    alone = environment.world_size == 1
    entry = ifaces.entry_for(prepared.entries, environment.node, alone=alone)
    if environment.channels[:1] in (("slurm",), ("env",)) and not environment.one_node:
        own = {address: link.name for link in interface.links_here() for address in link.addresses}
        channels.check_reachable(environment, prepared.interface, entry, own)
    line_ports = [0] if alone else channels.line_ports(environment, entry, forced)
    held = hold(prepared.interface.address, line_ports, channels.store_ports(entry, forced))
    return replace(prepared, held=held, told=f"{channels.token(environment)}@{held.line_address}")


Broadcast = Callable[[str | None], str]


def meet(prepared: Prepared, over_mpi: Broadcast) -> tuple[Meeting, tuple[socket.socket, ...]]:
    """Wait until all ranks have met.

    Args:
        prepared: with the sockets that :func:`bind` left.
        over_mpi: broadcasts rank 0's message over MPI; may raise :class:`mpi.NoWorldError`, upon which the
            next channel is taken.

    Returns:
        What all know then, and the lines: on rank 0 to all others, on the others to rank 0.

    Raises:
        SrunddpError: they did not meet.
    """
    environment = prepared.environment
    if environment.world_size == 1:
        assert prepared.held
        prepared.held.line.close()
        store = prepared.held.store_address
        return Meeting(store.host, store.port, 1, 0, 1, channels.token(environment), "none"), ()
    deadline = time.monotonic() + prepared.options.timeout
    channel, told = _hear(prepared, over_mpi)
    token, _, where = told.partition("@")
    hello = _hello(prepared, token or channels.token(environment))
    if not told and environment.step:
        channels.rank_zero_node(environment.step)
    if prepared.held:
        roster = Roster(hello, prepared.held, channel, environment.step.layout() if environment.step else {})
        meeting = roster.gather(deadline)
        return meeting, tuple(roster.lines.values())
    if told:
        host, _, port = where.rpartition(":")
        candidates = [Address(host.strip("[]"), int(port))]
    else:
        candidates = channels.locate(environment, prepared.interface, prepared.entries, prepared.options.ports)
    line, meeting = find(candidates, hello, deadline)
    return meeting, (line,)


def _hello(prepared: Prepared, token: str) -> Hello:
    return Hello(
        token=token,
        rank=prepared.environment.rank,
        world_size=prepared.environment.world_size,
        local_rank=prepared.environment.local_rank,
        node=prepared.environment.node,
        address=prepared.interface.address,
        pid=os.getpid(),
    )


def _hear(prepared: Prepared, over_mpi: Broadcast) -> tuple[str, str]:
    """The channel that works, and what rank 0 said over it; nothing where its address is worked out."""
    environment = prepared.environment
    for channel in environment.channels:
        if channel not in channels.TELLING:
            return channel, ""
        if channel == "pmi":
            descriptor = whole_number(os.environ, "PMI_FD")
            return channel, pmi.broadcast(prepared.told, descriptor=descriptor, timeout=prepared.options.timeout)
        try:
            return channel, over_mpi(prepared.told)
        except mpi.NoWorldError as reason:
            unsuitable = reason
    raise ConfigError(
        str(unsuitable),
        expected="mpi4py built for the MPI of this launcher",
        cure="install mpi4py for it, start with `srun --mpi=pmi2` or `--mpi=pmix`, or use --channel slurm",
        scope=Scope.JOB,
    )


def joined(prepared: Prepared, meeting: Meeting) -> process_group.Joined:
    """This rank's place in the world, with the store's socket handed over on rank 0."""
    return process_group.Joined(
        environment=prepared.environment,
        interface=prepared.interface,
        meeting=meeting,
        # The store owns the socket from now on and closes it.
        store_fd=prepared.held.store.detach() if prepared.held else None,
        timeout=prepared.options.timeout,
        backend=prepared.options.backend,
    )
