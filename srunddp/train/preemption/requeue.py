"""Ends a job that was stopped: asks Slurm to start it again, or exits with a code that says so."""

import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from srunddp.errors import Stopped
from srunddp.train.preemption.signals import StopRequest, StopRequests, signals_blocked
from srunddp.util import slurm_command

AGAIN = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later
ENDED = 128 + signal.SIGTERM

# Seconds that scontrol may take. By default Slurm gives a job 30 s from SIGTERM to SIGKILL.
_ANSWERS_WITHIN = 8.0
# Seconds that Slurm may take to end a job that it has promised to requeue.
_TERM_WITHIN = 30.0
_LOOK_EVERY = 0.05
# The most characters of scontrol's error in a message.
_LONGEST_ANSWER = 500
_NO_JOB = "no job of Slurm"
_NUMBER = re.compile(r"[0-9]{1,18}")


def stopped(cause: int, step: int, checkpoint: Path, refused: str | None) -> Stopped:
    """Return the error that ends a rank: with code 143, or 75 if the job has yet to be requeued.

    Args:
        cause: The number of the signal that caused the stop, or 0 for the end of the job's time.
        step: The number of steps done.
        checkpoint: The path of the checkpoint.
        refused: Why the job is not requeued; empty if it is requeued, None if nobody asked for it.
    """
    by = signal.Signals(cause).name if cause else "the end of the job's time"
    said = f"stopped after step {step} by {by}; checkpoint {checkpoint}"
    if refused:
        hint = ("" if refused == _NO_JOB else "requeue it, or ") + "start it again with resume=auto"
        return Stopped(f"{said}; not requeued: {refused} -> {hint}", AGAIN)
    return Stopped(said if refused is None else f"{said}; the job is requeued", ENDED)


def ask_for_requeue(requests: StopRequests) -> str | None:
    """Ask Slurm to start the job again.

    Args:
        requests: The requests on this rank.

    Returns:
        Why the job is not requeued; empty if it is requeued, None if SIGTERM has arrived meanwhile.
    """
    if not requests.config.requeue:
        return "preemption.requeue is off"
    # Slurm ends a job that it requeues by SIGTERM to all of its processes, which would reach
    # scontrol before Slurm's answer. Blocking it here blocks it in scontrol too.
    with signals_blocked(requests.config.signals):
        if _is_ended(requests):
            return None
        refused = requeue(requests.environ, requests.config.max_requeues)
    # SIGTERM may have ended scontrol too, after Slurm had got the request.
    if refused and _is_ended(requests):
        return None
    return refused


def _is_ended(requests: StopRequests) -> bool:
    return requests.pending()[0] is StopRequest.STOP


def wait_for_term(requests: StopRequests) -> None:
    """Wait until Slurm ends the job, at most half a minute.

    If this rank ended before, the job script would go on.

    Args:
        requests: The requests on this rank, which note the SIGTERM.
    """
    deadline = time.monotonic() + _TERM_WITHIN
    while not _is_ended(requests) and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY)


def requeue(environ: Mapping[str, str], max_requeues: int, limit: float = _ANSWERS_WITHIN) -> str:
    """Ask Slurm once to end this job and start it again.

    Args:
        environ: The environment, with Slurm's variables of the job.
        max_requeues: Do not ask if the job has been requeued this often.
        limit: The time limit of scontrol in seconds.

    Returns:
        Why the job is not requeued; empty if Slurm will requeue it.
    """
    job = _job(environ)
    restarts = environ.get("SLURM_RESTART_COUNT", "") or "0"
    if not job:
        return _NO_JOB
    if not _NUMBER.fullmatch(restarts):
        return f"SLURM_RESTART_COUNT is {restarts!r}"
    if int(restarts) >= max_requeues:
        return f"it was {restarts} times before, and preemption.max_requeues is {max_requeues}"
    try:
        # A signal to this rank's process group must not end scontrol.
        done = slurm_command.run(
            ["scontrol", "requeue", job], environ, timeout=limit, start_new_session=True
        )
    except FileNotFoundError:
        return "no scontrol in PATH"
    except OSError as error:
        return f"scontrol cannot be started: {error}"
    except subprocess.TimeoutExpired:
        return f"scontrol did not answer within {limit:g} s"
    said = " ".join(done.stderr.split())[:_LONGEST_ANSWER]
    if done.returncode:
        return f"scontrol failed: {said or f'it ended with {done.returncode}'}"
    return ""


def _job(environ: Mapping[str, str]) -> str:
    """Return the job's id for scontrol; empty outside of a Slurm job."""
    # Name a task of a job array by the array and the task: SLURM_JOB_ID of one of the tasks is the
    # array's number, for which scontrol would requeue the whole array.
    of_array = [environ.get(name, "") for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")]
    if all(map(_NUMBER.fullmatch, of_array)):
        return "_".join(of_array)
    job = environ.get("SLURM_JOB_ID", "")
    if _NUMBER.fullmatch(job):
        return job
    return ""
