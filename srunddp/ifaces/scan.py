"""Which interfaces of which nodes reach each other, found by trying: every rank's side of ``srunddp ifaces scan``."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from srunddp.bootstrap.network.interface import addresses_of, list_interfaces, why_unusable
from srunddp.bootstrap.rendezvous.protocol import listen
from srunddp.check.coordinator import Coordinator
from srunddp.errors import SrunddpError
from srunddp.util import infiniband
from srunddp.util.timeouts import call_in_daemon_thread

_WITHIN = 2.0
_SLACK = 15.0  # for a node that is busy
_AT_ONCE = 64
_NEIGHBOURS = 16


@dataclass(frozen=True)
class ScannedInterface:
    """An interface of a node.

    Attributes:
        address: its first, IPv4 before IPv6; network: that address belongs to, ``10.88.0.0/24``.
        speed: in Mbit/s, 0 where it is not known.
        passed_over: why it is none for a training; empty where it may be one.
        names: other names of the node that lead to the address.
        named: whether the node's own name leads to it.
        devices: the active InfiniBand and RoCE devices that NCCL is to use with it; layer: of its own ones,
            ``InfiniBand``, ``Ethernet`` for RoCE, or empty; others: devices that may belong to these.
    """

    name: str
    address: str
    network: str
    speed: int
    passed_over: str
    names: tuple[str, ...]
    named: bool
    devices: tuple[str, ...]
    layer: str
    others: tuple[str, ...] = ()

    @property
    def end(self) -> str:
        """What it is called in messages."""
        return f"{self.name} ({self.address or 'no address'})"


def links(node: str) -> list[ScannedInterface]:
    """Those of this node."""
    own = addresses_of(node)
    devices = [device for device in infiniband.devices() if device.active]
    found = []
    for link in list_interfaces():
        address = link.addresses[0] if link.addresses else ""
        theirs = [device for device in devices if link.name in device.interfaces]
        used, others = infiniband.with_interface(theirs, devices)
        usable = not why_unusable(link)
        found.append(
            ScannedInterface(
                name=link.name,
                address=address,
                network=_network(link.name, address),
                speed=max([link.speed, *(device.rate for device in theirs)]),
                passed_over=why_unusable(link),
                names=_names(address) if usable else (),
                named=address in own,
                devices=tuple(device.name for device in used),
                layer=theirs[0].layer if theirs else "",
                others=tuple(device.name for device in others),
            )
        )
    return found


def _network(name: str, address: str) -> str:
    import psutil

    masks = [found.netmask for found in psutil.net_if_addrs().get(name, ()) if found.address == address]
    if not masks or not masks[0]:
        return ""
    # An IPv6 mask comes as an address, of which the module takes no network.
    length = bin(int(ipaddress.ip_address(masks[0]))).count("1")
    return str(ipaddress.ip_interface(f"{address}/{length}").network)


def _names(address: str) -> tuple[str, ...]:
    """What the address is called, where the look-up answers in time."""
    try:
        name, aliases, _ = call_in_daemon_thread(lambda: socket.gethostbyaddr(address)).result(_WITHIN)
    except (OSError, TimeoutError):
        return ()
    return (name, *aliases)


@dataclass
class Scanner:
    """This rank, answering rank 0's questions."""

    node: str
    _listeners: dict[str, socket.socket] = field(default_factory=dict)

    def act(self, question: Mapping[str, Any]) -> Any:
        """The answer to one of them."""
        match question.get("do"):
            case "links":
                return [asdict(link) for link in links(self.node)]
            case "listen":
                return {address: self._listen(address) for address in question["addresses"]}
            case "connect":
                return self._connect(question["ways"])
            case "resolve":
                return {name: sorted(addresses_of(name)) for name in question["names"]}
        return None

    def _listen(self, address: str) -> int:
        try:
            self._listeners[address] = listen(address, [0])
        except SrunddpError:
            return 0
        return int(self._listeners[address].getsockname()[1])

    def _connect(self, ways: Sequence[tuple[str, str, str, int, bool]]) -> list[bool]:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda way: reaches(*way), ways))


def reaches(interface: str, source: str, host: str, port: int, neighbour: bool) -> bool:
    """Whether TCP goes from an interface of this node to an address.

    It is bound to the interface as well as to its address: the kernel would else send from any address over the
    interface that has the route. So bound it sends to any address as to a neighbour's, and Linux answers for all
    addresses on all interfaces; therefore only those count that are in one network, or that the node routes this way.

    Args:
        interface, source: of this node; host, port: of the other.
        neighbour: whether both addresses are in one network.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not neighbour and _routed_from(family, host) != source:
        return False
    with socket.socket(family, socket.SOCK_STREAM) as line:
        line.settimeout(_WITHIN)
        try:
            with contextlib.suppress(PermissionError):  # kernels before 5.7 let root alone do it
                line.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
            line.bind((source, 0))
            line.connect((host, port))
        except OSError:
            return False
    return True


def _routed_from(family: socket.AddressFamily, host: str) -> str:
    """The address that this node would send from; connecting UDP looks up the route, and sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


End = tuple[str, str]
Ends = dict[End, ScannedInterface]


@dataclass(frozen=True)
class ScanResult:
    """What was found.

    Attributes:
        ends: every interface, by node and name.
        reached: for each two ends that were tried, whether it worked.
        resolved: for each name, the addresses that each node finds for it.
    """

    ends: Ends
    reached: Mapping[tuple[End, End], bool]
    resolved: Mapping[str, Sequence[Sequence[str]]]


def survey(hub: Coordinator) -> ScanResult:
    """Ask one rank of each node for its interfaces, and have it try those of the others."""
    leaders = hub.leaders
    nodes = {rank: node for node, rank in leaders.items()}
    told = hub.ask_all({"do": "links"}, _SLACK, nodes)
    ends = {(nodes[rank], link["name"]): _link(link) for rank, found in sorted(told.items()) for link in found}
    usable = {end: link for end, link in ends.items() if not link.passed_over}
    reached = _reached(hub, leaders, usable, _ports(hub, leaders, usable))
    names = sorted({name for link in usable.values() for name in link.names})
    resolved = hub.ask_all({"do": "resolve", "names": names}, 2 * _SLACK, nodes)
    return ScanResult(ends, reached, {name: [one[name] for one in resolved.values()] for name in names})


def _link(told: Mapping[str, Any]) -> ScannedInterface:
    return ScannedInterface(**{**told, **{name: tuple(told[name]) for name in ("names", "devices", "others")}})


def _ports(hub: Coordinator, leaders: Mapping[str, int], usable: Ends) -> dict[str, dict[str, int]]:
    """For each node, on which port each of its addresses listens."""
    addresses: dict[str, list[str]] = {node: [] for node in leaders}
    for (node, _), link in usable.items():
        addresses[node].append(link.address)
    asked = {leaders[node]: {"do": "listen", "addresses": theirs} for node, theirs in addresses.items()}
    told = hub.ask(asked, _SLACK)
    return {node: told[rank] for node, rank in leaders.items() if rank in told}


def _reached(
    hub: Coordinator, leaders: Mapping[str, int], usable: Ends, ports: Mapping[str, Mapping[str, int]]
) -> dict[tuple[End, End], bool]:
    """Each node tries the next few in a ring of all: every two of up to 17 nodes."""
    ring = sorted(ports)
    ends: dict[str, list[End]] = {node: [] for node in ring}
    for end in usable:
        ends.setdefault(end[0], []).append(end)
    plan: dict[str, list[tuple[End, End]]] = {}
    for index, node in enumerate(ring):
        peers = [ring[(index + step) % len(ring)] for step in range(1, min(_NEIGHBOURS, len(ring) - 1) + 1)]
        plan[node] = [
            (a, b)
            for a in ends[node]
            for peer in peers
            for b in ends[peer]
            if (":" in usable[a].address) == (":" in usable[b].address)
        ]

    def way(a: End, b: End) -> tuple[str, str, str, int, bool]:
        neighbour = usable[a].network == usable[b].network
        return a[1], usable[a].address, usable[b].address, ports[b[0]].get(usable[b].address, 0), neighbour

    asked = {leaders[node]: {"do": "connect", "ways": [way(a, b) for a, b in pairs]} for node, pairs in plan.items()}
    rounds = 1 + max(map(len, plan.values()), default=0) // _AT_ONCE
    told = hub.ask(asked, rounds * _WITHIN + _SLACK)
    return {
        pair: bool(worked)
        for node, pairs in plan.items()
        for pair, worked in zip(pairs, told.get(leaders[node]) or [False] * len(pairs), strict=False)
    }
