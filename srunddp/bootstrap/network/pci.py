"""Measures how far a network interface is from a rank's GPU on the PCI bus, by the kernel's
sysfs.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from srunddp.bootstrap.environment.slurm import has_own
from srunddp.util.kernel_file import text_of
from srunddp.util.numa_nodes import SYSFS
from srunddp.util.nvml import look


def own_gpu(
    local_rank: int, local_world_size: int, variables: Mapping[str, str]
) -> tuple[str, str]:
    """Find the GPU that a rank will use.

    Args:
        local_rank: the rank's number on its node, from 0.
        local_world_size: the number of ranks on the node.
        variables: the rank's environment variables, which say which GPUs it sees.

    Returns:
        The GPU's PCI address and an empty text; or an empty text and why the GPU is not known.
    """
    view = look(variables.get("CUDA_VISIBLE_DEVICES"), SYSFS)
    if not view.devices:
        return "", view.missing or view.error or "no GPU is visible"
    own = has_own(variables, local_world_size, len(view.devices))
    address = view.devices[0 if own else local_rank % len(view.devices)]["address"]
    there = (SYSFS / "bus/pci/devices" / address).exists()
    if there:
        return (address, "")
    return ("", f"sysfs does not show GPU {address}")


def distance(gpu: str, interface: str) -> tuple[int, bool]:
    """Return a key to compare how far interfaces are from a GPU; the smallest is the nearest.

    The key is the length of the path that both devices share in sysfs, as a negative number, and
    then whether their NUMA nodes differ. An interface without a device in sysfs, such as a virtual
    one, is the farthest.

    Args:
        gpu: the GPU's PCI address, as sysfs writes it.
        interface: the name of the interface.
    """
    here = (SYSFS / "bus/pci/devices" / gpu).resolve()
    there = _device(SYSFS / "class/net" / interface)
    if not there:
        return 0, True
    # In sysfs each bridge is a folder, as in /sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0. The
    # longer the common path, the fewer bridges are between the two devices.
    return -len(Path(os.path.commonpath((here, there))).parts), _numa(here) != _numa(there)


def _device(folder: Path) -> Path | None:
    """Return the folder of an interface's PCI device; for a bond or a VLAN, that of the first
    interface below it. None if there is none.
    """
    if (folder / "device").exists():
        return (folder / "device").resolve()
    # If an interface is made of others, its folder has a link lower_NAME to each of them.
    below = sorted(link.name.removeprefix("lower_") for link in folder.glob("lower_*"))
    return next(filter(None, (_device(folder.with_name(name)) for name in below)), None)


def _numa(device: Path) -> str:
    """Return the NUMA node of a device. If sysfs gives none for the device itself, as for a virtio
    interface, it is that of the nearest device above; empty if none has one.
    """
    return next(
        filter(None, (text_of(place / "numa_node") for place in (device, *device.parents))), ""
    )
