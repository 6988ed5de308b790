"""InfiniBand and RoCE devices are read as the kernel shows them, and what it does not show is left open."""

from __future__ import annotations

from pathlib import Path

import pytest

from srunddp.util.infiniband import Device, devices, with_interface
from tests.support.starting import write


def device(root: Path, name: str, *interfaces: str, state: str = "4: ACTIVE", **port: str) -> None:
    """A device of ``/sys/class/infiniband`` with one port; an empty text is a file that is not there."""
    texts = {"state": state, "link_layer": "InfiniBand", "rate": "100 Gb/sec (4X EDR)"} | port
    for file, text in texts.items():
        if text:
            write(root / name / "ports" / "1" / file, f"{text}\n")
    for interface in interfaces:
        (root / name / "device" / "net" / interface).mkdir(parents=True)


def test_infiniband_and_roce_are_told_apart(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_1", "ens1f1", link_layer="Ethernet", rate="25 Gb/sec (1X EDR)")
    device(tmp_path, "mlx5_0", "ib1", "ib0")
    assert devices(tmp_path) == [
        Device("mlx5_0", "InfiniBand", active=True, rate=100_000, interfaces=("ib0", "ib1")),
        Device("mlx5_1", "Ethernet", active=True, rate=25_000, interfaces=("ens1f1",)),
    ]


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "3: ARMED", ""])
def test_a_port_that_is_not_active_is_none(tmp_path: Path, state: str) -> None:
    device(tmp_path, "mlx5_0", "ib0", state=state)
    assert [each.active for each in devices(tmp_path)] == [False]


@pytest.mark.parametrize(("rate", "known"), [("", 0), ("unknown", 0), ("2.5 Gb/sec (1X SDR)", 2500)])
def test_a_rate_that_is_not_shown_is_unknown(tmp_path: Path, rate: str, known: int) -> None:
    device(tmp_path, "mlx5_0", rate=rate)
    assert [(each.rate, each.interfaces) for each in devices(tmp_path)] == [(known, ())]


def test_a_device_without_any_port_is_not_active(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    assert devices(tmp_path) == [Device("mlx5_0", "", active=False, rate=0, interfaces=())]


def test_a_node_without_devices_has_none(tmp_path: Path) -> None:
    assert devices(tmp_path / "infiniband") == []


def ports_of(root: Path, name: str, *ports: tuple[str, str, str], net: tuple[str, ...] = ()) -> None:
    for number, (state, rate, layer) in enumerate(ports, 1):
        port = root / name / "ports" / str(number)
        port.mkdir(parents=True)
        for file, text in {"state": state, "rate": rate, "link_layer": layer}.items():
            (port / file).write_text(f"{text}\n")
    for each in net:
        (root / name / "device" / "net" / each).mkdir(parents=True)


def test_a_device_is_active_when_one_of_its_ports_is(tmp_path: Path) -> None:
    down, slow = ("1: DOWN", "400 Gb/sec (4X NDR)", "Ethernet"), ("4: ACTIVE", "100 Gb/sec (4X EDR)", "InfiniBand")
    ports_of(tmp_path, "mlx4_0", down, slow, net=("ib0",))
    ports_of(tmp_path, "mlx4_1", down, ("1: DOWN", "10 Gb/sec", "InfiniBand"))
    ports_of(tmp_path, "mlx4_2", slow, ("4: ACTIVE", "200 Gb/sec (4X HDR)", "InfiniBand"))
    (tmp_path / "bare").mkdir()
    assert devices(tmp_path) == [
        Device("bare", "", False, 0, ()),
        Device("mlx4_0", "InfiniBand", True, 100_000, ("ib0",)),
        Device("mlx4_1", "Ethernet", False, 400_000, ()),
        Device("mlx4_2", "InfiniBand", True, 200_000, ()),
    ]


def ib(number: int, rate: int = 400_000, layer: str = "InfiniBand") -> Device:
    return Device(f"mlx5_{number}", layer, True, rate, (f"net{number}",))


def test_of_infiniband_all_devices_of_the_best_rate_are_used() -> None:
    every = [*map(ib, range(8)), ib(8, 100_000), ib(9, 400_000, "Ethernet")]
    assert with_interface(every[:1], every) == (every[:8], [])
    assert with_interface(every[8:9], every) == (every[:8], [])
    assert with_interface([], every) == ([], [])


def test_of_roce_the_interfaces_own_are_used() -> None:
    every = [ib(0, layer="Ethernet"), ib(1, layer="Ethernet"), ib(2, 25_000, "Ethernet"), ib(3)]
    assert with_interface(every[:1], every) == (every[:1], every[1:2])
    assert with_interface(every[2:3], every) == (every[2:3], every[:2])
    assert with_interface(every[:1], [every[0], every[2]]) == (every[:1], [])
