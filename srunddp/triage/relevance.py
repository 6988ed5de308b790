"""What of all that was said still stands at the end: what a run survived is no failure, but may explain a later one."""

import re

from srunddp.triage.collect import GOES_ON, Evidence
from srunddp.triage.event import Event, surely_before
from srunddp.triage.launcher_reports import Report
from srunddp.triage.progress import is_below_error
from srunddp.triage.signatures import table
from srunddp.util.hostlist import group_by_key

FileReport = tuple[int, Report]  # by file

_WAITS = re.compile(r"^srunddp: waiting|Waiting in store based barrier")
_ATTEMPT = re.compile(r"(.*)attempt_(\d+)/")
# Who says it has it from the kernel, or from Slurm's own book-keeping.
_AUTHORITY = re.compile(
    r"\b(?:slurmstepd\S*|srun|sbatch|salloc|mpirun|NVRM|kernel)\b[^:]{0,40}:|There are not enough slots"
)
# What a script hands a library.
_OF_DATA = re.compile(r"shape|size|dimension|batch|label|range|argument|CUDA|index|key|match")
_UNSPECIFIC = ("unknown", "script-error", "rank-killed", "collective-timeout", "ranks-missing")


def first_report(evidence: Evidence) -> FileReport | None:
    """The end of a rank that a launcher reports, the one it calls first if it does."""
    reports = [(index, first) for index, found in evidence.reports.items() if (first := found.first())]
    return min(reports, key=lambda each: not each[1].root, default=None)


def partition_relevant(evidence: Evidence, report: FileReport | None) -> tuple[list[Event], list[Event]]:
    """What stands, and what was warned of, handled or survived."""
    superseded = _superseded_attempts(evidence)
    found = group_by_key(
        (event.file in superseded or _was_survived(event, evidence, report), event)
        for event in evidence.events
        if event.kind != "noise"
    )
    return found.get(False, []), found.get(True, [])


def _superseded_attempts(evidence: Evidence) -> set[int]:
    """The files of attempts, as torchrun keeps them apart, after which a later one went on."""
    attempts = {
        file: (match[1], int(match[2])) for file, name in enumerate(evidence.names) if (match := _ATTEMPT.match(name))
    }
    latest: dict[str, int] = {}
    for file, (run, attempt) in attempts.items():
        if evidence.steps.get(file, 0) >= GOES_ON or file in evidence.finished:
            latest[run] = max(attempt, latest.get(run, 0))
    return {file for file, (run, attempt) in attempts.items() if attempt < latest.get(run, 0)}


def _was_survived(event: Event, evidence: Evidence, report: FileReport | None) -> bool:
    if event.kind == "ending":  # a few steps more may be told before the ranks are gone
        later = max(evidence.finished.get(event.file, 0), evidence.restarted.get(event.file, 0))
        return event.weak or (event.progress >= GOES_ON and later > event.number)
    if _WAITS.search(event.text):
        return event.progress > 0 or 0 in evidence.observed.worlds
    if event.progress >= GOES_ON and not event.late:
        return True
    if event.weak or (event.kind == "secondary" and is_below_error(event.text) and not event.raised and not report):
        return True
    return not report and not event.ours and _ended_well(event, evidence)


def _ended_well(event: Event, evidence: Evidence) -> bool:
    """The run came to a good end after it, by a word of its own; a job script's word counts for less."""
    if event.late and event.file in evidence.well and not _AUTHORITY.search(event.text, 0, 120):
        return True  # a table of jobs, of this one or of others
    if evidence.finished.get(event.file, 0) <= event.number:  # what comes after a good end, or in another file
        return bool(evidence.finished) and event.kind in ("symptom", "secondary")
    if event.raised and (event.raised.top or event.kind == "primary"):
        return event.progress > 0
    if event.file in evidence.well or event.progress > 0:
        return True
    return event.kind != "primary" and evidence.steps[event.file] > 0


def explaining_event(weak: list[Event], cause: str, first: Event | None) -> Event | None:
    """What was said before, more quietly, of a failure that does not tell its cause."""
    if cause not in _UNSPECIFIC and not (first and not first.sure):
        return None
    what = cause
    if first and cause in ("script-error", "unknown"):
        what = f"{cause}\n{first.text}\n{_below(first)}"
    for event in weak:
        behind = table().causes[event.cause].behind
        if event is first or event.cause == cause or (first and cause != "unknown" and surely_before(first, event)):
            continue
        if behind.search(what) if behind else cause == "unknown" and event.kind == "primary" and not event.progress:
            return event
    return None


def _below(first: Event) -> str:
    """Where an exception came from, as far as that may matter: what the script surely raised itself says it all."""
    if not first.raised or first.sure:
        return ""
    code = first.raised.code.rpartition("\n")[2]
    return code if first.raised.inner or _OF_DATA.search(first.text) else f"{code}\nin a library"


def is_certain(
    first: Event, evidence: Evidence, report: FileReport | None, others: list[Event], weak: list[Event]
) -> bool:
    """Nothing contradicts it, and two signs agree: a traceback that nobody caught, and the launcher's report or that
    its process said no more. Slurm's and the kernel's own word need no other."""
    if not first.sure or first.progress or evidence.observed.ones > 1:
        return False
    if any(_contradicts(each, first) for each in (*others, *weak)):
        return False
    if _AUTHORITY.search(first.text, 0, 120):
        return first.file not in evidence.finished
    if not first.raised or not first.raised.top:
        return False
    if report and not report[1].is_victim:
        return first.rank is None or not report[1].ranks or first.rank in report[1].ranks
    return first.file not in evidence.finished


def _contradicts(other: Event, first: Event) -> bool:
    if other is first or other.cause == first.cause:
        return False
    if other.kind == "primary" or (other.kind == "ending" and other.sure):
        return True
    if other.kind == "secondary":
        return first.generic and surely_before(other, first)
    return other.cause not in ("unknown", "script-error") and not surely_before(first, other)
