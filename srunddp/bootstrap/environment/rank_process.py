"""The mark that a rank exports, by which the processes that it starts are told from ranks.

They inherit the launcher's variables, and are not that rank. A launcher in between starts ranks of
its own.
"""

import contextlib
import os
import zlib
from collections.abc import Mapping

from srunddp.bootstrap.environment import mpi, slurm
from srunddp.bootstrap.environment.rank_zero_discovery import EXPLICIT

RANK_PROCESS = "_SRUNDDP_RANK_PROCESS"
# One of these changes where a launcher starts processes below a rank.
_LAUNCHER_VARIABLES = (
    *("SLURM_JOB_ID", slurm.STEP_ID, slurm.RANK, "SLURM_TASK_PID"),
    *("PMIX_NAMESPACE", "PMI_PORT", "OMPI_MCA_ess_base_jobid", "PALS_APID", "FLUX_JOB_ID"),
    *EXPLICIT,
    *(name for each in mpi.LAUNCHERS for name in (each.rank, each.world_size, each.local_rank)),
)


def rank_mark(variables: Mapping[str, str], pid: int) -> str:
    """Return the mark of a rank.

    Args:
        variables: the rank's, with all that it exports: the mark has a checksum of them.
        pid: the rank's process.
    """
    return f"{pid},{_launcher_checksum(variables)},{_pmi_socket(variables)}"


def is_below_rank(variables: Mapping[str, str], pid: int) -> bool:
    """Tell whether a rank has started a process, and no launcher in between.

    Args:
        variables: the process's own.
        pid: its process id.
    """
    if not (found := variables.get(RANK_PROCESS, "")):
        return False
    # A mark that lacks parts is nobody's: no checksum is empty.
    rank, checksum, pmi = (*found.split(","), "", "")[:3]
    # A rank that has become another program by exec keeps its process id, and is still the rank. A
    # closed PMI_FD says nothing, as `subprocess` closes it in what it starts.
    # Hydra's processes may have the same numbers again, but a socket of their own.
    return (
        rank != str(pid)
        and checksum == _launcher_checksum(variables)
        and _pmi_socket(variables) in ("", pmi)
    )


def _launcher_checksum(variables: Mapping[str, str]) -> str:
    # A value that is not UTF-8 has surrogates in os.environ, which encode() refuses by default.
    return str(
        zlib.crc32(
            repr([variables.get(name) for name in _LAUNCHER_VARIABLES]).encode(
                errors="surrogateescape"
            )
        )
    )


def _pmi_socket(variables: Mapping[str, str]) -> str:
    """Name PMI's socket, where it is open."""
    # The link reads `socket:[48213]`, with a number that no two open sockets share.
    with contextlib.suppress(OSError, ValueError):
        return os.readlink(f"/proc/self/fd/{int(variables.get('PMI_FD', ''))}")
    return ""
