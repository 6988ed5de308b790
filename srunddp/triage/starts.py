"""Finds the newest start of a job: the files that belong to it, and the line of a file at which it
begins.

Slurm starts a job again when it is requeued; srunddp and torchrun start the ranks again when one
has failed. All starts may write to the same file.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from srunddp.triage.logs import Log
from srunddp.triage.own_files import PROCESS, marks_of
from srunddp.triage.rank_labels import RankLabels, named_stepd
from srunddp.triage.signatures import says

SLACK = 300.0  # seconds by which Slurm's clock and the file system's may differ
# Matches folders that belong to one start: torchrun's, and those of --monitor, whose names end with
# the number of requeues and the number of restarts since the last requeue.
_ATTEMPT = re.compile(r"(.*)(?:attempt_|monitor\.)(\d{1,9})(?:\.(\d{1,9}))?/")
_OF_MONITOR = re.compile(r".*monitor\.[\d.]+/")
_EARLIER = re.compile(r"failure\.\d+\.json")  # describes a start after which srunddp began another
_LISTED = 4  # names in a note
_OPENING_LINES = 20  # lines of ranks at the beginning of a log that may come again at a new start
_DIGITS = re.compile(r"0x[0-9a-f]+|[0-9]+")
_ONE_FAILURE = 5  # the most lines that torchrun writes about one failure
# Matches the lines that announce another start: the first in a file of --log-dir, the second in
# other output.
_AGAIN = re.compile(
    r"srunddp: (?:another start begins here|restart \d+ of \d+: all ranks start anew)"
)
# Matches rank 0's line after each rendezvous, see srunddp/run/start.py.
_PLACED = re.compile(r"srunddp: \d+ ranks? on \d+ nodes?, launcher ")
# The number of a start: for torchrun one number; for srunddp how often Slurm has requeued the job,
# and how often srunddp has restarted the ranks since the last requeue.
_Start = tuple[int, ...]


@dataclass
class NewestStart:
    """The logs of the newest start.

    Attributes:
        logs: The logs; the ``begin`` of each is the line at which the start begins.
        number: The number of the start, from 0.
        earlier: Names of the files, and descriptions of the lines, that are left out.
    """

    logs: list[Log] = field(default_factory=list)
    number: int = 0
    earlier: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return a note that names what is left out; empty if nothing is."""
        if not self.earlier:
            return []
        names = ", ".join(self.earlier[:_LISTED])
        more = len(self.earlier) - _LISTED
        if more > 0:
            names += f" and {more} more"
        return [f"left out, of earlier starts: {names}"]


def newest_start(found: Collection[Log], started: float) -> NewestStart:
    """Choose the logs of the newest start, and set the line at which the start begins in each.

    Args:
        found: All logs of a job.
        started: When the job's newest start began according to Slurm, in seconds since the epoch;
            0.0 if unknown.

    Returns:
        The logs of the newest start. If no log belongs to it, all logs: then the user has named
            the files of an earlier start.
    """
    attempts = _last_attempts(found)
    newest = NewestStart(number=max(map(sum, attempts.values()), default=0))
    for log in found:
        if _is_earlier(log, started, attempts):
            name = _shown(log)
            if name not in newest.earlier:
                newest.earlier.append(name)
            continue
        begins = begins_of_starts(log, started)
        log.begin = max(begins, default=0)
        newest.number = max(newest.number, len(begins))
        if begins:
            newest.earlier.append(f"{log.name} before line {log.begin}")
        newest.logs.append(log)
    if not newest.logs:
        return NewestStart(list(found), newest.number)
    return newest


def _last_attempts(found: Collection[Log]) -> dict[str, _Start]:
    """Find the last start of each torchrun agent, and of each run with --monitor, by the folders
    that belong to one start.

    Returns:
        The starts, by the path above these folders.
    """
    folders = dict[str, dict[_Start, list[Log]]]()
    for log in found:
        if match := _ATTEMPT.match(log.name):
            folders.setdefault(match[1], {}).setdefault(_number(match), []).append(log)
    return {above: _last(starts) for above, starts in folders.items()}


def _last(starts: dict[_Start, list[Log]]) -> _Start:
    """Return the start with the highest number that does not belong to an earlier run.

    A run outside Slurm may use the folder of an earlier run that had more restarts. The restarts of
    the earlier run ended before the processes of the later run began. Within one run, no restart
    ends before the processes of another start begin, because a restart keeps the processes.
    """
    *lower, last = sorted(starts)
    if not lower:
        return last
    spans = {start: _span(logs) for start, logs in starts.items()}
    while lower and any(spans[last].is_before(spans[each]) for each in lower):
        last = lower.pop()
    return last


@dataclass(frozen=True)
class _Span:
    """When the first process of a start began and the last mark of the start was written, in
    seconds since the epoch; NaN if unknown.
    """

    begin: float
    end: float

    def is_before(self, other: _Span) -> bool:
        return self.end <= other.begin


def _span(logs: Collection[Log]) -> _Span:
    marks = [each for log in logs for each in marks_of(log)]
    began = [each.time for each in marks if each.name == PROCESS]
    # Leave out when processes began: a restart keeps the processes of the start before, so their
    # beginning says nothing about the restart.
    later = [each.time for each in marks if each.name != PROCESS]
    return _Span(min(began, default=math.nan), max(later, default=math.nan))


def _shown(log: Log) -> str:
    """Return the name of a file in a note. The many files of --monitor are named by their
    folder.
    """
    match = _OF_MONITOR.match(log.name)
    return match[0] if match else log.name


def _number(match: re.Match[str]) -> _Start:
    return tuple(int(each) for each in match.groups()[1:] if each)


def _is_earlier(log: Log, started: float, attempts: dict[str, _Start]) -> bool:
    """Tell whether the whole file belongs to an earlier start."""
    if _EARLIER.fullmatch(log.path.name) or log.mtime < started - SLACK:
        return True
    attempt = _ATTEMPT.match(log.name)
    return attempt is not None and _number(attempt) != attempts[attempt[1]]


def begins_of_starts(log: Log, started: float) -> list[int]:
    """Return the numbers of the lines at which the starts after the first one begin.

    Args:
        log: The log to read.
        started: When the newest start began according to Slurm, in seconds since the epoch; 0.0 if
            unknown.
    """
    requeued = _Requeued(started)
    torchrun = _Torchrun()
    lines = log.lines()
    labels, begin = RankLabels.of_beginning(lines)
    for number, line in itertools.chain(begin, lines):
        text, _, _ = labels.strip(line)
        requeued.feed(number, text)
        torchrun.feed(number, text)
    return [*requeued.begins, *torchrun.begins()]


class _Job(Enum):
    """States of a job that Slurm may requeue.

    Attributes:
        RUNS: Nothing says that the job was requeued, or another start has begun since.
        REQUEUED: Slurm ends the job to requeue it; the ranks still write lines of the old start.
    """

    RUNS = auto()
    REQUEUED = auto()


class _Requeued:
    """Finds the starts that Slurm and srunddp announce.

    Args:
        started: When the newest start began according to Slurm, in seconds since the epoch.
    """

    def __init__(self, started: float) -> None:
        self.begins: list[int] = []
        self._started = _stamp(started)
        self._job = _Job.RUNS
        self._requeued_at = ""

    def feed(self, number: int, line: str) -> None:
        """Read a line; if another start begins with it, add its number to ``begins``."""
        if match := says("requeued", line):
            self._job = _Job.REQUEUED
            self._requeued_at = match[1]
        elif _AGAIN.fullmatch(line) or (self._job is _Job.REQUEUED and self._is_next(line)):
            self._job = _Job.RUNS
            self.begins.append(number)

    def _is_next(self, line: str) -> bool:
        """Tell whether the line belongs to the next start of a requeued job."""
        if _PLACED.match(line):
            return True
        # Without srunddp's line after a rendezvous, count a new start only if Slurm says that the
        # job started again after the requeue. Lines of Slurm's daemons still belong to the old
        # start.
        is_followed = self._requeued_at < self._started
        return is_followed and not named_stepd(line).startswith(("srun: ", "slurmstepd"))


def _stamp(unix: float) -> str:
    """Return a time as Slurm writes it. Such texts sort in the order of time.

    Args:
        unix: The time in seconds since the epoch.
    """
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(unix))


class _Ranks(Enum):
    """States of the ranks that torchrun starts, as far as the log shows.

    Attributes:
        RUN: torchrun has reported no failure, or the ranks have begun again since the last failure.
        ENDED: torchrun has reported a failure, and the ranks have not begun again since.
    """

    RUN = auto()
    ENDED = auto()


class _Opening:
    """The lines that ranks write only at the beginning of a start."""

    def __init__(self) -> None:
        self._forms = set[str]()
        self._count = 0

    def add(self, line: str) -> None:
        """Read a line that a rank wrote before its start ended. A line after the opening lines
        shows that lines of its form are not written only at the beginning.
        """
        self._count += 1
        if self._count > _OPENING_LINES and not self._forms:
            return
        form = _form(line)
        if self._count <= _OPENING_LINES:
            self._forms.add(form)
        else:
            self._forms.discard(form)

    def begins_with(self, line: str) -> bool:
        """Tell whether a line has the form of a line that ranks write only at the beginning."""
        return _form(line) in self._forms


def _form(line: str) -> str:
    return _DIGITS.sub("0", line)


class _Torchrun:
    """Finds the starts made by torchrun.

    torchrun always reports that ranks failed, but only at some log levels that it starts them
    again. Without this report, a new start is recognised by a line of a rank that is like one of
    the opening lines of the first start. Any other line after a failure may come from the job
    script, or from a rank that ends.
    """

    def __init__(self) -> None:
        self._opening = _Opening()
        self._ranks = _Ranks.RUN
        self._failures: dict[str, int] = {}  # the line number of each failure, by torchrun's words
        self._last_failure = 0  # the line number of the last failure
        self._is_announced = False  # whether torchrun has said that it starts the ranks again
        self._wrote_again = 0  # the line at which the ranks last began again; 0 if they did not
        # The number of torchrun's tables of failures: each node writes one when the last start has
        # failed.
        self._tables = 0

    def feed(self, number: int, line: str) -> None:
        """Read a line."""
        if "Root Cause (first observed failure)" in line:
            self._tables += 1
        if match := says("restarted", line):
            self._add_failure(number, match[0])
            self._is_announced |= "will restart" in match[0]
        elif not says("launcher", line):
            self._read_of_rank(number, line)

    def _read_of_rank(self, number: int, line: str) -> None:
        if self._ranks is _Ranks.RUN:
            self._opening.add(line)
        elif self._is_announced or self._opening.begins_with(line):
            self._ranks = _Ranks.RUN
            self._is_announced = False
            self._wrote_again = number

    def _add_failure(self, number: int, words: str) -> None:
        if self._failures and number <= self._last_failure + _ONE_FAILURE:
            return  # the line belongs to the last failure
        self._failures[words] = number
        self._last_failure = number
        self._ranks = _Ranks.ENDED

    def begins(self) -> list[int]:
        """Return the numbers of the lines at which the starts after the first one begin. Call this
        after the whole log is read.
        """
        failures = list(self._failures.values())
        # Leave out one failure for each table: torchrun writes a table when it starts no ranks
        # again.
        restarted = failures[: max(0, len(failures) - self._tables)]
        return [number + 1 for number in restarted if number < self._wrote_again]
