"""Which CPUs the launcher and the cgroups leave this rank, its share of them, and what is said
where they are few.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from srunddp.util.cgroup import cpu_quota
from srunddp.util.kernel_file import text_of
from srunddp.util.slurm_tres import tres_count

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # torch heeds the first that is set


@dataclass(frozen=True)
class Cpus:
    """Numbers of CPUs, of which each hardware thread is one.

    Attributes:
        allowed: in this process's affinity mask.
        machine: that the machine has.
        core: that one core has.
    """

    allowed: int
    machine: int
    core: int = 1

    @classmethod
    def here(cls) -> Cpus:
        """Count the CPUs of this process."""
        allowed = os.sched_getaffinity(0)
        # A mask in hexadecimal with a comma between 32 bits each, such as `00000001,00000001` for
        # CPUs 0 and 32. Where the kernel has no such file, a core counts as one CPU.
        siblings = Path(f"/sys/devices/system/cpu/cpu{min(allowed)}/topology/thread_siblings")
        return cls(
            len(allowed),
            os.cpu_count() or 1,
            int(text_of(siblings).replace(",", "") or "1", 16).bit_count(),
        )


def usable() -> int:
    """CPUs of this process's affinity mask, or of its cgroups' quota where that is less; 0 for less
    than one.
    """
    allowed = len(os.sched_getaffinity(0))
    return int(min(allowed, cpu_quota() or allowed))


def mask() -> str:
    """Return a checksum of this process's affinity mask, to compare it with another process's."""
    # A hello carries this, and rank 0 refuses a hello with a text of more than 256 letters, as a
    # list of many CPUs would be.
    return f"{zlib.crc32(str(sorted(os.sched_getaffinity(0))).encode()):08x}"


def share(cpus: int, sharers: int, environ: Mapping[str, str]) -> int:
    """Return how many CPUs a rank may use for itself, at least 1.

    mpirun without binding gives all ranks of a node one mask, and Slurm each task its own; Slurm
    without a plugin for affinity binds nothing, and what was asked for is in the environment alone.

    Args:
        cpus: that it may use together with others, as :func:`usable` says.
        sharers: ranks of its node that have the same mask, itself included.
        environ: of the rank, with what was asked for each task.
    """
    own = cpus // sharers
    return max(1, min(own, asked(environ) or own))


def threads(environ: Mapping[str, str], sharers: int) -> dict[str, str]:
    """Return ``OMP_NUM_THREADS`` as :func:`share` says, to be exported before torch is imported.

    Args:
        environ: of the rank.
        sharers: ranks of its node that have the same mask, itself included.

    Returns:
        The variable; nothing where the user has set one of ``THREADS``.
    """
    if any(name in environ for name in THREADS):
        return {}
    return {THREADS[0]: str(share(usable(), sharers, environ))}


def asked(environ: Mapping[str, str]) -> int:
    """CPUs that Slurm was asked for, for each task; 0 where nothing says so."""
    names = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK")
    return _known_to_srun(environ) or max(_number(environ, name) for name in names)


def _known_to_srun(environ: Mapping[str, str]) -> int:
    """CPUs for each task that srun itself has heard of; 0 where nothing says so.

    Since Slurm 23.11 sbatch's ``--cpus-per-task`` is in ``SLURM_TRES_PER_TASK``, too, and srun
    takes it over; what its own command line says replaces it there. srun of 22.05 and 23.02 reads
    ``SRUN_CPUS_PER_TASK`` alone, which later ones do not.
    """
    return tres_count(environ.get("SLURM_TRES_PER_TASK", ""), "cpu")


def advice(environ: Mapping[str, str], cpus: Cpus) -> list[str]:
    """Return a line for each sign that the launcher gave this rank fewer CPUs than it could.

    Args:
        environ: of the rank.
        cpus: the rank's.
    """
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environ:
        # Under mpirun Slurm's tasks are daemons and not ranks: CPUs per task mean something else
        # there.
        return _of_mpirun(environ, cpus)
    wanted = asked(environ)
    if wanted <= cpus.allowed:
        return []
    if not _known_to_srun(environ):
        why = (
            f"{wanted}, but srun of Slurm 22.05 and 23.02 does not take over sbatch's"
            " --cpus-per-task -> export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK in the job script,"
            f" or srun --cpus-per-task={wanted}"
        )
    elif wanted > cpus.machine:
        why = f"{wanted}, but the machine has {cpus.machine} -> --cpus-per-task={cpus.machine}"
    else:
        why = (
            f"{wanted}, as srun was told -> see what it binds ranks to with srun"
            " --cpu-bind=verbose, and whether a container or taskset allows fewer"
        )
    return [
        f"{wanted} CPUs per task were asked for, and this rank may use {cpus.allowed}; expected"
        f" {why}"
    ]


def _of_mpirun(environ: Mapping[str, str], cpus: Cpus) -> list[str]:
    """Open MPI binds each of up to two ranks to a core unless told otherwise, and its loader
    workers with it.
    """
    # Slurm may have given the job a part of the machine only.
    there = min(cpus.machine, _number(environ, "SLURM_CPUS_ON_NODE") or cpus.machine)
    ranks = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    # A rank with more than one core has been bound by somebody's choice, and where the ranks fill
    # the node no CPU is idle: in neither case is there anything to advise.
    if cpus.allowed > cpus.core or ranks * cpus.allowed >= there:
        return []
    return [
        f"mpirun has bound this rank, and so its loader workers, to {cpus.allowed} of {there} CPUs;"
        f" expected {there} shared by {ranks} on this node -> mpirun --bind-to none"
    ]


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else 0
