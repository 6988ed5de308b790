"""Which files are judged: those of one job, and of its newest start, see :mod:`.starts`."""

import functools
import math
import os
import re
import shlex
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from srunddp.errors import ConfigError, one_line
from srunddp.triage import logs
from srunddp.triage.collect import Evidence, GoodEnd
from srunddp.triage.event import Event
from srunddp.triage.logs import Log
from srunddp.triage.rank_labels import ranks_of_names
from srunddp.triage.signatures import Kind
from srunddp.triage.starts import SLACK, newest_start
from srunddp.util import slurm_command
from srunddp.util.hostlist import group_by_key

# --log-dir's, and torchrun's with eight letters after its --rdzv-id.
_FOLDER = re.compile(r"(\d{1,18}(?=\.)|\d{3,18}(?:_\d{1,7})?)(?:\.\d{1,9}|_\w{8})?", re.ASCII)
# slurm-7.out, preflight.7.json and NAME.o7 tell a job by their form, whatever its digits. Elsewhere
# a number has at least three and stands alone: not rank-100.log, nor dgx-102.rank1.log.
_NUMBER = re.compile(
    r"(?:(?<=^slurm-)|(?<=^preflight\.)|(?<=\.[oe]))\d{1,18}|"
    r"(?<![A-Za-z0-9])(?<!(?:rank|task|node|host|step)[-_.])[1-9]\d{2,17}(?![A-Za-z0-9]|.*\.rank\d)",
    re.ASCII,
)
_DATE = re.compile(r"20\d\d(?:[01]\d[0-3]\d)?", re.ASCII)  # or a year
_TASK = re.compile(r"_(\d{1,7})(?!\d|_log\.)", re.ASCII)  # submitit has a rank before _log
_BESIDE = re.compile(r"\.(?:out|err|log|[oe]\d+)$|^preflight\.")
_TOGETHER = 3600.0  # seconds between the last lines of files of one job
_LISTED = 8
_SHORT = 3  # digits: such a number may be of the run, as a batch size, or a rank
# The cause of an end by Slurm's state of the job.
_CAUSES = {
    "TIMEOUT": "time-limit",
    "OUT_OF_MEMORY": "host-out-of-memory",
    "NODE_FAIL": "node-failure",
    "PREEMPTED": "preempted",
    "CANCELLED": "cancelled",
    "FAILED": "unknown",
    "DEADLINE": "time-limit",
    "BOOT_FAIL": "node-failure",
}

_known = functools.cache(slurm_command.job)  # asked once
# By the job's number; of an array's task ``4711_3``; empty where no name tells one.
Groups = dict[str, list[Log]]


@dataclass(frozen=True)
class OtherJob:
    """A job that has logs beside those that are judged.

    Attributes:
        job: its number, as in :data:`Groups`.
        folder: where its logs are.
        last: when the last of them was written, in seconds since the epoch.
        command: that judges it; None where no name tells its number.
    """

    job: str
    folder: str
    last: float
    command: str | None

    def line(self) -> str:
        """Write the job in a line for a terminal."""
        said = f"also in {self.folder}/: {_title(self.job, self.last)}"
        return f"{said} -> {self.command}" if self.command else said

    def record(self) -> dict[str, str | float | None]:
        """Return the job for ``--json``."""
        return {
            "job": self.job or None,
            "folder": self.folder,
            "last_unix_s": self.last,
            "command": self.command,
        }


@dataclass
class JobLogs:
    """One job's logs.

    Attributes:
        job: its number, as in :data:`Groups`.
        start: the newest one, from 0.
        logs: of that start alone.
        others: the other jobs, the newest first.
        slurm: what Slurm says of the job.
        notes: what else is to be known.
    """

    job: str
    start: int
    logs: list[Log]
    others: list[OtherJob]
    slurm: slurm_command.Job | None
    notes: list[str]

    def lines(self) -> list[str]:
        """Write what was judged, and the other jobs, for a terminal."""
        said = [f"judged: {_title(self.job, _last(self.logs))}"]
        said += [each.line() for each in self.others[:_LISTED]]
        if len(self.others) > _LISTED:
            said.append(f"and {len(self.others) - _LISTED} others")
        return [one_line(line) for line in said]

    def record(self) -> dict[str, Any]:
        """Return what was judged, and the other jobs, for ``--json``."""
        return {
            "job": self.job or None,
            "start": self.start,
            "files": [str(log.path) for log in self.logs],
            "other_jobs": [each.record() for each in self.others],
        }

    def add_to(self, evidence: Evidence) -> None:
        """Add the notes, and how the job ended by Slurm's word, as one more file's only line."""
        evidence.notes += self.notes
        if not self.slurm:
            return
        evidence.runs = self.slurm.state in slurm_command.RUNNING
        file = len(evidence.names)
        evidence.names.append("Slurm")  # where a file's name stands
        if self.slurm.state == "COMPLETED":
            evidence.finished[file] = GoodEnd(1, 2)
        elif self.slurm.state in _CAUSES:
            evidence.events.append(self._end(self.slurm, file))

    def _end(self, known: slurm_command.Job, file: int) -> Event:
        """How the job ended by Slurm's word; of a failure it says no cause."""
        cause = _CAUSES[known.state]
        text = f"Slurm: job {self.job} ended as {known.state}, exit code {known.exit_code}"
        kind = Kind.SECONDARY if cause == "unknown" else Kind.ENDING
        sure = cause not in ("unknown", "cancelled")
        at = None
        if known.ended:
            at = logs.time_of(datetime.fromtimestamp(known.ended).isoformat(" "))
        return Event(cause, kind, sure, file, 1, text, time=at, ours=True)


def find(what: Sequence[str], log_dir: str) -> JobLogs:
    """Find the newest start of the job that is meant.

    Args:
        what: a job's number, ``4711``, ``4711.0`` or ``4711_3``; or files and folders; nothing for
            the newest job.
        log_dir: where jobs are looked for, beside the working directory.

    Raises:
        ConfigError: there is nothing to read.
    """
    match = None
    # A file or folder that is called 4711 is what the user named.
    if len(what) == 1 and not os.path.exists(what[0]):
        match = slurm_command.JOB.fullmatch(what[0])
    if match:
        groups = _of_number(match, log_dir)
    elif what:
        return _of_paths(what)
    else:
        groups = by_job(_pool(log_dir, "."))
    if not groups:
        of_job = f" of job {what[0]}" if match else ""
        raise ConfigError(
            f"no logs{of_job} in {log_dir}, and none here",
            expected="a folder JOB.STEP, slurm-JOB.out or NAME-JOB.out",
            hint="name the files, or --log-dir as the run had it",
        )
    return _choose(groups, groups, log_dir)


def _of_paths(what: Sequence[str]) -> JobLogs:
    """The newest job in files and folders; where files are named, the newest of theirs."""
    groups = by_job(logs.find(what))
    files = {Path(each) for each in what if os.path.isfile(each)}
    named = {job for job, found in groups.items() if any(log.path in files for log in found)}
    wanted = named - {""} or named or groups
    return _choose(groups, wanted, files=files)


def _of_number(match: re.Match[str], log_dir: str) -> Groups:
    """The job, or the tasks of an array: from where jobs are looked for, else from where Slurm says
    that it ran.
    """
    job = match[0].partition(".")[0]
    known = _known(job)
    numbers = {job}
    folders = ["."]
    if known:
        numbers.add(known.number)  # a task of an array has one of its own too
        folders.append(known.folder)
    step = match["step"] or "[0-9]+"
    # Of job 4711, step 0: not 4711.1/. Files without a step in their names may be of any.
    another_step = re.compile(rf"(?:^|/){match['number']}\.(?!{step}/)[0-9]+/")
    for folder in folders:
        pool = _pool(log_dir, folder, job)
        groups = by_job([log for log in pool if not another_step.search(str(log.path))])
        own = {
            each: found
            for each, found in groups.items()
            if each in numbers or each.partition("_")[0] in numbers
        }
        if own and match["task"]:
            return {job: [log for found in own.values() for log in found]}
        if own:
            return own
    # The name of its output need not have the number.
    if known and os.path.isfile(known.output):
        return {job: logs.find([known.output])}
    return {}


def _pool(log_dir: str, folder: str, job: str = "") -> list[Log]:
    """The logs of ``--log-dir``, of this job even where there are too many, and those beside it
    that tell a job.
    """
    parent = Path(folder, log_dir)
    # Searched for by the job's number, as the search of the whole folder below stops at MOST_FILES.
    own = [log for each in parent.glob(f"{job}.[0-9]*") for log in logs.of_folder(each)]
    beside = [
        log
        for log in logs.of_folder(folder, deep=False)
        if _BESIDE.search(log.name) and _named_job(log).job
    ]
    by_path = {log.path: log for log in (*own, *logs.of_folder(parent), *beside)}
    return list(by_path.values())


def by_job(found: Sequence[Log]) -> Groups:
    """Group logs by the job whose number the names of files and folders tell.

    Files without a number belong to the one job that has one, if there is no other and they are of
    about the same time.
    """
    ranks = ranks_of_names([log.name for log in found])
    named = [(_named_job(log, ranks.get(log.name)), log) for log in found]
    # An array has no file without a task: beside one the numbers are ranks.
    without_task = {each.name for each, _ in named if not each.task}
    groups = group_by_key((each.key(without_task), log) for each, log in named)
    local = [log for log in found if log.path.name.startswith("preflight.local.")]  # of no job
    nameless = [log for log in groups.get("", ()) if log not in local]
    # One job, and files that name none: they are the job's if they are of about the same time.
    if len(groups) == 2 and nameless:
        # The empty text sorts before any number.
        job = max(groups)
        if abs(_last(nameless) - _last(groups[job])) <= _TOGETHER:
            together = {job: [log for log in found if log not in local]}
            return together | {"": local} if local else together
    return groups


class _NamedJob(NamedTuple):
    """The numbers in a file's name, or in that of its folder.

    Attributes:
        name: of the file, up to the job's number; empty where the folder tells it.
        job: the number; empty where there is none.
        task: that of an array's task; empty where there is none.
    """

    name: str
    job: str
    task: str

    def key(self, without_task: Collection[str]) -> str:
        """Return the job as in :data:`Groups`.

        Args:
            without_task: Names that no task follows.
        """
        if self.task and self.name not in without_task:
            return f"{self.job}_{self.task}"
        return self.job


def _named_job(log: Log, rank: int | None = None) -> _NamedJob:
    """Read the numbers in a log's name; one that is its rank's is no job's."""
    name = log.path.name
    numbers = [each for each in _NUMBER.finditer(name) if int(each[0]) != rank]
    if not numbers:
        return _NamedJob("", _job_of_folder(log), "")
    job = max(numbers, key=_likeness)
    task = _TASK.match(name, job.end())
    return _NamedJob(name[: job.end()], job[0], task[1] if task else "")


def _likeness(number: re.Match[str]) -> tuple[bool, bool, int]:
    """How much a number in a name looks like a job's: no date, not short, far behind."""
    return not _DATE.fullmatch(number[0]), len(number[0]) > _SHORT, number.start()


def _job_of_folder(log: Log) -> str:
    """The job's number by the nearest folder that tells one, up to that which the user named."""
    for folder in log.path.parents[: len(PurePath(log.name).parts)]:
        if match := _FOLDER.fullmatch(folder.name):
            return str(match[1])
    return ""


def _choose(
    groups: Groups, wanted: Collection[str], log_dir: str = "", files: Collection[Path] = ()
) -> JobLogs:
    """The newest of the wanted jobs, with the files that the user named if they tell no number."""

    def age(job: str) -> tuple[int, list[Any]]:
        return int(_last(groups[job])), logs.natural(job)  # whole seconds: of a tie the number

    order = sorted(groups, key=age, reverse=True)
    job = next(each for each in order if each in wanted)
    found = groups[job] + [log for log in groups.get("", ()) if log.path in files]
    known = _known(job) if job else None
    if known:
        found += groups.get(known.number, [])  # of an array's task, as --log-dir's folder has it
        if not _is_of(known, _last(found)):
            known = None
    own = {log.path: log for log in found}
    started = known.started if known else None
    newest = newest_start(own.values(), started or 0.0)
    notes = newest.notes()
    if known and known.state in slurm_command.RUNNING:
        notes.append(f"job {job} still runs")
    others = []
    for each in order:
        left = [log for log in groups[each] if log.path not in own]
        if left:
            others.append(_other(each, left, log_dir))
    return JobLogs(job, newest.number, newest.logs, others, known, notes)


def _is_of(known: slurm_command.Job, last: float) -> bool:
    """Whether logs, by the time of their last line, are of the job that Slurm knows: another
    cluster's may have the same number.
    """
    begin = (known.started or math.inf) - SLACK
    end = (known.ended or time.time()) + SLACK
    return begin <= last <= end


def _other(job: str, found: Sequence[Log], log_dir: str) -> OtherJob:
    # The folder that the user named.
    folder = os.path.normpath(str(found[0].path).removesuffix(found[0].name) or ".")
    command = None
    if job:
        # The command reads the user's setting: where that is another folder, this one is named.
        default = os.path.normpath(os.environ.get("SRUNDDP_LOG_DIR") or "logs")
        where = log_dir or folder
        option = [] if where == default else [f"--log-dir={where}"]
        command = shlex.join(["srunddp", "triage", *option, job])
    return OtherJob(job, folder, _last(found), command)


def _title(job: str | None, last: float) -> str:
    named = f"job {job}" if job else "files without a job's number"
    return f"{named}, {time.strftime('%Y-%m-%d %H:%M', time.localtime(last))}"


def _last(found: Sequence[Log]) -> float:
    return max(log.mtime for log in found)
