"""What Slurm itself says of a job: where it ran, and its accounting's figures, to be compared with ours."""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from srunddp.report import format
from srunddp.report.summary import Summary
from srunddp.util.slurm_command import output as query

_NUMBER = re.compile(r"[0-9]{1,18}")
_SACCT = ("JobIDRaw", "State", "Start", "ElapsedRaw", "TimelimitRaw", "TotalCPU", "MaxRSS", "AveRSS")
_SSTAT = ("JobID", "NTasks", "AveCPU", "MaxRSS", "AveRSS")
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_ANOTHER = 300.0  # seconds between our start and Slurm's above which these are two starts of the job
_GONE = ("not found", "Invalid job id")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED")


@dataclass(frozen=True)
class Job:
    """What Slurm says of a job: its number, that of an array's task included; its working directory; and in seconds its
    time limit and how long it has lasted."""

    number: str
    folder: str
    limit_s: float | None = None
    lasted_s: float | None = None


@dataclass(frozen=True)
class SlurmAccounting:
    """Slurm's side of a run.

    Attributes:
        sentence: where the figures are from, or why there are none.
        rows: of the table: the figure's name, ours, Slurm's, and by how much ours is above, as a share of Slurm's.
        seff: what it prints, where it is installed.
    """

    sentence: str
    rows: tuple[tuple[str, str, str, str], ...] = ()
    seff: str = ""


def job(what: str) -> Job | None:
    """The job ``4711`` or ``4711_3``; None where Slurm does not know it; the controller forgets it soon."""
    shown = query("scontrol", "--oneliner", "show", "job", what).splitlines()
    own = next((line for line in shown if line.startswith(f"JobId={what} ")), shown[0] if shown else "")
    if number := re.match(r"JobId=(\d+)", own):
        folder = re.search(r"\bWorkDir=(.*?)(?: \w+=|$)", own)
        times = (re.search(rf"\b{name}=(\S+)", own) for name in ("TimeLimit", "RunTime"))
        return Job(number[1], folder[1] if folder else "", *(match and seconds(match[1]) for match in times))
    known = _table("sacct", what, ("JobIDRaw", "WorkDir", "TimelimitRaw", "ElapsedRaw"), "-X")
    for each in sorted(known, key=lambda each: each["JobIDRaw"] != what):
        if _NUMBER.fullmatch(each["JobIDRaw"]):
            minutes, lasted = _float(each["TimelimitRaw"]), _float(each["ElapsedRaw"])
            return Job(each["JobIDRaw"], each["WorkDir"], None if minutes is None else minutes * 60, lasted)
    return None


def completed(summary: Summary) -> Summary:
    """With what Slurm alone knows: that the step is over, the job's time limit, and how long it has lasted."""
    if summary.ending.running and _is_over(summary):
        summary = replace(summary, ending=replace(summary.ending, running=False))
    known = job(summary.job) if _step(summary) else None
    if known is None or known.number != summary.job:
        return replace(summary, job_s=None)
    return replace(summary, time_limit_s=summary.time_limit_s or known.limit_s, job_s=known.lasted_s)


def _is_over(summary: Summary) -> bool:
    """Whether the step has ended, as far as the controller knows: a killed one has not recorded it."""
    name = _step(summary)
    said = query("scontrol", "--oneliner", "show", "step", name, any_status=True) if name else ""
    return any(word in said for word in _GONE)


def _step(summary: Summary) -> str:
    """``4711.0``; empty where Slurm did not start the run."""
    known = _NUMBER.fullmatch(summary.job) and _NUMBER.fullmatch(summary.step)
    return f"{summary.job}.{summary.step}" if known else ""


def view(summary: Summary) -> SlurmAccounting:
    """Its figures of this run beside ours."""
    name = _step(summary)
    if not name:
        return SlurmAccounting("Not started by Slurm: nothing to compare with.")
    records = _table("sacct", summary.job, _SACCT, "--units=K")
    record, whole = (next((each for each in records if each["JobIDRaw"] == key), {}) for key in (name, summary.job))
    running = summary.ending.running or record.get("State", "") in _RUNNING
    # Where nothing is gathered, sstat has a step of no task, and its time is none.
    live = [each for each in _table("sstat", name, _SSTAT) if _float(each["NTasks"])] if running else []
    if not record and not live:
        return SlurmAccounting("Slurm's accounting does not answer for this run: nothing to compare with.")
    begun = _float(record.get("Start", ""))
    if begun is not None and abs(begun - summary.started) > _ANOTHER and not live:
        return SlurmAccounting("Slurm's accounting has another start of this job: nothing to compare with.")
    found = live[0] if live else record
    rows = _rows(summary, found, {**whole, "ElapsedRaw": record.get("ElapsedRaw", "")}, live=bool(live))
    source = "sstat, while it runs" if live else f"sacct: {record['State']}"
    seff = "" if running or not shutil.which("seff") else query("seff", summary.job).strip()
    return SlurmAccounting(f"Step {name} by {source}.", tuple(rows), seff)


def _rows(
    summary: Summary, found: Mapping[str, str], times: Mapping[str, str], *, live: bool
) -> Iterator[tuple[str, str, str, str]]:
    peaks = [each.rss_bytes for each in summary.ranks if each.rss_bytes is not None]
    memory = [each.rss_last for each in summary.ranks if each.rss_last is not None] if live else peaks
    cpu = [each.cpu_s for each in summary.ranks if each.cpu_s is not None]
    tasks = _float(found.get("NTasks", "")) or 1.0
    spent = seconds(found.get("AveCPU" if live else "TotalCPU", ""))
    limit = _float(times.get("TimelimitRaw", ""))
    wanted = [
        ("CPU time", format.duration, sum(cpu) if cpu else None, spent and spent * (tasks if live else 1.0)),
        ("MaxRSS of a task", format.size, max(peaks, default=None), size(found.get("MaxRSS", ""))),
        ("AveRSS of the tasks", format.size, fmean(memory) if memory else None, size(found.get("AveRSS", ""))),
        ("elapsed", format.duration, summary.seconds, _float(times.get("ElapsedRaw", ""))),
        ("time limit", format.duration, summary.time_limit_s, None if limit is None else limit * 60),
    ]
    for name, shown, ours, theirs in wanted:
        if theirs is not None:
            difference = format.UNKNOWN if ours is None or not theirs else f"{(ours - theirs) / theirs * 100:+.1f} %"
            yield name, shown(ours), shown(theirs), difference


def _table(command: str, job: str, names: Sequence[str], *options: str) -> list[dict[str, str]]:
    """What sacct or sstat has of a job or a step, by the names of the columns."""
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


def size(text: str) -> float | None:
    """Bytes, of ``12.5M``; without a letter they are bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text)
    return float(match[1]) * _SIZES[match[2]] if match else None


def _float(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(?:\.\d+)?", text) else None
