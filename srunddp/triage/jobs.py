"""Chooses the files to read: those of one job, and of its newest start (see :mod:`.starts`)."""

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
from srunddp.triage.collect import Authority, Evidence, GoodEnd
from srunddp.triage.event import Event
from srunddp.triage.logs import Log
from srunddp.triage.rank_labels import ranks_of_names
from srunddp.triage.signatures import Kind
from srunddp.triage.starts import SLACK, newest_start
from srunddp.util import slurm_command
from srunddp.util.hostlist import group_by_key

# Matches folder names with a job's number: JOB.STEP in --log-dir, and torchrun's folder, whose name
# is its --rdzv-id (often the job's number), "_" and eight letters.
_FOLDER = re.compile(r"(\d{1,18}(?=\.)|\d{3,18}(?:_\d{1,7})?)(?:\.\d{1,9}|_\w{8})?", re.ASCII)
# The form of slurm-7.out, preflight.7.json and NAME.o7 marks the number as a job's, however short
# it is. In other names a job's number has at least three digits and stands alone: rank-100.log and
# dgx-102.rank1.log contain no job's number.
_NUMBER = re.compile(
    r"(?:(?<=^slurm-)|(?<=^preflight\.)|(?<=\.[oe]))\d{1,18}|"
    r"(?<![A-Za-z0-9])(?<!(?:rank|task|node|host|step)[-_.])[1-9]\d{2,17}(?![A-Za-z0-9]|.*\.rank\d)",
    re.ASCII,
)
_DATE = re.compile(r"20\d\d(?:[01]\d[0-3]\d)?", re.ASCII)  # YYYYMMDD, or a year
# The number of an array's task, behind the job's number. A number before _log is not one: there
# submitit writes a rank.
_TASK = re.compile(r"_(\d{1,7})(?!\d|_log\.)", re.ASCII)
_BESIDE = re.compile(r"\.(?:out|err|log|[oe]\d+)$|^preflight\.")
# Seconds by which the last lines of files of one job may be apart.
_TOGETHER = 3600.0
_LISTED = 8
_SHORT = 3  # digits; a number this short may also be a rank or, for example, a batch size
# The cause that stands for each final state of a job in Slurm.
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

_known = functools.cache(slurm_command.job)  # asks Slurm only once for each job
# Logs by the number of their job (4711_3 for an array's task); "" stands for logs that name none.
Groups = dict[str, list[Log]]


@dataclass(frozen=True)
class OtherJob:
    """A job whose logs are found beside those of the diagnosed job.

    Attributes:
        job: The job's number, as in :data:`Groups`; empty if it is unknown.
        folder: The folder in which the job's logs are.
        last: When the newest of the logs was last written, in seconds since the epoch.
        command: The command that diagnoses this job; None if the job's number is unknown.
    """

    job: str
    folder: str
    last: float
    command: str | None

    def line(self) -> str:
        """Describe the job and the command that diagnoses it in one line, for a terminal."""
        said = f"also in {self.folder}/: {_title(self.job, self.last)}"
        return f"{said} -> {self.command}" if self.command else said

    def record(self) -> dict[str, str | float | None]:
        """Return the fields of this job for the ``--json`` output."""
        return {
            "job": self.job or None,
            "folder": self.folder,
            "last_unix_s": self.last,
            "command": self.command,
        }


@dataclass
class JobLogs:
    """The logs of one job.

    Attributes:
        job: The job's number, as in :data:`Groups`; empty if it is unknown.
        start: The number of the job's newest start, from 0.
        logs: The logs of the newest start only.
        others: The other jobs found, newest first.
        slurm: What Slurm knows about the job; None if nothing.
        notes: Sentences for the user: what was left out, and whether the job still runs.
    """

    job: str
    start: int
    logs: list[Log]
    others: list[OtherJob]
    slurm: slurm_command.Job | None
    notes: list[str]

    def lines(self) -> list[str]:
        """Return lines for a terminal: the diagnosed job, and the first eight of the other jobs."""
        said = [f"diagnosed: {_title(self.job, _last(self.logs))}"]
        said += [each.line() for each in self.others[:_LISTED]]
        if len(self.others) > _LISTED:
            said.append(f"and {len(self.others) - _LISTED} others")
        return [one_line(line) for line in said]

    def record(self) -> dict[str, Any]:
        """Return the diagnosed job, its files and the other jobs, for the ``--json`` output."""
        return {
            "job": self.job or None,
            "start": self.start,
            "files": [str(log.path) for log in self.logs],
            "other_jobs": [each.record() for each in self.others],
        }

    def add_to(self, evidence: Evidence) -> None:
        """Add the notes to the evidence, and what Slurm says about the job.

        How the job ended according to Slurm is added as if it was the only line of a log.
        """
        evidence.notes += self.notes
        if not self.slurm:
            return
        evidence.runs = self.slurm.state in slurm_command.RUNNING
        file = len(evidence.names)
        evidence.names.append("Slurm")  # shown where other events have a file's name
        if self.slurm.state == "COMPLETED":
            evidence.finished[file] = GoodEnd(1, Authority.EXIT_CODE)
        elif self.slurm.state in _CAUSES:
            evidence.events.append(self._end(self.slurm, file))

    def _end(self, known: slurm_command.Job, file: int) -> Event:
        """Make the event of the job's end according to Slurm; a state of FAILED gives no cause."""
        cause = _CAUSES[known.state]
        text = f"Slurm: job {self.job} ended as {known.state}, exit code {known.exit_code}"
        kind = Kind.SECONDARY if cause == "unknown" else Kind.ENDING
        sure = cause not in ("unknown", "cancelled")
        at = None
        if known.ended:
            at = logs.time_of(datetime.fromtimestamp(known.ended).isoformat(" "))
        return Event(cause, kind, sure, file, 1, text, time=at, ours=True)


def find(what: Sequence[str], log_dir: str) -> JobLogs:
    """Find the newest start of the job that the user means.

    Args:
        what: A job's number (``4711``, ``4711.0`` or ``4711_3``), or files and folders; empty for
            the newest job.
        log_dir: Where logs of jobs are searched, in addition to the working directory.

    Raises:
        ConfigError: There is nothing to read.
    """
    match = None
    # If a file or folder is called 4711, the user means the file or folder and not the job.
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
    """Choose the newest job in files and folders; if files are named, only their jobs count."""
    groups = by_job(logs.find(what))
    files = {Path(each) for each in what if os.path.isfile(each)}
    named = {job for job, found in groups.items() if any(log.path in files for log in found)}
    wanted = named - {""} or named or groups
    return _choose(groups, wanted, files=files)


def _of_number(match: re.Match[str], log_dir: str) -> Groups:
    """Find the logs of a job, or of the tasks of an array.

    The logs are searched in ``log_dir`` and in the working directory, then in the same places below
    the job's working directory, if Slurm knows it.

    Args:
        match: The match of the job's number, which may also name a step or a task of an array.
        log_dir: Where logs of jobs are searched.

    Returns:
        The logs by job; empty if there are none.
    """
    job = match[0].partition(".")[0]
    known = _known(job)
    numbers = {job}
    folders = ["."]
    if known:
        numbers.add(known.number)  # Slurm also gives each task of an array a number like a job's
        folders.append(known.folder)
    step = match["step"] or "[0-9]+"
    # For job 4711 with step 0, leave out 4711.1/. A file whose path names no step may belong to any
    # step.
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
    # The output file that Slurm knows need not have the job's number in its name.
    if known and os.path.isfile(known.output):
        return {job: logs.find([known.output])}
    return {}


def _pool(log_dir: str, folder: str, job: str = "") -> list[Log]:
    """List the logs in ``log_dir``, and the logs beside it whose names contain a job's number.

    Args:
        log_dir: The value of ``--log-dir``.
        folder: The folder that ``log_dir`` is relative to, and in which logs beside it are listed.
        job: The number of a job whose logs are listed even if there are more files than the limit;
            empty for no such job.
    """
    parent = Path(folder, log_dir)
    # Glob for the job's number, because of_folder(parent) lists no more than MOST_FILES.
    own = [log for each in parent.glob(f"{job}.[0-9]*") for log in logs.of_folder(each)]
    beside = [
        log
        for log in logs.of_folder(folder, deep=False)
        if _BESIDE.search(log.name) and _named_job(log).job
    ]
    by_path = {log.path: log for log in (*own, *logs.of_folder(parent), *beside)}
    return list(by_path.values())


def by_job(found: Sequence[Log]) -> Groups:
    """Group logs by the job number that the names of their files or folders contain.

    If there is exactly one job, files without a number count as the job's files, provided that the
    newest of them was written at about the same time as the newest of the job.
    """
    ranks = ranks_of_names([log.name for log in found])
    named = [(_named_job(log, ranks.get(log.name)), log) for log in found]
    # An array's files all have a task. If one file of a name has none, the numbers in the others
    # are ranks.
    without_task = {each.name for each, _ in named if not each.task}
    groups = group_by_key((each.key(without_task), log) for each, log in named)
    # srunddp check writes preflight.local.* outside of jobs, so these files belong to no job.
    local = [log for log in found if log.path.name.startswith("preflight.local.")]
    nameless = [log for log in groups.get("", ()) if log not in local]
    # There is exactly one job, and some files name no job. They belong to that job if they were
    # last written at about the same time.
    if len(groups) == 2 and nameless:
        # max() is the job, because the empty text sorts before any number.
        job = max(groups)
        if abs(_last(nameless) - _last(groups[job])) <= _TOGETHER:
            together = {job: [log for log in found if log not in local]}
            return together | {"": local} if local else together
    return groups


class _NamedJob(NamedTuple):
    """The numbers in a file's name, or in that of its folder.

    Attributes:
        name: The file's name up to the job's number; empty if the folder has the number.
        job: The job's number; empty if there is none.
        task: The number of an array's task; empty if there is none.
    """

    name: str
    job: str
    task: str

    def key(self, without_task: Collection[str]) -> str:
        """Return the key of :data:`Groups`: ``JOB``, or ``JOB_TASK`` for a task of an array.

        Args:
            without_task: Values of ``name`` after which a number is a rank, not a task.
        """
        if self.task and self.name not in without_task:
            return f"{self.job}_{self.task}"
        return self.job


def _named_job(log: Log, rank: int | None = None) -> _NamedJob:
    """Read the numbers in a log's name; a number equal to the log's rank is not taken for a job."""
    name = log.path.name
    numbers = [each for each in _NUMBER.finditer(name) if int(each[0]) != rank]
    if not numbers:
        return _NamedJob("", _job_of_folder(log), "")
    job = max(numbers, key=_likeness)
    task = _TASK.match(name, job.end())
    return _NamedJob(name[: job.end()], job[0], task[1] if task else "")


def _likeness(number: re.Match[str]) -> tuple[bool, bool, int]:
    """Return a sort key for numbers in a name, the greatest for the most likely number of a job: it
    is no date, is not short, and stands late in the name.
    """
    return not _DATE.fullmatch(number[0]), len(number[0]) > _SHORT, number.start()


def _job_of_folder(log: Log) -> str:
    """Return the job's number in the name of the nearest folder above a log; empty if there is
    none. Only the searched folder and the folders in it count.
    """
    for folder in log.path.parents[: len(PurePath(log.name).parts)]:
        if match := _FOLDER.fullmatch(folder.name):
            return str(match[1])
    return ""


def _choose(
    groups: Groups, wanted: Collection[str], log_dir: str = "", files: Collection[Path] = ()
) -> JobLogs:
    """Choose the newest of several jobs, and its newest start.

    Args:
        groups: The logs by job.
        wanted: The jobs to choose from.
        log_dir: The folder for the commands that diagnose the other jobs; empty for the folder in
            which the logs of each are.
        files: Files that the user has named. If no job's number is in the name of one, it counts as
            a file of the chosen job.
    """

    def age(job: str) -> tuple[int, list[Any]]:
        # Compare whole seconds. If two jobs are equally new, the higher number counts as newer.
        return int(_last(groups[job])), logs.natural(job)

    order = sorted(groups, key=age, reverse=True)
    job = next(each for each in order if each in wanted)
    found = groups[job] + [log for log in groups.get("", ()) if log.path in files]
    known = _known(job) if job else None
    if known:
        # In --log-dir, the folder of an array's task has the number that Slurm gives the task.
        found += groups.get(known.number, [])
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
    """Tell whether logs fit the times of the job that Slurm knows. Otherwise they belong to a job
    with the same number on another cluster.

    Args:
        known: The job as Slurm knows it.
        last: When the logs were last written, in seconds since the epoch.
    """
    begin = (known.started or math.inf) - SLACK
    end = (known.ended or time.time()) + SLACK
    return begin <= last <= end


def _other(job: str, found: Sequence[Log], log_dir: str) -> OtherJob:
    # Remove the log's name, which is its path below the searched folder: the rest is that folder.
    folder = os.path.normpath(str(found[0].path).removesuffix(found[0].name) or ".")
    command = None
    if job:
        # The command reads SRUNDDP_LOG_DIR too, so name the folder only if it differs from that.
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
