"""Which network interface this rank uses, checked before any socket opens.

An interface that the user exported (``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME``) wins over the
entry of ifaces.conf. Gloo wants exact names; NCCL takes a list of prefixes in which ``=`` means
exact and a leading ``^`` excludes. One choice is exported in both spellings.
"""

import fnmatch
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network.ifaces_entry import (
    AUTO,
    NEAREST,
    Entries,
    IfacesEntry,
    entry_for,
    is_pattern,
)
from srunddp.errors import ConfigError, Scope

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
# How the names of loopback begin, and of links that containers (docker, podman, cni, lxc, veth),
# Kubernetes' networks (flannel, calico) and virtual machines (virbr, vnet) make on a node.
_VIRTUAL = (
    "lo",
    "docker",
    "veth",
    "virbr",
    "cni",
    "br-",
    "flannel",
    "cali",
    "tunl",
    "kube",
    "podman",
    "lxc",
    "vnet",
)


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface of this node: its name, addresses that others can use, speed in
    Mbit/s.
    """

    name: str
    up: bool
    speed: int
    ipv4: tuple[str, ...]
    ipv6: tuple[str, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """IPv4 first; no link-local ones."""
        return self.ipv4 + self.ipv6

    def __str__(self) -> str:
        return (
            f"{self.name} ({'' if self.up else 'down, '}{' '.join(self.addresses) or 'no address'})"
        )


Links = tuple[NetworkInterface, ...]


class _Choice(NamedTuple):
    """An interface that is chosen by name, and not looked at yet.

    Attributes:
        name: the interface's.
        source: what decided it.
        passed_over: what else could be it, and why it was not taken.
    """

    name: str
    source: str
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class SelectedInterface:
    """The choice for this rank.

    Attributes:
        name: the interface.
        address: its numeric address, by which the others know this node if it has several.
        exports: ``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME`` and the entry's ``env``.
        source: the line of ifaces.conf or the variable that decided it.
        kept: the variables among ``exports`` that the user had exported, and that stay.
        passed_over: what else names an interface, or could be it, and why it was not taken.
        export_sources: for each of ``exports`` what decided it.
    """

    name: str
    address: str
    exports: Mapping[str, str]
    source: str
    kept: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    export_sources: Mapping[str, str] = field(default_factory=dict)


def select_interface(
    entries: Entries, environment: Environment, variables: Mapping[str, str], links: Links
) -> SelectedInterface:
    """Choose and check this rank's interface among the node's, by ifaces.conf's entries and what
    the user exported.

    Args:
        entries: of ifaces.conf.
        environment: this rank's.
        variables: the environment variables, of which some name an interface.
        links: the node's interfaces.

    Raises:
        ConfigError: the interface is not there, down or without an address; loopback between nodes.
    """
    alone = environment.world_size == 1
    entry = entry_for(entries, environment.node, or_default=alone, interfaces=_listed(links))
    exported = _exported(variables, links)
    # Also one that does not decide here is checked: it stays exported, and Gloo or NCCL goes by it.
    for each in exported:
        _checked(
            each.name,
            links,
            environment,
            f"{each.variable}={variables[each.variable]}",
            Scope.NODE,
            f"correct {each.variable}",
        )
    leaves_choice = entry.interfaces in ((AUTO,), (NEAREST,))
    if exported:
        choice = _of_user(exported[0], entry, variables)
    elif alone or (leaves_choice and environment.one_node):
        choice = _loopback(entry, alone=alone)
        return _interface(choice, "127.0.0.1", entry, variables)
    elif entry.interfaces == (NEAREST,):
        choice = _nearest(links, environment, variables, entry.where)
    elif leaves_choice:
        choice = _automatic(links, environment, entry.where)
    else:
        choice = _listed_for(entry, links, environment)
    # With several names to an entry, one rank of a node may be wrong and another right.
    if len(entry.interfaces + entry.networks) > 1:
        scope = Scope.RANK
    else:
        scope = Scope.NODE
    link = _checked(choice.name, links, environment, choice.source, scope, "correct this entry")
    return _interface(choice, _address(link, entry, environment), entry, variables)


class _Exported(NamedTuple):
    """An interface that the user has chosen, and by which variable."""

    name: str
    variable: str


def _of_user(exported: _Exported, entry: IfacesEntry, variables: Mapping[str, str]) -> _Choice:
    """Return the choice of the user's variable, which comes before the entry."""
    return _Choice(
        exported.name,
        f"{exported.variable}={variables[exported.variable]}",
        (f"{entry.where}, {entry.rule}: exported variables come first",),
    )


def _loopback(entry: IfacesEntry, *, alone: bool) -> _Choice:
    """Return the choice of ranks that need no other node."""
    passed_over: tuple[str, ...] = ()
    if alone and entry.interfaces != (AUTO,):
        passed_over = (f"{entry.where}, {entry.rule}: not needed",)
    who = "a single process" if alone else "all ranks share one node"
    return _Choice("lo", f"loopback, as {who}", passed_over)


def _listed_for(entry: IfacesEntry, links: Links, environment: Environment) -> _Choice:
    """Choose the interface by the name, pattern or network that is this rank's.

    Raises:
        ConfigError: no interface fits a pattern or network.
    """
    rules = entry.networks or entry.interfaces
    rule = rules[environment.local_rank % len(rules)]
    passed_over: tuple[str, ...] = ()
    if len(rules) > 1:
        passed_over = (f"{entry.where}, {entry.rule}: by local rank, in turn",)
    if entry.networks:
        kind = "network"
        fit = [link for link in links if _within(link, rule)]
    elif is_pattern(rule):
        kind = "interface"
        fit = [link for link in links if fnmatch.fnmatchcase(link.name, rule)]
    else:
        return _Choice(rule, entry.where, passed_over)
    source = f"{entry.where}, {kind} {rule}"
    usable = sorted((link for link in fit if link.up and link.addresses), key=_order)
    if not usable:
        raise ConfigError(
            f"no interface that is up fits {rule} on node {environment.node}, which has"
            f" {_listed(links)}",
            expected="one with an address",
            hint="correct this entry",
            where=source,
            scope=Scope.RANK if len(rules) > 1 else Scope.NODE,
        )
    best = usable[0].name
    others = (
        f"{link.name}: {why_unusable(link) or f'{best} comes first by name'}"
        for link in fit
        if link.name != best
    )
    return _Choice(best, source, (*passed_over, *others))


def _within(link: NetworkInterface, network: str) -> tuple[str, ...]:
    """Return the addresses of an interface that are in a network."""
    import ipaddress

    within = ipaddress.ip_network(network)
    return tuple(address for address in link.addresses if ipaddress.ip_address(address) in within)


def _order(link: NetworkInterface) -> tuple[object, ...]:
    """Sorts by name, ib2 before ib10; what ``auto`` would not take comes last."""
    # `ib10` gives `ib`, `10` and an empty text: texts and numbers in turn.
    parts = re.split(r"(\d+)", link.name)
    return bool(why_unusable(link)), [*map(str, parts[::2])], [*map(int, parts[1::2])]


def _nearest(
    links: Links, environment: Environment, variables: Mapping[str, str], where: str
) -> _Choice:
    """Choose the interface nearest to this rank's GPU on PCI among those of the best kind; equally
    near ones are taken in turn.
    """
    from srunddp.bootstrap.network import pci  # most sites need none of it

    usable = sorted((link for link in links if not why_unusable(link)), key=_order)
    gpu, unknown = pci.own_gpu(environment.local_rank, environment.local_world_size or 1, variables)
    if not gpu or not usable:
        choice = _automatic(links, environment, where)
        return choice._replace(source=f"{choice.source}; not by distance to the GPU: {unknown}")
    # Distance counts among these only: what is next to the GPU may be a management interface.
    best = [link.name for link in usable if _kind(link) == min(map(_kind, usable))]
    distances = {name: pci.distance(gpu, name) for name in best}
    nearest = [name for name in best if distances[name] == min(distances.values())]
    chosen = nearest[environment.local_rank % len(nearest)]
    passed_over = []
    for link in usable:
        if link.name == chosen:
            continue
        if link.name in nearest:
            why = "as near: by local rank, in turn"
        elif link.name in best:
            why = f"farther than {chosen}"
        else:
            why = "slower, or not InfiniBand"
        passed_over.append(f"{link.name}: {why}")
    return _Choice(chosen, f"{where}, nearest to GPU {gpu}", tuple(passed_over))


def _interface(
    choice: _Choice, address: str, entry: IfacesEntry, variables: Mapping[str, str]
) -> SelectedInterface:
    """Write the choice in both spellings, with the entry's variables; the user's exports stay."""
    ours = {**entry.env, GLOO: choice.name, NCCL: f"={choice.name}"}
    # NCCL may choose among the interface's addresses: it has to take the family that the ranks have
    # met over.
    if ":" in address:
        ours["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    sources = {}
    for name in ours:
        if variables.get(name):
            sources[name] = "exported"
        elif name in entry.env:
            sources[name] = entry.where
        else:
            sources[name] = choice.source
    passed_over = list(choice.passed_over)
    if variables.get(NCCL, "").startswith("^"):
        passed_over.append(f"{NCCL}={variables[NCCL]}: excludes, and chooses none")
    return SelectedInterface(
        name=choice.name,
        address=address,
        # A variable that is set and empty is no choice of the user's.
        exports={name: variables.get(name) or value for name, value in ours.items()},
        source=choice.source,
        kept=tuple(name for name in ours if variables.get(name)),
        passed_over=tuple(passed_over),
        export_sources=sources,
    )


def _address(link: NetworkInterface, entry: IfacesEntry, environment: Environment) -> str:
    """Choose the address by which the others know this node; if they know none, the first of the
    family that they use.
    """
    if len(link.addresses) == 1:
        return link.addresses[0]
    own: Sequence[str] = link.addresses
    if entry.networks:
        network = entry.networks[environment.local_rank % len(entry.networks)]
        own = _within(link, network) or own
    if len(own) == 1:
        return own[0]
    if environment.master:
        name = environment.master[0]
    else:
        name = entry.address.format(node=environment.node)
    known = addresses_of(name or environment.node)
    families = {":" in host for host in known if not is_loopback(host)}
    # Known by a name first, then of the family that the names lead to; of equals min() takes the
    # first, which is IPv4.
    return min(own, key=lambda host: (host not in known, (":" in host) not in families))


def _exported(variables: Mapping[str, str], links: Links) -> list[_Exported]:
    """Return the interfaces that the user's own variables mean on this node; Gloo's come first."""
    found = [_Exported(name, GLOO) for name in variables.get(GLOO, "").split(",") if name]
    nccl = variables.get(NCCL, "")
    if not nccl or nccl.startswith("^"):  # which excludes
        return found
    # NCCL's own syntax: `=ib0,ib1` are names, `ib` without the sign is the beginning of names.
    is_exact = nccl.startswith("=")
    wanted = nccl.removeprefix("=").split(",")
    usable = [link.name for link in links if link.up and link.addresses]
    fitting = (
        name
        for want in wanted
        for name in usable
        if (name == want if is_exact else name.startswith(want))
    )
    # Where none fits, what it names first is wrong by name.
    return [*found, _Exported(next(fitting, wanted[0]), NCCL)]


def _automatic(links: Links, environment: Environment, source: str) -> _Choice:
    usable = []
    passed_over = []
    for link in links:
        if why := why_unusable(link):
            passed_over.append(f"{link.name}: {why}")
        else:
            usable.append(link)
    if not usable:
        raise ConfigError(
            f"node {environment.node} has no interface that reaches other nodes: {_listed(links)}",
            expected=(
                "one that is up, has an address, and is not loopback, a bridge or a container's"
            ),
            hint="name the right one in ifaces.conf",
            where=source,
            scope=Scope.NODE,
        )
    # The address that the others know this node by is the one they are known to reach.
    known = addresses_of(environment.node)
    best = min(usable, key=lambda link: (not known & set(link.addresses), *_kind(link)))
    passed_over += [f"{link.name}: {best.name} comes first" for link in usable if link is not best]
    return _Choice(best.name, f"auto, {source}", tuple(passed_over))


def _kind(link: NetworkInterface) -> tuple[bool, int]:
    """Sorts InfiniBand first, then by speed."""
    return not link.name.startswith("ib"), -link.speed


def why_unusable(link: NetworkInterface) -> str:
    """Tell why an interface of this node is none to choose; empty where it may be one that reaches
    other nodes.
    """
    # The kernel has this folder for each bridge, whatever its name is.
    if link.name.startswith(_VIRTUAL) or Path("/sys/class/net", link.name, "bridge").exists():
        return "loopback, a bridge or a container's"
    if not link.up:
        return "down"
    if not link.addresses:
        return "no address"
    # An interface gives itself such an address where no DHCP server has answered.
    if all(host.startswith("169.254.") for host in link.addresses):
        return "a link-local address only"
    return ""


def is_loopback(host: str) -> bool:
    """Whether no other node reaches this address."""
    return host.startswith(("127.", "::1"))


def shown_speed(speed: int) -> str:
    """Return a link's speed, given in Mbit/s, as people read it."""
    return f"{speed / 1000:g} Gbit/s" if speed > 0 else "speed unknown"


def addresses_of(name: str) -> set[str]:
    """Look up the addresses that a name leads to, as text; none where it does not resolve."""
    try:
        return {
            str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        }
    except (OSError, UnicodeError):
        # A UnicodeError: a part of the name is empty, or has more than 63 letters.
        return set()


def shares_subnet(own: str, other: str) -> bool:
    """Tell whether an address is in the subnet of one of this node's own addresses.

    Args:
        own: an address of this node, whose interface knows the subnet.
        other: the address that is looked for there, of the same family.
    """
    import psutil

    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    here = [
        found
        for addresses in psutil.net_if_addrs().values()
        for found in addresses
        if found.address == own
    ]
    for mask in (found.netmask for found in here if found.netmask):
        bits = [int.from_bytes(socket.inet_pton(family, text)) for text in (own, other, mask)]
        return (bits[0] ^ bits[1]) & bits[2] == 0
    return False


def _checked(
    name: str, links: Links, environment: Environment, source: str, scope: Scope, hint: str
) -> NetworkInterface:
    link = next((link for link in links if link.name == name), None)
    if not link:
        wrong = "is not there"
    elif not link.up or not link.addresses:
        wrong = "has no address" if link.up else "is down"
    elif is_loopback(link.addresses[0]) and not environment.one_node:
        wrong = "is loopback, which other nodes cannot reach"
    else:
        return link
    raise ConfigError(
        f"interface {name} {wrong} on node {environment.node}, which has {_listed(links)}",
        expected="one that is up and has an address",
        hint=hint,
        where=source,
        scope=scope,
    )


def _listed(links: Links) -> str:
    return ", ".join(map(str, links)) or "none"


def list_interfaces() -> Links:
    """Ask psutil for this node's interfaces."""
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        ipv4 = tuple(each.address for each in addresses if each.family == socket.AF_INET)
        every6 = [each.address for each in addresses if each.family == socket.AF_INET6]
        # A link-local address holds for one link: the other end would have to name its own
        # interface with it.
        ipv6 = tuple(address for address in every6 if not address.startswith("fe80"))
        found.append(
            NetworkInterface(
                name, bool(state and state.isup), state.speed if state else 0, ipv4, ipv6
            )
        )
    return tuple(found)
