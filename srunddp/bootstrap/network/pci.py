"""How far a network interface is from a rank's GPU on the PCI bus, as the kernel shows it in sysfs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from srunddp.bootstrap.environment.detect import Environment
from srunddp.errors import ConfigError
from srunddp.util import cuda_visible_devices
from srunddp.util.kernel_file import text_of

SYSFS = Path("/sys")


def own_gpu(environment: Environment, variables: Mapping[str, str]) -> tuple[str, str]:
    """The PCI address of the GPU that this rank will use, or empty; then why it is not known."""
    visible, unknown = cuda_visible_devices.addresses(variables.get("CUDA_VISIBLE_DEVICES"))
    if not visible:
        return "", unknown
    # Before the ranks meet, their number on this node may not be known: then a GPU for each is what is expected.
    size = environment.local_world_size or max(1, min(len(visible), environment.world_size))
    own = cuda_visible_devices.has_own(variables, size, len(visible))
    try:
        gpu = visible[cuda_visible_devices.device_index(environment.local_rank, size, len(visible), own=own)]
    except (ConfigError, IndexError):
        return "", f"{len(visible)} GPUs for {size} ranks of this node"
    return (gpu, "") if _gpu(gpu).exists() else ("", f"sysfs does not show GPU {gpu}")


def distance(gpu: str, interface: str) -> tuple[int, bool]:
    """How far an interface is from a GPU; the least is the nearest.

    First the bridges that both are below count, as a negative number, then whether their NUMA nodes differ. An
    interface of which sysfs shows no device, as of a virtual one, is the farthest.
    """
    here, there = _gpu(gpu).resolve(), _device(SYSFS / "class/net" / interface)
    if not there:
        return 0, True
    return -len(Path(os.path.commonpath((here, there))).parts), _numa(here) != _numa(there)


def _gpu(address: str) -> Path:
    return SYSFS / "bus/pci/devices" / address


def _device(folder: Path) -> Path | None:
    """The PCI device of an interface, or of the first one that is below a bond or a VLAN."""
    if (folder / "device").exists():
        return (folder / "device").resolve()
    below = sorted(link.name.removeprefix("lower_") for link in folder.glob("lower_*"))
    return next(filter(None, (_device(folder.with_name(name)) for name in below)), None)


def _numa(device: Path) -> str:
    """Of a PCI device, or of what is below one, as a virtio interface is."""
    return next(filter(None, (text_of(place / "numa_node") for place in (device, *device.parents))), "")
