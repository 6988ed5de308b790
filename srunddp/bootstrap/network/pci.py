"""How far a network interface is from a rank's GPU on the PCI bus, as the kernel shows it in
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
        local_rank: the rank's.
        local_world_size: ranks of its node.
        variables: its environment variables, of which some tell which GPUs it sees.

    Returns:
        The GPU's PCI address, and nothing; or nothing, and why it is not known.
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
    """Return how far an interface is from a GPU, to be compared; the least is the nearest.

    First the bridges that both are below count, as a negative number, then whether their NUMA nodes
    differ. An interface of which sysfs shows no device, as of a virtual one, is the farthest.

    Args:
        gpu: its PCI address, as sysfs has it.
        interface: its name.
    """
    here = (SYSFS / "bus/pci/devices" / gpu).resolve()
    there = _device(SYSFS / "class/net" / interface)
    if not there:
        return 0, True
    # Each bridge is a folder, as in /sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0: the longer
    # the common path, the fewer bridges are in between.
    return -len(Path(os.path.commonpath((here, there))).parts), _numa(here) != _numa(there)


def _device(folder: Path) -> Path | None:
    """Find the PCI device of an interface, or of the first one that is below a bond or a VLAN."""
    if (folder / "device").exists():
        return (folder / "device").resolve()
    # The kernel links an interface that is made of others to each of them as lower_NAME.
    below = sorted(link.name.removeprefix("lower_") for link in folder.glob("lower_*"))
    return next(filter(None, (_device(folder.with_name(name)) for name in below)), None)


def _numa(device: Path) -> str:
    """Read the NUMA node of a PCI device, or of a device below one, as a virtio interface is."""
    return next(
        filter(None, (text_of(place / "numa_node") for place in (device, *device.parents))), ""
    )
