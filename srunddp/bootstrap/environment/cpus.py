"""Count the CPUs that the launcher and the cgroups leave to a rank, work out its share of them, and
advise the user if there are too few.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from srunddp.util.cgroup import cpu_quota
from srunddp.util.kernel_file import text_of
from srunddp.util.quick_dataclass import dataclass
from srunddp.util.slurm_tres import tres_count

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # torch uses the first that is set


@dataclass(frozen=True)
class Cpus:
    """Counts of CPUs; each hardware thread counts as one.

    Attributes:
        allowed: the CPUs in this process's affinity mask.
        machine: the CPUs of the machine.
        core: the CPUs (hardware threads) of one core.
    """

    allowed: int
    machine: int
    core: int = 1

    @classmethod
    def here(cls) -> Cpus:
        """Count the CPUs of this process, of its machine and of a core."""
        allowed = os.sched_getaffinity(0)
        # The file holds a hexadecimal mask with a comma after every 32 bits, such as
        # `00000001,00000001` for CPUs 0 and 32. If the kernel has no such file, a core counts as
        # one CPU.
        siblings = Path(f"/sys/devices/system/cpu/cpu{min(allowed)}/topology/thread_siblings")
        return cls(
            len(allowed),
            os.cpu_count() or 1,
            int(text_of(siblings).replace(",", "") or "1", 16).bit_count(),
        )


def usable() -> int:
    """Return the number of CPUs in this process's affinity mask, or its cgroups' CPU quota if that
    is less, rounded down; 0 for a quota below one CPU.
    """
    allowed = len(os.sched_getaffinity(0))
    return int(min(allowed, cpu_quota() or allowed))


def mask() -> str:
    """Return a checksum of this process's affinity mask, to compare it with another process's."""
    # A hello carries this text, and rank 0 refuses a hello with a text of more than 256 letters: a
    # list of many CPUs would be too long.
    return f"{zlib.crc32(str(sorted(os.sched_getaffinity(0))).encode()):08x}"


def share(cpus: int, sharers: int, environ: Mapping[str, str]) -> int:
    """Return how many CPUs a rank may use for itself, at least 1.

    Ranks with the same affinity mask divide its CPUs: mpirun without binding gives one mask to all
    ranks of a node. Slurm without an affinity plugin does so too, so the result is at most the
    number of CPUs per task that the environment says were asked for.

    Args:
        cpus: the number of CPUs that the rank may share with others, from :func:`usable`.
        sharers: the number of ranks on the node with the same mask, this rank included.
        environ: the rank's environment, which may say how many CPUs each task asked for.
    """
    own = cpus // sharers
    return max(1, min(own, asked(environ) or own))


def threads(environ: Mapping[str, str], sharers: int) -> dict[str, str]:
    """Return the variable ``OMP_NUM_THREADS`` that gives the rank one thread for each CPU of its
    :func:`share`. It must be exported before torch is imported.

    Args:
        environ: the rank's environment.
        sharers: the number of ranks on the node with the same mask, this rank included.

    Returns:
        The variable and its value; empty if the user has set one of ``THREADS``.
    """
    if any(name in environ for name in THREADS):
        return {}
    return {THREADS[0]: str(share(usable(), sharers, environ))}


def asked(environ: Mapping[str, str]) -> int:
    """Return how many CPUs per task Slurm was asked for; 0 if no variable says so."""
    names = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK")
    return _known_to_srun(environ) or max(_number(environ, name) for name in names)


def _known_to_srun(environ: Mapping[str, str]) -> int:
    """Return the CPUs per task in ``SLURM_TRES_PER_TASK``, a number that srun takes into account; 0
    if the variable does not give it.

    Since Slurm 23.11, sbatch sets this variable from ``--cpus-per-task``, srun reads it, and
    ``--cpus-per-task`` of srun itself replaces the value. In Slurm 22.05 and 23.02, srun ignores
    sbatch's ``--cpus-per-task`` and reads only ``SRUN_CPUS_PER_TASK``; later versions do not read
    ``SRUN_CPUS_PER_TASK``.
    """
    return tres_count(environ.get("SLURM_TRES_PER_TASK", ""), "cpu")


def advice(environ: Mapping[str, str], cpus: Cpus) -> list[str]:
    """Return lines of advice for the user if the launcher gave this rank fewer CPUs than it could
    have.

    Args:
        environ: the rank's environment.
        cpus: the counts that :meth:`Cpus.here` returned in the rank.
    """
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environ:
        # Under mpirun, Slurm's tasks are mpirun's daemons, so CPUs per task are not CPUs per rank.
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
    """Return advice against Open MPI's default for one or two ranks, which binds each rank to one
    core: the rank's loader workers have to share that core. Empty if the binding wastes no CPU.
    """
    # Slurm may have given the job only a part of the machine.
    there = min(cpus.machine, _number(environ, "SLURM_CPUS_ON_NODE") or cpus.machine)
    ranks = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    # If a rank has more than one core, this is not the default for one or two ranks, and loader
    # workers have room. If the ranks fill the node, no CPU is idle. In both cases there is nothing
    # to advise.
    if cpus.allowed > cpus.core or ranks * cpus.allowed >= there:
        return []
    return [
        f"mpirun has bound this rank, and so its loader workers, to {cpus.allowed} of {there} CPUs;"
        f" expected {there} shared by {ranks} on this node -> mpirun --bind-to none"
    ]


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else 0
