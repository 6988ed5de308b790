"""A draft names for every node the interface that reaches the others, in a file that srunddp reads
as it was meant.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.bootstrap.network.ifaces_conf import parse
from srunddp.bootstrap.network.ifaces_entry import IfacesEntry, entry_for
from srunddp.errors import ConfigError
from srunddp.ifaces.cli import add_entries
from srunddp.ifaces.draft import draft, networks
from srunddp.ifaces.scan import ScannedInterface, ScanResult
from tests.support.facts import tells

TODAY = datetime.date(2026, 1, 2)
NODES = tuple(f"n{number:02d}" for number in range(1, 5))
IB = {"layer": "InfiniBand", "devices": ("mlx5_0",)}


def link(name: str, network: str, number: int, **changes: Any) -> ScannedInterface:
    """An interface of the node of this number, in the network ``10.1`` or ``fd00:1:`` say."""
    address = f"{network}:{number:x}" if ":" in network else f"{network}.0.{number}"
    known: dict[str, Any] = {
        "speed": 10_000,
        "passed_over": "",
        "names": (),
        "named": False,
        "devices": (),
    }
    return ScannedInterface(**{"name": name, "address": address, "layer": ""} | known | changes)


def network(link: ScannedInterface) -> str:
    """The network that it was made in."""
    if ":" in link.address:
        return link.address.rpartition(":")[0]
    return link.address.rsplit(".", 2)[0]


def rail(
    name: str, network: str, nodes: Sequence[str] = NODES, **changes: Any
) -> dict[tuple[str, str], ScannedInterface]:
    """An interface of each of these nodes."""
    return {(node, name): link(name, network, NODES.index(node) + 1, **changes) for node in nodes}


def scan(
    *rails: Mapping[tuple[str, str], ScannedInterface], lost: Sequence[str] = (), resolved: Any = ()
) -> ScanResult:
    """What is found where all in one network reach each other, but not those of ``lost``: nodes or
    networks.
    """
    ends = {end: link for each in rails for end, link in each.items()}
    reached = {
        (a, b): network(ends[a]) == network(ends[b])
        and not {a[0], b[0], network(ends[a])} & set(lost)
        for a, b in itertools.permutations(ends, 2)
        if a[0] != b[0] and not ends[a].passed_over and not ends[b].passed_over
    }
    return ScanResult(ends, reached, dict(resolved))


def drafted(found: ScanResult) -> tuple[str, tuple[str, ...], dict[str, IfacesEntry]]:
    """The draft, the nodes that it has no entry for, and the entry of each other one."""
    text, missing = draft(found, TODAY)
    entries = parse(text.encode(), "ifaces.conf")
    assert text.startswith("# By `srunddp ifaces scan` on 2026-01-02: ")
    nodes = {node for node, _ in found.ends} - set(missing)
    return text, missing, {node: entry_for(entries, node) for node in nodes}


def interfaces(found: ScanResult) -> dict[str, tuple[str, ...]]:
    return {node: entry.interfaces for node, entry in drafted(found)[2].items()}


# Which network.


def test_nodes_with_one_name_are_one_entry() -> None:
    names = dict(zip(NODES, ("ens1f0", "ens1f0", "eno1", "ens1f0"), strict=True))
    ends = {
        (node, name): link(name, "10.1", number)
        for number, (node, name) in enumerate(names.items())
    }
    named = {end: link(end[1], "10.1", number, named=True) for number, end in enumerate(ends)}
    assert interfaces(scan(named)) == {node: (name,) for node, name in names.items()}
    text = draft(scan(named), TODAY)[0]
    assert [line for line in text.splitlines() if line.startswith("- nodes")] == [
        "- nodes: n[01-02,04]",
        "- nodes: n03",
    ]
    assert "  interface: ens1f0  # up, 10 Gbit/s, reaches all 3 other nodes" in text.splitlines()


@pytest.mark.parametrize("ethernet", [10_000, 400_000])
def test_infiniband_is_taken_over_ethernet_however_fast(ethernet: int) -> None:
    found = scan(
        rail("ib0", "10.1", speed=100_000, **IB), rail("eno1", "10.2", speed=ethernet, named=True)
    )
    assert set(interfaces(found).values()) == {("ib0",)}
    not_chosen = (
        f"# Not chosen: eno1 on n[01-04], which reach each other ({ethernet // 1000} Gbit/s)."
    )
    assert not_chosen in drafted(found)[0].splitlines()


@pytest.mark.parametrize(
    ("rails", "taken", "said"),
    [
        # The faster, whatever the names lead to; of two equal ones that of the names; IPv4 at equal
        # speed.
        (
            (rail("eno1", "10.1", speed=1000, named=True), rail("ens2", "10.2", speed=25_000)),
            "ens2",
            "eno1 on",
        ),
        ((rail("eno1", "10.1"), rail("eno2", "10.2", named=True)), "eno2", "eno1 on"),
        ((rail("eno1", "fd00:1:", named=True), rail("eno2", "10.2")), "eno2", "(10 Gbit/s, IPv6)"),
        ((rail("eno1", "fd00:1:", speed=25_000), rail("eno2", "10.2")), "eno1", "eno2 on"),
        ((rail("ib0", "10.1", **IB), rail("ib1", "10.2", **IB)), "ib0", "ib1 on"),
        (
            (rail("ib0", "10.1", NODES[:3], speed=200_000, **IB), rail("eno1", "10.2", speed=1000)),
            "eno1",
            "ib0 on",
        ),
    ],
)
def test_the_best_of_two_networks_is_taken(rails: Any, taken: str, said: str) -> None:
    text, _, entries = drafted(scan(*rails))
    assert {entry.interfaces for entry in entries.values()} == {(taken,)}
    (line,) = [line for line in text.splitlines() if line.startswith("# Not chosen: ")]
    assert said in line


@pytest.mark.parametrize(("speed", "taken"), [(10_000, ("ib0", "ib1")), (1000, ("ib0",))])
def test_of_several_rails_in_one_network_the_fastest_are_listed(
    speed: int, taken: tuple[str, ...]
) -> None:
    second = {
        (node, "ib1"): link("ib1", "10.1", 100 + number, speed=speed)
        for number, node in enumerate(NODES)
    }
    assert interfaces(scan(rail("ib0", "10.1"), second)) == dict.fromkeys(NODES, taken)


# What does not reach the others.


def test_what_reaches_nobody_or_is_down_is_passed_over_and_said() -> None:
    fast = rail("eno2", "10.2", speed=25_000, named=True)
    down = rail("ib0", "10.3", NODES[1:3], passed_over="down")
    found = scan(rail("eno1", "10.1", speed=1000), fast, down, lost=["10.2"])
    assert interfaces(found) == dict.fromkeys(NODES, ("eno1",))
    lines = drafted(found)[0].splitlines()
    assert any(tells(line, "# ", "eno2", "n[01-04]", "reaches no other") for line in lines)
    assert any(tells(line, "# ", "ib0", "n[02-03]", "down") for line in lines)


def test_a_node_that_reaches_none_has_no_entry_and_is_said() -> None:
    text, missing, entries = drafted(scan(rail("eno1", "10.1"), lost=["n03"]))
    assert missing == ("n03",)
    assert tells(text, "# n03", "no entry")
    assert "reaches all 2 other nodes" in text
    assert sorted(entries) == ["n01", "n02", "n04"]
    with pytest.raises(ConfigError, match="n03"):
        entry_for(parse(text.encode(), "x"), "n03")


def test_where_nobody_reaches_anybody_there_is_no_entry() -> None:
    text, missing, _ = drafted(scan(rail("eno1", "10.1"), lost=["10.1"]))
    assert missing == NODES
    assert parse(text.encode(), "x") == ()


def test_a_broken_way_within_the_network_is_said() -> None:
    found = scan(rail("eno1", "10.1"))
    one_lost = {**found.reached, (("n01", "eno1"), ("n02", "eno1")): False}
    assert tells(draft(ScanResult(found.ends, one_lost, {}), TODAY)[0], "# 1 ", "did not work")
    both = scan(rail("eno1", "10.1", speed=25_000), rail("eno2", "10.2"))
    reached = {**both.reached, (("n01", "eno1"), ("n02", "eno1")): False}
    assert set(interfaces(ScanResult(both.ends, reached, {})).values()) == {("eno2",)}


# By which address.


def named(
    template: str,
) -> tuple[dict[tuple[str, str], ScannedInterface], dict[str, list[list[str]]]]:
    """A network whose addresses have names, and what all nodes find for them."""
    ends = {
        (node, "ib0"): link("ib0", "10.1", number, names=(template.format(node=node),))
        for number, node in enumerate(NODES, 1)
    }
    found = {each.names[0]: [[each.address]] * len(NODES) for each in ends.values()}
    return ends, found


def test_a_name_of_every_node_that_all_know_is_one_template() -> None:
    ends, resolved = named("{node}-ib0.cluster")
    text, _, entries = drafted(scan(ends, resolved=resolved))
    assert {entry.address for entry in entries.values()} == {"{node}-ib0.cluster"}
    assert text.count("- nodes:") == 1


@pytest.mark.parametrize("elsewhere", [[], ["10.9.0.2"]])
def test_a_name_that_one_node_does_not_know_is_no_template(elsewhere: list[str]) -> None:
    ends, resolved = named("{node}-ib0")
    resolved["n02-ib0"] = [["10.1.0.2"], ["10.1.0.2"], elsewhere, ["10.1.0.2"]]
    entries = drafted(scan(ends, resolved=resolved))[2]
    assert [entries[node].address for node in NODES] == [
        f"10.1.0.{number}" for number in range(1, 5)
    ]


# NCCL's devices.


def drafted_of(links: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]) -> str:
    """Of two nodes with these interfaces, and the devices that each is to use, and may be to
    use.
    """
    ends = {
        (node, name): link(
            name, f"10.{each}", number, named=True, devices=used, layer="Ethernet", others=others
        )
        for number, node in enumerate(("node01", "node02"))
        for each, (name, (used, others)) in enumerate(links.items())
    }
    reached = {(a, b): True for a in ends for b in ends if a[0] != b[0]}
    return draft(ScanResult(ends, reached, {}), TODAY)[0]


def test_each_active_device_is_named_once_and_exactly() -> None:
    text = drafted_of({"ib0": (("mlx5_0", "mlx5_10"), ()), "ib1": (("mlx5_10",), ())})
    assert '  env: {NCCL_IB_HCA: "=mlx5_0,mlx5_10"}  # active InfiniBand or RoCE\n' in text


def test_devices_in_doubt_are_a_comment() -> None:
    both = {"eth1": (("mlx5_1",), ("mlx5_2",)), "eth2": (("mlx5_2",), ("mlx5_1",))}
    assert '  env: {NCCL_IB_HCA: "=mlx5_1,mlx5_2"}  # active InfiniBand or RoCE\n' in drafted_of(
        both
    )
    text = drafted_of({"eth1": both["eth1"]})
    assert '  # env: {NCCL_IB_HCA: "=mlx5_1"}  # without it NCCL uses mlx5_2 as well: ' in text
    assert "\n  env:" not in text


# Whatever is found.


def test_nodes_whose_names_are_numbers_are_read_back() -> None:
    ends = {(node, "ib0"): link("ib0", "10.1", int(node), named=True) for node in ("1", "2", "3")}
    assert interfaces(scan(ends)) == dict.fromkeys(("1", "2", "3"), ("ib0",))


NAMES = (
    "n1",
    "n10",
    "n01",
    "gpu-a",
    "gpu-a1",
    "rack1-n2",
    "rack2-n2",
    "rack2-n3",
    "1",
    "2",
    "03",
    "x",
)


@st.composite
def any_scan(pick: st.DrawFn) -> ScanResult:
    nodes = pick(st.lists(st.sampled_from(NAMES), min_size=2, unique=True))
    some = st.sampled_from
    ends: dict[tuple[str, str], ScannedInterface] = {}
    for number, node in enumerate(nodes, 1):
        for name in pick(
            st.lists(some(["eno1", "ib0", "ib1", "enp1s0f0np0", "p1p1.100"]), unique=True)
        ):
            changes = {
                "speed": pick(some([0, 1000, 100_000])),
                "passed_over": pick(some(["", "", "", "down"])),
                "named": pick(st.booleans()),
                "names": pick(some([(), (f"{node}-ib",), (f"data-{node}.lab",)])),
                "devices": pick(some([(), ("mlx5_0",), ("mlx5_1", "mlx5_10")])),
            }
            network = pick(some(["10.1", "10.2", "fd00:1:"]))
            ends[node, name] = link(name, network, len(ends) + 16 * number, **changes)
    resolved = {
        name: [pick(some([[each.address], [each.address], [], ["10.9.9.9"]]))] * 2
        for each in ends.values()
        for name in each.names
    }
    return scan(ends, lost=pick(st.lists(some([*nodes, "10.1"]), max_size=2)), resolved=resolved)


@given(any_scan())
def test_every_draft_is_read_back_as_it_was_meant(found: ScanResult) -> None:
    text, missing, entries = drafted(found)
    best = next(iter(networks(found)), None)
    assert set(entries) == (set(best.links) if best else set())
    for node, entry in entries.items():
        assert best is not None
        links = best.links[node]
        assert entry.interfaces == tuple(each.name for each in links)
        devices = sorted({device for each in links for device in each.devices})
        assert entry.env == ({"NCCL_IB_HCA": "=" + ",".join(devices)} if devices else {})
        address = entry.address.format(node=node)
        leads = found.resolved.get(address, [[address]])
        if links[0].named:
            assert address == ""
        else:
            assert all({each.address for each in links} & set(seen) for seen in leads)
    for node in missing:
        with pytest.raises(ConfigError):
            entry_for(parse(text.encode(), "x") or (IfacesEntry("", ()),), node)


# Added to a file that is there.

OWN = "# racks 1 and 2\n- nodes: n[01-02]  # ours\n  interface: eno9\n\n# the end"


@pytest.mark.parametrize("end", ["", "\n"])
def test_nodes_that_no_entry_matches_are_added_to_a_file(tmp_path: Path, end: str) -> None:
    path = tmp_path / "ifaces.conf"
    found = scan(rail("ib0", "10.1", named=True))
    path.write_text(OWN + end)
    text, missing = draft(found, TODAY, parse(path.read_bytes(), "f"))
    add_entries(text, str(path))
    merged = path.read_text()
    assert missing == ()
    assert merged.startswith(f"{OWN}\n\n# By `srunddp ifaces scan` on 2026-01-02: ")
    entries = parse(merged.encode(), "f")
    assert [entry.nodes for entry in entries] == ["n[01-02]", "n[03-04]"]
    assert [entry_for(entries, node).interfaces for node in NODES] == [("eno9",)] * 2 + [
        ("ib0",)
    ] * 2
    assert draft(found, TODAY, entries) == ("", ())
    add_entries("", str(path))
    assert path.read_text() == merged


def test_a_merged_file_leaves_nodes_without_a_network_out() -> None:
    found = scan(
        rail("ib0", "10.1", NODES[:3]),
        {("n04", "lo"): link("lo", "127.0", 1, passed_over="loopback")},
    )
    assert draft(found, TODAY)[1] == ("n04",)
    assert draft(found, TODAY, (IfacesEntry("n04", ("eno9",)),))[1] == ()


def test_a_file_with_its_entries_in_brackets_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ifaces.conf"
    path.write_text("[{nodes: n01, interface: eno9}]\n")
    with pytest.raises(ConfigError, match=f"{path} has its entries in brackets; "):
        add_entries("- nodes: n02\n  interface: ib0\n", str(path))
    assert path.read_text() == "[{nodes: n01, interface: eno9}]\n"
