"""What carries a training: the devices behind an interface, and those that NCCL is told to use."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

import pytest

from srunddp.bootstrap.network import interface as interfaces
from srunddp.check.checks.interface import physical
from srunddp.ifaces import scan
from srunddp.ifaces.draft import draft
from srunddp.ifaces.scan import ScannedInterface, ScanResult
from srunddp.util import infiniband
from srunddp.util.infiniband import Device, with_interface

# What is behind an interface.


@pytest.mark.parametrize(
    ("folders", "behind"),
    [
        (["eth0/device"], True),
        (["eth0"], False),  # veth, dummy, tun
        (["eth0/bonding", "eth0/lower_a", "eth0/lower_b"], True),
        (["eth0/lower_eno1", "eno1/device"], True),  # a VLAN
        (["eth0/lower_bond0", "bond0/bonding"], True),  # a VLAN on a bond
        (["eth0/lower_veth1", "veth1"], False),
        (["eth0/bridge", "eth0/lower_eno1", "eno1/device"], False),
    ],
)
def test_a_bond_or_a_vlan_has_a_device_behind_it_and_a_bridge_and_a_veth_have_none(
    folders: list[str], behind: bool, tmp_path: Path
) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    assert physical("eth0", tmp_path) is behind


# InfiniBand and RoCE devices.


def device(root: Path, name: str, *ports: tuple[str, str, str], net: tuple[str, ...] = ()) -> None:
    for number, (state, rate, layer) in enumerate(ports, 1):
        port = root / name / "ports" / str(number)
        port.mkdir(parents=True)
        for file, text in {"state": state, "rate": rate, "link_layer": layer}.items():
            (port / file).write_text(f"{text}\n")
    for each in net:
        (root / name / "device" / "net" / each).mkdir(parents=True)


def test_a_device_is_active_when_any_of_its_ports_is_and_has_that_ports_rate(tmp_path: Path) -> None:
    down, slow = ("1: DOWN", "400 Gb/sec (4X NDR)", "Ethernet"), ("4: ACTIVE", "100 Gb/sec (4X EDR)", "InfiniBand")
    device(tmp_path, "mlx4_0", down, slow, net=("ib0",))
    device(tmp_path, "mlx4_1", down, ("1: DOWN", "10 Gb/sec", "InfiniBand"))
    device(tmp_path, "mlx4_2", slow, ("4: ACTIVE", "200 Gb/sec (4X HDR)", "InfiniBand"))
    (tmp_path / "bare").mkdir()
    assert infiniband.devices(tmp_path) == [
        Device("bare", "", False, 0, ()),
        Device("mlx4_0", "InfiniBand", True, 100_000, ("ib0",)),
        Device("mlx4_1", "Ethernet", False, 400_000, ()),
        Device("mlx4_2", "InfiniBand", True, 200_000, ()),
    ]


def ib(number: int, rate: int = 400_000, layer: str = "InfiniBand") -> Device:
    return Device(f"mlx5_{number}", layer, True, rate, (f"net{number}",))


def test_of_infiniband_all_devices_of_the_best_rate_are_used_though_one_alone_has_an_address() -> None:
    every = [*map(ib, range(8)), ib(8, 100_000), ib(9, 400_000, "Ethernet")]
    assert with_interface(every[:1], every) == (every[:8], [])
    assert with_interface(every[8:9], every) == (every[:8], [])
    assert with_interface([], every) == ([], [])


def test_of_roce_the_interfaces_own_are_used_and_others_as_fast_are_in_doubt() -> None:
    every = [ib(0, layer="Ethernet"), ib(1, layer="Ethernet"), ib(2, 25_000, "Ethernet"), ib(3)]
    assert with_interface(every[:1], every) == (every[:1], every[1:2])
    assert with_interface(every[2:3], every) == (every[2:3], every[:2])
    assert with_interface(every[:1], [every[0], every[2]]) == (every[:1], [])


def test_a_link_brings_the_nodes_devices_and_arrives_as_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    here = (
        interfaces.NetworkInterface("net0", True, 0, ("10.1.0.1",), ()),
        interfaces.NetworkInterface("eth9", True, 10, ("10.9.0.1",), ()),
    )
    monkeypatch.setattr(scan, "list_interfaces", lambda: here)
    monkeypatch.setattr(scan, "_names", lambda _: ())
    monkeypatch.setattr(infiniband, "devices", lambda: [*map(ib, range(3)), Device("off", "InfiniBand", False, 9, ())])
    first, second = scan.links("node01")
    assert (first.devices, first.others, first.layer, first.speed) == (
        ("mlx5_0", "mlx5_1", "mlx5_2"),
        (),
        "InfiniBand",
        400_000,
    )
    assert (second.devices, second.layer) == ((), "")
    assert scan._link({**vars(first), "names": [], "devices": list(first.devices), "others": []}) == first


# The draft.


def drafted(links: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]) -> str:
    """Of two nodes with these interfaces, and the devices that each is to use, and may be to use."""
    ends = {
        (node, name): ScannedInterface(name, f"10.{each}.0.{number}", "", 9000, "", (), True, used, "Ethernet", others)
        for number, node in enumerate(("node01", "node02"))
        for each, (name, (used, others)) in enumerate(links.items())
    }
    reached = {(a, b): True for a in ends for b in ends if a[0] != b[0]}
    return draft(ScanResult(ends, reached, {}), datetime.date(2026, 1, 2)).text


def test_each_device_of_an_entry_is_named_once() -> None:
    every = tuple(f"mlx5_{number}" for number in range(3))
    text = drafted({"ib0": (every, ()), "ib1": (every, ())})
    assert '  env: {NCCL_IB_HCA: "=mlx5_0,mlx5_1,mlx5_2"}  # active InfiniBand or RoCE\n' in text


def test_devices_that_may_be_this_networks_too_make_it_a_comment_unless_their_interfaces_are_taken() -> None:
    both = {"eth1": (("mlx5_1",), ("mlx5_2",)), "eth2": (("mlx5_2",), ("mlx5_1",))}
    assert '  env: {NCCL_IB_HCA: "=mlx5_1,mlx5_2"}  # active InfiniBand or RoCE\n' in drafted(both)
    text = drafted({"eth1": both["eth1"]})
    assert '  # env: {NCCL_IB_HCA: "=mlx5_1"}  # without it NCCL uses mlx5_2 as well: ' in text
    assert "\n  env:" not in text


def test_a_speed_that_is_not_known_is_said_so() -> None:
    assert [interfaces.shown_speed(speed) for speed in (2500, 0, -1)] == ["2.5 Gbit/s", *["an unknown speed"] * 2]
