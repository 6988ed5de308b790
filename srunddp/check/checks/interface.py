"""Checks which interface each rank uses, whether it is usable, and whether names resolve to it."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from srunddp.bootstrap.network import ifaces_entry
from srunddp.bootstrap.network.interface import (
    addresses_of,
    is_loopback,
    list_interfaces,
    shown_speed,
)
from srunddp.bootstrap.rendezvous import discovery
from srunddp.check.finding import FAIL, WARN, Check, CheckContext, Finding, Ranks
from srunddp.errors import SrunddpError
from srunddp.util import infiniband

_SYSFS = Path("/sys/class/net")


@dataclass(frozen=True, kw_only=True)
class InterfaceFacts:
    """The interface of one rank, and the RDMA devices of its node.

    Attributes:
        wrong: What was found, what was expected and the hint, if the interface is wrong or rank 0
            cannot be found; else empty.
        name, address: See :class:`srunddp.bootstrap.network.interface.SelectedInterface`; empty if
            no interface could be selected.
        speed: The speed of the interface in Mbit/s; 0 if it is not known.
        mtu: The MTU of the interface in bytes; 0 if it is not known.
        physical: Whether the speed that the interface reports is real, see :func:`physical`.
        own_name: The addresses to which the node's hostname resolves on the node itself.
        devices: The names of active InfiniBand and RoCE devices.
        rdma_rate: The sum of the rates of ``devices`` in Mbit/s.
        one_node: Whether all ranks are known to be on one node.
    """

    wrong: list[str]
    name: str
    address: str
    speed: int
    mtu: int
    physical: bool
    own_name: list[str]
    devices: list[str]
    rdma_rate: int
    one_node: bool


def collect(context: CheckContext) -> InterfaceFacts:
    """Collect which interface this rank uses, and whether rank 0's name resolves."""
    import psutil

    chosen = context.interface
    active = [device for device in infiniband.devices() if device.active]
    if chosen:
        name = chosen.name
    else:
        name = ""
    state = psutil.net_if_stats().get(name)
    return InterfaceFacts(
        wrong=list(context.interface_error) or _lookup(context),
        name=name,
        address=chosen.address if chosen else "",
        speed=state.speed if state else 0,
        mtu=state.mtu if state else 0,
        physical=bool(name) and physical(name),
        own_name=sorted(addresses_of(socket.gethostname())),
        devices=[device.name for device in active],
        rdma_rate=sum(device.rate for device in active),
        one_node=context.environment.one_node,
    )


def physical(name: str, sysfs: Path = _SYSFS) -> bool:
    """Tell whether an interface is hardware, a bond, or lies above one of these, as a VLAN does.

    The speed that such an interface reports is real; that of a bridge is not.

    Args:
        name: The interface's name.
        sysfs: The folder with an entry for each interface.
    """
    folder = sysfs / name
    if (folder / "bridge").exists():
        return False
    # sysfs has a link `lower_NAME` to each interface below a bond, a VLAN or the like. `device` is
    # a link to hardware.
    below = (link.name.removeprefix("lower_") for link in folder.glob("lower_*"))
    return any((folder / kind).exists() for kind in ("device", "bonding")) or any(
        physical(one, sysfs) for one in below
    )


def _lookup(context: CheckContext) -> list[str]:
    """Return why this rank could not find rank 0, or on rank 0, why other ranks could not find it;
    empty if nothing is wrong, or if rank 0 publishes its address.
    """
    environment = context.environment
    chosen = context.interface
    # If rank 0 publishes its address, ranks do not need its name.
    if environment.world_size == 1 or environment.discovery.publishes or not chosen:
        return []
    try:
        if environment.rank:
            discovery.candidate_addresses(environment, chosen, context.loaded.entries, None)
        elif not environment.one_node:
            entry = ifaces_entry.entry_for(context.loaded.entries, environment.node)
            discovery.check_reachable(environment, chosen, entry, list_interfaces())
    except SrunddpError as error:
        return [error.found, error.expected, error.hint]
    return []


def evaluate(seen: Ranks[InterfaceFacts]) -> Iterator[Finding]:
    """Judge the interfaces: a wrong one, or a rank 0 that cannot be found, is a failure.
    Differences between nodes and a hostname that resolves to loopback are warnings.
    """
    for one in seen:
        if one.facts.wrong:
            yield one.finding(FAIL, *one.facts.wrong)
        own = one.facts.own_name
        if own and not one.facts.one_node and all(map(is_loopback, own)):
            found = f"the node's own name leads to {', '.join(own)}, which is loopback"
            hint = (
                "remove its name from that line of its /etc/hosts: a program that ignores the"
                " interface, as MPI may, hangs there"
            )
            yield one.finding(WARN, found, "an address that other nodes reach", hint)
    # On a single node, the training does not use the interface.
    fit = seen.where(lambda one: one.facts.name and not one.facts.one_node)
    hint = "ip link set {} mtu {}: large packets get lost where the MTUs differ"
    yield from _unlike(fit, "{} has MTU {}", lambda facts: str(facts.mtu), hint)
    hint = "see its cable and the switch's port: all ranks wait for the slowest"
    yield from _unlike(fit, "{}: {}", lambda facts: shown_speed(facts.speed), hint)
    hint = (
        "repair the port, or give these nodes the same ones by `env: {{NCCL_IB_HCA: …}}` in"
        " ifaces.conf"
    )
    devices = "active InfiniBand or RoCE devices: {1}"
    yield from _unlike(fit, devices, lambda facts: ", ".join(facts.devices) or "none", hint)


def _unlike(
    fit: Ranks[InterfaceFacts], text: str, value: Callable[[InterfaceFacts], str], hint: str
) -> Iterator[Finding]:
    usual, others = fit.minority(lambda one: value(one.facts))
    for known, who in others.items():
        name = who[0].facts.name
        found = text.format(name, known)
        expected = f"{usual}, as on the other nodes"
        yield who.finding(WARN, found, expected, hint.format(name, usual), ranks=False)


def summary(seen: Ranks[InterfaceFacts]) -> str:
    """Name the interfaces of all ranks, with their speeds and MTUs."""
    facts = [one.facts for one in seen if one.facts.name]
    if not facts:
        return "none that is usable"
    names = ", ".join(sorted({each.name for each in facts}))
    speeds = ", ".join(map(shown_speed, sorted({each.speed for each in facts})))
    mtus = ", ".join(map(str, sorted({each.mtu for each in facts})))
    return f"{names}: {speeds}, MTU {mtus}"


CHECK = Check("interface", InterfaceFacts, collect, evaluate, summary)
