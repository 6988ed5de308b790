"""A scan finds which interfaces reach each other by trying with real packets, and blames no route
of the kernel's.
"""

from __future__ import annotations

import datetime
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from srunddp.bootstrap.network import interface, probe
from srunddp.bootstrap.network.probe import Probe, Prober
from srunddp.check.messages import CheckMessage, Connect, Connected, Listen, Listening
from srunddp.check.session import CheckSession, UnknownQuestionError
from srunddp.ifaces import scan
from srunddp.ifaces.draft import draft
from srunddp.ifaces.scan import (
    Interfaces,
    ListInterfaces,
    ResolvedNames,
    ResolveNames,
    ScannedInterface,
    ScanResult,
    handle,
    links,
    survey,
)
from srunddp.util import infiniband
from srunddp.util.infiniband import Device
from tests.cluster.network import tool
from tests.support.many_nodes import PER_NODE, ManyNodes, host, quick
from tests.support.namespaces import address, asked, coordinator_of, rule
from tests.support.starting import NODE

pytestmark = pytest.mark.slow

WEST, EAST = (address(node, "data0") for node in ("west", "east"))
BOTH = {(("west", "data0"), ("east", "data0")), (("east", "data0"), ("west", "data0"))}


@pytest.fixture
def session(names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckSession]:
    monkeypatch.setattr(probe, "WITHIN", 0.5)
    with coordinator_of(names, lambda node: partial(handle, node, Prober())) as session:
        yield session


def worked(found: ScanResult) -> set[Any]:
    return {pair for pair, reached in found.reached.items() if reached}


# Two nodes.


def test_interfaces_in_one_network_alone_reach_each_other(session: CheckSession) -> None:
    """Linux answers for all of its addresses on all interfaces; that is no way for a training."""
    found = survey(session)
    assert worked(found) == BOTH
    assert len(found.reached) == 8
    assert {name for _, name in found.ends} == {"lo", "data0", "data1"}
    assert found.ends["west", "data0"].address == WEST
    assert found.ends["west", "lo"].passed_over == "loopback, a bridge or a container's"
    assert not found.ends["west", "data0"].passed_over


def test_a_network_in_which_packets_get_lost_reaches_nobody(
    session: CheckSession, names: dict[str, str]
) -> None:
    with rule(names["east"], "input", f"ip saddr {WEST} drop"):
        assert worked(survey(session)) == set()


def test_a_network_that_is_routed_reaches_the_other(
    session: CheckSession, names: dict[str, str]
) -> None:
    """The ends of data1 are in two networks; with routes each leads to the other."""
    routes = {"west": "10.201.3.0/25", "east": "10.201.2.0/25"}
    for node, network in routes.items():
        tool("ip", "-n", names[node], "route", "add", network, "dev", "data1")
    try:
        over_data1 = {tuple((node, "data1") for node, _ in pair) for pair in BOTH}
        assert {(a, b) for a, b in worked(survey(session)) if a[1] == "data1"} == over_data1
    finally:
        for node, network in routes.items():
            tool("ip", "-n", names[node], "route", "del", network)


def test_a_node_with_ipv6_alone_is_reached_by_it(
    session: CheckSession, names: dict[str, str]
) -> None:
    for node, name in names.items():
        tool("ip", "-n", name, "addr", "del", f"{address(node, 'data0')}/24", "dev", "data0")
    try:
        found = survey(session)
        assert worked(found) == BOTH
        assert found.ends["west", "data0"].address == "fd00:201::1"
    finally:
        for node, name in names.items():
            tool("ip", "-n", name, "addr", "add", f"{address(node, 'data0')}/24", "dev", "data0")


def test_an_interface_that_went_away_reaches_nobody(session: CheckSession) -> None:
    """Between what a node said and what it is asked; an error there would look as if rank 0 were
    lost.
    """
    port = asked(session, "east", Listen((EAST,)), Listening).ports[EAST]
    way = Probe(source=WEST, host=EAST, port=port, interface="data0")
    probes = (
        replace(way, interface="data7"),
        replace(way, source="10.201.9.9"),
        replace(way, port=9),
        way,
    )
    tried = asked(session, "west", Connect(probes), Connected)
    assert [bool(why) for why in tried.failures] == [True, True, True, False]


# This node.


def test_its_own_interfaces_and_names_travel() -> None:
    found = CheckMessage.decode(handle(NODE, Prober(), ListInterfaces()).encode())
    assert isinstance(found, Interfaces)
    assert found.interfaces == tuple(links(NODE))
    (lo,) = [link for link in found.interfaces if link.name == "lo"]
    assert (lo.address, lo.names) == ("127.0.0.1", ())
    question = ResolveNames(("127.0.0.1", "nowhere.invalid"))
    answer = CheckMessage.decode(handle(NODE, Prober(), question).encode())
    assert answer == ResolvedNames({"127.0.0.1": ("127.0.0.1",), "nowhere.invalid": ()})


def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """This node has one interface."""
    there = SimpleNamespace(family=socket.AF_INET, address="10.88.0.11", netmask="255.255.255.0")
    state = SimpleNamespace(isup=True, speed=10_000, mtu=1500)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [there]})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": state})


def test_an_interface_has_the_speed_of_its_active_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch)
    devices = [
        Device("mlx5_0", "InfiniBand", active=True, rate=200_000, interfaces=("eth0",)),
        Device("mlx5_1", "InfiniBand", active=False, rate=400_000, interfaces=("eth0",)),
        Device("mlx5_2", "InfiniBand", active=True, rate=400_000, interfaces=("ib7",)),
    ]
    monkeypatch.setattr(infiniband, "devices", lambda: devices)
    (link,) = links(NODE)
    # NCCL takes the fastest.
    assert (link.speed, link.devices, link.layer) == (200_000, ("mlx5_2",), "InfiniBand")


def test_the_names_of_an_address_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch)
    monkeypatch.setattr(socket, "gethostbyaddr", lambda _: ("n1-ib.lab", ["n1-ib"], ["10.88.0.11"]))
    monkeypatch.setattr(
        scan, "addresses_of", lambda name: {"10.88.0.11"} if name == "n1" else set()
    )
    assert [(link.names, link.named) for link in links("n1")] == [(("n1-ib.lab", "n1-ib"), True)]
    assert [link.named for link in links("n2")] == [False]
    monkeypatch.setattr(interface, "_VIRTUAL", ("eth",))
    monkeypatch.setattr(scan, "why_unusable", interface.why_unusable)
    assert [(link.names, bool(link.passed_over)) for link in links("n1")] == [((), True)]


def test_a_look_up_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "gethostbyaddr", lambda _: over.wait())
    monkeypatch.setattr(scan, "_WITHIN", 0.1)
    try:
        assert [link.names for link in links(NODE) if link.names] == []
    finally:
        over.set()


def test_a_thousand_nodes_are_scanned_and_drafted() -> None:
    def answer(rank: int, question: CheckMessage) -> CheckMessage:
        node = f"node{rank // PER_NODE:04d}"
        match question:
            case ListInterfaces():
                usual = ScannedInterface(
                    name="",
                    address="",
                    speed=100_000,
                    passed_over="",
                    names=(f"{node}-ib",),
                    named=False,
                    devices=(),
                    layer="",
                )
                own = (replace(usual, name=f"ib{n}", address=host(rank + n)) for n in range(2))
                return Interfaces(tuple(own))
            case Listen():
                return Listening(dict.fromkeys(question.addresses, 4000))
            case Connect():
                return Connected(("",) * len(question.probes))
            case ResolveNames():
                hosts = {name: host(int(name[4:8]) * PER_NODE) for name in question.names}
                return ResolvedNames({name: (each,) for name, each in hosts.items()})
        raise UnknownQuestionError(question.kind)

    with quick(20.0):  # of which the made-up ranks take most
        text, missing = draft(survey(ManyNodes(answer)), datetime.date(2026, 1, 2))  # type: ignore[arg-type]
    assert missing == ()
    assert "- nodes: node[0000-0999]\n  interface: [ib0, ib1]" in text
    assert 'address: "{node}-ib"' in text
