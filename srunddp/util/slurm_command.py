"""Run Slurm's commands: in plain English, without a terminal, and with a time limit."""

import contextlib
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WITHIN = 5.0  # seconds that a command of Slurm may take by default
# Matches the number of a job (4711), of a task of a job array (4711_3) or of a job step (4711.0).
JOB = re.compile(r"(?P<number>\d{1,18})(?:_(?P<task>\d{1,18}))?(?:\.(?P<step>\d{1,9}))?", re.ASCII)
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED")
# Variables that make Slurm's commands print times in seconds since the epoch, and messages in
# English.
_FORMAT = {"SLURM_TIME_FORMAT": "%s", "TZ": "UTC", "LC_ALL": "C"}
# Matches a field of scontrol's output. Its value may contain spaces, as in a job's name or comment,
# and ends where the next "Name=" begins.
_FIELD = re.compile(r"([\w:/]+)=(.*?)(?= +[\w:/]+=| *$)")
# sacct's name of each field, by scontrol's name of the same field.
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
        number: The job's number. Each task of an array has a different one.
        folder: The job's working directory.
        limit_s: The time limit in seconds; None if there is none or it is unknown.
        lasted_s: How many seconds the job has run; None if unknown.
        state: Slurm's name of the job's state, for example ``TIMEOUT``; empty if unknown.
        exit_code: The exit code and, after a colon, the signal, for example ``1:0``; empty if
            unknown.
        started, ended: When the job began (the last time, if it was requeued) and ended, in seconds
            since the epoch; None if this has not happened yet or is unknown.
        output: The path of the file of standard output; empty if unknown, as for a job that only
            sacct still knows.
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
    """Run a command, wait for it, and return its exit code and output.

    Args:
        command: The command and its arguments.
        environ: The command's environment variables; None for those of this process.
        timeout: Seconds after which the command is killed; None for no limit.
        input: The text for standard input, which is empty by default.
        as_is: Whether to leave the variables for language and time format as they are, for a
            command that passes its environment on to a job. Otherwise the command prints English
            messages and times in seconds.
        start_new_session: Whether to run the command in a new session, so that it gets no signals
            that are sent to this process's group.

    Raises:
        OSError: The command cannot be started.
        subprocess.TimeoutExpired: The command took longer than the timeout.
    """
    return subprocess.run(
        command,
        env={**(os.environ if environ is None else environ), **({} if as_is else _FORMAT)},
        # Never pass on this process's standard input: the command could wait for a terminal.
        input=input or "",
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout,
        start_new_session=start_new_session,
    )


def outside(environ: Mapping[str, str], *kept: str) -> dict[str, str]:
    """Return environment variables without those of the Slurm job in which this process runs, so
    that a command with the returned variables does not act on this job.

    Args:
        environ: The environment variables of this process.
        kept: Names of further Slurm variables to keep. Those that Slurm's commands need to find the
            cluster are kept anyway.
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
        environ: The command's environment variables; None for those of this process.
        timeout: Seconds that the command may take.
        any_status: Whether to return the output even if the command fails. What the command writes
            to standard error is then added after its output.

    Returns:
        The output; empty if the command does not exist, takes too long or (without ``any_status``)
        fails.
    """
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        done = run(command, environ, timeout=timeout)
        # Some callers look for an error message, as that of scontrol about a job step that is over.
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
        what: The number of a job, such as ``4711``, or of a task of an array, such as ``4711_3``.

    Returns:
        What Slurm knows; None if neither command knows the job.
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
    # For a job array, scontrol prints a record for each task, with the task's job number as JobId.
    # Prefer the record whose JobId was asked for.
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
