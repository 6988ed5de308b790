"""Finds out whether the srun of this job step still runs. It may have been lost with its node, or
be out of reach while this node is cut off.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from enum import Enum, auto

from srunddp.errors import ConfigError, UnavailableError
from srunddp.supervisor.signals import ENDING
from srunddp.util import hostlist, slurm_command

_ANSWERS_WITHIN = 5.0
_TRIES = 3
_LOOK_EVERY = 2.0
AWAITED = 3600.0
"""For how many seconds a task on a node that is cut off waits at most: longer than Slurm waits for
an answer of the node.
"""


class SrunState(Enum):
    """The state of the srun of this job step, as far as it is known."""

    THERE = auto()  # srun runs, or the launcher is not srun
    ENDED = auto()  # the node of srun answers, but srun no longer listens
    CUT_OFF = auto()  # the node of srun does not answer


def require_srun(say: Callable[[str], None]) -> None:
    """Check on a new rank 0 that the node of srun answers. If it does not, requeue the job, or
    cancel the job if Slurm refuses to requeue it.

    In a batch job srun runs on the first node. If that node is lost, the output of the tasks is
    lost too, and the job step never ends.

    Args:
        say: Prints a line for the user.

    Raises:
        UnavailableError: The node of srun does not answer. The message says what has happened to
            the job.
    """
    if any(state() is not SrunState.CUT_OFF for _ in range(_TRIES)):
        return
    host = os.environ["SLURM_SRUN_COMM_HOST"]
    job = os.environ.get("SLURM_JOB_ID", "")
    done = "the job is requeued"
    # The output of this job step is lost, so the user can read the reason only in the comment of
    # the job.
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
    """Wait until the node of srun can be reached, or a signal asks for an end; for one hour at
    most.

    Call this before a process ends on a node that was cut off: when it ends, Slurm tries only for a
    few seconds to tell srun.
    """
    end = time.monotonic() + AWAITED
    while (
        state() is SrunState.CUT_OFF
        and time.monotonic() < end
        and not signal.sigpending() & {*ENDING}
    ):
        time.sleep(_LOOK_EVERY)


def is_in_job(node: str) -> bool | None:
    """Return whether a node still belongs to this job; None if Slurm does not answer.

    When Slurm sets a node DOWN, it removes the node from the job for good.

    Args:
        node: The node's name in Slurm.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    names = slurm_command.output("squeue", "--noheader", "--jobs", job, "--format", "%N")
    try:
        return node in hostlist.expand(names.strip()) if names.strip() else None
    except ConfigError:
        return None


def state() -> SrunState:
    """Connect to srun, and return its state. This takes several seconds if its node does not
    answer.
    """
    host = os.environ.get("SLURM_SRUN_COMM_HOST", "")
    port = os.environ.get("SLURM_SRUN_COMM_PORT", "")
    if not host or not port.isdecimal():
        return SrunState.THERE
    try:
        socket.create_connection((host, int(port)), _ANSWERS_WITHIN).close()
    except ConnectionRefusedError:
        return SrunState.ENDED  # a refusal is an answer of srun's node
    except OSError:
        return SrunState.CUT_OFF
    return SrunState.THERE


def _refusal(*command: str) -> str:
    """Run a command of Slurm's, and return why it failed; empty if it succeeded."""
    try:
        done = slurm_command.run(command, start_new_session=True)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if done.returncode:
        return " ".join(done.stderr.split()) or f"it ended with {done.returncode}"
    return ""
