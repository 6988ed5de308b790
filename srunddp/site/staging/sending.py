"""Sends an archive to some nodes of a job by sbcast, which takes all nodes of a job or of one of its steps."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from srunddp.site.staging.jobs import Job
from srunddp.site.staging.slurm import StagingError, srun, start

_WAITING = 'echo "$SLURM_STEP_ID"; exec cat >/dev/null'


def send(job: Job, archive: str, nodes: Sequence[str]) -> None:
    """Copy a file into the job's folder on these nodes, under its own name.

    Raises:
        StagingError: a node could not take it, with sbcast's words.
    """
    words = [*srun(job.number, len(nodes), nodes), "/bin/sh", "-c", _WAITING]
    target = os.path.join(job.folder, os.path.basename(archive))
    with start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as step:
        assert step.stdout is not None
        number = step.stdout.readline().decode().strip()
        if not number:
            raise StagingError(
                f"srun has ended with {step.wait()}",
                expected="a step on the nodes to be staged",
                cure="see its message",
            )
        problem = _sbcast("--force", "--compress", f"--jobid={job.number}.{number}", archive, target)
        if "ompress" in problem:  # Slurm was built without lz4
            problem = _sbcast("--force", f"--jobid={job.number}.{number}", archive, target)
    if problem:
        raise StagingError(f"sbcast: {problem}", expected="a copy on each node", cure="see to these nodes")


def _sbcast(*words: str) -> str:
    """What is wrong, in one line; empty if nothing is."""
    with start(["sbcast", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, said = process.communicate()
    lines = [line.removeprefix("sbcast: error: ") for line in said.decode(errors="replace").splitlines() if line]
    return "; ".join(lines) or f"ended with {process.returncode}" if process.returncode else ""
