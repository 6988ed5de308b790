"""Finds out where rank 0 listens: from the text that rank 0 has published, or by deriving from the
environment the addresses and ports at which the ranks look for it.
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
_SCAN = "srunddp ifaces scan -o ifaces.conf"
OTHER_NAME = (
    'set `address: "{node}-data"` or the like in ifaces.conf, or start with `srun --mpi=pmi2`'
)


def network_hint(environment: Environment) -> str:
    """Return a hint by which command the user finds a network over which the ranks reach each
    other; empty if all ranks share one node.
    """
    if environment.one_node:
        return ""
    # The scan must find its own rank 0 although the network of this run does not work. So advise to
    # start it with PMI, over which its rank 0 publishes all addresses of its node.
    if environment.step and not environment.discovery.publishes:
        scan = f"`srun --mpi=pmi2 {_SCAN}`"
    else:
        scan = f"`{_SCAN}`, started as this run was,"
    return f"{scan} finds a network between the nodes, for --ifaces=ifaces.conf"


def token(environment: Environment) -> str:
    """Return the text by which the ranks of one run recognise each other.

    It prevents mix-ups between jobs and steps; it is not secret and stops no attacker. In a job
    step all ranks know the token before the rendezvous, and each requeue changes it. With explicit
    variables the ranks know it too, but every run at this address and port has the same one.
    Otherwise this function returns a random token, and all ranks use the one of rank 0, which is
    published together with rank 0's address.
    """
    if environment.step:
        return environment.step.id
    if environment.master:
        return f"{environment.master[0]}:{environment.master[1]}"
    return os.urandom(8).hex()


def token_source(environment: Environment) -> str:
    """Describe, for messages, from which variables the token of a step, or of explicit variables,
    is made.
    """
    if environment.step:
        return "job, step and restart count; TORCHELASTIC_RUN_ID"
    return "MASTER_ADDR:MASTER_PORT"


class Introduction(NamedTuple):
    """The values with which a rank greets rank 0, or rank 0 receives the other ranks.

    Attributes:
        hello: the hello of this rank.
        trust: this rank's kind of proof.
        addresses: where rank 0 listens, as it has published; empty if it publishes nothing, so that
            each rank works this out.
    """

    hello: Hello
    trust: Authenticator
    addresses: list[Address]


def hello(environment: Environment, token: str, address: str = "", generation: int = 0) -> Hello:
    """Return the hello by which this rank introduces itself.

    Args:
        environment: this rank's environment.
        token: the run's token.
        address: the address of this rank's interface, from which it connects; empty for any.
        generation: how many restarts the run has had.
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
        layout=environment.layout,
        generation=generation,
    )


def introduce(
    environment: Environment, published: str, address: str = "", generation: int = 0
) -> Introduction:
    """Return this rank's hello, its kind of proof, and the addresses at which rank 0 listens.

    Args:
        environment: this rank's environment.
        published: the text that rank 0 has published; empty if it publishes nothing.
        address: the address of this rank's interface, from which it connects; empty for any.
        generation: how many restarts the run has had.

    Raises:
        PeerError: rank 0 has published that it failed.
        RendezvousError: the published text is not from a rank 0 of srunddp.
    """
    if not published:
        return Introduction(
            hello(environment, token(environment), address, generation),
            choose_authenticator(),
            [],
        )
    # Outside a step, a rank learns the token only here, because rank 0 has drawn it.
    advertisement = decode_advertisement(published)
    return Introduction(
        hello(environment, advertisement.token, address, generation),
        choose_authenticator(advertisement.secret),
        advertisement.addresses,
    )


def rendezvous_ports(
    environment: Environment, entry: IfacesEntry, forced: range | None
) -> list[int]:
    """Return the ports that rank 0 tries for the rendezvous, and at which the others look for it,
    in this order.

    Args:
        environment: this rank's environment.
        entry: the entry of ifaces.conf for rank 0's node; it may name the ports that a firewall
            leaves open.
        forced: the ports of ``--port``, used instead of the entry's; None without the option.
    """
    allowed = forced or entry.ports
    # A way that publishes returns no ports: take any allowed one, or let the kernel choose (0).
    return working_out(environment).ports(environment, allowed) or list(allowed or [0])


def ports_source(environment: Environment, entry: IfacesEntry, forced: range | None) -> str:
    """Describe, for messages, the setting that restricts the ports of :func:`rendezvous_ports`, and
    the rule by which they are chosen.

    Args:
        environment, entry, forced: as for :func:`rendezvous_ports`.
    """
    rule = working_out(environment).ports_rule
    if forced:
        return f"--port {forced[0]}-{forced[-1]}; {rule}"
    if entry.ports:
        return f"ports: {entry.ports[0]}-{entry.ports[-1]} of {entry.where}; {rule}"
    return rule


def place_source(environment: Environment, entry: IfacesEntry, variables: Mapping[str, str]) -> str:
    """Describe, for messages, the variable that tells where rank 0 is, and the entry that gives its
    address.

    Args:
        environment: this rank's environment.
        entry: the entry of ifaces.conf for rank 0's node.
        variables: this rank's environment variables.
    """
    source = working_out(environment).source(environment, variables)
    if entry.address:
        return f"{source}, address: of {entry.where}"
    return source


def discover(
    environment: Environment, message: str | None, timeout: float, over_mpi: Broadcast, say: Say
) -> tuple[str, str]:
    """Find the channel that works, and exchange over it what rank 0 publishes.

    Args:
        environment: this rank's environment.
        message: on rank 0, the text to publish; None on the other ranks.
        timeout: seconds to wait for the slowest rank over PMI.
        over_mpi: broadcasts over MPI; if it raises MpiNotLaunchedError, the next way is tried.
        say: takes rank 0's lines about what it waits for.

    Returns:
        The channel's name, and the text that rank 0 published; the text is empty if each rank works
        out where rank 0 is.

    Raises:
        SrunddpError: no channel works, or the exchange failed.
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
            # After this error MPI has not started, and no rank has learned anything this way, so
            # all try the next one. After any other error some ranks may have the message already,
            # and would not take part in another way.
            # Keep the error: Python deletes the name after `as` at the end of the clause.
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
    """Return the first way by which ranks work out rank 0's address themselves; if there is none,
    the way over which rank 0 publishes it.
    """
    return next(
        (each for each in environment.discoveries if not each.publishes), environment.discovery
    )


def rank_zero_name(environment: Environment, entries: Entries) -> tuple[IfacesEntry, str]:
    """Return the entry of ifaces.conf for rank 0's node, and the name by which the others look for
    rank 0.

    Args:
        environment: this rank's environment.
        entries: the entries of ifaces.conf.

    Raises:
        ConfigError: the variables do not determine rank 0's node, or no entry matches it.
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
    """Work out the addresses at which rank 0 may listen, from what this rank knows.

    On rank 0's own node, the host is the address of this rank's interface, or each address of the
    node if no interface could be chosen. On another node, it is each address to which rank 0's name
    resolves.

    Args:
        environment: this rank's environment.
        interface: this rank's interface; None if it could not be chosen.
        entries: the entries of ifaces.conf.
        forced: the ports of ``--port``; None without the option.

    Raises:
        ConfigError: the variables do not determine rank 0's node, or its name resolves to no
            address that other nodes can reach.
    """
    entry, name = rank_zero_name(environment, entries)
    here = working_out(environment).rank_zero(environment).here
    # Do not resolve rank 0's name on rank 0's own node. The name may resolve to loopback there (as
    # in Debian's /etc/hosts), and rank 0 does not listen on loopback.
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
    """Return the addresses of this node at which rank 0 may listen: that of the interface, or all
    if no interface could be chosen.
    """
    if interface:
        return [interface.address]
    if environment.one_node:
        return ["127.0.0.1"]
    # Without an interface, it is not known at which address of this node rank 0 listens, or the
    # others look for it. So return all of them.
    addresses = [address for link in list_interfaces() for address in link.addresses]
    return [host for host in addresses if not is_loopback(host)]


def resolve_node(
    environment: Environment, interface: SelectedInterface | None, entries: Entries
) -> list[str]:
    """Return the addresses of rank 0's node at which the other ranks look for rank 0. Call it on
    rank 0.

    Args:
        environment: rank 0's environment.
        interface: rank 0's interface; None if it could not be chosen. The ranks on rank 0's node
            look for rank 0 at the address of this interface.
        entries: the entries of ifaces.conf.
    """
    if interface:
        beside = [interface.address]
    else:
        beside = []
    if environment.one_node:
        return beside or _own(environment, None)
    # Ranks of other nodes look at all addresses to which the name resolves, but rank 0 can bind
    # only those of its node.
    found = addresses_of(
        _own_name(environment, entry_for(entries, environment.node, or_default=True))
    )
    return list(
        dict.fromkeys([*beside, *(host for host in _own(environment, None) if host in found)])
    )


def hostname_of(entry: IfacesEntry, node: str) -> str:
    """Return the name by which the other nodes reach a node.

    Args:
        entry: the entry of ifaces.conf for the node.
        node: the launcher's name for the node.
    """
    return entry.address.format(node=node) or node


def _own_name(environment: Environment, entry: IfacesEntry) -> str:
    """Return the name by which the others look for rank 0. Call it on rank 0's node."""
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
    """Check that the other ranks will look for rank 0 at the interface on which it listens, and not
    at another interface of its node, where they would not find it. Call this on rank 0.

    Args:
        environment: rank 0's environment.
        interface: the interface on which rank 0 listens.
        entry: the entry of ifaces.conf for rank 0's node.
        links: the interfaces of rank 0's node.

    Raises:
        ConfigError: the name that the others look up resolves to another interface of this node.
    """
    name = _own_name(environment, entry)
    found = addresses_of(name)
    addresses = {address: link.name for link in links for address in link.addresses}
    # Only a name that resolves to another interface of this node is certainly wrong: a name that
    # does not resolve here, or resolves to loopback, may be right on the other nodes.
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
