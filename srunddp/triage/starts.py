"""The newest start of a job that was requeued or restarted: which files are of it, and where it begins in them."""

import re
import time
from collections.abc import Sequence

from srunddp.triage.logs import Log

SLACK = 300.0  # seconds by which Slurm's clock and that of the files may differ
_ATTEMPT = re.compile(r"(.*)attempt_(\d{1,9})/")  # torchrun's
_EARLIER = re.compile(r"failure\.(\d{1,9})\.json")
_REQUEUED = re.compile(
    rb"\*\*\* (?:JOB|STEP) .{1,200} CANCELLED AT (\S+) DUE TO (?:JOB REQUEUE|PREEMPTION|NODE FAILURE)"
)
_OF_SLURM = re.compile(rb"srun: |slurmstepd")
# The first line of a run, see srunddp/run/cli.py; and the line that a file of --log-dir has before another start.
_PLACED = re.compile(rb"srunddp: \d+ ranks? on \d+ nodes?, launcher ")
_AGAIN = b"srunddp: another start begins here"


def newest_start(found: Sequence[Log], started: float | None) -> tuple[list[Log], int, list[str]]:
    """The logs of the newest start, its number from 0, and a note of what is left out.

    Only certain marks count: torchrun's and srunddp's own, and Slurm's where something surely came after it.

    Args:
        started: when the newest start began, as Slurm tells it.
    """
    last: dict[str, int] = {}
    for match in filter(None, (_ATTEMPT.match(log.name) for log in found)):
        last[match[1]] = max(int(match[2]), last.get(match[1], 0))
    kept, earlier, numbers = [], [], [0, *last.values()]
    for log in found:
        attempt, failure = _ATTEMPT.match(log.name), _EARLIER.fullmatch(log.path.name)
        numbers += [int(failure[1])] if failure else []
        if failure or (attempt and int(attempt[2]) < last[attempt[1]]) or (started and log.mtime < started - SLACK):
            earlier.append(log.name)
            continue
        log.begin, starts = _begin(log, started)
        earlier += [f"{log.name} before line {log.begin}"] if log.begin else []
        numbers.append(starts)
        kept.append(log)
    monitored = (each for folder in {log.path.parent for log in kept} for each in folder.glob("monitor.*"))
    numbers += [int(each.suffix[1:]) for each in monitored if each.suffix[1:].isdecimal()]
    if not kept:  # the user named what is of an earlier one
        return list(found), max(numbers), []
    names = ", ".join(earlier[:4]) + (f" and {len(earlier) - 4} more" if len(earlier) > 4 else "")
    return kept, max(numbers), [f"left out, of earlier starts: {names}"] if earlier else []


def _begin(log: Log, started: float | None) -> tuple[int, int]:
    """The first line of the newest start, and how many there were before it; 0 where the file has one."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(started)).encode() if started else b""
    begin = starts = mark = 0
    is_followed = False  # by another start, as Slurm says
    for number, line in ((n, t.encode()) for n, t in log.lines()):
        if b" DUE TO " in line and (match := _REQUEUED.search(line)):
            mark, is_followed = number, match[1] < stamp
        elif _AGAIN in line or (mark and (_PLACED.match(line) or (is_followed and not _OF_SLURM.match(line)))):
            begin, starts, mark = number, starts + 1, 0
    return begin, starts
