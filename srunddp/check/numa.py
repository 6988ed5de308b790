"""Which NUMA node a device and CPUs belong to, as Linux tells."""

from __future__ import annotations

from pathlib import Path

SYSFS = Path("/sys")


def of_device(address: str, sysfs: Path = SYSFS) -> int:
    """Of the PCI device ``0000:17:00.0``; -1 where nothing tells, as on machines with one node."""
    try:
        return int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def of_cpus(cpus: set[int], sysfs: Path = SYSFS) -> list[int]:
    """Those that have any of these CPUs."""
    nodes = {folder: _numbers(folder / "cpulist") for folder in (sysfs / "devices/system/node").glob("node[0-9]*")}
    return sorted(int(folder.name.removeprefix("node")) for folder, there in nodes.items() if there & cpus)


def _numbers(path: Path) -> set[int]:
    """Of a list like ``0-3,8``."""
    found: set[int] = set()
    try:
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        pass  # a node without CPUs has an empty list
    return found
