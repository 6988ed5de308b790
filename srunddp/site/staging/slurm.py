"""Slurm's own commands, started for the whole job from within it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any

from srunddp.errors import SrunddpError

# What the commands take from a batch script's environment to find the job; the rest would be the training's layout.
_JOB = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_JOB_ID", "SLURM_JOBID")


class StagingError(SrunddpError):
    """The nodes cannot be brought what they lack (sysexits' EX_UNAVAILABLE)."""

    exit_code = 69


def srun(job: str, nnodes: int, nodes: Sequence[str] = ()) -> list[str]:
    """The words that start one task on each node beside whatever else runs in the job.

    Args:
        nodes: their names; empty for all of the job's.
    """
    listed = [f"--nodelist={','.join(nodes)}"] if nodes else []
    layout = [f"--nodes={nnodes}", f"--ntasks={nnodes}", "--ntasks-per-node=1", *listed]
    manner = ["--overlap", "--kill-on-bad-exit=1", "--mpi=none", "--export=ALL", "--chdir=/"]
    return ["srun", f"--jobid={job}", *manner, *layout]


def start(words: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start one of Slurm's commands, out of reach of a terminal's Ctrl-C.

    Raises:
        StagingError: it is not there.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SRUN_", "SBATCH_"))}
    kept |= {name: os.environ[name] for name in _JOB if name in os.environ}
    try:
        return subprocess.Popen(words, env=kept, start_new_session=True, **streams)
    except OSError as error:
        raise StagingError(
            f"{words[0]}: {error.strerror}", expected="Slurm's commands", cure="see whether it is in PATH"
        ) from None


def last_line(output: bytes) -> str:
    """What a command said last, which says the most; without its name in front."""
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].partition("error: ")[2] or lines[-1] if lines else "it says nothing"
