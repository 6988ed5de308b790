"""InfiniBand and RoCE devices of this node, as the kernel shows them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from srunddp.util.kernel_file import text_of

_ROOT = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: ``mlx5_0``, as NCCL_IB_HCA takes it.
        active: whether a port is.
        layer: ``InfiniBand``, or ``Ethernet`` for RoCE, and rate in Mbit/s, 0 where it is not
            known: of its fastest port, if any is active of its active ones.
        interfaces: its network interfaces.
    """

    name: str
    layer: str
    active: bool
    rate: int
    interfaces: tuple[str, ...]


def devices(root: Path = _ROOT) -> list[Device]:
    """List the devices of this node, by name; empty where there are none."""
    return [_device(folder) for folder in sorted(root.glob("*"))]


def with_interface(
    own: Sequence[Device], every: Sequence[Device]
) -> tuple[list[Device], list[Device]]:
    """Choose the devices that NCCL is to use where a network interface is chosen.

    InfiniBand carries NCCL without an address, and often only one device has one: all of the best
    rate are used. RoCE needs addresses, so a fast device without this interface may belong to
    another network.

    Args:
        own: The active devices of the interface.
        every: All active devices of the node.

    Returns:
        The devices to use, and those of which it is not known whether they belong to the network.
    """
    alike = [device for device in every if own and device.layer == own[0].layer]
    best = [device for device in alike if device.rate == max(each.rate for each in alike)]
    if own and own[0].layer == "InfiniBand":
        return best, []
    return list(own), [device for device in best if device not in own]


def _device(folder: Path) -> Device:
    ports = sorted((folder / "ports").glob("*"))
    # The file has "4: ACTIVE" or "1: DOWN".
    active = [port for port in ports if "ACTIVE" in text_of(port / "state")]
    # A device without ports is described by its own folder, which has none of these files: no
    # layer, and rate 0.
    port = max(active or ports, key=_rate, default=folder)
    interfaces = tuple(sorted(path.name for path in (folder / "device" / "net").glob("*")))
    return Device(folder.name, text_of(port / "link_layer"), bool(active), _rate(port), interfaces)


def _rate(port: Path) -> int:
    # "100 Gb/sec (4X EDR)".
    rate = re.match(r"([0-9.]+) Gb/sec", text_of(port / "rate"))
    return int(float(rate[1]) * 1000) if rate else 0
