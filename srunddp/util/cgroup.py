"""Control groups of version 1 and 2: where a process's are, what they limit, and what the kernel
counts in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from srunddp.util.hostlist import numbers_of
from srunddp.util.kernel_file import KernelFile, number_after, opened, text_of

ROOT = Path("/sys/fs/cgroup")
_JOB = re.compile(r".*/job_\d+(?=/|$)")
_UNLIMITED = 1 << 60  # more than any machine has; version 1 says so in pages


def own_groups() -> str:
    """The groups of this process, as /proc/self/cgroup has them: a line for each hierarchy."""
    return text_of(Path("/proc/self/cgroup"))


def cpu_quota(groups: str | None = None, root: Path = ROOT) -> float | None:
    """CPUs that its groups leave a process, as a container's ``--cpus=2`` does; None for any
    number.

    Args:
        groups: of the process, this one unless given.
        root: where the control groups are mounted.
    """
    limits = [
        _cpus(folder) for controller in ("", "cpu") for folder in _upwards(groups, controller, root)
    ]
    return min((limit for limit in limits if limit), default=None)


def _cpus(folder: Path) -> float | None:
    """Version 2 has quota and period in one file, and ``max`` for no limit; version 1 has two
    files, and -1.
    """
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    match text_of(folder / "cpu.max").split() or [text_of(folder / name) for name in names]:
        case [quota, period] if quota.isdecimal() and period:
            return int(quota) / int(period)
    return None


def cpuset(groups: str | None = None, root: Path = ROOT) -> set[int]:
    """CPUs that its groups let a process run on; empty where they do not say. For the arguments see
    cpu_quota.
    """
    names = {"": "cpuset.cpus.effective", "cpuset": "cpuset.effective_cpus"}
    listed = (
        text_of(folder / names[each]) for each in names for folder in _upwards(groups, each, root)
    )
    return numbers_of(next(filter(None, listed), ""))


def memory_limit(groups: str, root: Path = ROOT) -> int | None:
    """Bytes that a process may use with the others of its groups: the least limit of these; None
    for no limit.
    """
    names = {"": "memory.max", "memory": "memory.limit_in_bytes"}
    limits = [
        text_of(folder / names[each]) for each in names for folder in _upwards(groups, each, root)
    ]
    found = [int(limit) for limit in limits if limit.isdecimal()]
    return min((limit for limit in found if limit < _UNLIMITED), default=None)


def oom_kills() -> int:
    """How many processes the kernel has killed in this process's group because its memory was used
    up.
    """
    for controller, name in (("memory", "memory.oom_control"), ("", "memory.events")):
        for folder in _folders(None, controller, ROOT):
            if found := re.search(r"^oom_kill (\d+)$", text_of(folder / name), re.MULTILINE):
                return int(found[1])
    return 0


class JobGroup:
    """What the kernel counts for a whole job of Slurm on this node, in the group that all of its
    steps are in.

    Args:
        version: of the control groups.
        cpu, memory, statistics: the files of its CPU time and its memory.
    """

    def __init__(
        self, version: int, cpu: KernelFile, memory: KernelFile, statistics: KernelFile | None
    ) -> None:
        self._version = version
        self._cpu = cpu
        self._memory = memory
        self._statistics = statistics

    @classmethod
    def find(cls, groups: str, root: Path = ROOT) -> JobGroup | None:
        """The job's, where both CPU time and memory are counted for it, by the groups of a process
        of the job.
        """
        for version, cpu, memory in (
            (2, ("", "cpu.stat"), ("", "memory.current")),
            (1, ("cpuacct", "cpuacct.usage"), ("memory", "memory.usage_in_bytes")),
        ):
            time = _of_job(groups, root, *cpu)
            used = _of_job(groups, root, *memory)
            if time and used:
                return cls(version, time, used, _of_job(groups, root, memory[0], "memory.stat"))
        return None

    def cpu_seconds(self) -> float:
        """Of all its processes, also those that have ended."""
        text = self._cpu.read()
        if self._version == 1:
            return int(text) / 1e9
        return (number_after(text, b"usage_usec ") or 0) / 1e6

    def memory_bytes(self) -> int:
        """What it uses but for file pages that the kernel would drop first: those fill up in any
        job that reads.
        """
        used = int(self._memory.read())
        if not self._statistics:
            return used
        if self._version == 1:
            name = b"total_inactive_file "
        else:
            name = b"\ninactive_file "
        return max(0, used - (number_after(self._statistics.read(), name) or 0))


def _of_job(groups: str, root: Path, controller: str, name: str) -> KernelFile | None:
    jobs = (_JOB.match(str(folder)) for folder in _folders(groups, controller, root))
    return next((file for job in jobs if job and (file := opened(Path(job[0], name)))), None)


def _upwards(groups: str | None, controller: str, root: Path) -> Iterator[Path]:
    """A process's group and those above it. In a container its own is ``root``, whatever its path
    says.
    """
    for folder in _folders(groups, controller, root):
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def _folders(groups: str | None, controller: str, root: Path) -> list[Path]:
    """Where the group of a controller of version 1 may be, or with an empty name that of version
    2.
    """
    found = []
    for line in (own_groups() if groups is None else groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller and controller in controllers.split(","):
            found += [root / mount / path.lstrip("/") for mount in (controllers, controller)]
        elif not controller and not controllers:
            found += [mount / path.lstrip("/") for mount in (root, root / "unified")]
    return found
