"""The NUMA nodes of this machine, as sysfs has them."""

from pathlib import Path

from srunddp.util.hostlist import numbers_of
from srunddp.util.kernel_file import text_of

SYSFS = Path("/sys")


def numa_node_of_device(address: str, sysfs: Path = SYSFS) -> int:
    """Find the NUMA node of a PCI device.

    Args:
        address: of the device, as ``0000:17:00.0``.
        sysfs: where it is mounted.

    Returns:
        -1 where nothing tells, as on machines with one node.
    """
    # The kernel itself writes -1 for a device without a node; a container may not show the file.
    return int(text_of(sysfs / "bus/pci/devices" / address / "numa_node") or -1)


def numa_nodes_of_cpus(cpus: set[int], sysfs: Path = SYSFS) -> list[int]:
    """Find the NUMA nodes that have any of these CPUs."""
    nodes = (sysfs / "devices/system/node").glob("node[0-9]*")
    return sorted(
        int(each.name.removeprefix("node"))
        for each in nodes
        if cpus & numbers_of(text_of(each / "cpulist"))
    )
