"""Which CPUs and PCI devices belong to which NUMA node of this machine, read from sysfs."""

from pathlib import Path

from srunddp.util.hostlist import numbers_of
from srunddp.util.kernel_file import text_of

SYSFS = Path("/sys")


def numa_node_of_device(address: str, sysfs: Path = SYSFS) -> int:
    """Find the NUMA node of a PCI device.

    Args:
        address: The device's address, for example ``0000:17:00.0``.
        sysfs: Where sysfs is mounted.

    Returns:
        The number of the node; -1 if it is not known, as on machines with a single NUMA node.
    """
    # The kernel writes -1 for a device without a node. In a container the file may be missing.
    return int(text_of(sysfs / "bus/pci/devices" / address / "numa_node") or -1)


def numa_nodes_of_cpus(cpus: set[int], sysfs: Path = SYSFS) -> list[int]:
    """Return the numbers of the NUMA nodes that contain at least one of these CPUs, in ascending
    order; empty if sysfs lists no NUMA nodes.
    """
    nodes = (sysfs / "devices/system/node").glob("node[0-9]*")
    return sorted(
        int(each.name.removeprefix("node"))
        for each in nodes
        if cpus & numbers_of(text_of(each / "cpulist"))
    )
