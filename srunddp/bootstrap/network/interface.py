"""Which network interface this rank uses, checked before any socket opens.

An interface that the user exported (``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME``) wins over the entry
of ifaces.conf. Gloo wants exact names; NCCL takes a list of prefixes in which ``=`` means exact and a
leading ``^`` excludes. One choice is exported in both spellings.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from srunddp.bootstrap.environment.detect import Environment
from srunddp.bootstrap.network.ifaces_conf import AUTO, IfacesEntry, entry_for
from srunddp.errors import ConfigError, Scope

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
_VIRTUAL = ("lo", "docker", "veth", "virbr", "cni", "br-", "flannel", "cali", "tunl", "kube", "podman", "lxc", "vnet")


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface of this node: its name, addresses that others can use, speed in Mbit/s."""

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
        return f"{self.name} ({'' if self.up else 'down, '}{' '.join(self.addresses) or 'no address'})"


@dataclass(frozen=True)
class SelectedInterface:
    """The choice for this rank.

    Attributes:
        name: the interface; address: its numeric address, by which the others know this node if it has several.
        exports: ``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME`` and the entry's ``env``.
        source: the line of ifaces.conf or the variable that decided it.
        kept: the variables among ``exports`` that the user had exported, and that stay.
        passed_over: what else names an interface, or could be it, and why it was not taken.
    """

    name: str
    address: str
    exports: Mapping[str, str]
    source: str
    kept: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()


def select_interface(
    entries: tuple[IfacesEntry, ...],
    environment: Environment,
    variables: Mapping[str, str],
    links: tuple[NetworkInterface, ...],
) -> SelectedInterface:
    """Choose and check this rank's interface among the node's, by ifaces.conf's entries and what the user exported.

    Raises:
        ConfigError: the interface is not there, down or without an address; loopback between nodes.
    """
    alone = environment.world_size == 1
    entry = entry_for(entries, environment.node, alone=alone)
    passed_over: tuple[str, ...] = ()
    says = f"{entry.where}, interface {' '.join(entry.interfaces)}"
    for name, variable in (exported := _exported(variables, links)):
        _checked(name, links, environment, f"{variable}={variables[variable]}", Scope.NODE, hint=f"correct {variable}")
    if exported:
        name, source = exported[0][0], f"{exported[0][1]}={variables[exported[0][1]]}"
        passed_over = (f"{says}: exported variables come first",)
    elif alone:
        over = () if entry.interfaces == (AUTO,) else (f"{says}: not needed",)
        return _interface("lo", "127.0.0.1", entry, variables, "loopback, as a single process", over)
    elif entry.interfaces != (AUTO,):
        name, source = entry.interfaces[environment.local_rank % len(entry.interfaces)], entry.where
        if len(entry.interfaces) > 1:
            passed_over = (f"{says}: by local rank, in turn",)
    elif environment.one_node:
        return _interface("lo", "127.0.0.1", entry, variables, "loopback, as all ranks share one node")
    else:
        name, source, passed_over = _automatic(links, environment, entry.where)
    # With several names to an entry, one rank of a node may be wrong and another right.
    scope = Scope.RANK if len(entry.interfaces) > 1 else Scope.NODE
    link = _checked(name, links, environment, source, scope)
    return _interface(name, _address(link, entry, environment), entry, variables, source, passed_over)


def _interface(
    name: str,
    address: str,
    entry: IfacesEntry,
    variables: Mapping[str, str],
    source: str,
    passed_over: tuple[str, ...] = (),
) -> SelectedInterface:
    """The choice in both spellings and the entry's variables; what the user exported stays."""
    family = {"NCCL_SOCKET_FAMILY": "AF_INET6"} if ":" in address else {}
    ours = {**entry.env, GLOO: name, NCCL: f"={name}", **family}
    exports = {key: variables.get(key) or value for key, value in ours.items()}
    kept = tuple(key for key in ours if variables.get(key))
    if variables.get(NCCL, "").startswith("^"):
        passed_over = (*passed_over, f"{NCCL}={variables[NCCL]}: excludes, and chooses none")
    return SelectedInterface(name, address, exports, source, kept, passed_over)


def _address(link: NetworkInterface, entry: IfacesEntry, environment: Environment) -> str:
    """Of several addresses the one by which the others know this node, else the first of the same family."""
    if len(link.addresses) == 1:
        return link.addresses[0]
    name = environment.master[0] if environment.master else entry.address.format(node=environment.node)
    known = addresses_of(name or environment.node)
    families = {":" in host for host in known if not is_loopback(host)}
    return min(link.addresses, key=lambda host: (host not in known, (":" in host) not in families))


def _exported(variables: Mapping[str, str], links: tuple[NetworkInterface, ...]) -> list[tuple[str, str]]:
    """The interfaces that the user's own variables mean on this node, each with the variable; Gloo's come first."""
    found = [(name, GLOO) for name in variables.get(GLOO, "").split(",") if name]
    nccl = variables.get(NCCL, "")
    if nccl and not nccl.startswith("^"):
        found.append((_nccl_takes(nccl, links), NCCL))
    return found


def _nccl_takes(setting: str, links: tuple[NetworkInterface, ...]) -> str:
    """The first usable interface that a setting of NCCL fits; the first name in it where none does."""
    wanted = setting.removeprefix("=").split(",")
    for want in wanted:
        for link in links:
            name_fits = link.name == want if setting.startswith("=") else link.name.startswith(want)
            if name_fits and link.up and link.addresses:
                return link.name
    return wanted[0]


def _automatic(
    links: tuple[NetworkInterface, ...], environment: Environment, source: str
) -> tuple[str, str, tuple[str, ...]]:
    usable = [link for link in links if not why_unusable(link)]
    passed_over = tuple(f"{link.name}: {why_unusable(link)}" for link in links if why_unusable(link))
    if not usable:
        found = f"node {environment.node} has no interface that reaches other nodes: {_listed(links)}"
        expected = "one that is up, has an address, and is not loopback, a bridge or a container's"
        hint = "name the right one in ifaces.conf"
        raise ConfigError(found, expected=expected, hint=hint, where=source, scope=Scope.NODE)
    # The address that the others know this node by is the one they are known to reach.
    known = addresses_of(environment.node)
    best = min(usable, key=lambda link: (not known & set(link.addresses), not link.name.startswith("ib"), -link.speed))
    others = tuple(f"{link.name}: {best.name} comes first" for link in usable if link is not best)
    return best.name, f"auto, {source}", passed_over + others


def why_unusable(link: NetworkInterface) -> str:
    """Why an interface of this node is none to choose; empty where it may be one that reaches other nodes."""
    if link.name.startswith(_VIRTUAL) or Path("/sys/class/net", link.name, "bridge").exists():
        return "loopback, a bridge or a container's"
    if not link.up:
        return "down"
    if not link.addresses:
        return "no address"
    return "a link-local address only" if all(host.startswith("169.254.") for host in link.addresses) else ""


def is_loopback(host: str) -> bool:
    """Whether no other node reaches this address."""
    return host.startswith(("127.", "::1"))


def shown_speed(speed: int) -> str:
    """A link's speed in Mbit/s, for people."""
    return f"{speed / 1000:g} Gbit/s" if speed > 0 else "unknown speed"


def addresses_of(name: str) -> set[str]:
    """The addresses that a name leads to, as text; none where it does not resolve."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return set()


def shares_subnet(own: str, other: str) -> bool:
    """Whether an address is in the subnet that an interface of this node has for its own address."""
    import psutil

    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    here = [found for addresses in psutil.net_if_addrs().values() for found in addresses if found.address == own]
    for mask in (found.netmask for found in here if found.netmask):
        bits = [int.from_bytes(socket.inet_pton(family, text)) for text in (own, other, mask)]
        return (bits[0] ^ bits[1]) & bits[2] == 0
    return False


def _checked(
    name: str,
    links: tuple[NetworkInterface, ...],
    environment: Environment,
    source: str,
    scope: Scope,
    *,
    hint: str = "correct this entry",
) -> NetworkInterface:
    link = next((link for link in links if link.name == name), None)
    if not link:
        wrong = "is not there"
    elif not link.up:
        wrong = "is down"
    elif not link.addresses:
        wrong = "has no address"
    elif is_loopback(link.addresses[0]) and not environment.one_node:
        wrong = "is loopback, which other nodes cannot reach"
    else:
        return link
    found = f"interface {name} {wrong} on node {environment.node}, which has {_listed(links)}"
    raise ConfigError(found, expected="one that is up and has an address", hint=hint, where=source, scope=scope)


def _listed(links: tuple[NetworkInterface, ...]) -> str:
    return ", ".join(map(str, links)) or "none"


def list_interfaces() -> tuple[NetworkInterface, ...]:
    """This node's interfaces, by psutil."""
    import psutil

    states, found = psutil.net_if_stats(), []
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        ipv4 = tuple(each.address for each in addresses if each.family == socket.AF_INET)
        every6 = [each.address for each in addresses if each.family == socket.AF_INET6]
        ipv6 = tuple(address for address in every6 if not address.startswith("fe80"))
        found.append(NetworkInterface(name, bool(state and state.isup), state.speed if state else 0, ipv4, ipv6))
    return tuple(found)
