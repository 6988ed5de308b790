"""What Slurm's accounting says of a run, to be compared with our figures."""

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from srunddp.report import format
from srunddp.report.summary import Summary
from srunddp.util.slurm_command import RUNNING, figure, job, seconds, table
from srunddp.util.slurm_command import output as query

_NUMBER = re.compile(r"[0-9]{1,18}")
_SACCT = ("JobIDRaw", "State", "Start", "ElapsedRaw", "TimelimitRaw", "TotalCPU", "MaxRSS", "AveRSS")
_SSTAT = ("JobID", "NTasks", "AveCPU", "MaxRSS", "AveRSS")
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_ANOTHER = 300.0  # seconds between our start and Slurm's above which these are two starts of the job
_GONE = ("not found", "Invalid job id")


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
    records = table("sacct", summary.job, _SACCT, "--units=K")
    record, whole = (next((each for each in records if each["JobIDRaw"] == key), {}) for key in (name, summary.job))
    running = summary.ending.running or record.get("State", "") in RUNNING
    # Where nothing is gathered, sstat has a step of no task, and its time is none.
    live = [each for each in table("sstat", name, _SSTAT) if figure(each["NTasks"])] if running else []
    if not record and not live:
        return SlurmAccounting("Slurm's accounting does not answer for this run: nothing to compare with.")
    begun = figure(record.get("Start", ""))
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
    tasks = figure(found.get("NTasks", "")) or 1.0
    spent = seconds(found.get("AveCPU" if live else "TotalCPU", ""))
    limit = figure(times.get("TimelimitRaw", ""))
    wanted = [
        ("CPU time", format.duration, sum(cpu) if cpu else None, spent and spent * (tasks if live else 1.0)),
        ("MaxRSS of a task", format.size, max(peaks, default=None), size(found.get("MaxRSS", ""))),
        ("AveRSS of the tasks", format.size, fmean(memory) if memory else None, size(found.get("AveRSS", ""))),
        ("elapsed", format.duration, summary.seconds, figure(times.get("ElapsedRaw", ""))),
        ("time limit", format.duration, summary.time_limit_s, None if limit is None else limit * 60),
    ]
    for name, shown, ours, theirs in wanted:
        if theirs is not None:
            difference = format.UNKNOWN if ours is None or not theirs else f"{(ours - theirs) / theirs * 100:+.1f} %"
            yield name, shown(ours), shown(theirs), difference


def size(text: str) -> float | None:
    """Bytes, of ``12.5M``; without a letter they are bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text)
    return float(match[1]) * _SIZES[match[2]] if match else None
