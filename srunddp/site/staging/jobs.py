"""The Slurm job whose nodes are meant, and which others of this user there are."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from srunddp.errors import ConfigError
from srunddp.site.staging.slurm import StagingError, start

_SQUEUE = 20.0


@dataclass(frozen=True)
class Job:
    """A job with nodes of its own.

    Attributes:
        number: Slurm's; nnodes: how many nodes.
        base: a folder that each node has on a disk of its own; folder: of this job in it.
    """

    number: str
    nnodes: int
    base: str
    folder: str

    @classmethod
    def of(cls, environ: Mapping[str, str], base: str) -> Job:
        """The one that this process is part of, or whose allocation its shell has.

        Raises:
            ConfigError: there is none, or it has several components, each with nodes of its own.
        """
        number, nnodes = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_NUM_NODES", "")
        if not (re.fullmatch(r"[0-9]{1,12}", number) and re.fullmatch(r"[0-9]{1,6}", nnodes)):
            raise ConfigError(
                "this is no Slurm job: SLURM_JOB_ID and SLURM_JOB_NUM_NODES do not say which",
                expected="a batch script, or a shell below salloc",
                cure="call srunddp stage there",
            )
        if "SLURM_HET_SIZE" in environ:
            cure = "submit one job with nodes of one kind"
            raise ConfigError("this is a heterogeneous job", expected="a job with one component", cure=cure)
        base = os.path.abspath(base)
        return cls(number, int(nnodes), base, os.path.join(base, f"sdd-{os.getuid()}-{number}"))


def alive() -> list[str] | None:
    """The numbers of this user's jobs that have nodes; None where Slurm does not say."""
    states = "--states=running,suspended,stopped,configuring,completing,stage_out,signaling,resizing"
    words = ["squeue", f"--user={os.getuid()}", "--noheader", "--format=%A", states]
    try:
        with start(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            try:
                output, _ = process.communicate(timeout=_SQUEUE)
            except subprocess.TimeoutExpired:
                process.kill()
                return None
    except StagingError:
        return None
    return output.decode().split() if process.returncode == 0 else None
