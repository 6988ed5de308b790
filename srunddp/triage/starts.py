"""The newest start of a job: which files are of it, and where in a file of several it begins.

Slurm starts a job anew when it is requeued, srunddp and torchrun when a rank failed. All of them
may go on in the same file.
"""

import re
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from srunddp.triage.logs import Log
from srunddp.triage.rank_labels import named_stepd
from srunddp.triage.signatures import says

SLACK = 300.0  # seconds by which Slurm's clock and that of the files may differ
_ATTEMPT = re.compile(r"(.*)attempt_(\d{1,9})/")  # torchrun's
_EARLIER = re.compile(r"failure\.\d+\.json")  # of a start after which srunddp began another
_LISTED = 4  # names in a note
_ONE_FAILURE = 5  # lines that torchrun writes of it at most
# The line before another start, in a file of --log-dir and elsewhere; and the first of a run, see
# srunddp/run/cli.py.
_AGAIN = re.compile(
    r"srunddp: (?:another start begins here|restart \d+ of \d+: all ranks start anew)"
)
_PLACED = re.compile(r"srunddp: \d+ ranks? on \d+ nodes?, launcher ")


@dataclass
class NewestStart:
    """The logs of the newest start.

    Attributes:
        logs: each with the line at which it begins there.
        number: of the start, from 0.
        earlier: what is left out, in words.
    """

    logs: list[Log] = field(default_factory=list)
    number: int = 0
    earlier: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Say in a sentence what is left out; none where nothing is."""
        if not self.earlier:
            return []
        names = ", ".join(self.earlier[:_LISTED])
        more = len(self.earlier) - _LISTED
        if more > 0:
            names += f" and {more} more"
        return [f"left out, of earlier starts: {names}"]


def newest_start(found: Collection[Log], started: float) -> NewestStart:
    """Choose the files of the newest start, and set where each begins.

    Args:
        found: all logs of a job.
        started: when its newest start began by Slurm's word, in seconds since the epoch; 0.0 where
            that is not known.

    Returns:
        All files where none is of the newest start: then the user named those of an earlier one.
    """
    attempts = _last_attempts(found)
    newest = NewestStart(number=max(attempts.values(), default=0))
    for log in found:
        if _is_earlier(log, started, attempts):
            newest.earlier.append(log.name)
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


def _last_attempts(found: Collection[Log]) -> dict[str, int]:
    """The last attempt of each of torchrun's agents, by the folder of its attempts."""
    attempts = dict[str, int]()
    for log in found:
        if match := _ATTEMPT.match(log.name):
            attempts[match[1]] = max(int(match[2]), attempts.get(match[1], 0))
    return attempts


def _is_earlier(log: Log, started: float, attempts: dict[str, int]) -> bool:
    """Whether the whole file is of an earlier start."""
    if _EARLIER.fullmatch(log.path.name) or log.mtime < started - SLACK:
        return True
    attempt = _ATTEMPT.match(log.name)
    return attempt is not None and int(attempt[2]) < attempts[attempt[1]]


def begins_of_starts(log: Log, started: float) -> list[int]:
    """Find the first line of each start after the first.

    Args:
        log: to be read.
        started: when the newest start began by Slurm's word, in seconds since the epoch.
    """
    requeued = _Requeued(started)
    torchrun = _Torchrun()
    for number, line in log.lines():
        requeued.feed(number, line)
        torchrun.feed(number, line)
    return [*requeued.begins, *torchrun.begins()]


class _Job(Enum):
    """How far a job that is requeued has come.

    Attributes:
        RUNS: nothing says that it was requeued, or another start has begun since.
        REQUEUED: Slurm ends it to requeue it; what the ranks write is still of the old start.
    """

    RUNS = auto()
    REQUEUED = auto()


class _Requeued:
    """Finds the starts that Slurm's and srunddp's own words tell apart.

    Args:
        started: when the newest start began by Slurm's word, in seconds since the epoch.
    """

    def __init__(self, started: float) -> None:
        self.begins: list[int] = []
        self._started = _stamp(started)
        self._job = _Job.RUNS
        self._requeued_at = ""

    def feed(self, number: int, line: str) -> None:
        """Read a line."""
        if match := says("requeued", line):
            self._job = _Job.REQUEUED
            self._requeued_at = match[1]
        elif _AGAIN.fullmatch(line) or (self._job is _Job.REQUEUED and self._is_next(line)):
            self._job = _Job.RUNS
            self.begins.append(number)

    def _is_next(self, line: str) -> bool:
        """Whether the line is of the next start of a job that was requeued."""
        if _PLACED.match(line):
            return True
        # Without srunddp's line, only if Slurm knows of a start after it; and its daemons go on to
        # write of the old one.
        is_followed = self._requeued_at < self._started
        return is_followed and not named_stepd(line).startswith(("srun: ", "slurmstepd"))


def _stamp(unix: float) -> str:
    """A time as Slurm writes it, whose order is that of the letters."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(unix))


class _Ranks(Enum):
    """What was written last of torchrun's ranks.

    Attributes:
        RUN: no failure yet, or a line of a rank since the last one.
        ENDED: a failure, and since then only the launcher's lines.
    """

    RUN = auto()
    ENDED = auto()


class _Torchrun:
    """Finds the starts by torchrun, which says that ranks failed, and not that it starts them anew:
    that shows when a rank writes again.
    """

    def __init__(self) -> None:
        self._ranks = _Ranks.RUN
        self._failures: dict[str, int] = {}  # the line of each, by its words
        self._last_failure = 0
        self._wrote_again = 0  # the first line of a rank after the last failure
        self._tables = 0  # of failures; it is written once for each node, after the last start

    def feed(self, number: int, line: str) -> None:
        """Read a line."""
        if "Root Cause (first observed failure)" in line:
            self._tables += 1
        if match := says("restarted", line):
            self._add_failure(number, match[0])
        elif self._ranks is _Ranks.ENDED and not says("launcher", line):
            self._ranks = _Ranks.RUN
            self._wrote_again = number

    def _add_failure(self, number: int, words: str) -> None:
        if self._failures and number <= self._last_failure + _ONE_FAILURE:
            return  # it is of the last one
        self._failures[words] = number
        self._last_failure = number
        self._ranks = _Ranks.ENDED

    def begins(self) -> list[int]:
        """Return the first line of each start after the first, once all is read."""
        failures = list(self._failures.values())
        # Each table is of a failure that no start followed: torchrun writes it when it gives up.
        restarted = failures[: max(0, len(failures) - self._tables)]
        return [number + 1 for number in restarted if number < self._wrote_again]
