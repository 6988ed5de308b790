"""Where rank 0 is: what it published, or the addresses and ports at which the others look for
it.
"""

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from srunddp._version import __version__
from srunddp.bootstrap.environment import mpi
from srunddp.bootstrap.environment.cpus import mask
from srunddp.bootstrap.environment.types import Discovery, Environment
from srunddp.bootstrap.network.ifaces_entry import DEFAULT, Entries, IfacesEntry, entry_for
from srunddp.bootstrap.network.interface import (
    Links,
    SelectedInterface,
    addresses_of,
    is_loopback,
    list_interfaces,
)
from srunddp.bootstrap.rendezvous.auth import Authenticator, choose_authenticator
from srunddp.bootstrap.rendezvous.messages import Hello
from srunddp.bootstrap.rendezvous.protocol import Address, decode_advertisement
from srunddp.errors import ConfigError, Scope
from srunddp.util.console import SAY_EVERY, periodically

Broadcast = Callable[[str | None], str]
Say = Callable[[str], None]
OTHER_NAME = (
    'set `address: "{node}-data"` or the like in ifaces.conf, or start with `srun --mpi=pmi2`'
)


def token(environment: Environment) -> str:
    """Return the name by which the ranks of a run know each other.

    It stops mix-ups between jobs and steps; it is no secret and stops no attacker. All ranks know
    it before they meet in a job step, where it also differs with each requeue, and with explicit
    variables, where it is the same in each start. Elsewhere each process draws one, and rank 0's is
    published with its address.
    """
    if environment.step:
        return environment.step.id
    if environment.master:
        return f"{environment.master[0]}:{environment.master[1]}"
    return os.urandom(8).hex()


def token_source(environment: Environment) -> str:
    """Say what :func:`token` is made of where all ranks know it, for people."""
    if environment.step:
        return "job, step and restart count; TORCHELASTIC_RUN_ID"
    return "MASTER_ADDR:MASTER_PORT"


class Introduction(NamedTuple):
    """How a rank comes to rank 0, or receives others as such.

    Attributes:
        hello: what it says of itself.
        trust: its kind of proof.
        addresses: where rank 0 has published that it listens; empty where it publishes nothing, and
            each rank works that out.
    """

    hello: Hello
    trust: Authenticator
    addresses: list[Address]


def hello(environment: Environment, token: str, address: str = "") -> Hello:
    """Make up what this rank says of itself.

    Args:
        environment: this rank's.
        token: of the run.
        address: of its interface, to connect from; empty for any.
    """
    return Hello(
        token=token,
        rank=environment.rank,
        world_size=environment.world_size + environment.spares,
        local_rank=environment.local_rank,
        node=environment.node,
        address=address,
        pid=os.getpid(),
        cpus=mask(),
        local_world_size=environment.local_world_size or 0,
        version=__version__,
    )


def introduce(environment: Environment, published: str, address: str = "") -> Introduction:
    """Make up what this rank says of itself, and how it proves that it belongs to the run.

    Args:
        environment: this rank's.
        published: what rank 0 has published; empty where it publishes nothing.
        address: of this rank's interface, to connect from; empty for any.

    Raises:
        PeerError: rank 0 has published that it failed.
        RendezvousError: what it has published is no announcement.
    """
    if not published:
        return Introduction(
            hello(environment, token(environment), address), choose_authenticator(), []
        )
    # Only now does a rank without a step know the run's name: rank 0 has drawn it.
    advertisement = decode_advertisement(published)
    return Introduction(
        hello(environment, advertisement.token, address),
        choose_authenticator(advertisement.secret),
        advertisement.addresses,
    )


def rendezvous_ports(
    environment: Environment, entry: IfacesEntry, forced: range | None
) -> list[int]:
    """Return the ports that rank 0 tries for the rendezvous, and the others look at, in order.

    Args:
        environment: this rank's.
        entry: of ifaces.conf for rank 0's node, which may say which ports a firewall leaves open.
        forced: those of ``--port``, which come before the entry's; None without.
    """
    allowed = forced or entry.ports
    # A way that publishes has no rule for ports, and 0 lets the kernel choose one.
    return working_out(environment).ports(environment, allowed) or list(allowed or [0])


def ports_source(environment: Environment, entry: IfacesEntry, forced: range | None) -> str:
    """Say what limits :func:`rendezvous_ports` to some, and the rule by which they follow, for
    people.

    Args:
        environment, entry, forced: as there.
    """
    rule = working_out(environment).ports_rule
    if forced:
        return f"--port {forced[0]}-{forced[-1]}; {rule}"
    if entry.ports:
        return f"ports: {entry.ports[0]}-{entry.ports[-1]} of {entry.where}; {rule}"
    return rule


def place_source(environment: Environment, entry: IfacesEntry, variables: Mapping[str, str]) -> str:
    """Say what tells where rank 0 is, for people.

    Args:
        environment: this rank's.
        entry: of ifaces.conf for rank 0's node.
        variables: this rank's environment variables.
    """
    source = working_out(environment).source(environment, variables)
    if entry.address:
        return f"{source}, address: of {entry.where}"
    return source


def discover(
    environment: Environment, message: str | None, timeout: float, over_mpi: Broadcast, say: Say
) -> tuple[str, str]:
    """Find the channel that works, and what rank 0 published over it; nothing where its address is
    worked out.

    Args:
        message: what rank 0 says; None on the others.
        timeout: seconds to wait for the slowest rank over PMI.
        over_mpi: broadcasts over MPI; after its MpiNotLaunchedError the next way is taken.
        say: takes rank 0's lines on what it waits for.

    Raises:
        SrunddpError: none works.
    """
    waiting = say if environment.rank == 0 else lambda _: None
    for way in environment.discoveries:
        if not way.publishes:
            return way.name, ""
        try:
            with periodically(
                waiting, f"waiting for all ranks in {way.waits_in}, {{}} s so far", SAY_EVERY
            ):
                if way.starts_mpi:
                    return way.name, over_mpi(message)
                return way.name, way.exchange(message, environment, timeout)
        except mpi.MpiNotLaunchedError as reason:
            # MPI has not been started then, and no rank has been told anything by this way. After
            # any other error some may have been, and would not take part in another way.
            # Python deletes the name after `as` at the end of the clause.
            unsuitable = reason
    raise ConfigError(
        str(unsuitable),
        expected="mpi4py built for the MPI of this launcher",
        hint=(
            "install mpi4py for it, start with `srun --mpi=pmi2` or `--mpi=pmix`, or use --channel"
            " slurm"
        ),
        scope=Scope.JOB,
    )


def working_out(environment: Environment) -> Discovery:
    """Return the way by which the ranks work out where rank 0 is; where it publishes that, the one
    over which it does.
    """
    return next(
        (each for each in environment.discoveries if not each.publishes), environment.discovery
    )


def rank_zero_name(environment: Environment, entries: Entries) -> tuple[IfacesEntry, str]:
    """Return the entry of ifaces.conf for rank 0's node, and the name by which the others look for
    it.

    Args:
        environment: this rank's.
        entries: of ifaces.conf.

    Raises:
        ConfigError: where it is cannot be known.
    """
    zero = working_out(environment).rank_zero(environment)
    entry = entry_for(entries, zero.name) if zero.is_node else DEFAULT
    return entry, hostname_of(entry, zero.name)


def candidate_addresses(
    environment: Environment,
    interface: SelectedInterface | None,
    entries: Entries,
    forced: range | None,
) -> list[Address]:
    """Work out where rank 0 may listen, from what this rank knows.

    If it shares this rank's node, that is this rank's interface, or any of them where it has none.

    Args:
        environment: this rank's.
        interface: this rank's; None where that could not be chosen.
        entries: of ifaces.conf.
        forced: the ports of ``--port``; None without.

    Raises:
        ConfigError: rank 0's node cannot be known, or its name leads nowhere that other nodes
            reach.
    """
    entry, name = rank_zero_name(environment, entries)
    here = working_out(environment).rank_zero(environment).here
    # On rank 0's own node its name may lead to loopback, as Debian's /etc/hosts has it, where rank
    # 0 does not listen.
    if here:
        hosts = _own(environment, interface)
    else:
        hosts = _resolve(name, environment)
    return [
        Address(host, port)
        # All hosts at the first port come first: rank 0 goes on to the next port only if one is
        # taken.
        for port in rendezvous_ports(environment, entry, forced)
        for host in hosts
    ]


def _own(environment: Environment, interface: SelectedInterface | None) -> list[str]:
    """Return the addresses of this node at which rank 0 may be: its interface's, or any where it
    has none.
    """
    if interface:
        return [interface.address]
    if environment.one_node:
        return ["127.0.0.1"]
    # Which of them rank 0 has taken, or the others look at, is not known here.
    addresses = [address for link in list_interfaces() for address in link.addresses]
    return [host for host in addresses if not is_loopback(host)]


def resolve_node(
    environment: Environment, interface: SelectedInterface | None, entries: Entries
) -> list[str]:
    """Return those of this node's own addresses at which the others look for rank 0, which runs on
    it.

    Args:
        environment: rank 0's.
        interface: rank 0's, at which ranks of this node look; None where that could not be chosen.
        entries: of ifaces.conf.
    """
    if interface:
        beside = [interface.address]
    else:
        beside = []
    if environment.one_node:
        return beside or _own(environment, None)
    # The others look where the name leads to. Of these addresses only the node's own can be bound.
    found = addresses_of(
        _own_name(environment, entry_for(entries, environment.node, or_default=True))
    )
    return list(
        dict.fromkeys([*beside, *(host for host in _own(environment, None) if host in found)])
    )


def hostname_of(entry: IfacesEntry, node: str) -> str:
    """Return the name by which the other nodes reach a node.

    Args:
        entry: of ifaces.conf for the node.
        node: the name by which its launcher knows it.
    """
    return entry.address.format(node=node) or node


def _own_name(environment: Environment, entry: IfacesEntry) -> str:
    """Return the name by which the others look for rank 0, asked on its own node."""
    if environment.master:
        return environment.master[0]
    return hostname_of(entry, environment.node)


def _resolve(name: str, environment: Environment) -> list[str]:
    found = addresses_of(name)
    reachable = sorted(host for host in found if environment.one_node or not is_loopback(host))
    if reachable:
        return reachable
    if found:
        addresses = ", ".join(sorted(found))
        text = f"{name} resolves to {addresses} on node {environment.node}, which is loopback"
    else:
        text = f"{name} does not resolve on node {environment.node}"
    raise ConfigError(
        text,
        expected="a name for rank 0's address on the data network",
        hint=f"{OTHER_NAME}; with --channel env correct MASTER_ADDR",
        scope=Scope.NODE,
    )


def check_reachable(
    environment: Environment, interface: SelectedInterface, entry: IfacesEntry, links: Links
) -> None:
    """Refuse at once to wait where nobody will come; for rank 0.

    Args:
        environment: rank 0's.
        interface: on which it listens.
        entry: of ifaces.conf, for its node.
        links: the interfaces of its node.

    Raises:
        ConfigError: the name that the others will look up is another interface of this node.
    """
    name = _own_name(environment, entry)
    found = addresses_of(name)
    addresses = {address: link.name for link in links for address in link.addresses}
    # Only another interface of this node is a proof: a name that leads nowhere here, or to
    # loopback, may be right on the other nodes.
    elsewhere = {
        host: addresses[host] for host in found if host in addresses and not host.startswith("127.")
    }
    if not elsewhere or interface.address in elsewhere:
        return
    host, other = next(iter(elsewhere.items()))
    if environment.master:
        where = f"MASTER_ADDR={name}"
        hint = "correct one of the two"
    else:
        where = entry.where
        hint = OTHER_NAME
    raise ConfigError(
        f"the others look for rank 0 at {name}, which is {host} on {other}; its interface is"
        f" {interface.name} ({interface.address})",
        expected="a name that leads to that interface",
        hint=hint,
        where=where,
        scope=Scope.JOB,
    )
