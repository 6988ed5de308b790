"""The interface nearest to a rank's GPU, on a made-up sysfs with a made-up NVML."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from srunddp.bootstrap.network import interface, pci
from srunddp.bootstrap.network.interface import NetworkInterface, SelectedInterface
from tests.bootstrap.network.test_interface import chosen, entry, link, rank
from tests.programs.nvml import pynvml
from tests.support.facts import tells

GPUS = ("0000:17:00.0", "0000:98:00.0")
IB0 = link("ib0", "10.0.0.7")
IB1 = link("ib1", "10.0.1.7")
ETH = link("eth0", "10.1.0.7", speed=100_000)
# Each GPU is below one PCI switch with an interface, on a NUMA node of its own.
PLACES = {
    GPUS[0]: "pci0000:16/0000:16:01.0",
    GPUS[1]: "pci0000:97/0000:97:01.0",
    "ib0": "pci0000:16/0000:16:01.0/0000:18:00.0",
    "ib1": "pci0000:97/0000:97:01.0/0000:99:00.0",
    "eth0": "pci0000:97/0000:97:01.0/0000:9a:00.0/virtio0",
}


def made_up(folder: Path, places: dict[str, str]) -> Path:
    """A sysfs with these devices; those below the buses 97 and b0 are on NUMA node 1."""
    for name, place in places.items():
        device = folder / "devices" / place / (name if name in GPUS else "")
        device.mkdir(parents=True, exist_ok=True)
        if name in GPUS or "virtio" not in place:
            numa = device
        else:
            numa = device.parent
        (numa / "numa_node").write_text(
            "1\n" if place.startswith(("pci0000:97", "pci0000:b0")) else "0\n"
        )
        if name in GPUS:
            link = folder / "bus/pci/devices" / name
        else:
            link = folder / "class/net" / name / "device"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
    return folder


def nvml_of(*addresses: str, **more: object) -> str:
    """What NVML says of a node with GPUs at these addresses."""
    usual = {"name": "NVIDIA H100", "total": 1, "free": 1}
    gpus = [
        usual | {"uuid": f"GPU-{number}", "address": f"0000{gpu}"}
        for number, gpu in enumerate(addresses)
    ]
    return json.dumps({"driver": "580.95.05", "cuda": 13000, "gpus": gpus, **more})


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with two GPUs; the name of the file that NVML reads."""
    nvml = tmp_path / "nvml.json"
    nvml.write_text(nvml_of(*GPUS))
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setenv("FAKE_NVML", str(nvml))
    monkeypatch.setattr(pci, "SYSFS", made_up(tmp_path / "sys", PLACES))
    monkeypatch.setattr(interface, "addresses_of", lambda name: set())
    return nvml


def of_rank(
    local_rank: int,
    links: tuple[NetworkInterface, ...] = (ETH, IB1, IB0),
    size: int = 2,
    **variables: str,
) -> SelectedInterface:
    who = replace(rank(local_rank, local_world_size=size), world_size=2 * size)
    return chosen(entry("nearest"), variables, links, who)


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["ib0", "ib1"]), ("1,0", ["ib1", "ib0"]), ("GPU-1", ["ib1"])]
)
def test_each_rank_takes_the_interface_at_its_gpu(visible: str | None, names: list[str]) -> None:
    if visible is None:
        variables: dict[str, Any] = {}
    else:
        variables = {"CUDA_VISIBLE_DEVICES": visible}
    found = [of_rank(number, size=len(names), **variables) for number in range(len(names))]
    assert [each.name for each in found] == names
    gpu = GPUS[int(names[0][-1])]
    assert found[0].source == f"ifaces.conf:4:3, nearest to GPU {gpu}"
    assert (
        f"{'ib1' if names[0] == 'ib0' else 'ib0'}: farther than {names[0]}" in found[0].passed_over
    )


@pytest.mark.parametrize(
    "variables", [{"SLURM_GPUS_PER_TASK": "2"}, {"SLURM_TRES_PER_TASK": "gres/gpu=2"}]
)
def test_a_rank_with_gpus_of_its_own_uses_the_first(variables: dict[str, Any]) -> None:
    assert of_rank(1, **variables).source == f"ifaces.conf:4:3, nearest to GPU {GPUS[0]}"


def test_on_the_same_numa_node_is_nearer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither interface is below the GPU's own bridges."""
    apart = {"ib0": "pci0000:b0/0000:b1:00.0", "ib1": "pci0000:a0/0000:a1:00.0"}
    monkeypatch.setattr(pci, "SYSFS", made_up(tmp_path / "other", PLACES | apart))
    assert [of_rank(number).name for number in range(2)] == ["ib1", "ib0"]


def test_a_vlan_is_where_the_interface_below_it_is(tmp_path: Path) -> None:
    (tmp_path / "sys/class/net/ib0.7/lower_ib0").mkdir(parents=True)
    assert (
        pci.distance(GPUS[0], "ib0.7")
        == pci.distance(GPUS[0], "ib0")
        < pci.distance(GPUS[0], "ib1")
    )
    assert pci.distance(GPUS[0], "tun0") > pci.distance(GPUS[0], "ib1")


def test_equally_near_ones_are_taken_in_turn() -> None:
    """A faster kind comes first, though another is nearer; InfiniBand is the best."""
    links = (
        link("eth7", "10.7.0.7", speed=1000),
        link("eth9", "10.9.0.7", speed=400_000),
        link("eth8", "10.8.0.7"),
    )
    fast = replace(links[2], speed=400_000)
    found = [of_rank(number, (*links[:2], fast)) for number in range(2)]
    assert [each.name for each in found] == ["eth8", "eth9"]
    slower, as_near = found[0].passed_over
    assert tells(slower, "eth7:", "slower")
    assert tells(as_near, "eth9:", "local rank")
    assert of_rank(1, (ETH, IB0)).name == "ib0"


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (nvml_of(), "no GPU is visible"),
        (nvml_of(error=18), "RM has detected an NVML/RM version mismatch."),
        (nvml_of("ffff:01:00.0"), "sysfs does not show GPU ffff:01:00.0"),
    ],
)
def test_without_a_gpus_place_it_is_auto_and_that_is_said(node: Path, known: str, why: str) -> None:
    node.write_text(known)
    found = of_rank(0)
    assert found.name == "ib1"  # the first of the best kind, as auto takes it
    assert tells(found.source, "auto", "ifaces.conf:4:3", "GPU", why)


def test_ranks_of_one_node_and_single_ones_use_loopback() -> None:
    links = (link("lo", "127.0.0.1"), IB0)
    assert (
        chosen(entry("nearest"), links=links, who=rank(world_size=2, local_world_size=2)).name
        == "lo"
    )
    assert (
        chosen(entry("nearest"), links=links, who=rank(world_size=1, local_world_size=1)).name
        == "lo"
    )
