"""Which interface each rank uses, whether it is fit for it, and whether names lead to it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from srunddp.bootstrap.network import ifaces_conf
from srunddp.bootstrap.network.interface import addresses_of, is_loopback, list_interfaces, shown_speed
from srunddp.bootstrap.rendezvous import discovery
from srunddp.check.comparison import finding_about, minority
from srunddp.check.finding import Check, CheckContext, Finding, Observation, Severity
from srunddp.errors import SrunddpError
from srunddp.util import infiniband

NAME = "interface"
_SYSFS = Path("/sys/class/net")


@dataclass(frozen=True)
class InterfaceFacts:
    """Of one rank.

    Attributes:
        wrong: what is found, expected and to be done where the interface is wrong; else empty.
        name, address, source: see :class:`srunddp.bootstrap.network.interface.SelectedInterface`.
        speed: in Mbit/s, 0 where it is not known; mtu: in bytes; physical: whether a device is behind it.
        own_name: the addresses that the node's own hostname leads to on it.
        lookup: the same as ``wrong``, for finding rank 0.
        devices: active InfiniBand and RoCE devices; rdma_rate: of all of these, in Mbit/s.
        one_node: whether all ranks are known to share one.
    """

    wrong: list[str]
    name: str
    address: str
    source: str
    speed: int
    mtu: int
    physical: bool
    own_name: list[str]
    lookup: list[str]
    devices: list[str]
    rdma_rate: int
    one_node: bool


Ranks = Sequence[Observation[InterfaceFacts]]


def collect(subject: CheckContext) -> InterfaceFacts:
    """This rank's."""
    chosen, active = subject.interface, [device for device in infiniband.devices() if device.active]
    name, speed, mtu = chosen.name if chosen else "", 0, 0
    if chosen:
        import psutil

        state = psutil.net_if_stats().get(name)
        speed, mtu = (state.speed, state.mtu) if state else (0, 0)
    return InterfaceFacts(
        wrong=list(subject.interface_error),
        name=name,
        address=chosen.address if chosen else "",
        source=chosen.source if chosen else "",
        speed=speed,
        mtu=mtu,
        physical=bool(name) and physical(name),
        own_name=sorted(addresses_of(socket.gethostname())),
        lookup=_lookup(subject),
        devices=[device.name for device in active],
        rdma_rate=sum(device.rate for device in active),
        one_node=subject.environment.one_node,
    )


def physical(name: str, sysfs: Path = _SYSFS) -> bool:
    """Whether a device is behind an interface, if only behind a bond or a VLAN; a bridge's speed is made up."""
    folder = sysfs / name
    if (folder / "bridge").exists():
        return False
    below = (link.name.removeprefix("lower_") for link in folder.glob("lower_*"))
    return any((folder / kind).exists() for kind in ("device", "bonding")) or any(physical(one, sysfs) for one in below)


def _lookup(subject: CheckContext) -> list[str]:
    """What would keep this rank from finding rank 0, or rank 0 from being found, where names have to lead to it."""
    environment, chosen = subject.environment, subject.interface
    if environment.world_size == 1 or environment.discovery.publishes or not chosen:
        return []
    try:
        if environment.rank:
            discovery.candidate_addresses(environment, chosen, subject.loaded.entries, None)
        elif not environment.one_node:
            entry = ifaces_conf.entry_for(subject.loaded.entries, environment.node)
            discovery.check_reachable(environment, chosen, entry, list_interfaces())
    except SrunddpError as error:
        return [error.found, error.expected, error.hint]
    return []


def judge(seen: Ranks) -> Iterator[Finding]:
    """A wrong interface or an address that leads elsewhere stops a job; differences between nodes are warned of."""
    for one in seen:
        for wrong in (one.facts.wrong, one.facts.lookup):
            if wrong:
                found, expected, hint = wrong
                yield Finding(Severity.FAIL, NAME, found, expected, hint, (one.node,))
        own = one.facts.own_name
        if own and not one.facts.one_node and all(map(is_loopback, own)):
            found = f"the node's own name leads to {', '.join(own)}, which is loopback"
            hint = "take its name from that line of its /etc/hosts: what ignores the interface, as MPI may, hangs there"
            yield Finding(Severity.WARN, NAME, found, "an address that other nodes reach", hint, (one.node,))
    yield from _unlike(seen)


def _unlike(seen: Ranks) -> Iterator[Finding]:
    fit = [one for one in seen if one.facts.name and not one.facts.one_node]
    if not fit:
        return
    usual, others = minority(fit, lambda one: one.facts.mtu)
    for mtu, who in others.items():
        name = who[0].facts.name
        hint = f"ip link set {name} mtu {usual}: large packets get lost where the MTUs differ"
        yield _other(who, f"{name} has MTU {mtu}", f"{usual}, as on the other nodes", hint)
    fast, others = minority(fit, lambda one: one.facts.speed)
    for speed, who in others.items():
        hint = "see its cable and the switch's port: all ranks wait for the slowest"
        yield _other(
            who,
            f"{who[0].facts.name} runs at {shown_speed(speed)}",
            f"{shown_speed(fast)}, as on the other nodes",
            hint,
        )
    most, unlike = minority(fit, lambda one: tuple(one.facts.devices))
    for devices, who in unlike.items():
        found = f"active InfiniBand or RoCE devices: {_listed(devices)}"
        hint = "mend the port, or give these nodes the same ones by `env: {NCCL_IB_HCA: …}` in ifaces.conf"
        yield _other(who, found, f"{_listed(most)}, as on the other nodes", hint)


def _other(who: Ranks, found: str, expected: str, hint: str) -> Finding:
    return finding_about(who, Severity.WARN, NAME, (found, expected, hint), ranks=False)


def _listed(devices: Sequence[str]) -> str:
    return ", ".join(devices) or "none"


def summary(seen: Ranks) -> str:
    """The interfaces, with speed and MTU."""
    facts = [one.facts for one in seen if one.facts.name]
    if not facts:
        return "none that is fit"
    names, rates = sorted({each.name for each in facts}), sorted({each.speed for each in facts})
    mtus = sorted({each.mtu for each in facts})
    return f"{', '.join(names)}: {', '.join(map(shown_speed, rates))}, MTU {', '.join(map(str, mtus))}"


CHECK = Check(NAME, InterfaceFacts, collect, judge, summary)
