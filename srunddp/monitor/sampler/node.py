"""The job's share of this node, from its control group where there is one, else from its processes;
and its links.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from srunddp.monitor.sampler.process_tree import Tasks
from srunddp.util import cgroup
from srunddp.util.kernel_file import KernelFile, opened

_NET = Path("/proc/self/net/dev")
_RDMA = Path("/sys/class/infiniband")
_WORD = 4  # what the data counters of an RDMA port count in
# Fields of a line of /proc/net/dev, after the interface's name.
_RECEIVED = 0
_SENT = 8  # behind eight on what was received
_TICKS = os.sysconf("SC_CLK_TCK")
_MIB = 1 << 20
_IOWAIT = 5  # in the first line of /proc/stat


class Node:
    """What is written of the node as a whole.

    Args:
        tasks: that are run here.
        interface: the chosen one.
        environ: with Slurm's variables.
        groups: as in /proc/self/cgroup.
        root: where the control groups are mounted.
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
        """Take what changes rarely: the CPUs that the tasks may use. Their masks say that, and
        where Slurm binds nothing they may use what others have asked for, so that its own numbers
        do not.
        """
        allowed = self._tasks.cpus()
        if allowed:
            self._cpus = f"{min(allowed, self._quota or allowed):g}"

    def rows(self, time: str) -> str:
        """Return the node's line; the tasks must have been looked at before."""
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
    """Read Slurm's variables for the memory that the job was given on this node.

    Returns:
        Bytes; None for all of the node's.
    """

    def number(name: str) -> int:
        text = environ.get(name, "")
        return int(text) if text.isdecimal() else 0

    # A job has one of the two variables: --mem is for the node, --mem-per-cpu for each of its CPUs
    # here.
    return (
        number("SLURM_MEM_PER_NODE") or number("SLURM_MEM_PER_CPU") * number("SLURM_CPUS_ON_NODE")
    ) * _MIB or None


class NetworkCounters:
    """Bytes over the links of this node's network namespace but loopback, and over its InfiniBand
    and RoCE ports.

    Args:
        chosen: the interface that the run uses.
        net, rdma: where the kernel shows them.
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
            # A port that shows one way alone would look as if it only received, or only sent.
            if len(counters) == 2:
                self._ports.append((f"{device.name}/{folder.name},rdma,{int(is_chosen)}", counters))

    def rows(self, time: str) -> str:
        """Read the counters; return a line for each link and port."""
        rows: list[str] = []
        if self._net:
            titles = 2
            lines = self._net.read(whole=True).splitlines()[titles:]
            rows = [self._of_interface(line, time) for line in lines]
        return "".join([*rows, *(_of_port(*port, time) for port in self._ports)])

    def _of_interface(self, line: bytes, time: str) -> str:
        name, _, counters = line.rpartition(b":")  # in a name there may be one: eth0:1
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
    """A port's counters go over the wire without the kernel's network."""
    try:
        received, sent = (str(int(file.read()) * _WORD) for file in counters)
    except (OSError, ValueError):
        received = sent = ""
    return f"{time},{label},{received},{sent}\n"
