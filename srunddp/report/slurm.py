"""What Slurm's accounting says of a run, to be compared with our figures."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from srunddp.report import format
from srunddp.report.summary import Summary
from srunddp.util.slurm_command import output as query
from srunddp.util.slurm_job import figure, job, seconds, table

_NUMBER = re.compile(r"[0-9]{1,18}")
_SACCT = ("JobIDRaw", "State", "Start", "ElapsedRaw", "TimelimitRaw", "TotalCPU", "MaxRSS", "AveRSS")
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_ANOTHER = 300.0  # seconds between our start and Slurm's above which these are two starts of the job
_GONE = ("not found", "Invalid job id")


@dataclass(frozen=True)
class SlurmAccounting:
    """Slurm's side of a run.

    Attributes:
        sentence: where the figures are from, or why there are none.
        rows: of the table: the figure's name, ours, Slurm's, and by how much ours is above, as a share of Slurm's.
    """

    sentence: str
    rows: tuple[tuple[str, str, str, str], ...] = ()


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
    if not record:
        return SlurmAccounting("Slurm's accounting does not answer for this run: nothing to compare with.")
    begun = figure(record.get("Start", ""))
    if begun is not None and abs(begun - summary.started) > _ANOTHER:
        return SlurmAccounting("Slurm's accounting has another start of this job: nothing to compare with.")
    rows = _rows(summary, record, figure(whole.get("TimelimitRaw", "")))
    return SlurmAccounting(f"Step {name} by sacct: {record['State']}.", tuple(rows))


def _rows(summary: Summary, found: Mapping[str, str], limit: float | None) -> Iterator[tuple[str, str, str, str]]:
    memory = [each.rss_bytes for each in summary.ranks if each.rss_bytes is not None]
    cpu = [each.cpu_s for each in summary.ranks if each.cpu_s is not None]
    wanted = [
        ("CPU time", format.duration, sum(cpu) if cpu else None, seconds(found["TotalCPU"]) or None),
        ("MaxRSS of a task", format.size, max(memory, default=None), size(found["MaxRSS"])),
        ("AveRSS of the tasks", format.size, fmean(memory) if memory else None, size(found["AveRSS"])),
        ("elapsed", format.duration, summary.seconds, figure(found["ElapsedRaw"])),
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
