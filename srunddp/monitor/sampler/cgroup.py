"""What the kernel counts for the whole job on this node, where Slurm gives it a control group of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from srunddp.monitor.sampler.kernel_file import KernelFile, number_after, opened
from srunddp.util.sysfs import text_of

ROOT = Path("/sys/fs/cgroup")
_JOB = re.compile(r".*/job_\d+(?=/|$)")
_UNLIMITED = 1 << 60  # more than any machine has; version 1 says so in pages
_MIB = 1 << 20


@dataclass(frozen=True)
class JobGroup:
    """The job's group, which all of its steps are in."""

    version: int
    cpu: KernelFile
    memory: KernelFile
    statistics: KernelFile | None

    @classmethod
    def find(cls, groups: str, root: Path = ROOT) -> JobGroup | None:
        """The job's, where both CPU time and memory are counted for it.

        Args:
            groups: of a process of the job, as in /proc/PID/cgroup.
            root: where they are mounted.
        """
        for version, cpu, memory, names in (
            (2, _folders(groups, root, ""), _folders(groups, root, ""), ("cpu.stat", "memory.current")),
            (
                1,
                _folders(groups, root, "cpuacct"),
                _folders(groups, root, "memory"),
                ("cpuacct.usage", "memory.usage_in_bytes"),
            ),
        ):
            time = _first([_of_job(folder) for folder in cpu], names[0])
            used = _first([_of_job(folder) for folder in memory], names[1])
            if time and used:
                statistics = _first([_of_job(folder) for folder in memory], "memory.stat")
                return cls(version, time, used, statistics)
        return None

    def cpu_seconds(self) -> float:
        """Of all its processes, also those that have ended."""
        text = self.cpu.read()
        return int(text) / 1e9 if self.version == 1 else (number_after(text, b"usage_usec ") or 0) / 1e6

    def memory_bytes(self) -> int:
        """What it uses but for file pages that the kernel would drop first: those fill up in any job that reads."""
        used = int(self.memory.read())
        if not self.statistics:
            return used
        name = b"total_inactive_file " if self.version == 1 else b"\ninactive_file "
        return max(0, used - (number_after(self.statistics.read(), name) or 0))


def memory_limit(groups: str, environ: Mapping[str, str], root: Path = ROOT) -> int | None:
    """Bytes that the job may use on this node: the least limit of the groups above a process, else what was asked for.

    Args:
        groups: of the process, as in /proc/PID/cgroup.
        environ: with Slurm's variables.
    """
    limits = []
    for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        for folder in _folders(groups, root, controller):
            for at in (folder, *folder.parents):
                text = text_of(at / name) if at.is_relative_to(root) else ""
                limits += [int(text)] if text.isdecimal() else []
    return min((limit for limit in limits if limit < _UNLIMITED), default=None) or _asked_for(environ)


def _asked_for(environ: Mapping[str, str]) -> int | None:
    def number(name: str) -> int:
        text = environ.get(name, "")
        return int(text) if text.isdecimal() else 0

    per_cpu = number("SLURM_MEM_PER_CPU") * number("SLURM_CPUS_ON_NODE")
    return (number("SLURM_MEM_PER_NODE") or per_cpu) * _MIB or None


def _folders(groups: str, root: Path, controller: str) -> list[Path]:
    """Where the group of a controller of version 1 may be, or with an empty name that of version 2."""
    found = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller and controller in controllers.split(","):
            found += [root / mount / path.lstrip("/") for mount in (controllers, controller)]
        elif not controller and not controllers:
            found += [mount / path.lstrip("/") for mount in (root, root / "unified")]
    return found


def _of_job(folder: Path) -> Path | None:
    job = _JOB.match(str(folder))
    return Path(job[0]) if job else None


def _first(folders: list[Path | None], name: str) -> KernelFile | None:
    return next((file for folder in folders if folder and (file := opened(folder / name))), None)
