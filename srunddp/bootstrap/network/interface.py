"""Choose the network interface of this rank, and check it before any socket opens.

An interface that the user exported (``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME``) wins over the
entry of ifaces.conf. Gloo wants exact names. NCCL takes a list of prefixes; a leading ``=`` makes
them exact names, and a leading ``^`` excludes them. The choice is exported to Gloo as the exact
name and to NCCL with the ``=``. It is also exported in ``TP_SOCKET_IFNAME``, from which TensorPipe
(torch's RPC) reads one exact name.
"""

import fnmatch
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import field
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
from srunddp.util.quick_dataclass import dataclass

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
TENSORPIPE = "TP_SOCKET_IFNAME"
_USERS = "exported"
# The beginnings of the names of loopback, and of links that containers (docker, podman, cni, lxc,
# veth), Kubernetes' networks (flannel, calico) and virtual machines (virbr, vnet) make on a node.
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
    """A network interface of this node.

    Attributes:
        name: as ``ip link`` shows it.
        up: whether the interface is up.
        speed: in Mbit/s; 0 if the kernel does not know it.
        ipv4, ipv6: its numeric addresses, without link-local addresses of IPv6.
    """

    name: str
    up: bool
    speed: int
    ipv4: tuple[str, ...]
    ipv6: tuple[str, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses of the interface, IPv4 first."""
        return self.ipv4 + self.ipv6

    def __str__(self) -> str:
        return (
            f"{self.name} ({'' if self.up else 'down, '}{' '.join(self.addresses) or 'no address'})"
        )


Links = tuple[NetworkInterface, ...]
UNKNOWN = "?"
"""The address of an interface on a node that this process cannot inspect."""


class _Choice(NamedTuple):
    """An interface that is chosen by its name, but not yet checked.

    Attributes:
        name: the name of the interface.
        source: the line of ifaces.conf, the variable or the rule that decided it.
        passed_over: the other candidates, each with the reason why it was not taken.
    """

    name: str
    source: str
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class SelectedInterface:
    """The interface of this rank, and the variables to export for it.

    Attributes:
        name: the name of the interface.
        address: its numeric address; if it has several, the one by which other nodes know this
            node.
        exports: ``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME``, ``TP_SOCKET_IFNAME`` and the
            entry's ``env``.
        source: the line of ifaces.conf, the variable or the rule that decided the interface.
        kept: the names among ``exports`` whose values are the user's own.
        passed_over: the other settings that name an interface, and the other candidates, each with
            the reason why it was not chosen.
        export_sources: what decided the value of each name in ``exports``.
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
    """Choose this rank's interface by the user's exports, or else by the entry of ifaces.conf, and
    check it.

    Args:
        entries: the entries of ifaces.conf.
        environment: this rank's environment.
        variables: the environment variables; the user's may name an interface.
        links: the node's interfaces.

    Raises:
        ConfigError: no entry matches the node; or the interface does not exist, is down, has no
            address, or is loopback although there are several nodes.
    """
    alone = environment.world_size == 1
    entry = entry_for(entries, environment.node, or_default=alone, interfaces=_listed(links))
    exported = _exported(variables, links)
    # Check every exported interface, even one that does not decide here: it stays exported, and
    # Gloo, NCCL or TensorPipe will use it.
    for each in [*exported, *_exported_for_rpc(variables)]:
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
    # If the entry has several interfaces, it may be wrong for one rank of the node and right for
    # another.
    if len(entry.interfaces + entry.networks) > 1:
        scope = Scope.RANK
    else:
        scope = Scope.NODE
    link = _checked(choice.name, links, environment, choice.source, scope, "correct this entry")
    return _interface(choice, _address(link, entry, environment), entry, variables)


def select_elsewhere(
    entry: IfacesEntry, environment: Environment, variables: Mapping[str, str]
) -> SelectedInterface | None:
    """Choose a rank's interface for a node that this process cannot inspect. Each interface that
    the entry or a variable names is taken to be up, with the address :data:`UNKNOWN`.

    Args:
        entry: the node's entry of ifaces.conf.
        environment: the rank's environment.
        variables: its environment variables.

    Returns:
        The interface; None if the choice depends on what interfaces the node has, so that only a
        process on the node can make it.
    """
    names = list(entry.interfaces if entry.exact else ())
    for variable in (GLOO, NCCL, TENSORPIPE):
        exported = variables.get(variable, "")
        if not exported.startswith("^"):  # ^ excludes interfaces, and names none to use
            names += [name.lstrip("=") for name in exported.split(",")]
    links = tuple(
        NetworkInterface(name, True, 0, (UNKNOWN,), ()) for name in dict.fromkeys(names) if name
    )
    try:
        return select_interface((entry,), environment, variables, links)
    except ConfigError:
        return None


class _Exported(NamedTuple):
    """An interface that the user has chosen, and the variable that names it."""

    name: str
    variable: str


def _of_user(exported: _Exported, entry: IfacesEntry, variables: Mapping[str, str]) -> _Choice:
    """Return the interface that the user's variable names, which comes before the entry."""
    return _Choice(
        exported.name,
        f"{exported.variable}={variables[exported.variable]}",
        (f"{entry.where}, {entry.rule}: exported variables come first",),
    )


def _loopback(entry: IfacesEntry, *, alone: bool) -> _Choice:
    """Choose loopback, for when no rank is on another node."""
    passed_over: tuple[str, ...] = ()
    if alone and entry.interfaces != (AUTO,):
        passed_over = (f"{entry.where}, {entry.rule}: not needed",)
    who = "a single process" if alone else "all ranks share one node"
    return _Choice("lo", f"loopback, as {who}", passed_over)


def _listed_for(entry: IfacesEntry, links: Links, environment: Environment) -> _Choice:
    """Choose the interface by the name, pattern or network that the entry has for this local rank.

    Raises:
        ConfigError: no usable interface matches the pattern or network.
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
            hint=_device_of_this_node(rule) or "correct this entry",
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


def _device_of_this_node(name: str) -> str:
    """Return a hint with this node's interfaces if a name or pattern fits a device instead of an
    interface; else an empty text.
    """
    from srunddp.util import infiniband  # only for an error

    own = (each for each in infiniband.devices() if fnmatch.fnmatchcase(each.name, name))
    interfaces = dict.fromkeys(interface for each in own for interface in each.interfaces)
    return infiniband.no_interface(name, tuple(interfaces))


def _within(link: NetworkInterface, network: str) -> tuple[str, ...]:
    """Return the addresses of an interface that are in a network."""
    import ipaddress

    within = ipaddress.ip_network(network)
    return tuple(address for address in link.addresses if ipaddress.ip_address(address) in within)


def _order(link: NetworkInterface) -> tuple[object, ...]:
    """Return the key to sort interfaces by name, ib2 before ib10; unusable ones come last."""
    # `ib10` is split into `ib`, `10` and an empty text: texts and numbers in turn.
    parts = re.split(r"(\d+)", link.name)
    return bool(why_unusable(link)), [*map(str, parts[::2])], [*map(int, parts[1::2])]


def _nearest(
    links: Links, environment: Environment, variables: Mapping[str, str], where: str
) -> _Choice:
    """Choose the interface nearest to this rank's GPU on the PCI bus. Only interfaces of the best
    kind are candidates: InfiniBand if there is any, then the fastest. Local ranks use equally near
    interfaces in turn. If the GPU is unknown, choose as ``auto`` does.
    """
    from srunddp.bootstrap.network import pci  # most sites do not need it

    usable = sorted((link for link in links if not why_unusable(link)), key=_order)
    gpu, unknown = pci.own_gpu(environment.local_rank, environment.local_world_size or 1, variables)
    if not gpu or not usable:
        choice = _automatic(links, environment, where)
        return choice._replace(source=f"{choice.source}; not by distance to the GPU: {unknown}")
    # Compare the distances of the best kind only: the interface next to the GPU may be one for
    # management.
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
    """Return the chosen interface with its exports: the name as Gloo and NCCL want it, and the
    entry's ``env``. Variables that the user has set keep their values.
    """
    ours = {
        **entry.env,
        GLOO: choice.name,
        NCCL: f"={choice.name}",
        TENSORPIPE: choice.name,
    }
    # If the interface has IPv4 and IPv6 addresses, NCCL chooses one itself. Make it use the family
    # over which the ranks have met.
    if ":" in address:
        ours["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    sources = dict.fromkeys(ours, choice.source) | env_sources(entry, variables)
    sources |= {name: _USERS for name in ours if variables.get(name)}
    passed_over = list(choice.passed_over)
    if variables.get(NCCL, "").startswith("^"):
        passed_over.append(f"{NCCL}={variables[NCCL]}: excludes, and chooses none")
    return SelectedInterface(
        name=choice.name,
        address=address,
        # An empty variable is not a choice of the user.
        exports={name: variables.get(name) or value for name, value in ours.items()},
        source=choice.source,
        kept=tuple(name for name in ours if variables.get(name)),
        passed_over=tuple(passed_over),
        export_sources=sources,
    )


def env_sources(entry: IfacesEntry, variables: Mapping[str, str]) -> dict[str, str]:
    """Return for each variable of an entry's ``env`` what decides its value: the entry, or the user
    who has exported it.
    """
    return {name: _USERS if variables.get(name) else entry.where for name in entry.env}


def _address(link: NetworkInterface, entry: IfacesEntry, environment: Environment) -> str:
    """Choose one address of the interface: one to which the node's name (or ``MASTER_ADDR``)
    resolves, or else the first of the same family as the addresses of that name.
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
    # Prefer an address to which the name resolves, then one of the same family. Among equals min()
    # takes the first, which is an IPv4 address if there is one.
    return min(own, key=lambda host: (host not in known, (":" in host) not in families))


def _exported(variables: Mapping[str, str], links: Links) -> list[_Exported]:
    """Return the interfaces that the user's variables select on this node; Gloo's come first."""
    found = [_Exported(name, GLOO) for name in variables.get(GLOO, "").split(",") if name]
    nccl = variables.get(NCCL, "")
    if not nccl or nccl.startswith("^"):  # ^ excludes interfaces, and selects none
        return found
    # In NCCL's syntax, `=ib0,ib1` lists exact names; `ib` without the sign is a prefix of names.
    is_exact = nccl.startswith("=")
    wanted = nccl.removeprefix("=").split(",")
    usable = [link.name for link in links if link.up and link.addresses]
    fitting = (
        name
        for want in wanted
        for name in usable
        if (name == want if is_exact else name.startswith(want))
    )
    # If no interface fits, return the first name, which the check then refuses.
    return [*found, _Exported(next(fitting, wanted[0]), NCCL)]


def _exported_for_rpc(variables: Mapping[str, str]) -> list[_Exported]:
    """Return the interface that the user's ``TP_SOCKET_IFNAME`` names for torch's RPC, as a list of
    one; empty if the variable is not set.

    The variable does not decide the interface of Gloo and NCCL, which may use a faster one.
    """
    name = variables.get(TENSORPIPE, "")
    return [_Exported(name, TENSORPIPE)] if name else []


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
    # Prefer the interface that has an address of this node's name: other nodes should reach it.
    known = addresses_of(environment.node)
    best = min(usable, key=lambda link: (not known & set(link.addresses), *_kind(link)))
    passed_over += [f"{link.name}: {best.name} comes first" for link in usable if link is not best]
    return _Choice(best.name, f"auto, {source}", tuple(passed_over))


def _kind(link: NetworkInterface) -> tuple[bool, int]:
    """Return the key to sort interfaces: InfiniBand first, then the fastest."""
    return not link.name.startswith("ib"), -link.speed


def why_unusable(link: NetworkInterface) -> str:
    """Return why an interface of this node cannot be chosen; empty if it may reach other nodes."""
    # The kernel has this folder for each bridge, whatever its name is.
    if link.name.startswith(_VIRTUAL) or Path("/sys/class/net", link.name, "bridge").exists():
        return "loopback, a bridge or a container's"
    if not link.up:
        return "down"
    if not link.addresses:
        return "no address"
    # An interface gives itself such an address if no DHCP server answers.
    if all(host.startswith("169.254.") for host in link.addresses):
        return "a link-local address only"
    return ""


def is_loopback(host: str) -> bool:
    """Whether this is a loopback address, which no other node can reach."""
    return host.startswith(("127.", "::1"))


def shown_speed(speed: int) -> str:
    """Return a link's speed, given in Mbit/s, as text in Gbit/s; ``speed unknown`` for 0."""
    return f"{speed / 1000:g} Gbit/s" if speed > 0 else "speed unknown"


def addresses_of(name: str) -> set[str]:
    """Return the numeric addresses to which a name resolves; none if it does not resolve."""
    try:
        return {
            str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        }
    except (OSError, UnicodeError):
        # A UnicodeError means that a part of the name is empty, or has more than 63 letters.
        return set()


def shares_subnet(own: str, other: str) -> bool:
    """Tell whether an address is in the subnet of one of this node's own addresses.

    Args:
        own: the address of this node; its interface has the netmask.
        other: the address to look for in that subnet; it has the same family.
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
        hint=(not link and _device_of_this_node(name)) or hint,
        where=source,
        scope=scope,
    )


def _listed(links: Links) -> str:
    return ", ".join(map(str, links)) or "none"


def list_interfaces() -> Links:
    """Return all network interfaces of this node, usable or not, as psutil lists them."""
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        ipv4 = tuple(each.address for each in addresses if each.family == socket.AF_INET)
        every6 = [each.address for each in addresses if each.family == socket.AF_INET6]
        # Leave out link-local addresses: the other end would have to add the name of its own
        # interface to use one.
        ipv6 = tuple(address for address in every6 if not address.startswith("fe80"))
        found.append(
            NetworkInterface(
                name, bool(state and state.isup), state.speed if state else 0, ipv4, ipv6
            )
        )
    return tuple(found)
