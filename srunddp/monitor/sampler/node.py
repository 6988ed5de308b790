"""Measures how much of this node the job uses, and the traffic of the node's links. CPU time and
memory are read from the job's control group or, if it has none, summed over its processes.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from srunddp.monitor.sampler.process_tree import Tasks
from srunddp.util import cgroup
from srunddp.util.kernel_file import KernelFile, opened

_NET = Path("/proc/self/net/dev")
_RDMA = Path("/sys/class/infiniband")
_WORD = 4  # bytes; the unit of an RDMA port's data counters
# Fields of a line of /proc/net/dev, after the interface's name.
_RECEIVED = 0
_SENT = 8  # the eight fields before it count what was received
_TICKS = os.sysconf("SC_CLK_TCK")
_MIB = 1 << 20
_IOWAIT = 5  # the position of iowait in the first line of /proc/stat


class Node:
    """Measures how much of the whole node the job uses.

    Args:
        tasks: The tasks that run on this node.
        interface: Name of the network interface that the run uses.
        environ: The environment with Slurm's variables.
        groups: The content of /proc/self/cgroup; None to read it from there.
        root: Where the control groups are mounted.
    """

    def __init__(
        self,
        tasks: Tasks,
        interface: str,
        environ: Mapping[str, str] = os.environ,
        groups: str | None = None,
        root: Path = cgroup.ROOT,
    ) -> None:
        groups = cgroup.own_groups() if groups is None else groups
        self._tasks = tasks
        self._interface = interface
        self._group = cgroup.JobGroup.find(groups, root)
        self._limit = cgroup.memory_limit(groups, root) or requested_memory(environ) or ""
        self._quota = cgroup.cpu_quota()
        self._all_cpus = opened("/proc/stat")
        self._cpus = ""

    def look(self) -> None:
        """Count the CPUs that the tasks may use. The number rarely changes, so this need not be
        called for each reading.

        The number comes from the affinity masks and the CPU quota. It cannot come from Slurm's
        variables: if Slurm does not bind tasks to CPUs, they may also run on CPUs that other jobs
        have requested.
        """
        allowed = self._tasks.cpus()
        if allowed:
            self._cpus = f"{min(allowed, self._quota or allowed):g}"

    def rows(self, time: str) -> str:
        """Return the node's CSV line. Call :meth:`Tasks.look` first, because the line contains what
        it has read.

        Args:
            time: The first column of the line, in Unix time.
        """
        trees = self._tasks.trees
        group = self._group
        if group:
            cpu = group.cpu_seconds()
        else:
            cpu = sum(tree.cpu.value for tree in trees) / 1e9
        if group:
            memory = group.memory_bytes()
        else:
            memory = sum(tree.resident for tree in trees)
        bytes_read = sum(tree.bytes_read.value for tree in trees)
        written = sum(tree.bytes_written.value for tree in trees)
        if self._all_cpus:
            ticks = self._all_cpus.read().split(None, _IOWAIT + 1)[_IOWAIT]
        else:
            ticks = b""
        if ticks:
            iowait = f"{int(ticks) / _TICKS:.2f}"
        else:
            iowait = ""
        source = "cgroup" if group else "processes"
        usage = f"{cpu:.3f},{self._cpus},{memory},{self._limit},{bytes_read},{written},{iowait}"
        return f"{time},{usage},{self._interface},{source}\n"


def requested_memory(environ: Mapping[str, str]) -> int | None:
    """Read from Slurm's variables how much memory the job may use on this node.

    Returns:
        The number of bytes; None if the job has no limit and may use all memory of the node.
    """

    def number(name: str) -> int:
        text = environ.get(name, "")
        return int(text) if text.isdecimal() else 0

    # Slurm sets only one of the two limits: --mem applies to the whole node, --mem-per-cpu to each
    # CPU that the job has on the node.
    return (
        number("SLURM_MEM_PER_NODE") or number("SLURM_MEM_PER_CPU") * number("SLURM_CPUS_ON_NODE")
    ) * _MIB or None


class NetworkCounters:
    """Reads the byte counters of the node's network interfaces (except loopback) and RDMA ports.

    Args:
        chosen: The interface that the run uses.
        net: The kernel's file with the counters of the interfaces.
        rdma: The kernel's folder with the InfiniBand and RoCE devices.
    """

    def __init__(self, chosen: str, net: Path = _NET, rdma: Path = _RDMA) -> None:
        self._chosen = chosen.encode()
        self._net = opened(net)
        self._ports: list[tuple[str, list[KernelFile]]] = []
        for folder in sorted(rdma.glob("*/ports/*")):
            paths = [folder / "counters" / f"port_{way}_data" for way in ("rcv", "xmit")]
            counters = [file for path in paths if (file := opened(path))]
            device = folder.parent.parent
            is_chosen = (device / "device" / "net" / chosen).exists()
            # Skip a port with only one of the two counters: it would look as if it only sent or
            # only received.
            if len(counters) == 2:
                self._ports.append((f"{device.name}/{folder.name},rdma,{int(is_chosen)}", counters))

    def rows(self, time: str) -> str:
        """Read the counters, and return one CSV line for each interface and each RDMA port.

        Args:
            time: The first column of each line, in Unix time.
        """
        rows: list[str] = []
        if self._net:
            titles = 2
            lines = self._net.read(whole=True).splitlines()[titles:]
            rows = [self._of_interface(line, time) for line in lines]
        return "".join([*rows, *(_of_port(*port, time) for port in self._ports)])

    def _of_interface(self, line: bytes, time: str) -> str:
        name, _, counters = line.rpartition(b":")  # an alias such as eth0:1 has a colon in its name
        name = name.strip()
        fields = counters.split(None, _SENT + 1)
        if name == b"lo":
            return ""
        link = name.decode(errors="replace")
        chosen = int(name == self._chosen)
        received = int(fields[_RECEIVED])
        sent = int(fields[_SENT])
        return f"{time},{link},net,{chosen},{received},{sent}\n"


def _of_port(label: str, counters: list[KernelFile], time: str) -> str:
    """Return the CSV line of an RDMA port, whose traffic is not in the counters of the interfaces.
    If a counter cannot be read, both are empty.
    """
    try:
        received, sent = (str(int(file.read()) * _WORD) for file in counters)
    except (OSError, ValueError):
        received = sent = ""
    return f"{time},{label},{received},{sent}\n"
