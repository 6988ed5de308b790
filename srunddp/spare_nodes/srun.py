"""Whether this step's srun is there: it may be gone with its node, or out of reach while this node
is cut off.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable

from srunddp.errors import UnavailableError
from srunddp.supervisor.signals import ENDING
from srunddp.util import slurm_command

_ANSWERS_WITHIN = 5.0
_TRIES = 3
_LOOK_EVERY = 2.0
_AWAITED = 3600.0  # longer than Slurm waits for a node


def require_srun(say: Callable[[str], None]) -> None:
    """On a new rank 0: go on where srun is there; else have Slurm start the job again, or end it
    where it does not.

    In a batch job srun is on the first node. When that is lost no task's output goes anywhere, and
    the step never ends.

    Raises:
        UnavailableError: srun is gone, and what has become of the job.
    """
    if any(_answers() is not False for _ in range(_TRIES)):
        return
    host = os.environ["SLURM_SRUN_COMM_HOST"]
    job = os.environ.get("SLURM_JOB_ID", "")
    done = "the job is requeued"
    # Output goes nowhere: this is where a user sees why.
    _refusal(
        "scontrol",
        "update",
        f"jobid={job}",
        f"comment=srunddp: srun on {host} was lost with its node",
    )
    if why := _refusal("scontrol", "requeue", job):
        done = (
            f"the job cannot be requeued ({why}), and is {_refusal('scancel', job) or 'cancelled'}"
        )
    say(f"srun on {host} is gone with its node: {done}")
    raise UnavailableError(
        f"srun on {host} is gone: {done}", expected="srun to stay", hint="see the job's next start"
    )


def await_srun() -> None:
    """Before this process ends on a node that was cut off: Slurm tells srun of that end for a few
    seconds only.
    """
    end = time.monotonic() + _AWAITED
    while _answers() is False and time.monotonic() < end and not signal.sigpending() & {*ENDING}:
        time.sleep(_LOOK_EVERY)


def _answers() -> bool | None:
    """Whether its node can be reached; None where there is no srun."""
    host = os.environ.get("SLURM_SRUN_COMM_HOST", "")
    port = os.environ.get("SLURM_SRUN_COMM_PORT", "")
    if not host or not port.isdecimal():
        return None
    try:
        socket.create_connection((host, int(port)), _ANSWERS_WITHIN).close()
    except ConnectionRefusedError:
        return None  # it has ended
    except OSError:
        return False
    return True


def _refusal(*command: str) -> str:
    """Why Slurm does not do so; empty where it does."""
    try:
        done = slurm_command.run(command, start_new_session=True)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if done.returncode:
        return " ".join(done.stderr.split()) or f"it ended with {done.returncode}"
    return ""
