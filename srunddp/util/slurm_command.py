"""Ask one of Slurm's commands: in plain English, with nothing to read from a terminal, and within a
limit of time.
"""

import contextlib
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WITHIN = 5.0  # seconds, after which Slurm is taken not to answer
# ``4711``, a task of an array ``4711_3``, a step ``4711.0``.
JOB = re.compile(r"(?P<number>\d{1,18})(?:_(?P<task>\d{1,18}))?(?:\.(?P<step>\d{1,9}))?", re.ASCII)
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED")
# Times in seconds since the epoch; messages that can be matched.
_FORMAT = {"SLURM_TIME_FORMAT": "%s", "TZ": "UTC", "LC_ALL": "C"}
# A value may have spaces, as a job's name and comment do: it ends where the next "Name=" begins.
_FIELD = re.compile(r"([\w:/]+)=(.*?)(?= +[\w:/]+=| *$)")  # of scontrol
# What scontrol and what sacct call it.
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
    """What Slurm says of a job.

    Attributes:
        number: also of an array's task, which has one of its own.
        folder: its working directory.
        output: the file of its standard output, which the controller alone tells.
        limit_s, lasted_s: its time limit, and how long it has lasted.
        state: as ``TIMEOUT``.
        exit_code: as ``1:0``, the second number is the signal's.
        started, ended: of its newest start, in seconds since the epoch; None where that is to come.
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
        environ: for the command; this process's, unless given.
        timeout: seconds, after which the command is killed; None for no limit.
        input: for its standard input, which is empty unless given.
        as_is: leave ``environ`` as it is, for a command that hands it on to a job.
        start_new_session: so that a signal to this process's group is not for the command.

    Raises:
        OSError: the command does not exist.
        subprocess.TimeoutExpired: it took longer.
    """
    return subprocess.run(
        command,
        env={**(os.environ if environ is None else environ), **({} if as_is else _FORMAT)},
        # Never this process's own, which may be a terminal: the command would wait for it.
        input=input or "",
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout,
        start_new_session=start_new_session,
    )


def outside(environ: Mapping[str, str], *kept: str) -> dict[str, str]:
    """Return variables as outside of any job, for a command that must not take this job's.

    Args:
        environ: The variables.
        kept: Names of Slurm's variables to keep, besides those by which its commands find it.
    """
    # srun and sbatch read most of a job's variables as if they were options: with SLURM_JOB_ID set,
    # srun would start a step in that job.
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
    """Run a command of Slurm for what it prints.

    Args:
        command: its words.
        environ: its variables; this process's unless given.
        timeout: seconds that it may take.
        any_status: also what a command prints that fails, with its errors after it.

    Returns:
        Nothing where it does not exist, takes longer or fails.
    """
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        done = run(command, environ, timeout=timeout)
        # For a caller that looks for a word of the error, such as scontrol's about a step that is
        # gone.
        if any_status:
            return done.stdout + done.stderr
        if done.returncode:
            return ""
        return done.stdout
    return ""


def job(what: str) -> Job | None:
    """Ask Slurm about a job: scontrol, which forgets a job soon after its end, then sacct.

    Args:
        what: ``4711``, or an array's task ``4711_3``.

    Returns:
        None where neither knows it.
    """
    lines = output("scontrol", "--oneliner", "show", "job", what).splitlines()
    found = [dict(_FIELD.findall(line)) for line in lines if line.startswith("JobId=")]
    if not found:
        # -X: the job's own line without those of its steps. WorkDir is last, as a path may have the
        # "|" that separates the columns.
        printed = output("sacct", "-P", "-n", "-X", "-j", what, "-o", ",".join(_NAMES.values()))
        rows = (line.split("|", len(_NAMES) - 1) for line in printed.splitlines())
        found = [dict(zip(_NAMES, row, strict=True)) for row in rows if len(row) == len(_NAMES)]
    if not found:
        return None
    # For an array scontrol prints a record for each task, whose JobId is the task's own.
    own = dict.fromkeys((*_NAMES, "StdOut"), "") | next(
        (each for each in found if each["JobId"] == what), found[0]
    )
    state = own["JobState"].partition(" ")[0]  # "CANCELLED by 1000"
    limit = seconds(own["TimeLimit"])
    lasted = seconds(own["RunTime"])
    started = figure(own["StartTime"])
    # Of a job that runs, Slurm names as its end what its limit gives.
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
    """Read a duration of Slurm's, ``[DD-[HH:]]MM:SS[.mmm]``; None for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)", text)
    if not match:
        return None
    days, hours, minutes, left = (float(part or 0) for part in match.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + left


def figure(text: str) -> float | None:
    """Read a number; None for a text that is none, such as ``Unknown``."""
    return float(text) if re.fullmatch(r"\d+(?:\.\d+)?", text) else None
