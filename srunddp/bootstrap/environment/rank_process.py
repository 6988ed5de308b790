"""A mark in the environment that tells the process which is the rank from those that it starts.

They inherit the launcher's variables, and would take themselves for that rank and wait for the others.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping

from srunddp.bootstrap.environment import mpi, slurm

VARIABLE = "SRUNDDP_RANK_PROCESS"
# One of these changes where a launcher starts processes below a rank.
_TOLD = (
    *("SLURM_JOB_ID", slurm.STEP_ID, slurm.RANK, "SLURM_TASK_PID"),
    *("PMIX_NAMESPACE", "PMI_PORT", "OMPI_MCA_ess_base_jobid", "PALS_APID", "FLUX_JOB_ID"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *(name for each in mpi.LAUNCHERS for name in (each.rank, each.world_size, each.local_rank)),
)


def mark(variables: Mapping[str, str], pid: int) -> str:
    """The mark of a rank, when all that it exports is there."""
    return f"{pid},{_told(variables)},{_pmi(variables)}"


def is_below(variables: Mapping[str, str], pid: int) -> bool:
    """Whether a rank has started this process, and no launcher in between."""
    if not (found := variables.get(VARIABLE, "")):
        return False
    rank, told, pmi = (*found.split(","), "", "")[:3]
    # Hydra's processes may have the same numbers again, but a socket of their own.
    return rank != str(pid) and told == _told(variables) and _pmi(variables) in ("", pmi)


def _told(variables: Mapping[str, str]) -> str:
    return str(zlib.crc32(repr([variables.get(name) for name in _TOLD]).encode(errors="surrogateescape")))


def _pmi(variables: Mapping[str, str]) -> str:
    """PMI's socket, where it is open."""
    with contextlib.suppress(OSError, ValueError):
        return os.readlink(f"/proc/self/fd/{int(variables.get('PMI_FD', ''))}")
    return ""
