"""A scan finds which interfaces reach each other by trying with real packets, and blames no route of the kernel's."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from srunddp.bootstrap.network import interface
from srunddp.bootstrap.rendezvous.protocol import listen
from srunddp.check.coordinator import Coordinator
from srunddp.ifaces import scan
from srunddp.ifaces.scan import Scanner, ScanResult, links, reaches, survey
from srunddp.util import infiniband
from srunddp.util.infiniband import Device
from tests.cluster.network import tool
from tests.support.namespaces import address, asked, hub_of, rule, two_nodes
from tests.support.starting import NODE

WEST, EAST = (address(node, "data0") for node in ("west", "east"))
BOTH = {(("west", "data0"), ("east", "data0")), (("east", "data0"), ("west", "data0"))}


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, str]]:
    with two_nodes() as names:
        yield names


@pytest.fixture
def hub(names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    monkeypatch.setattr(scan, "_WITHIN", 0.5)
    with hub_of(names, lambda node: Scanner(node).act) as hub:
        yield hub


def worked(found: ScanResult) -> set[Any]:
    return {pair for pair, reached in found.reached.items() if reached}


# Two nodes.


def test_interfaces_in_one_network_reach_each_other_and_no_others_do(hub: Coordinator) -> None:
    """Linux answers for all of its addresses on all interfaces; that is no way for a training."""
    found = survey(hub)
    assert worked(found) == BOTH
    assert len(found.reached) == 8


def test_every_interface_is_told_with_address_network_and_why_it_is_none(hub: Coordinator) -> None:
    ends = survey(hub).ends
    assert {name for _, name in ends} == {"lo", "data0", "data1"}
    assert (ends["west", "data0"].address, ends["west", "data0"].network) == (WEST, "10.201.1.0/24")
    assert ends["east", "data1"].network == "10.201.3.0/25"
    assert ends["west", "lo"].passed_over == "loopback, a bridge or a container's"
    assert not ends["west", "data0"].passed_over


def test_a_network_in_which_packets_get_lost_reaches_nobody(hub: Coordinator, names: dict[str, str]) -> None:
    with rule(names["east"], "input", f"ip saddr {WEST} drop"):
        assert worked(survey(hub)) == set()


def test_a_network_that_is_routed_reaches_the_other(hub: Coordinator, names: dict[str, str]) -> None:
    """The ends of data1 are in two networks; with routes each leads to the other."""
    routes = {"west": "10.201.3.0/25", "east": "10.201.2.0/25"}
    words = ["route", "{}", "dev", "data1"]
    for node, network in routes.items():
        tool("ip", "-n", names[node], words[0], "add", network, *words[2:])
    try:
        assert {(a, b) for a, b in worked(survey(hub)) if a[1] == "data1"} == {
            (("west", "data1"), ("east", "data1")),
            (("east", "data1"), ("west", "data1")),
        }
    finally:
        for node, network in routes.items():
            tool("ip", "-n", names[node], "route", "del", network)


def test_a_node_with_ipv6_alone_is_reached_by_it(hub: Coordinator, names: dict[str, str]) -> None:
    for node, name in names.items():
        tool("ip", "-n", name, "addr", "del", f"{address(node, 'data0')}/24", "dev", "data0")
    try:
        found = survey(hub)
        assert worked(found) == BOTH
        assert found.ends["west", "data0"].network == "fd00:201::/64"
    finally:
        for node, name in names.items():
            tool("ip", "-n", name, "addr", "add", f"{address(node, 'data0')}/24", "dev", "data0")


def test_a_port_where_nobody_listens_is_not_reached(hub: Coordinator) -> None:
    ways = [["data0", WEST, EAST, 0, True], ["data0", WEST, EAST, 9, True]]
    assert asked(hub, "west", do="connect", ways=ways) == [False, False]


def test_an_interface_that_went_away_reaches_nobody(hub: Coordinator) -> None:
    """Between what a node said and what it is asked; an error there would look as if rank 0 were lost."""
    port = asked(hub, "east", do="listen", addresses=[EAST])[EAST]
    ways = [["data7", WEST, EAST, port, True], ["data0", "10.201.9.9", EAST, port, True]]
    ways += [["data0", WEST, EAST, port, True]]
    assert asked(hub, "west", do="connect", ways=ways) == [False, False, True]


# This node.


def test_its_own_interfaces_travel() -> None:
    found = Scanner(NODE).act({"do": "links"})
    assert json.loads(json.dumps(found)) == json.loads(json.dumps([vars(link) for link in links(NODE)]))
    (lo,) = [link for link in found if link["name"] == "lo"]
    assert (lo["address"], lo["network"], lo["names"]) == ("127.0.0.1", "127.0.0.0/8", ())


def test_it_listens_where_it_can() -> None:
    scanner = Scanner(NODE)
    told = scanner.act({"do": "listen", "addresses": ["127.0.0.1", "192.0.2.7"]})
    assert told["192.0.2.7"] == 0
    socket.create_connection(("127.0.0.1", told["127.0.0.1"]), 5.0).close()


def test_names_are_looked_up_and_one_that_is_not_known_leads_nowhere() -> None:
    told = Scanner(NODE).act({"do": "resolve", "names": ["127.0.0.1", "nowhere.invalid"]})
    assert told == {"127.0.0.1": ["127.0.0.1"], "nowhere.invalid": []}


def test_a_question_that_it_does_not_know_is_answered() -> None:
    assert Scanner(NODE).act({"do": "dance"}) is None


def test_loopback_reaches_itself_from_the_address_that_it_was_given() -> None:
    with listen("127.0.0.1", [0]) as there:
        port = there.getsockname()[1]
        assert reaches("lo", "127.0.0.2", "127.0.0.1", port, neighbour=True)
        line, (host, _) = there.accept()
        line.close()
        assert host == "127.0.0.2"
        # The kernel would send from 127.0.0.1.
        assert not reaches("lo", "127.0.0.2", "127.0.0.1", port, neighbour=False)
        assert reaches("lo", "127.0.0.1", "127.0.0.1", port, neighbour=False)


def known(monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily, address: str, mask: str | None) -> None:
    """This node has one interface."""
    there = SimpleNamespace(family=family, address=address, netmask=mask)
    state = SimpleNamespace(isup=True, speed=10_000, mtu=1500)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [there]})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": state})


@pytest.mark.parametrize(
    ("host", "mask", "network"),
    [
        ("10.88.0.11", "255.255.255.0", "10.88.0.0/24"),
        ("10.88.3.11", "255.255.252.0", "10.88.0.0/22"),
        ("10.88.0.11", "255.255.255.255", "10.88.0.11/32"),
        ("10.88.0.11", "255.255.255.254", "10.88.0.10/31"),
        ("10.88.0.11", None, ""),
        ("fd00:88::11", "ffff:ffff:ffff:ffff::", "fd00:88::/64"),
        ("fd00:88::11", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ff00", "fd00:88::/120"),
    ],
)
def test_the_network_of_an_address_follows_from_its_mask(
    monkeypatch: pytest.MonkeyPatch, host: str, mask: str | None, network: str
) -> None:
    known(monkeypatch, socket.AF_INET6 if ":" in host else socket.AF_INET, host, mask)
    (link,) = links(NODE)
    assert (link.address, link.network) == (host, network)


def test_an_interface_has_the_speed_of_its_active_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, socket.AF_INET, "10.88.0.11", "255.255.255.0")
    devices = [
        Device("mlx5_0", "InfiniBand", active=True, rate=200_000, interfaces=("eth0",)),
        Device("mlx5_1", "InfiniBand", active=False, rate=400_000, interfaces=("eth0",)),
        Device("mlx5_2", "InfiniBand", active=True, rate=400_000, interfaces=("ib7",)),
    ]
    monkeypatch.setattr(infiniband, "devices", lambda: devices)
    (link,) = links(NODE)
    assert (link.speed, link.devices, link.layer) == (200_000, ("mlx5_2",), "InfiniBand")  # NCCL takes the fastest


def test_other_names_of_the_address_and_whether_the_nodes_own_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, socket.AF_INET, "10.88.0.11", "255.255.255.0")
    monkeypatch.setattr(socket, "gethostbyaddr", lambda _: ("n1-ib.lab", ["n1-ib"], ["10.88.0.11"]))
    monkeypatch.setattr(scan, "addresses_of", lambda name: {"10.88.0.11"} if name == "n1" else set())
    assert [(link.names, link.named) for link in links("n1")] == [(("n1-ib.lab", "n1-ib"), True)]
    assert [link.named for link in links("n2")] == [False]
    monkeypatch.setattr(interface, "_VIRTUAL", ("eth",))
    monkeypatch.setattr(scan, "why_unusable", interface.why_unusable)
    assert [(link.names, bool(link.passed_over)) for link in links("n1")] == [((), True)]
