"""Which interfaces of which nodes reach each other, found by trying: every rank's side of ``srunddp ifaces scan``."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from srunddp.bootstrap.network.interface import addresses_of, list_interfaces, why_unusable
from srunddp.bootstrap.network.probe import NO_ANSWER, Probe, Prober
from srunddp.check.connectivity import run_listeners, run_plan
from srunddp.check.coordinator import Coordinator
from srunddp.check.finding import call_in_daemon_thread
from srunddp.util import infiniband
from srunddp.util.hostlist import group_by_key

_WITHIN = 2.0
_SLACK = 15.0  # for a node that is busy
_NEIGHBOURS = 16


@dataclass(frozen=True, kw_only=True)
class ScannedInterface:
    """An interface of a node.

    Attributes:
        address: its first, IPv4 before IPv6.
        speed: in Mbit/s, 0 where it is not known.
        passed_over: why it is none for a training; empty where it may be one.
        names: other names of the node that lead to the address.
        named: whether the node's own name leads to it.
        devices: the active InfiniBand and RoCE devices that NCCL is to use with it; layer: of its own ones,
            ``InfiniBand``, ``Ethernet`` for RoCE, or empty; others: devices that may belong to these.
    """

    name: str
    address: str
    speed: int
    passed_over: str
    names: Sequence[str]
    named: bool
    devices: Sequence[str]
    layer: str
    others: Sequence[str] = ()


def links(node: str) -> list[ScannedInterface]:
    """The interfaces of this node."""
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


def _names(address: str) -> tuple[str, ...]:
    """What the address is called, where the look-up answers in time."""
    try:
        name, aliases, _ = call_in_daemon_thread(lambda: socket.gethostbyaddr(address)).result(_WITHIN)
    except (OSError, TimeoutError):
        return ()
    return (name, *aliases)


def handle(node: str, prober: Prober, question: Mapping[str, Any]) -> Any:
    """This rank's answer to one of rank 0's questions."""
    match question.get("do"):
        case "links":
            return [asdict(link) for link in links(node)]
        case "resolve":
            return {name: sorted(addresses_of(name)) for name in question["names"]}
    return prober.handle(question)


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


def survey(coordinator: Coordinator) -> ScanResult:
    """Ask one rank of each node for its interfaces, and have it try those of the others."""
    node_leaders = coordinator.node_leaders
    nodes = {rank: node for node, rank in node_leaders.items()}
    answers = coordinator.broadcast({"do": "links"}, _SLACK, nodes)
    ends = {
        (nodes[rank], link["name"]): ScannedInterface(**link)
        for rank, found in sorted(answers.items())
        for link in found
    }
    usable = {end: link for end, link in ends.items() if not link.passed_over}
    reached = _reached(coordinator, node_leaders, usable)
    names = sorted({name for link in usable.values() for name in link.names})
    resolved = coordinator.broadcast({"do": "resolve", "names": names}, 2 * _SLACK, nodes)
    return ScanResult(ends, reached, {name: [one[name] for one in resolved.values()] for name in names})


def _reached(coordinator: Coordinator, node_leaders: Mapping[str, int], usable: Ends) -> dict[tuple[End, End], bool]:
    """Have each node try the ends of the next few in a ring of all: every two of up to 17 nodes."""
    ends = group_by_key((end[0], end) for end in usable)
    ports = run_listeners(
        coordinator, {node_leaders[node]: [usable[end].address for end in theirs] for node, theirs in ends.items()}
    )
    plan: dict[int, dict[tuple[End, End], Probe]] = {}
    ring = sorted(node for node in ends if node_leaders[node] in ports)
    for index, node in enumerate(ring):
        peers = [ring[(index + step) % len(ring)] for step in range(1, min(_NEIGHBOURS, len(ring) - 1) + 1)]
        tried = ((a, b) for a in ends[node] for peer in peers for b in ends[peer])
        hosts = {(a, b): (usable[a].address, usable[b].address) for a, b in tried}
        plan[node_leaders[node]] = {
            (a, b): Probe(source=here, host=there, port=ports[node_leaders[b[0]]][there], interface=a[1])
            for (a, b), (here, there) in hosts.items()
            if (":" in here) == (":" in there)  # both of IPv4, or both of IPv6
        }
    answers = run_plan(coordinator, plan)
    return {pair: answers.get(pair, NO_ANSWER) == "" for probes in plan.values() for pair in probes}
