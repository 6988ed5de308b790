"""InfiniBand and RoCE devices of this node, as the kernel shows them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: ``mlx5_0``, as NCCL_IB_HCA takes it.
        layer: ``InfiniBand``, or ``Ethernet`` for RoCE.
        active: whether its first port is; rate: of that port, in Mbit/s, 0 where it is not known.
        interfaces: its network interfaces.
    """

    name: str
    layer: str
    active: bool
    rate: int
    interfaces: tuple[str, ...]


def devices(root: Path = _ROOT) -> list[Device]:
    """Those of this node; none where there are none."""
    return [_device(folder) for folder in sorted(root.glob("*"))]


def _device(folder: Path) -> Device:
    port = folder / "ports" / "1"
    rate = re.match(r"([0-9.]+) Gb/sec", _read(port / "rate"))
    return Device(
        name=folder.name,
        layer=_read(port / "link_layer"),
        active="ACTIVE" in _read(port / "state"),
        rate=int(float(rate[1]) * 1000) if rate else 0,
        interfaces=tuple(sorted(path.name for path in (folder / "device" / "net").glob("*"))),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
