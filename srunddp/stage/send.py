"""Sends an archive to some nodes of a job by sbcast, which takes all nodes of a job or of one of its steps."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Sequence
from typing import IO

from srunddp.stage.slurm import Job, StagingError, last_line, srun, start

_WAITING = 'echo "sdd-step $SLURM_STEP_ID"; exec cat >/dev/null'


def send(job: Job, archive: str, nodes: Sequence[str], timeout: float) -> None:
    """Copy a file into the job's folder on these nodes, under its own name.

    Args:
        timeout: seconds for all of it.

    Raises:
        StagingError: a node could not take it, with sbcast's words.
    """
    words = [*srun(job.number, len(nodes), nodes), "/bin/sh", "-c", _WAITING]
    target = os.path.join(job.folder, os.path.basename(archive))
    step = start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    limit = threading.Timer(timeout, step.kill)
    limit.start()
    try:
        with step:
            assert step.stdout is not None
            to = f"--jobid={job.number}.{_number(step.stdout)}"
            problem = _sbcast(timeout, "--force", "--compress", to, archive, target)
            if "ompress" in problem:  # Slurm was built without lz4
                problem = _sbcast(timeout, "--force", to, archive, target)
    finally:
        limit.cancel()
    if problem:
        raise StagingError(f"sbcast: {problem}", expected="a copy on each node", cure="see to these nodes")


def _number(output: IO[bytes]) -> str:
    """Of the step that waits; a site's own messages before are none."""
    for line in output:
        if found := re.fullmatch(rb"sdd-step ([0-9]+)\n", line):
            return found[1].decode()
    raise StagingError("srun has ended", expected="a step on the nodes to be staged", cure="see whether they are up")


def _sbcast(timeout: float, *words: str) -> str:
    """What is wrong, in one line; empty if nothing is."""
    with start(["sbcast", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _, said = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"not done within {timeout:g} s"
    return last_line(said) if process.returncode else ""
