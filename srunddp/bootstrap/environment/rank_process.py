"""Makes and recognises the mark that a rank exports, so that the processes started by the rank are
not taken for ranks.

Processes started by a rank inherit the launcher's variables, but they are not the rank. If a rank
starts another launcher, that launcher's processes are ranks again.
"""

import contextlib
import os
import zlib
from collections.abc import Mapping

from srunddp.bootstrap.environment import mpi, slurm
from srunddp.bootstrap.environment.rank_zero_discovery import EXPLICIT

RANK_PROCESS = "_SRUNDDP_RANK_PROCESS"
# If a launcher is started below a rank, at least one of these variables has another value in the
# launcher's processes than in the rank.
_LAUNCHER_VARIABLES = (
    *("SLURM_JOB_ID", slurm.STEP_ID, slurm.RANK, "SLURM_TASK_PID"),
    *("PMIX_NAMESPACE", "PMI_PORT", "OMPI_MCA_ess_base_jobid", "PALS_APID", "FLUX_JOB_ID"),
    *EXPLICIT,
    *(name for each in mpi.LAUNCHERS for name in (each.rank, each.world_size, each.local_rank)),
)


def rank_mark(variables: Mapping[str, str], pid: int) -> str:
    """Return the text that a rank exports as its mark: its process id, a checksum of the launcher's
    variables, and its PMI socket.

    Args:
        variables: the rank's environment variables, with all that the rank itself exports.
        pid: the rank's process id.
    """
    return f"{pid},{_launcher_checksum(variables)},{_pmi_socket(variables)}"


def is_below_rank(variables: Mapping[str, str], pid: int) -> bool:
    """Tell whether a rank started a process, directly or through other processes, without another
    launcher in between.

    Args:
        variables: the environment variables of the process.
        pid: its process id.
    """
    if not (found := variables.get(RANK_PROCESS, "")):
        return False
    # A mark with missing parts gets empty ones, and an empty checksum never matches.
    rank, checksum, pmi = (*found.split(","), "", "")[:3]
    # The process with the mark's process id is the rank itself, after it has run another program by
    # exec. A closed PMI_FD proves nothing, because `subprocess` closes descriptors in the processes
    # that it starts. An open PMI_FD must be the rank's socket: the processes of another Hydra may
    # have the same rank numbers, but they have another socket.
    return (
        rank != str(pid)
        and checksum == _launcher_checksum(variables)
        and _pmi_socket(variables) in ("", pmi)
    )


def _launcher_checksum(variables: Mapping[str, str]) -> str:
    # repr() escapes the surrogates that os.environ has for bytes that are not UTF-8, and which
    # encode() would refuse.
    return str(zlib.crc32(repr([variables.get(name) for name in _LAUNCHER_VARIABLES]).encode()))


def _pmi_socket(variables: Mapping[str, str]) -> str:
    """Return the kernel's name for the socket at PMI_FD; empty if none is open."""
    # The link reads `socket:[48213]`, with a number that no two open sockets share.
    with contextlib.suppress(OSError, ValueError):
        return os.readlink(f"/proc/self/fd/{int(variables.get('PMI_FD', ''))}")
    return ""
