"""Control groups of versions 1 and 2: which ones a process is in, their limits, and the CPU time,
memory and kills that they count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from srunddp.util.hostlist import numbers_of
from srunddp.util.kernel_file import KernelFile, number_after, opened, text_of

ROOT = Path("/sys/fs/cgroup")
# Matches the beginning of a path up to the job's group: .../slurmstepd.scope/job_71 of
# .../slurmstepd.scope/job_71/step_0/user/task_1, or .../slurm/uid_1000/job_71 with version 1. Slurm
# names the group after the job's number. Since 26.05, with version 2, it names it after the job's
# SLUID, such as s08SM8C0WHB800, unless cgroup.conf has CgroupJobIdPaths=yes.
_JOB = re.compile(r".*/(?:job_\d+|s[0-9A-Z]{13})(?=/|$)")
_UNLIMITED = 1 << 60  # bytes, more than any machine has; version 1 writes "no limit" as about 2**63


def own_groups() -> str:
    """Return the content of /proc/self/cgroup, which has a line for each hierarchy of control
    groups; empty if it cannot be read.
    """
    return text_of(Path("/proc/self/cgroup"))


def cpu_quota(groups: str | None = None, root: Path = ROOT) -> float | None:
    """Find the smallest CPU quota among a process's control groups.

    A container's ``--cpus=2`` sets such a quota.

    Args:
        groups: The content of the process's /proc/PID/cgroup; None for this process.
        root: Where the control groups are mounted.

    Returns:
        The number of CPUs, which may be a fraction; None if there is no quota.
    """
    # Look at the parent groups too: their quotas also limit the process, but the files of the
    # process's group do not show them.
    limits = [
        _cpus(folder) for controller in ("", "cpu") for folder in _upwards(groups, controller, root)
    ]
    return min((limit for limit in limits if limit), default=None)


def _cpus(folder: Path) -> float | None:
    """Return the CPU quota of one group as a number of CPUs; None if the group has no quota."""
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    # Version 2 has one file, cpu.max: "200000 100000" is two CPUs, "max ..." no quota. Version 1
    # has two files, and -1 (which isdecimal() rejects) for no quota.
    match text_of(folder / "cpu.max").split() or [text_of(folder / name) for name in names]:
        case [quota, period] if quota.isdecimal() and period:
            return int(quota) / int(period)
    return None


def cpuset(groups: str | None = None, root: Path = ROOT) -> set[int]:
    """Find the CPUs on which a process's control groups let it run.

    Args:
        groups: The content of the process's /proc/PID/cgroup; None for this process.
        root: Where the control groups are mounted.

    Returns:
        The numbers of the CPUs; empty if no group lists them.
    """
    names = {"": "cpuset.cpus.effective", "cpuset": "cpuset.effective_cpus"}
    listed = (
        text_of(folder / names[each]) for each in names for folder in _upwards(groups, each, root)
    )
    # Use the nearest group that has the file. With version 2, a group without the cpuset controller
    # does not have the file, and its processes run on the CPUs of its parent group.
    return numbers_of(next(filter(None, listed), ""))


def memory_limit(groups: str, root: Path = ROOT) -> int | None:
    """Find the smallest memory limit among a process's control groups.

    Args:
        groups: The content of the process's /proc/PID/cgroup.
        root: Where the control groups are mounted.

    Returns:
        The limit in bytes, for all processes of the group together; None if there is none.
    """
    names = {"": "memory.max", "memory": "memory.limit_in_bytes"}
    limits = [
        text_of(folder / names[each]) for each in names for folder in _upwards(groups, each, root)
    ]
    found = [int(limit) for limit in limits if limit.isdecimal()]
    return min((limit for limit in found if limit < _UNLIMITED), default=None)


def oom_kills() -> int:
    """Return how many processes of this process's control group the kernel has killed because
    memory ran out; 0 if no file of the group tells.
    """
    # Both versions may be mounted, but each controller belongs to only one of them (cgroups(7)): if
    # version 1 has the memory controller, version 2 has no memory.events.
    for controller, name in (("memory", "memory.oom_control"), ("", "memory.events")):
        for folder in _folders(None, controller, ROOT):
            if found := re.search(r"^oom_kill (\d+)$", text_of(folder / name), re.MULTILINE):
                return int(found[1])
    return 0


def kills_whole_step(variables: Mapping[str, str]) -> bool:
    """Return whether the kernel kills all processes of a job step on a node when their memory runs
    out, and not only the largest one. Since 24.11 Slurm's option ``--oom-kill-step`` or its setting
    ``OOMKillStep`` asks for this.

    Args:
        variables: The environment of a process of the job step. Slurm sets
            ``SLURM_OOM_KILL_STEP`` there, for the option as well as for the setting.
    """
    return variables.get("SLURM_OOM_KILL_STEP") == "1"


class JobGroup:
    """CPU time and memory of a whole Slurm job on this node, from the group that contains all its
    steps.

    Args:
        version: The version of the control groups, 1 or 2.
        cpu: The file with the group's CPU time.
        memory: The file with the group's memory in use.
        statistics: The group's memory.stat; None if there is none.
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
        """Find the group of the job that a process belongs to.

        Args:
            groups: The content of the process's /proc/PID/cgroup.
            root: Where the control groups are mounted.

        Returns:
            The group; None unless the kernel counts both CPU time and memory for the job.
        """
        # Version 1 may have a job's group for memory only. Then use neither figure of it, so that
        # the caller does not show memory of the group beside CPU time summed over processes.
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
        """Return the CPU seconds of all the job's processes on this node, including ended ones.

        Raises:
            OSError: The group has been removed.
        """
        text = self._cpu.read()
        if self._version == 1:
            return int(text) / 1e9
        return (number_after(text, b"usage_usec ") or 0) / 1e6

    def memory_bytes(self) -> int:
        """Return the bytes of memory that the job uses on this node, without inactive file pages.

        Inactive file pages are left out because they grow in every job that reads files, and the
        kernel drops them first when memory becomes scarce.

        Raises:
            OSError: The group has been removed.
        """
        used = int(self._memory.read())
        if not self._statistics:
            return used
        # The job's processes are in the groups of its steps and tasks. Version 1 includes child
        # groups only in the total_ fields, version 2 in all fields.
        if self._version == 1:
            name = b"total_inactive_file "
        else:
            name = b"\ninactive_file "
        return max(0, used - (number_after(self._statistics.read(), name) or 0))


def _of_job(groups: str, root: Path, controller: str, name: str) -> KernelFile | None:
    jobs = (_JOB.match(str(folder)) for folder in _folders(groups, controller, root))
    return next((file for job in jobs if job and (file := opened(Path(job[0], name)))), None)


def _upwards(groups: str | None, controller: str, root: Path) -> Iterator[Path]:
    """Yield a process's group and its parent groups, up to ``root``."""
    for folder in _folders(groups, controller, root):
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def _folders(groups: str | None, controller: str, root: Path) -> list[Path]:
    """Return the folders that may be a process's group; some of them may not exist.

    ``controller`` is the name of a version 1 controller, or empty for the group of version 2.
    """
    found = []
    # A line "4:cpu,cpuacct:/slurm/uid_1000" belongs to version 1, "0::/system.slice" to version 2.
    for line in (own_groups() if groups is None else groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller and controller in controllers.split(","):
            # Controllers that share a hierarchy are mounted as "cpu,cpuacct". Not every system has
            # a link "cpu" to that folder.
            found += [root / mount / path.lstrip("/") for mount in (controllers, controller)]
        elif not controller and not controllers:
            # Where version 1 has the controllers, systemd mounts version 2 in the folder "unified".
            found += [mount / path.lstrip("/") for mount in (root, root / "unified")]
    return found
