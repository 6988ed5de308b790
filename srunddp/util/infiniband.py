"""InfiniBand and RoCE devices of this node, as shown in /sys."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from srunddp.util.kernel_file import text_of

_ROOT = Path("/sys/class/infiniband")
# Beginnings of the names that drivers and rdma-core's udev rules give to devices: mlx5_0,
# mlx5_bond_0, hfi1_0, bnxt_re0, rocep65s0f0. Names such as ibp65s0 are left out, because a network
# interface may have such a name too.
_DEVICE = re.compile(
    r"mlx[45]_|hfi1_|qib\d|bnxt_re|irdma|efa_|qedr\d|erdma_|mana_\d|rocep|roceP|rdmap|rxe\d|siw\d"
)


@dataclass(frozen=True)
class Device:
    """An InfiniBand or RoCE device.

    Attributes:
        name: The name as NCCL_IB_HCA takes it, for example ``mlx5_0``.
        layer: The link layer of the device's fastest active port (of the fastest port if no port is
            active): ``InfiniBand``, or ``Ethernet`` for RoCE; empty if unknown.
        active: Whether any port is active.
        rate: The rate in Mbit/s of the port that ``layer`` is about; 0 if unknown.
        interfaces: The names of the device's network interfaces.
    """

    name: str
    layer: str
    active: bool
    rate: int
    interfaces: tuple[str, ...]


def no_interface(name: str, interfaces: Sequence[str] = ()) -> str:
    """Return a hint for a name that was given as a network interface but looks like the name of an
    InfiniBand or RoCE device; empty for any other name.

    Args:
        name: The name or pattern of names, as the user wrote it.
        interfaces: The interfaces of the device; empty if they are not known.
    """
    if not _DEVICE.match(name):
        return ""
    if interfaces:
        meant = f"write {' or '.join(interfaces)}"
    else:
        meant = f"write the interface in /sys/class/infiniband/{name}/device/net, such as ib0"
    # NCCL accepts beginnings of names, but no patterns.
    hca = name.rstrip("*")
    return f"{name} is a device: {meant}; NCCL takes devices by `env: {{NCCL_IB_HCA: {hca}}}`"


def devices(root: Path = _ROOT) -> list[Device]:
    """List the devices of this node, sorted by name; empty if there are none."""
    return [_device(folder) for folder in sorted(root.glob("*"))]


def with_interface(
    own: Sequence[Device], every: Sequence[Device]
) -> tuple[list[Device], list[Device]]:
    """Choose the devices that NCCL uses once a network interface is chosen.

    Over InfiniBand all devices of the highest rate are used: NCCL needs no IP address there, and
    often only one of several devices has an address. RoCE needs addresses, so a fast device that
    does not have the chosen interface may belong to another network.

    Args:
        own: The active devices of the chosen interface.
        every: All active devices of the node.

    Returns:
        The devices to use, and the other devices of the highest rate of which nobody knows whether
        they belong to the same network; there are none of these over InfiniBand.
    """
    alike = [device for device in every if own and device.layer == own[0].layer]
    best = [device for device in alike if device.rate == max(each.rate for each in alike)]
    if own and own[0].layer == "InfiniBand":
        return best, []
    return list(own), [device for device in best if device not in own]


def _device(folder: Path) -> Device:
    ports = sorted((folder / "ports").glob("*"))
    # The file contains "4: ACTIVE" or "1: DOWN".
    active = [port for port in ports if "ACTIVE" in text_of(port / "state")]
    # For a device without ports, read the files in the device's folder: neither "link_layer" nor
    # "rate" exists there, so the layer is empty and the rate 0.
    port = max(active or ports, key=_rate, default=folder)
    interfaces = tuple(sorted(path.name for path in (folder / "device" / "net").glob("*")))
    return Device(folder.name, text_of(port / "link_layer"), bool(active), _rate(port), interfaces)


def _rate(port: Path) -> int:
    # The file contains, for example, "100 Gb/sec (4X EDR)".
    rate = re.match(r"([0-9.]+) Gb/sec", text_of(port / "rate"))
    return int(float(rate[1]) * 1000) if rate else 0
