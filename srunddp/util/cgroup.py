"""Control groups of version 1 and 2: where a process's are, what they limit, and what the kernel
counts in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from srunddp.util.hostlist import numbers_of
from srunddp.util.kernel_file import KernelFile, number_after, opened, text_of

ROOT = Path("/sys/fs/cgroup")
# /sys/fs/cgroup/system.slice/slurmstepd.scope/job_71/step_0/user/task_1, or with version 1
# /sys/fs/cgroup/memory/slurm/uid_1000/job_71/step_0/task_1.
# Slurm names a job's group by the job's number; since 26.05, in version 2 and unless cgroup.conf
# has CgroupJobIdPaths=yes, by its SLUID, such as s08SM8C0WHB800.
_JOB = re.compile(r".*/(?:job_\d+|s[0-9A-Z]{13})(?=/|$)")
_UNLIMITED = 1 << 60  # more than any machine has; version 1 says so in pages


def own_groups() -> str:
    """Read the control groups of this process from /proc/self/cgroup: a line for each hierarchy."""
    return text_of(Path("/proc/self/cgroup"))


def cpu_quota(groups: str | None = None, root: Path = ROOT) -> float | None:
    """Find the least quota of CPUs among a process's control groups.

    A container's ``--cpus=2`` is such a quota.

    Args:
        groups: The process's lines of /proc/PID/cgroup; those of this process unless given.
        root: Where the control groups are mounted.

    Returns:
        A number of CPUs, which may be a fraction; None for no limit.
    """
    # A limit above binds a group as well, though the files of the group itself do not show it.
    limits = [
        _cpus(folder) for controller in ("", "cpu") for folder in _upwards(groups, controller, root)
    ]
    return min((limit for limit in limits if limit), default=None)


def _cpus(folder: Path) -> float | None:
    """Version 2 has quota and period in one file, and ``max`` for no limit; version 1 has two
    files, and -1.
    """
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    # "200000 100000" in cpu.max is two CPUs. The -1 of version 1 is no decimal, so no limit.
    match text_of(folder / "cpu.max").split() or [text_of(folder / name) for name in names]:
        case [quota, period] if quota.isdecimal() and period:
            return int(quota) / int(period)
    return None


def cpuset(groups: str | None = None, root: Path = ROOT) -> set[int]:
    """Find the CPUs that a process's control groups let it run on.

    Args:
        groups: The process's lines of /proc/PID/cgroup; those of this process unless given.
        root: Where the control groups are mounted.

    Returns:
        The CPUs' numbers; empty where the groups do not say.
    """
    names = {"": "cpuset.cpus.effective", "cpuset": "cpuset.effective_cpus"}
    listed = (
        text_of(folder / names[each]) for each in names for folder in _upwards(groups, each, root)
    )
    # The nearest group that says anything: in version 2 the file is absent where the cpuset
    # controller is not enabled, and the CPUs are then those of the group above.
    return numbers_of(next(filter(None, listed), ""))


def memory_limit(groups: str, root: Path = ROOT) -> int | None:
    """Find the least limit of memory among a process's control groups.

    Args:
        groups: The process's lines of /proc/PID/cgroup.
        root: Where the control groups are mounted.

    Returns:
        Bytes, for all processes of the group together; None for no limit.
    """
    names = {"": "memory.max", "memory": "memory.limit_in_bytes"}
    limits = [
        text_of(folder / names[each]) for each in names for folder in _upwards(groups, each, root)
    ]
    found = [int(limit) for limit in limits if limit.isdecimal()]
    return min((limit for limit in found if limit < _UNLIMITED), default=None)


def oom_kills() -> int:
    """Count the processes of this one's control group that were killed for lack of memory."""
    # A system may have both versions mounted, but each controller is in one of them alone
    # (cgroups(7)): where version 1 has memory, version 2 has no memory.events.
    for controller, name in (("memory", "memory.oom_control"), ("", "memory.events")):
        for folder in _folders(None, controller, ROOT):
            if found := re.search(r"^oom_kill (\d+)$", text_of(folder / name), re.MULTILINE):
                return int(found[1])
    return 0


def kills_whole_step(variables: Mapping[str, str]) -> bool:
    """Whether the kernel kills all of a step's processes on a node when their memory runs out, and
    not the largest alone: Slurm's ``--oom-kill-step``, and a site's ``OOMKillStep``, since 24.11.

    Args:
        variables: of a process of the step, where Slurm says so whoever asked for it.
    """
    return variables.get("SLURM_OOM_KILL_STEP") == "1"


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
        """Find the group of the job that a process belongs to.

        Args:
            groups: The process's lines of /proc/PID/cgroup.
            root: Where the control groups are mounted.

        Returns:
            None unless both CPU time and memory are counted for the job.
        """
        # Only where both are there: version 1 may have a group of the job for memory alone, and the
        # CPU time of a group does not go with the memory of its processes.
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
        """Return the CPU time of all the job's processes on this node, ended ones included.

        Raises:
            OSError: The group is gone.
        """
        text = self._cpu.read()
        if self._version == 1:
            return int(text) / 1e9
        return (number_after(text, b"usage_usec ") or 0) / 1e6

    def memory_bytes(self) -> int:
        """Return the memory in use, without the file pages that the kernel would drop first.

        Those pages fill up in any job that reads files.

        Raises:
            OSError: The group is gone.
        """
        used = int(self._memory.read())
        if not self._statistics:
            return used
        # The processes are in the groups of steps and tasks below the job's. Version 1 counts those
        # in the fields with total_ only, version 2 in all fields.
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
    # "4:cpu,cpuacct:/slurm/uid_1000" is of version 1, "0::/system.slice" of version 2.
    for line in (own_groups() if groups is None else groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller and controller in controllers.split(","):
            # Controllers that share a hierarchy are mounted as cpu,cpuacct, and not every system
            # has the link from cpu to that.
            found += [root / mount / path.lstrip("/") for mount in (controllers, controller)]
        elif not controller and not controllers:
            # systemd mounts version 2 at "unified" where version 1 has the controllers.
            found += [mount / path.lstrip("/") for mount in (root, root / "unified")]
    return found
