"""How the ranks learn where rank 0's line is: told over PMI-1 or MPI, or worked out from what all know.

A channel that tells needs no agreement on a port. The two that work it out do: ``SLURM_*`` alone, from the
step's node list and reserved or derived ports; explicit variables, from ``MASTER_ADDR`` and ``MASTER_PORT``.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping

from srunddp._version import __version__
from srunddp.bootstrap.environment import mpi
from srunddp.bootstrap.environment.cpus import mask
from srunddp.bootstrap.environment.detect import Environment
from srunddp.bootstrap.environment.slurm import NODE_LIST, SlurmStep, parse_uint
from srunddp.bootstrap.network.ifaces_conf import IfacesEntry, entry_for, entry_or_default
from srunddp.bootstrap.network.interface import (
    NetworkInterface,
    SelectedInterface,
    addresses_of,
    is_loopback,
    list_interfaces,
)
from srunddp.bootstrap.rendezvous import pmi
from srunddp.bootstrap.rendezvous.protocol import Address, Hello
from srunddp.errors import ConfigError, Scope
from srunddp.util.console import SAY_EVERY, periodically

TELLING = ("pmi", "mpi")

# Below Linux's ephemeral range (32768 and up), where the kernel hands ports out to anyone.
_DERIVED = range(20480, 32768)
_CANDIDATES = 24

Broadcast = Callable[[str | None], str]


def token(environment: Environment) -> str:
    """The name of this run by which its ranks know each other.

    It stops mix-ups between jobs and steps; it is no secret and stops no attacker.
    """
    if environment.step:
        return f"{environment.step.job}.{environment.step.step}.{environment.step.restarts}"
    if environment.master:
        return f"{environment.master[0]}:{environment.master[1]}"
    return os.urandom(8).hex()


def hello(environment: Environment, token: str, address: str = "") -> Hello:
    """What this rank says of itself.

    Args:
        token: of the run.
        address: of its interface, from which the line is to go; empty for any.
    """
    return Hello(
        token=token,
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        node=environment.node,
        address=address,
        pid=os.getpid(),
        cpus=mask(),
        local_world_size=environment.local_world_size or 0,
        version=__version__,
    )


def line_ports(environment: Environment, entry: IfacesEntry, forced: range | None) -> list[int]:
    """The ports that rank 0 tries for its line, and the others look at, in order.

    Args:
        environment: who this rank is.
        entry: of ifaces.conf for rank 0's node, whose ``ports`` are those a firewall leaves open.
        forced: ``--port``.
    """
    if environment.master:
        return [environment.master[1]]
    allowed = forced or entry.ports
    if environment.step is None:
        return list(allowed or [0])
    reserved = [] if allowed else list(environment.step.reserved_ports)
    return reserved + _derived(environment.step, allowed or _DERIVED)


def _derived(step: SlurmStep, allowed: range) -> list[int]:
    start = zlib.crc32(f"{step.job}.{step.step}.{step.restarts}".encode()) % len(allowed)
    return [allowed[(start + offset) % len(allowed)] for offset in range(min(len(allowed), _CANDIDATES))]


def store_ports(entry: IfacesEntry, forced: range | None) -> list[int]:
    """The ports that rank 0 tries for the store: any, unless a firewall leaves only some."""
    return list(forced or entry.ports or [0])


def discover(
    environment: Environment, told: str | None, timeout: float, over_mpi: Broadcast, say: Callable[[str], None]
) -> tuple[str, str]:
    """The channel that works, and what rank 0 said over it; nothing where its address is worked out.

    Args:
        told: what rank 0 says; None on the others.
        timeout: seconds to wait for the slowest rank over PMI.
        over_mpi: broadcasts over MPI; may raise :class:`mpi.NoWorldError`, upon which the next channel is taken.
        say: takes rank 0's lines on what it waits for.

    Raises:
        SrunddpError: none works.
    """
    waiting = say if environment.rank == 0 else lambda _: None
    for channel in environment.channels:
        if channel not in TELLING:
            return channel, ""
        if channel == "pmi":
            descriptor = parse_uint(os.environ, "PMI_FD")
            with periodically(waiting, "waiting for all ranks in PMI's barrier, {} s so far", SAY_EVERY):
                return channel, pmi.broadcast(told, descriptor=descriptor, timeout=timeout)
        try:
            with periodically(waiting, "waiting for all ranks in MPI_Init, {} s so far", SAY_EVERY):
                return channel, over_mpi(told)
        except mpi.MpiNotLaunchedError as reason:
            unsuitable = reason
    raise ConfigError(
        str(unsuitable),
        expected="mpi4py built for the MPI of this launcher",
        hint="install mpi4py for it, start with `srun --mpi=pmi2` or `--mpi=pmix`, or use --channel slurm",
        scope=Scope.JOB,
    )


def candidate_addresses(
    environment: Environment,
    interface: SelectedInterface | None,
    entries: tuple[IfacesEntry, ...],
    forced: range | None,
) -> list[Address]:
    """Where rank 0's line may be, worked out without being told.

    Args:
        interface: of this rank, on which rank 0 is if it shares the node; None where it has none, for any of them.

    Raises:
        ConfigError: rank 0's node cannot be known, or its name leads nowhere that other nodes reach.
    """
    if environment.master:
        host, port = environment.master
        hosts = _own(environment, interface) if environment.one_node else _resolve(host, environment)
        return [Address(host, port) for host in hosts]
    assert environment.step is not None
    node = rank_zero_node(environment.step)
    entry = entry_for(entries, node)
    ports = line_ports(environment, entry, forced)
    hosts = (
        _own(environment, interface) if environment.node == node else _resolve(hostname_of(entry, node), environment)
    )
    return [Address(host, port) for port in ports for host in hosts]


def _own(environment: Environment, interface: SelectedInterface | None) -> list[str]:
    if interface:
        return [interface.address]
    addresses = [address for link in list_interfaces() for address in link.addresses]
    return ["127.0.0.1"] if environment.one_node else [host for host in addresses if not is_loopback(host)]


def resolve_node(
    environment: Environment, interface: SelectedInterface | None, entries: tuple[IfacesEntry, ...]
) -> list[str]:
    """On rank 0: those of this node's own addresses at which the others look for it, by its name or beside it."""
    beside = [interface.address] if interface else []
    if environment.one_node:
        return beside or _own(environment, None)
    entry = entry_or_default(entries, environment.node)
    found = addresses_of(environment.master[0] if environment.master else hostname_of(entry, environment.node))
    return list(dict.fromkeys([*beside, *(host for host in _own(environment, None) if host in found)]))


def hostname_of(entry: IfacesEntry, node: str) -> str:
    """The name by which the other nodes reach a node."""
    return entry.address.format(node=node) or node


def rank_zero_node(step: SlurmStep) -> str:
    """The node of rank 0 by the step's node list.

    Raises:
        ConfigError: the distribution does not begin with the first node.
    """
    if step.unordered:
        raise ConfigError(
            f"{step.unordered}: SLURM_* alone does not tell where rank 0 is",
            expected="a block, cyclic or plane distribution",
            hint="start with `srun --mpi=pmi2`, which tells it for any placement",
            scope=Scope.NODE,
        )
    return step.nodes[0]


def _resolve(name: str, environment: Environment) -> list[str]:
    found = addresses_of(name)
    if not found:
        raise _unresolved(f"{name} does not resolve on node {environment.node}")
    reachable = sorted(host for host in found if environment.one_node or not is_loopback(host))
    if not reachable:
        raise _unresolved(
            f"{name} resolves to {', '.join(sorted(found))} on node {environment.node}, which is loopback"
        )
    return reachable


def _unresolved(found: str) -> ConfigError:
    return ConfigError(
        found,
        expected="a name for rank 0's address on the data network",
        hint='set `address: "{node}-data"` or the like in ifaces.conf, or start with `srun --mpi=pmi2`; '
        "with --channel env correct MASTER_ADDR",
        scope=Scope.NODE,
    )


def check_reachable(
    environment: Environment, interface: SelectedInterface, entry: IfacesEntry, links: Iterable[NetworkInterface]
) -> None:
    """On rank 0: refuse at once when the name that the others will look up is another interface of this node.

    Args:
        environment, interface, entry: of rank 0.
        links: this node's interfaces.

    Raises:
        ConfigError: the others would knock where nobody listens.
    """
    name = environment.master[0] if environment.master else hostname_of(entry, environment.node)
    found, addresses = addresses_of(name), {address: link.name for link in links for address in link.addresses}
    elsewhere = {host: addresses[host] for host in found if host in addresses and not host.startswith("127.")}
    if elsewhere and interface.address not in elsewhere:
        host, other = next(iter(elsewhere.items()))
        raise ConfigError(
            f"the others look for rank 0 at {name}, which is {host} on {other}; its interface is {interface.name} "
            f"({interface.address})",
            expected="a name that leads to that interface",
            hint="correct one of the two"
            if environment.master
            else 'add `address: "{node}-data"` or the like, or start with `srun --mpi=pmi2`',
            where=f"MASTER_ADDR={name}" if environment.master else entry.where,
            scope=Scope.JOB,
        )


def reason(environment: Environment, variables: Mapping[str, str]) -> str:
    """The variable for which the channel is there, and the channels that come after it, for people."""
    names = {"pmi": "PMI_FD", "slurm": NODE_LIST, "env": "MASTER_ADDR"}
    if not environment.channels:
        return "none is needed"
    name = names.get(environment.channels[0])
    why = f"{name}={variables.get(name, '')}" if name else environment.sources["rank"]
    return why + "".join(f", then {other}" for other in environment.channels[1:])


def on_channel(environment: Environment) -> str:
    """The channel in use, for people: ``slurm``, ``pmi``, ``mpi``, ``env`` or ``none``."""
    return environment.channels[0] if environment.channels else "none"
