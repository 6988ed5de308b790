"""InfiniBand and RoCE devices are read as the kernel shows them, and what it does not show is left
open.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from srunddp.util.infiniband import Device, devices, with_interface
from tests.support.starting import write

SLOW = {"state": "4: ACTIVE", "link_layer": "InfiniBand", "rate": "100 Gb/sec (4X EDR)"}


def device(
    root: Path, name: str, *interfaces: str, ports: tuple[dict[str, str], ...] = (SLOW,)
) -> None:
    """A device of ``/sys/class/infiniband``; an empty text is a file that is not there."""
    (root / name).mkdir()
    for number, port in enumerate(ports, 1):
        for file, text in port.items():
            if text:
                write(root / name / "ports" / str(number) / file, f"{text}\n")
    for interface in interfaces:
        (root / name / "device" / "net" / interface).mkdir(parents=True)


def test_infiniband_and_roce_are_told_apart(tmp_path: Path) -> None:
    roce = SLOW | {"link_layer": "Ethernet", "rate": "25 Gb/sec (1X EDR)"}
    device(tmp_path, "mlx5_1", "ens1f1", ports=(roce,))
    device(tmp_path, "mlx5_0", "ib1", "ib0")
    assert devices(tmp_path) == [
        Device("mlx5_0", "InfiniBand", active=True, rate=100_000, interfaces=("ib0", "ib1")),
        Device("mlx5_1", "Ethernet", active=True, rate=25_000, interfaces=("ens1f1",)),
    ]
    assert devices(tmp_path / "infiniband") == []


@pytest.mark.parametrize(
    ("port", "active", "rate"),
    [
        *(({"state": state}, False, 100_000) for state in ("1: DOWN", "2: INIT", "3: ARMED", "")),
        *(({"rate": rate}, True, 0) for rate in ("", "unknown")),
        ({"rate": "2.5 Gb/sec (1X SDR)"}, True, 2500),
    ],
)
def test_what_a_port_does_not_show_is_left_open(
    tmp_path: Path, port: dict[str, str], active: bool, rate: int
) -> None:
    device(tmp_path, "mlx5_0", ports=(SLOW | port,))
    assert devices(tmp_path) == [Device("mlx5_0", "InfiniBand", active, rate, ())]


def test_a_device_is_active_when_one_of_its_ports_is(tmp_path: Path) -> None:
    down = {"state": "1: DOWN", "rate": "400 Gb/sec (4X NDR)", "link_layer": "Ethernet"}
    device(tmp_path, "mlx4_0", "ib0", ports=(down, SLOW))
    device(tmp_path, "mlx4_1", ports=(down, SLOW | {"state": "1: DOWN", "rate": "10 Gb/sec"}))
    device(tmp_path, "mlx4_2", ports=(SLOW, SLOW | {"rate": "200 Gb/sec (4X HDR)"}))
    device(tmp_path, "bare", ports=())
    assert devices(tmp_path) == [
        Device("bare", "", False, 0, ()),
        Device("mlx4_0", "InfiniBand", True, 100_000, ("ib0",)),
        Device("mlx4_1", "Ethernet", False, 400_000, ()),
        Device("mlx4_2", "InfiniBand", True, 200_000, ()),
    ]


def ib(number: int, rate: int = 400_000, layer: str = "InfiniBand") -> Device:
    return Device(f"mlx5_{number}", layer, True, rate, (f"net{number}",))


def test_infiniband_takes_the_best_of_all_roce_its_own() -> None:
    every = [*map(ib, range(8)), ib(8, 100_000), ib(9, 400_000, "Ethernet")]
    assert with_interface(every[:1], every) == (every[:8], [])
    assert with_interface(every[8:9], every) == (every[:8], [])
    assert with_interface([], every) == ([], [])
    every = [ib(0, layer="Ethernet"), ib(1, layer="Ethernet"), ib(2, 25_000, "Ethernet"), ib(3)]
    assert with_interface(every[:1], every) == (every[:1], every[1:2])
    assert with_interface(every[2:3], every) == (every[2:3], every[:2])
    assert with_interface(every[:1], [every[0], every[2]]) == (every[:1], [])
