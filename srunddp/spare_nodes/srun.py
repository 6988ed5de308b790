"""Whether this step's srun is there. It may be lost with its node, or be out of reach while this
node is cut off.
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
    """Check on a new rank 0 that srun's node answers. If it does not, requeue the job, or cancel
    the job if Slurm refuses to requeue it.

    In a batch job srun runs on the first node. If that node is lost, the output of the tasks goes
    nowhere, and the step never ends.

    Args:
        say: Prints a line for the user.

    Raises:
        UnavailableError: srun is gone. The message says what has become of the job.
    """
    if any(_answers() is not False for _ in range(_TRIES)):
        return
    host = os.environ["SLURM_SRUN_COMM_HOST"]
    job = os.environ.get("SLURM_JOB_ID", "")
    done = "the job is requeued"
    # The output of this step goes nowhere, so the user can read the reason only in the comment.
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
    """Wait until srun's node can be reached, or a signal asks for an end; for one hour at most.

    When a process ends on a node that was cut off, Slurm tries only for a few seconds to tell srun.
    """
    end = time.monotonic() + _AWAITED
    while _answers() is False and time.monotonic() < end and not signal.sigpending() & {*ENDING}:
        time.sleep(_LOOK_EVERY)


def _answers() -> bool | None:
    """Whether srun's node can be reached; None if there is no srun, or srun has ended."""
    host = os.environ.get("SLURM_SRUN_COMM_HOST", "")
    port = os.environ.get("SLURM_SRUN_COMM_PORT", "")
    if not host or not port.isdecimal():
        return None
    try:
        socket.create_connection((host, int(port)), _ANSWERS_WITHIN).close()
    except ConnectionRefusedError:
        return None  # the node answers, and srun has ended
    except OSError:
        return False
    return True


def _refusal(*command: str) -> str:
    """Run a command of Slurm's, and return why it failed; empty if it succeeded."""
    try:
        done = slurm_command.run(command, start_new_session=True)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if done.returncode:
        return " ".join(done.stderr.split()) or f"it ended with {done.returncode}"
    return ""
