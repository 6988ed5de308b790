"""Tests which interfaces of the nodes reach each other, for ``srunddp ifaces scan``."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from srunddp.bootstrap.network.interface import addresses_of, list_interfaces, why_unusable
from srunddp.bootstrap.network.probe import Prober
from srunddp.check import connectivity
from srunddp.check.connectivity import Endpoint, attempt, listening, plan
from srunddp.check.finding import call_in_daemon_thread
from srunddp.check.messages import CheckMessage
from srunddp.check.session import CheckSession
from srunddp.util import infiniband

# Seconds to look up the name of an address. If the DNS server is down, each look-up would fail only
# after about ten seconds, and a node may have several addresses.
_WITHIN = 2.0
# Seconds to wait for the answer of a node, which may be busy.
_SLACK = 15.0


@dataclass(frozen=True, kw_only=True)
class ScannedInterface:
    """An interface of a node.

    Attributes:
        name: The name of the interface, as ``ip link`` shows it.
        address: The first address, IPv4 before IPv6; empty if there is none.
        speed: The speed in Mbit/s; 0 if it is not known.
        passed_over: Why a training cannot use the interface; empty if it can.
        names: The names to which the address resolves; empty if it has no name, or if a training
            cannot use the interface.
        named: Whether the node's own name resolves to the address.
        devices: The active InfiniBand and RoCE devices that NCCL should use with the interface.
        layer: The kind of device that the interface belongs to: ``InfiniBand``, or ``Ethernet`` for
            RoCE; empty for an interface without such a device.
        others: Other active devices, which may belong to the same network.
    """

    name: str
    address: str
    speed: int
    passed_over: str
    names: tuple[str, ...]
    named: bool
    devices: tuple[str, ...]
    layer: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class ListInterfaces(CheckMessage, kind="list_interfaces"):
    """Rank 0 asks for the interfaces of the node. :class:`Interfaces` is the answer."""


@dataclass(frozen=True)
class Interfaces(CheckMessage, kind="interfaces"):
    """A rank answers with the interfaces of its node.

    Attributes:
        interfaces: All interfaces, even those that a training cannot use.
    """

    interfaces: tuple[ScannedInterface, ...]


@dataclass(frozen=True)
class ResolveNames(CheckMessage, kind="resolve_names"):
    """Rank 0 asks for the addresses of names. :class:`ResolvedNames` is the answer.

    Attributes:
        names: The names to look up.
    """

    names: tuple[str, ...]


@dataclass(frozen=True)
class ResolvedNames(CheckMessage, kind="resolved_names"):
    """A rank answers with the addresses that its node finds for names.

    Attributes:
        addresses: The addresses of each name; none for a name that the node cannot resolve.
    """

    addresses: dict[str, tuple[str, ...]]


def links(node: str) -> list[ScannedInterface]:
    """Return the interfaces of this node, with their names and devices.

    Args:
        node: The node's own name, as Slurm or MPI gives it.
    """
    own = addresses_of(node)
    devices = [device for device in infiniband.devices() if device.active]
    found = []
    for link in list_interfaces():
        if link.addresses:
            address = link.addresses[0]
        else:
            address = ""
        theirs = [device for device in devices if link.name in device.interfaces]
        used, others = infiniband.with_interface(theirs, devices)
        why = why_unusable(link)
        found.append(
            ScannedInterface(
                name=link.name,
                address=address,
                # For IP over InfiniBand the kernel may not know the speed of the interface, but it
                # knows the rate of the device.
                speed=max([link.speed, *(device.rate for device in theirs)]),
                passed_over=why,
                names=() if why else _names(address),
                named=address in own,
                devices=tuple(device.name for device in used),
                layer=theirs[0].layer if theirs else "",
                others=tuple(device.name for device in others),
            )
        )
    return found


def _names(address: str) -> tuple[str, ...]:
    """Return the names of an address; empty if it has none, or the look-up takes too long."""
    # gethostbyaddr() has no time limit and cannot be interrupted, so call it in a thread that is
    # left behind if it takes too long.
    try:
        name, aliases, _ = call_in_daemon_thread(lambda: socket.gethostbyaddr(address)).result(
            _WITHIN
        )
    except (OSError, TimeoutError):
        return ()
    return (name, *aliases)


def handle(node: str, prober: Prober, question: CheckMessage) -> CheckMessage:
    """Return this rank's answer to one of rank 0's questions.

    Args:
        node: This node's name.
        prober: Connects to other nodes, and listens for connections from them.
        question: Rank 0's question: one of this module, or one about connections.
    """
    match question:
        case ListInterfaces():
            return Interfaces(tuple(links(node)))
        case ResolveNames():
            found = {name: tuple(sorted(addresses_of(name))) for name in question.names}
            return ResolvedNames(found)
    return connectivity.answer(prober, question)


End = tuple[str, str]


@dataclass(frozen=True)
class ScanResult:
    """The results of a scan.

    Attributes:
        ends: Every interface, by the names of its node and of the interface.
        reached: For each pair of interfaces that was tried, whether the first interface could
            connect to the second.
        resolved: For each name of an interface's address, a sequence of addresses from each node
            that answered: what the node finds for the name.
    """

    ends: Mapping[End, ScannedInterface]
    reached: Mapping[tuple[End, End], bool]
    resolved: Mapping[str, Sequence[Sequence[str]]]


def survey(session: CheckSession) -> ScanResult:
    """Ask one rank of each node for the node's interfaces, and have the interfaces of all nodes
    connect to each other.

    Args:
        session: Rank 0's connections to all ranks that have joined.
    """
    leaders = session.node_leaders
    nodes = {rank: node for node, rank in leaders.items()}
    answers = session.broadcast(ListInterfaces(), _SLACK, Interfaces, nodes)
    ends = {
        (nodes[rank], link.name): link
        for rank, found in sorted(answers.items())
        for link in found.interfaces
    }
    usable = {end: link for end, link in ends.items() if not link.passed_over}
    known = {
        (a, b): Endpoint(rank=leaders[a], interface=b, host=link.address)
        for (a, b), link in usable.items()
    }
    reached = _reached(session, known)
    names = tuple(sorted({name for link in usable.values() for name in link.names}))
    # Wait twice as long for these answers, because each node looks up the names one by one.
    found = session.broadcast(ResolveNames(names), 2 * _SLACK, ResolvedNames, nodes)
    resolved = {name: [one.addresses.get(name, ()) for one in found.values()] for name in names}
    return ScanResult(ends, reached, resolved)


def _reached(session: CheckSession, known: Mapping[End, Endpoint]) -> dict[tuple[End, End], bool]:
    """Have each interface connect to interfaces of other nodes with an address of the same family.

    Returns:
        For each pair that was tried, whether the first interface could connect to the second.
    """
    ends = listening(session, known)
    # With few interfaces, plan() returns all pairs. With many, each interface tries only a few
    # others, because the number of pairs grows with the square of the number of interfaces.
    ways = plan({end: end[0] for end in ends})
    pairs = [(a, b) for a, b in ways if (":" in ends[a].host) == (":" in ends[b].host)]
    # Bind each connection to its interface. Otherwise the kernel would use any interface that has a
    # route, and all interfaces would seem to reach each other.
    failing = attempt(session, ends, pairs, bound=True)
    # A rank that was lost has reported no failures, so its connections would otherwise seem to
    # work.
    lost = {end for end, each in ends.items() if each.rank in session.errors}
    return {pair: pair not in failing and lost.isdisjoint(pair) for pair in pairs}
