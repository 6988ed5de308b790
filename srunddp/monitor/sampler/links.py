"""Bytes over the links of this node's network namespace, and over the ports of InfiniBand and RoCE devices."""

from __future__ import annotations

from pathlib import Path

from srunddp.monitor.sampler.kernel_file import KernelFile, opened

COLUMNS = ("time", "link", "kind", "chosen", "received_bytes", "sent_bytes")
NET = Path("/proc/self/net/dev")
RDMA = Path("/sys/class/infiniband")
_WORD = 4  # what a port's data counters count in
_RECEIVED, _SENT = 0, 8  # in a line of /proc/net/dev


class NetworkCounters:
    """All of them but loopback.

    Args:
        chosen: the interface that the run uses.
        net, rdma: where the kernel shows them.
    """

    def __init__(self, chosen: str, net: Path = NET, rdma: Path = RDMA) -> None:
        self._chosen = chosen.encode()
        self._net = opened(net)
        self._ports = [port for folder in sorted(rdma.glob("*/ports/*")) if (port := _Port.of(folder, chosen))]

    def rows(self, time: str) -> str:
        """A line for each."""
        rows = [self._of_interface(line, time) for line in self._net.read_all().splitlines()[2:]] if self._net else []
        return "".join(rows) + "".join(port.row(time) for port in self._ports)

    def _of_interface(self, line: bytes, time: str) -> str:
        name, _, counters = line.rpartition(b":")  # in a name there may be one: eth0:1
        name, fields = name.strip(), counters.split()
        if name == b"lo":
            return ""
        chosen = int(name == self._chosen)
        return f"{time},{name.decode(errors='replace')},net,{chosen},{int(fields[_RECEIVED])},{int(fields[_SENT])}\n"


class _Port:
    """A port of a device; its counters go over the wire without the kernel's network."""

    def __init__(self, name: str, chosen: bool, received: KernelFile, sent: KernelFile) -> None:
        self._name, self._chosen, self._received, self._sent = name, chosen, received, sent

    @classmethod
    def of(cls, folder: Path, interface: str) -> _Port | None:
        received, sent = (opened(folder / "counters" / f"port_{way}_data") for way in ("rcv", "xmit"))
        if not received or not sent:
            return None
        device = folder.parent.parent
        chosen = (device / "device" / "net" / interface).exists()
        return cls(f"{device.name}/{folder.name}", chosen, received, sent)

    def row(self, time: str) -> str:
        try:
            received, sent = (str(int(file.read()) * _WORD) for file in (self._received, self._sent))
        except (OSError, ValueError):
            received = sent = ""
        return f"{time},{self._name},rdma,{int(self._chosen)},{received},{sent}\n"
