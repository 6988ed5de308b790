"""InfiniBand and RoCE devices are read as the kernel shows them, and what it does not show is left open."""

from __future__ import annotations

from pathlib import Path

import pytest

from srunddp.util.infiniband import Device, devices
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
