from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from srunddp.bootstrap.environment.rank_zero_discovery import discovery_named
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network import interface
from srunddp.bootstrap.network.ifaces_entry import DEFAULT, IfacesEntry
from srunddp.bootstrap.network.interface import (
    NetworkInterface,
    SelectedInterface,
    select_interface,
    shown_speed,
)
from srunddp.errors import ConfigError
from srunddp.util import infiniband
from tests.support.facts import tells


def link(name: str, *addresses: str, up: bool = True, speed: int = 1000) -> NetworkInterface:
    ipv4 = tuple(address for address in addresses if ":" not in address)
    return NetworkInterface(
        name, up, speed, ipv4, tuple(address for address in addresses if ":" in address)
    )


LO = link("lo", "127.0.0.1", "::1")
ETH = link("eth0", "192.168.1.7")
IB0 = link("ib0", "10.0.0.7")
IB1 = link("ib1", "10.0.1.7")
IB10 = link("ib10", "10.0.10.7")
LINKS = (LO, ETH, IB1, IB0, IB10)


def rank(local_rank: int = 0, world_size: int = 8, local_world_size: int | None = 4) -> Environment:
    """A rank on node07, of two nodes unless the numbers say one."""
    ways = (discovery_named("slurm"),)
    return Environment(
        launcher="Slurm",
        rank=local_rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node="node07",
        sources={},
        discoveries=ways,
    )


def entry(*interfaces: str, env: dict[str, str] | None = None) -> IfacesEntry:
    return IfacesEntry("*", interfaces, env=env or {}, where="ifaces.conf:4:3")


def chosen(
    of: IfacesEntry,
    variables: dict[str, str] | None = None,
    links: tuple[NetworkInterface, ...] = LINKS,
    who: Environment | None = None,
) -> SelectedInterface:
    return select_interface((of,), who or rank(), variables or {}, links)


def refused(of: IfacesEntry, *how: Any, **more: Any) -> str:
    """The message with which these arguments of :func:`chosen` are refused."""
    with pytest.raises(ConfigError) as caught:
        chosen(of, *how, **more)
    text = str(caught.value)
    assert "; expected " in text
    assert " -> " in text
    return text


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The addresses that names lead to; none unless a test says so."""
    known: dict[str, set[str]] = {}
    monkeypatch.setattr(interface, "addresses_of", lambda name: known.get(name, set()))
    return known


# By ifaces.conf.


NONE = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "", "TP_SOCKET_IFNAME": ""}


def exports(name: str) -> dict[str, str]:
    """What names an interface to Gloo, NCCL and torch's RPC."""
    return {
        "GLOO_SOCKET_IFNAME": name,
        "NCCL_SOCKET_IFNAME": f"={name}",
        "TP_SOCKET_IFNAME": name,
    }


@pytest.mark.parametrize("variables", [{}, NONE])
def test_gloo_and_nccl_get_the_same_interface(variables: dict[str, str]) -> None:
    """NCCL takes prefixes: without the `=`, ib1 would mean ib10 as well. An empty variable is
    none.
    """
    found = chosen(entry("ib1"), variables)
    assert (found.name, found.address, found.source) == ("ib1", "10.0.1.7", "ifaces.conf:4:3")
    assert found.exports == exports("ib1")


def test_local_ranks_take_the_interfaces_in_turn() -> None:
    of = entry("ib0", "ib1", "eth0")
    assert [chosen(of, who=rank(number)).name for number in range(5)] == [
        "ib0",
        "ib1",
        "eth0",
        "ib0",
        "ib1",
    ]


def test_the_first_entry_for_this_node_decides() -> None:
    entries = (
        IfacesEntry("node08", ("eth0",)),
        IfacesEntry("node[01-07]", ("ib1",), where="f:9"),
        IfacesEntry("*", ("ib0",)),
    )
    found = select_interface(entries, rank(), {}, LINKS)
    assert (found.name, found.source) == ("ib1", "f:9")


@pytest.mark.parametrize(
    ("who", "name"), [(rank(), "ib0"), (rank(world_size=1, local_world_size=1), "lo")]
)
def test_the_entrys_variables_yield_to_the_users(who: Environment, name: str) -> None:
    of = entry("ib0", env={"NCCL_IB_HCA": "mlx5_0", "NCCL_IB_TC": "106"})
    found = chosen(of, {"NCCL_IB_TC": "41", "NCCL_DEBUG": "INFO", "NCCL_IB_HCA": ""}, who=who)
    assert found.exports == exports(name) | {"NCCL_IB_HCA": "mlx5_0", "NCCL_IB_TC": "41"}
    assert found.kept == ("NCCL_IB_TC",)


def test_a_node_without_an_entry_is_told_with_its_interfaces() -> None:
    text = refused(replace(entry("ib0"), nodes="node08"))
    assert tells(text, "ifaces.conf", "node07", "lo", "127.0.0.1")


@pytest.mark.parametrize(
    ("of", "links", "wrong"),
    [
        ("ib7", LINKS, "interface ib7 is not there on node node07"),
        ("ib", LINKS, "interface ib is not there on node node07"),
        (
            "ib9",
            (*LINKS, link("ib9", "10.0.9.7", up=False)),
            "interface ib9 is down on node node07",
        ),
        ("ib9", (*LINKS, link("ib9")), "interface ib9 has no address on node node07"),
        ("lo", LINKS, "interface lo is loopback, which other nodes cannot reach on node node07"),
    ],
)
def test_an_unusable_interface_is_told_with_others(
    of: str, links: tuple[NetworkInterface, ...], wrong: str
) -> None:
    text = refused(entry(of), links=links)
    assert text.startswith(f"ifaces.conf:4:3: {wrong}, which has ")
    for there in ("lo (127.0.0.1 ::1)", "eth0 (192.168.1.7)", "ib0 (10.0.0.7)", "ib1 (10.0.1.7)"):
        assert there in text
    assert "correct this entry" in text


@pytest.mark.parametrize(
    ("addresses", "taken", "family"),
    [(("fd00::7",), "fd00::7", "AF_INET6"), (("fd00::7", "10.0.6.7"), "10.0.6.7", None)],
)
def test_ipv4_comes_first_and_nccl_is_told_of_ipv6(
    addresses: list[str], taken: str, family: str | None
) -> None:
    found = chosen(entry("ib6"), links=(LO, link("ib6", *addresses)))
    assert (found.address, found.exports.get("NCCL_SOCKET_FAMILY")) == (taken, family)


# By a network or a pattern.

IB2 = link("ib2", "10.0.2.7")
BRIDGE = link("br-data", "10.0.3.7")


@pytest.mark.parametrize(
    ("networks", "local_rank", "name", "address"),
    [
        (("192.168.0.0/16",), 0, "eth0", "192.168.1.7"),
        (("10.0.0.0/16",), 0, "ib0", "10.0.0.7"),  # the first by name, ib2 before ib10
        (("10.0.2.0/23",), 0, "ib2", "10.0.2.7"),  # of a bridge and an interface the interface
        (("10.0.3.0/24",), 0, "br-data", "10.0.3.7"),
        (("10.0.10.0/24", "10.0.1.0/24"), 1, "ib1", "10.0.1.7"),
        (("10.0.10.0/24", "10.0.1.0/24"), 2, "ib10", "10.0.10.7"),
        (("fd00:20::/64",), 0, "eth6", "fd00:20::7"),
        (("10.66.0.0/16",), 0, "eth6", "10.66.0.7"),
    ],
)
def test_a_network_names_the_interface_and_its_address(
    networks: tuple[str, ...], local_rank: int, name: str, address: str
) -> None:
    links = (
        LO,
        BRIDGE,
        IB10,
        IB2,
        IB1,
        IB0,
        ETH,
        link("eth6", "10.77.0.7", "10.66.0.7", "fd00:20::7"),
    )
    of = IfacesEntry("*", networks=networks, where="f:4:3")
    found = chosen(of, links=links, who=rank(local_rank))
    assert (found.name, found.address) == (name, address)
    assert found.source == f"f:4:3, network {networks[local_rank % len(networks)]}"
    assert found.exports["NCCL_SOCKET_IFNAME"] == f"={name}"


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("ib*", "ib2"), ("ib1*", "ib10"), ("[e-i]*", "eth0"), ("ib?", "ib2"), ("*", "eth0")],
)
def test_of_several_that_fit_a_pattern_the_first_is_taken(pattern: str, name: str) -> None:
    """By name, of those that are up and have an address; loopback and bridges come last."""
    links = (LO, BRIDGE, IB10, link("ib0"), link("ib1", "10.0.1.7", up=False), IB2, ETH)
    found = chosen(entry(pattern), links=links)
    assert (found.name, found.source) == (name, f"ifaces.conf:4:3, interface {pattern}")


def test_what_fits_too_is_listed_with_the_reason() -> None:
    links = (IB10, link("ib0", up=False), link("ib1"), IB2, ETH)
    larger, down, without = chosen(entry("ib*"), links=links).passed_over
    assert tells(larger, "ib10:", "ib2", "by name")
    assert tells(down, "ib0:", "down")
    assert tells(without, "ib1:", "no address")


@pytest.mark.parametrize(
    "of", [entry("hsn*"), IfacesEntry("*", networks=("10.9.0.0/16",), where="ifaces.conf:4:3")]
)
def test_a_rule_that_nothing_fits_is_refused(of: IfacesEntry) -> None:
    text = refused(of, links=(ETH, link("hsn0", "10.9.0.1", up=False)))
    assert tells(text, "ifaces.conf:4:3", of.rule, of.rule.split()[1], "node07")
    assert "hsn0 (down, 10.9.0.1)" in text


# By what the user exported.


@pytest.mark.parametrize(
    ("name", "value", "means"),
    [
        ("GLOO_SOCKET_IFNAME", "ib1", "ib1"),
        ("GLOO_SOCKET_IFNAME", "ib1,ib0", "ib1"),
        ("NCCL_SOCKET_IFNAME", "ib0", "ib0"),
        ("NCCL_SOCKET_IFNAME", "eth", "eth0"),  # a prefix
        ("NCCL_SOCKET_IFNAME", "ib", "ib1"),  # the first that has it
        ("NCCL_SOCKET_IFNAME", "hsn,eth", "eth0"),
        ("NCCL_SOCKET_IFNAME", "=ib10", "ib10"),
        ("NCCL_SOCKET_IFNAME", "=hsn0,ib0", "ib0"),
    ],
)
def test_the_users_interface_wins_over_the_file(name: str, value: str, means: str) -> None:
    found = chosen(entry("lo"), {name: value})
    assert (found.name, found.source) == (means, f"{name}={value}")
    assert found.exports == exports(means) | {name: value}


@pytest.mark.parametrize(
    ("of", "variables", "source"),
    [
        (
            "eth0",
            {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib1"},
            "GLOO_SOCKET_IFNAME=ib0",
        ),
        # Excludes, and chooses none.
        ("ib0", {"NCCL_SOCKET_IFNAME": "^docker0,lo"}, "ifaces.conf:4:3"),
    ],
)
def test_gloos_variable_wins_over_nccls_and_both_stay(
    of: str, variables: dict[str, str], source: str
) -> None:
    found = chosen(entry(of), variables)
    assert (found.name, found.source) == ("ib0", source)
    assert found.exports == exports("ib0") | variables


def test_an_interface_exported_for_rpc_stays_with_rpc() -> None:
    """Gloo and NCCL keep theirs, which may be faster."""
    found = chosen(entry("ib1"), {"TP_SOCKET_IFNAME": "eth0"})
    assert (found.name, found.source) == ("ib1", "ifaces.conf:4:3")
    assert found.exports == exports("ib1") | {"TP_SOCKET_IFNAME": "eth0"}
    assert found.kept == ("TP_SOCKET_IFNAME",)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("GLOO_SOCKET_IFNAME", "ib7", "ib7"),
        ("GLOO_SOCKET_IFNAME", "ib0,ib7", "ib7"),  # each must be there
        ("GLOO_SOCKET_IFNAME", "=ib0", "=ib0"),  # NCCL's spelling, which Gloo does not know
        ("GLOO_SOCKET_IFNAME", "^lo", "^lo"),
        ("GLOO_SOCKET_IFNAME", "10.0.0.7", "10.0.0.7"),
        ("NCCL_SOCKET_IFNAME", "=ib", "ib"),  # exact
        ("NCCL_SOCKET_IFNAME", "hsn", "hsn"),
        ("TP_SOCKET_IFNAME", "ib", "ib"),  # exact
        ("TP_SOCKET_IFNAME", "lo", "lo"),  # reaches no other node
    ],
)
@pytest.mark.parametrize("beside", [{}, {"GLOO_SOCKET_IFNAME": "ib0"}])
def test_a_users_interface_not_there_is_refused(
    name: str, value: str, shown: str, beside: dict[str, str]
) -> None:
    text = refused(entry("ib0"), beside | {name: value})
    assert tells(text, f"{name}={value}:", shown, "node07")
    assert "ib0 (10.0.0.7)" in text
    assert text.endswith(f"-> correct {name}")


@pytest.mark.parametrize(
    ("of", "interfaces", "meant"),
    [
        ("mlx5_0", ("ib0",), "write ib0;"),
        ("mlx5_0", (), "/sys/class/infiniband/mlx5_0/device/net"),
        ("mlx5_*", ("ib0",), "write ib0;"),
        ("mlx5_1", ("ib0",), "/sys/class/infiniband/mlx5_1/device/net"),
    ],
)
def test_a_device_for_an_interface_is_told_its_interface(
    monkeypatch: pytest.MonkeyPatch, of: str, interfaces: tuple[str, ...], meant: str
) -> None:
    here = infiniband.Device("mlx5_0", "InfiniBand", True, 100_000, interfaces)
    monkeypatch.setattr(infiniband, "devices", lambda: [here])
    exported = {} if "*" in of else {"GLOO_SOCKET_IFNAME": of}
    for text in (refused(entry(of)), refused(entry("ib*"), exported or {"TP_SOCKET_IFNAME": of})):
        assert tells(text.partition(" -> ")[2], of, "device", "NCCL_IB_HCA")
    assert meant in refused(entry(of))
    assert infiniband.no_interface("ib0", interfaces) == ""
    up = (*LINKS, link("mlx5_0", "10.9.0.7"))
    assert chosen(entry("mlx5_0"), links=up).name == "mlx5_0"  # the name is allowed


# By itself.


def test_auto_takes_the_interface_that_the_nodes_name_leads_to(names: dict[str, set[str]]) -> None:
    names["node07"] = {"192.168.1.7"}
    found = chosen(entry("auto"))
    assert (found.name, found.source) == ("eth0", "auto, ifaces.conf:4:3")


def test_auto_names_what_it_passed_over_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bridge is known by the kernel, whatever its name."""
    exists = Path.exists
    monkeypatch.setattr(
        Path, "exists", lambda path: str(path) == "/sys/class/net/site0/bridge" or exists(path)
    )
    down = link("eth5", "10.5.0.1", up=False)
    bare = link("eth6")
    bridge = link("site0", "10.9.0.1", speed=100_000)
    found = select_interface(
        (DEFAULT,), rank(), {}, (LO, ETH, IB0, down, bare, bridge, link("docker0", "172.17.0.1"))
    )
    assert found.name == "ib0"
    assert tells(found.source, "auto", "default", "ifaces.conf")
    reasons = dict(each.split(": ") for each in found.passed_over)
    assert len(reasons) == len(found.passed_over) == 6
    for name in ("lo", "docker0", "site0"):
        assert tells(reasons[name], "loopback", "bridge")
    assert tells(reasons["eth5"], "down")
    assert tells(reasons["eth6"], "no address")
    assert tells(reasons["eth0"], "ib0")


@pytest.mark.parametrize(
    "name",
    [
        "lo",
        "docker0",
        "docker_gwbridge",
        "veth12ab",
        "virbr0",
        "cni0",
        "br-5f2a",
        "flannel.1",
        "cali12",
        "tunl0",
        "kube-ipvs0",
        "podman0",
        "lxcbr0",
        "vnet3",
    ],
)
def test_auto_never_takes_a_virtual_interface(name: str, names: dict[str, set[str]]) -> None:
    """Not even when it is the fastest and the node's name leads there."""
    names["node07"] = {"172.17.0.1"}
    found = chosen(entry("auto"), links=(link(name, "172.17.0.1", speed=100_000), ETH))
    assert found.name == "eth0"


def test_auto_with_nothing_to_take_lists_what_there_is() -> None:
    text = refused(entry("auto"), links=(LO, link("eth5", "10.5.0.1", up=False), link("eth6")))
    assert tells(text, "ifaces.conf:4:3", "node07")
    for there in ("lo (127.0.0.1 ::1)", "eth5 (down, 10.5.0.1)", "eth6 (no address)"):
        assert there in text
    assert tells(text, " -> ", "ifaces.conf")


# One node.


FAST = link("eth1", "10.0.1.1", speed=100_000)
DOWN = link("ib0", "10.0.0.7", up=False)
ONE_NODE = rank(world_size=4)


@pytest.mark.parametrize(
    ("of", "variables", "links", "who", "name"),
    [
        (
            "eth0",
            {"NCCL_SOCKET_IFNAME": "ib"},
            (DOWN, link("ib1"), link("ib2", "10.0.2.7")),
            rank(),
            "ib2",
        ),
        ("auto", {}, (LO, ETH, FAST), rank(), "eth1"),
        ("auto", {}, (LO, ETH, FAST, IB0), rank(), "ib0"),
        ("auto", {}, LINKS, ONE_NODE, "lo"),
        # How many nodes is not known.
        ("auto", {}, LINKS, rank(world_size=4, local_world_size=None), "ib1"),
        ("lo", {}, LINKS, ONE_NODE, "lo"),
        ("eth0", {"GLOO_SOCKET_IFNAME": "lo"}, LINKS, ONE_NODE, "lo"),
        ("ib0", {}, LINKS, ONE_NODE, "ib0"),
        # A laptop, whatever the site's file says.
        ("ib7", {}, (LO,), rank(world_size=1, local_world_size=1), "lo"),
    ],
)
def test_the_interface_that_is_taken(
    of: str,
    variables: dict[str, str],
    links: tuple[NetworkInterface, ...],
    who: Environment,
    name: str,
) -> None:
    found = chosen(entry(of), variables, links, who)
    assert found.name == name
    assert exports(name) | variables == found.exports
    assert found.address == {each.name: each for each in links}[name].addresses[0]


# What this machine has.


def test_the_links_of_this_machine_are_found() -> None:
    (loopback,) = (here for here in interface.list_interfaces() if here.name == "lo")
    assert loopback.up
    assert "127.0.0.1" in loopback.ipv4
    assert {here.name for here in interface.list_interfaces()} == set(psutil.net_if_addrs())


def test_link_local_addresses_are_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need a scope that differs between nodes."""
    found = [
        SimpleNamespace(family=socket.AF_INET6, address=address)
        for address in ("fe80::1%eth0", "fd00::1")
    ]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": found})
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    (only,) = interface.list_interfaces()
    assert only.addresses == ("fd00::1",)
    assert not only.up


# An interface with several addresses.

TWO = link("eth5", "10.9.0.1", "10.9.0.2", "fd99::1", "fd99::2")


@pytest.mark.parametrize(
    ("known", "address"),
    [
        (set(), "10.9.0.1"),
        ({"10.9.0.2"}, "10.9.0.2"),
        ({"fd99::2"}, "fd99::2"),
        ({"fd99::7"}, "fd99::1"),
        ({"172.16.0.1"}, "10.9.0.1"),
        ({"127.0.1.1", "::1"}, "10.9.0.1"),
    ],
)
def test_of_several_addresses_the_known_one_is_taken(
    names: dict[str, set[str]], known: set[str], address: str
) -> None:
    names["node07"] = known
    found = chosen(entry("eth5"), links=(LO, TWO))
    assert found.address == address
    assert ("NCCL_SOCKET_FAMILY" in found.exports) == (":" in address)


def test_master_addr_decides_among_several_addresses(names: dict[str, set[str]]) -> None:
    names["head"] = {"fd99::2"}
    who = replace(rank(), discoveries=(discovery_named("env"),), master=("head", 29500))
    assert chosen(entry("eth5"), links=(LO, TWO), who=who).address == "fd99::2"


def test_a_speed_that_is_not_known_is_said_so() -> None:
    assert [shown_speed(speed) for speed in (2500, 0, -1)] == ["2.5 Gbit/s", *["speed unknown"] * 2]
