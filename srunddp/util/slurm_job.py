"""One job, as Slurm knows it: its number, where it ran, its state and its times."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from srunddp.util.slurm_command import output as query

# ``4711``, a task of an array ``4711_3``, a step ``4711.0``.
JOB = re.compile(r"(?P<number>\d{1,18})(?:_(?P<task>\d{1,18}))?(?:\.(?P<step>\d{1,9}))?", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,18}")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED")
_COLUMNS = ("JobIDRaw", "State", "ExitCode", "TimelimitRaw", "ElapsedRaw", "Start", "End", "WorkDir")


@dataclass(frozen=True)
class Job:
    """What Slurm says of a job.

    Attributes:
        number: also of an array's task, which has one of its own.
        folder: its working directory; output: the file of its standard output, which the controller alone tells.
        limit_s, lasted_s: its time limit, and how long it has lasted.
        state: as ``TIMEOUT``; exit_code: as ``1:0``, the second number is the signal's.
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


def job(what: str) -> Job | None:
    """The job ``4711`` or ``4711_3``; None where Slurm does not know it; the controller forgets it soon."""
    shown = query("scontrol", "--oneliner", "show", "job", what).splitlines()
    own = next((line for line in shown if line.startswith(f"JobId={what} ")), shown[0] if shown else "")
    if number := re.match(r"JobId=(\d+)", own):
        names = ("JobState", "ExitCode", "TimeLimit", "RunTime", "StartTime", "EndTime")
        state, code, *times = (_field(own, name, r"\S+") for name in names)
        folder, out = (_field(own, name, r".*?(?= \w+=|$)") for name in ("WorkDir", "StdOut"))
        limit, lasted, started, ended = *map(seconds, times[:2]), *map(figure, times[2:])
        return Job(number[1], folder, limit, lasted, state, code, started, ended, out)
    known = table("sacct", what, _COLUMNS, "-X")
    for each in sorted(known, key=lambda each: each["JobIDRaw"] != what):
        if _NUMBER.fullmatch(each["JobIDRaw"]):
            state = each["State"].partition(" ")[0]  # "CANCELLED by 1000"
            minutes, lasted, started, ended = (figure(each[name]) for name in _COLUMNS[3:7])
            limit = None if minutes is None else minutes * 60
            return Job(each["JobIDRaw"], each["WorkDir"], limit, lasted, state, each["ExitCode"], started, ended)
    return None


def _field(line: str, name: str, value: str) -> str:
    match = re.search(rf"\b{name}=({value})", line)
    return match[1] if match else ""


def table(command: str, job: str, names: Sequence[str], *options: str) -> list[dict[str, str]]:
    """What sacct has of a job or a step, by the names of the columns."""
    printed = query(command, "-P", "-n", *options, "-j", job, "-o", ",".join(names))
    rows = (line.split("|", len(names) - 1) for line in printed.splitlines())
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def seconds(text: str) -> float | None:
    """Of ``[DD-[HH:]]MM:SS[.mmm]``."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)", text)
    if not match:
        return None
    days, hours, minutes, left = (float(part or 0) for part in match.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + left


def figure(text: str) -> float | None:
    """A number; None for whatever is none, as ``Unknown``."""
    return float(text) if re.fullmatch(r"\d+(?:\.\d+)?", text) else None
