"""A batch job whose srun is gone, with the node that it was on: no task's output goes anywhere, and the step never ends."""

import os
import socket
import subprocess
from collections.abc import Callable

from srunddp.errors import UnavailableError
from srunddp.util import slurm_command

_ANSWERS_WITHIN = 5.0


def require_srun(say: Callable[[str], None]) -> None:
    """Go on where this step's srun is there; else have Slurm start the job again, or end it where it does not.

    Raises:
        UnavailableError: srun is gone, and what has become of the job.
    """
    host, port, job = (os.environ.get(f"SLURM_{name}", "") for name in ("SRUN_COMM_HOST", "SRUN_COMM_PORT", "JOB_ID"))
    try:
        socket.create_connection((host, int(port)), _ANSWERS_WITHIN).close()
        return
    except (OSError, ValueError):
        if not port.isdecimal():
            return
    done = "the job is requeued"
    if why := _refusal("scontrol", "requeue", job):
        done = f"the job cannot be requeued ({why}), and is {_refusal('scancel', job) or 'cancelled'}"
    say(f"srun on {host} is gone with its node: {done}")
    raise UnavailableError(f"srun on {host} is gone: {done}", expected="srun to stay", hint="see the job's next start")


def _refusal(*command: str) -> str:
    """Why Slurm does not do so; empty where it does."""
    try:
        done = slurm_command.run(command, start_new_session=True)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return " ".join(done.stderr.split()) or f"it ended with {done.returncode}" if done.returncode else ""
