"""The job's share of this node: from its control group where there is one, else from its processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from srunddp.bootstrap.environment import cpus
from srunddp.monitor.sampler import cgroup
from srunddp.monitor.sampler.cgroup import JobGroup
from srunddp.monitor.sampler.kernel_file import opened
from srunddp.monitor.sampler.tasks import Tasks
from srunddp.util.sysfs import text_of

COLUMNS = (
    "time",
    "cpu_s",
    "cpus",
    "memory_bytes",
    "memory_limit_bytes",
    "read_bytes",
    "written_bytes",
    "iowait_s",
    "interface",
    "source",
)
_TICKS = os.sysconf("SC_CLK_TCK")
_IOWAIT = 5  # in the first line of /proc/stat


class Node:
    """What is written of the node as a whole.

    Args:
        tasks: that are run here; interface: the chosen one.
        environ: with Slurm's variables; groups: as in /proc/self/cgroup; root: where the control groups are mounted.
    """

    def __init__(
        self,
        tasks: Tasks,
        interface: str,
        environ: Mapping[str, str] = os.environ,
        groups: str | None = None,
        root: Path = cgroup.ROOT,
    ) -> None:
        groups = text_of(Path("/proc/self/cgroup")) if groups is None else groups
        self._tasks = tasks
        self._interface = interface
        self._group = JobGroup.find(groups, root)
        self._limit = cgroup.memory_limit(groups, environ, root) or ""
        self._quota = cpus.quota()
        self._all_cpus = opened("/proc/stat")
        self._cpus = ""

    def look(self) -> None:
        """Take what changes rarely: the CPUs that the tasks may use. Their masks say that, and where Slurm binds
        nothing they may use what others have asked for, so that its own numbers do not.
        """
        allowed = self._tasks.cpus()
        self._cpus = f"{min(allowed, self._quota or allowed):g}" if allowed else self._cpus

    def rows(self, time: str) -> str:
        """The node's line, after the tasks have been looked at."""
        cpu, memory, source = self._used()
        bytes_read = sum(tree.bytes_read.value for tree in self._tasks.trees)
        written = sum(tree.bytes_written.value for tree in self._tasks.trees)
        return (
            f"{time},{cpu:.3f},{self._cpus},{memory},{self._limit},{bytes_read},{written},{self._iowait()},"
            f"{self._interface},{source}\n"
        )

    def _used(self) -> tuple[float, int, str]:
        if self._group:
            return self._group.cpu_seconds(), self._group.memory_bytes(), "cgroup"
        trees = self._tasks.trees
        return sum(tree.cpu.value for tree in trees) / 1e9, sum(tree.resident for tree in trees), "processes"

    def _iowait(self) -> str:
        if not self._all_cpus:
            return ""
        return f"{int(self._all_cpus.read().split(None, _IOWAIT + 1)[_IOWAIT]) / _TICKS:.2f}"
