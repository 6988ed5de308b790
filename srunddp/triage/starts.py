"""The newest start of a job that was requeued or restarted: which files are of it, and where it begins in them."""

import re
from collections.abc import Sequence
from datetime import datetime

from srunddp.triage.logs import Log

SLACK = 300.0  # seconds by which Slurm's clock and that of the files may differ
_ATTEMPT = re.compile(r"(.*)attempt_(\d{1,9})/")  # torchrun's
_EARLIER = re.compile(r"failure\.(\d{1,9})\.json")
_MONITOR = re.compile(r"monitor\.(\d{1,9})")
_REQUEUED = re.compile(
    rb"\*\*\* (?:JOB|STEP) .{1,200} CANCELLED AT (\S+) DUE TO (?:JOB REQUEUE|PREEMPTION|NODE FAILURE)"
)
_OF_SLURM = re.compile(rb"srun: |slurmstepd")
# The first line of a run, see srunddp/run/cli.py; and what --log-dir's file has before that of another start.
_PLACED = re.compile(rb"srunddp: \d+ ranks? on \d+ nodes?, launcher ")
_AGAIN = b"srunddp: another start of the run begins here"


def newest_start(found: Sequence[Log], started: float | None) -> tuple[list[Log], int, str]:
    """The logs of the newest start, its number from 0, and a note of what is left out.

    Only certain marks count: torchrun's and srunddp's own, and Slurm's before something that surely came after it.

    Args:
        started: when the newest start began, as Slurm tells it.
    """
    newest: dict[str, int] = {}
    attempts = {log.name: match for log in found if log.size and (match := _ATTEMPT.match(log.name))}
    for match in attempts.values():
        newest[match[1]] = max(int(match[2]), newest.get(match[1], 0))
    kept, earlier, start = [], [], max(newest.values(), default=0)
    for log in found:
        attempt, failure = _ATTEMPT.match(log.name), _EARLIER.fullmatch(log.path.name)
        start = max(start, int(failure[1]) if failure else 0)
        is_old = bool(started and log.mtime < started - SLACK)
        if is_old or failure or (attempt and int(attempt[2]) < newest.get(attempt[1], 0)):
            earlier.append(log.name)
            continue
        kept.append(log)
        log.begin, starts = _begin(log, started)
        earlier += [f"{log.name} before line {log.begin}"] if log.begin else []
        start = max(start, starts)
    folders = {log.path.parent for log in kept}
    numbers = [
        int(match[1])
        for folder in folders
        for each in folder.glob("monitor.*")
        if (match := _MONITOR.fullmatch(each.name))
    ]
    names = ", ".join(earlier[:4]) + (f" and {len(earlier) - 4} more" if len(earlier) > 4 else "")
    return kept, max([start, *numbers]), f"earlier starts are left out: {names}" if earlier else ""


def _begin(log: Log, started: float | None) -> tuple[int, int]:
    """The first line of the newest start, and how many there were before it; 0 where the file has one."""
    begin = starts = mark = 0
    surely = False  # after the mark there is another start
    for number, line in log.pieces():
        if _AGAIN in line:
            begin, starts, mark = number, starts + 1, 0
        elif b" DUE TO " in line and (match := _REQUEUED.search(line)):
            mark, surely = number, bool(started and _seconds(match[1]) < started)
        elif mark and (_PLACED.match(line) or (surely and not _OF_SLURM.match(line))):
            begin, starts, mark = number, starts + 1, 0
    return begin, starts


def _seconds(stamp: bytes) -> float:
    """Of Slurm's clock, as the node writes it."""
    try:
        return datetime.fromisoformat(stamp.decode()).timestamp()
    except ValueError:
        return float("inf")
