"""Run Slurm's commands: in plain English, without a terminal, and with a time limit."""

import contextlib
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WITHIN = 5.0  # seconds, after which Slurm counts as not answering
# A job ``4711``, a task of an array ``4711_3``, or a step ``4711.0``.
JOB = re.compile(r"(?P<number>\d{1,18})(?:_(?P<task>\d{1,18}))?(?:\.(?P<step>\d{1,9}))?", re.ASCII)
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED")
# Makes Slurm print times in seconds since the epoch and messages in English.
_FORMAT = {"SLURM_TIME_FORMAT": "%s", "TZ": "UTC", "LC_ALL": "C"}
# A value may contain spaces, as in a job's name or comment: it ends where the next "Name=" begins.
_FIELD = re.compile(r"([\w:/]+)=(.*?)(?= +[\w:/]+=| *$)")  # of scontrol
# Field names of scontrol, and the sacct names of the same fields.
_NAMES = {
    "JobId": "JobIDRaw",
    "JobState": "State",
    "ExitCode": "ExitCode",
    "TimeLimit": "Timelimit",
    "RunTime": "Elapsed",
    "StartTime": "Start",
    "EndTime": "End",
    "WorkDir": "WorkDir",
}


@dataclass(frozen=True)
class Job:
    """What Slurm knows about a job.

    Attributes:
        number: The job's number; a task of an array has one of its own.
        folder: The working directory.
        limit_s: The time limit in seconds; None if there is none or it is unknown.
        lasted_s: How many seconds the job has run; None if unknown.
        state: For example ``TIMEOUT``.
        exit_code: For example ``1:0``; the second number is the signal.
        started, ended: Seconds since the epoch, of the latest start; None if this has not happened
            yet or is unknown.
        output: The file of standard output; only the controller knows it.
    """

    number: str
    folder: str
    limit_s: float | None = None
    lasted_s: float | None = None
    state: str = ""
    exit_code: str = ""
    started: float | None = None
    ended: float | None = None
    output: str = ""


def run(
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    timeout: float | None = WITHIN,
    input: str | None = None,
    as_is: bool = False,
    start_new_session: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command and wait for it.

    Args:
        command: The command and its arguments.
        environ: The command's environment; this process's if None.
        timeout: Seconds after which the command is killed; None for no limit.
        input: The text for standard input, which is empty by default.
        as_is: Do not set language and time format, for a command that passes its environment on to
            a job.
        start_new_session: Keep signals to this process's group away from the command.

    Raises:
        OSError: The command cannot be started.
        subprocess.TimeoutExpired: The command took longer than the timeout.
    """
    return subprocess.run(
        command,
        env={**(os.environ if environ is None else environ), **({} if as_is else _FORMAT)},
        # Never pass on this process's own input: if it is a terminal, the command could wait for
        # it.
        input=input or "",
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout,
        start_new_session=start_new_session,
    )


def outside(environ: Mapping[str, str], *kept: str) -> dict[str, str]:
    """Return the variables without those of the present job, for a command that must not act on it.

    Args:
        environ: The variables to start from.
        kept: Names of Slurm variables to keep, in addition to those that Slurm's commands need to
            find the cluster.
    """
    # srun and sbatch read most of a job's variables like options: if SLURM_JOB_ID is set, srun
    # would start a step in that job.
    kept = (
        "SLURM_CONF",
        "SLURM_CONF_SERVER",
        "SLURM_CLUSTERS",
        "SLURM_JWT",
        "SLURM_TIME_FORMAT",
        *kept,
    )
    return {
        name: value
        for name, value in environ.items()
        if name in kept or not name.startswith("SLURM_")
    }


def output(
    *command: str,
    environ: Mapping[str, str] | None = None,
    timeout: float = WITHIN,
    any_status: bool = False,
) -> str:
    """Run a Slurm command and return what it prints.

    Args:
        command: The command and its arguments.
        environ: The command's environment; this process's if None.
        timeout: The time limit in seconds.
        any_status: Return the output of a failing command too, followed by its errors.

    Returns:
        Empty if the command does not exist, takes too long or (without ``any_status``) fails.
    """
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        done = run(command, environ, timeout=timeout)
        # Some callers look for an error message, for example scontrol's about a step that is gone.
        if any_status:
            return done.stdout + done.stderr
        if done.returncode:
            return ""
        return done.stdout
    return ""


def job(what: str) -> Job | None:
    """Ask Slurm about a job: first scontrol, then sacct, because scontrol soon forgets an ended
    job.

    Args:
        what: ``4711``, or a task of an array, ``4711_3``.

    Returns:
        None if neither command knows the job.
    """
    lines = output("scontrol", "--oneliner", "show", "job", what).splitlines()
    found = [dict(_FIELD.findall(line)) for line in lines if line.startswith("JobId=")]
    if not found:
        # -X leaves out the job's steps. WorkDir must stay the last column, because a path may
        # contain the separator "|".
        printed = output("sacct", "-P", "-n", "-X", "-j", what, "-o", ",".join(_NAMES.values()))
        rows = (line.split("|", len(_NAMES) - 1) for line in printed.splitlines())
        found = [dict(zip(_NAMES, row, strict=True)) for row in rows if len(row) == len(_NAMES)]
    if not found:
        return None
    # For an array scontrol prints one record per task, whose JobId is the task's own number.
    own = dict.fromkeys((*_NAMES, "StdOut"), "") | next(
        (each for each in found if each["JobId"] == what), found[0]
    )
    state = own["JobState"].partition(" ")[0]  # "CANCELLED by 1000"
    limit = seconds(own["TimeLimit"])
    lasted = seconds(own["RunTime"])
    started = figure(own["StartTime"])
    # For a running job, Slurm computes EndTime from the time limit.
    ended = None if state in RUNNING else figure(own["EndTime"])
    return Job(
        own["JobId"],
        own["WorkDir"],
        limit,
        lasted,
        state,
        own["ExitCode"],
        started,
        ended,
        own["StdOut"],
    )


def seconds(text: str) -> float | None:
    """Read a Slurm duration, ``[DD-[HH:]]MM:SS[.mmm]``, in seconds; None for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)", text)
    if not match:
        return None
    days, hours, minutes, left = (float(part or 0) for part in match.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + left


def asked_seconds(text: str) -> float | None:
    """Read a time limit as users write it for ``--time``, in seconds: ``M``, ``M:S``, ``H:M:S``,
    ``D-H``, ``D-H:M`` or ``D-H:M:S``; None for anything else.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if not match:
        return None
    days = float(match[1] or 0)
    parts = [float(part) for part in match.groups()[1:] if part]
    if match[1] or len(parts) == 3:
        units = (3600, 60, 1)
    else:
        units = (60, 1, 0)
    return days * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def figure(text: str) -> float | None:
    """Read a non-negative decimal number; None for any other text, such as ``Unknown``."""
    return float(text) if re.fullmatch(r"\d+(?:\.\d+)?", text) else None
