"""Which files are judged: those of one job, and of its newest start."""

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
from typing import Any

from srunddp.errors import ConfigError, one_line
from srunddp.triage import logs
from srunddp.triage.collect import Evidence
from srunddp.triage.event import Event
from srunddp.triage.logs import Log
from srunddp.triage.rank_labels import ranks_of_names
from srunddp.triage.signatures import says
from srunddp.util import slurm_command
from srunddp.util.hostlist import group_by_key

# --log-dir's, and torchrun's with eight letters after its --rdzv-id.
_FOLDER = re.compile(r"(\d{1,18}(?=\.)|\d{3,18}(?:_\d{1,7})?)(?:\.\d{1,9}|_\w{8})?", re.ASCII)
_NUMBER = re.compile(
    r"(?:(?<=^slurm-)|(?<=^preflight\.)|(?<=\.[oe]))\d{1,18}|"
    r"(?<![A-Za-z0-9])(?<!(?:rank|task|node|host|step)[-_.])[1-9]\d{2,17}(?![A-Za-z0-9]|.*\.rank\d)",
    re.ASCII,
)
_DATE = re.compile(r"20\d\d(?:[01]\d[0-3]\d)?", re.ASCII)  # or a year
_TASK = re.compile(r"_(\d{1,7})(?!\d|_log\.)", re.ASCII)  # submitit has a rank before _log
_BESIDE = re.compile(r"\.(?:out|err|log|[oe]\d+)$|^preflight\.")
_TOGETHER = 3600.0  # seconds between the last lines of files of one job
_SLACK = 300.0  # seconds by which Slurm's clock and that of the files may differ
_LISTED = 8
_SHORT = 3  # digits: such a number may be of the run, as a batch size, or a rank
_ATTEMPT = re.compile(r"(.*)attempt_(\d{1,9})/")  # torchrun's
_NEAR = 5  # lines of torchrun's about one failure
# The line before another start, in a file of --log-dir and elsewhere; and the first of a run, see
# srunddp/run/cli.py.
_AGAIN = re.compile(
    r"srunddp: (?:another start begins here|restart \d+ of \d+: all ranks start anew)"
)
_PLACED = re.compile(r"srunddp: \d+ ranks? on \d+ nodes?, launcher ")
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


@dataclass
class JobLogs:
    """One job's logs.

    Attributes:
        job: its number, as in :data:`Groups`; start: the newest, from 0; logs: of that alone.
        others: the other jobs, the newest first, as ``--json`` has them.
        slurm: what Slurm says of the job; notes: what else is to be known.
    """

    job: str
    start: int
    logs: list[Log]
    others: list[dict[str, Any]]
    slurm: slurm_command.Job | None
    notes: list[str]

    def lines(self) -> list[str]:
        """What was judged, and the other jobs."""
        said = [f"judged: {_title(self.job, _last(self.logs))}"]
        for each in self.others[:_LISTED]:
            if each["command"]:
                hint = f" -> {each['command']}"
            else:
                hint = ""
            said.append(
                f"also in {each['folder']}/: {_title(each['job'], each['last_unix_s'])}{hint}"
            )
        if len(self.others) > _LISTED:
            said.append(f"and {len(self.others) - _LISTED} others")
        return [one_line(line) for line in said]

    def record(self) -> dict[str, Any]:
        """For ``--json``."""
        files = [str(log.path) for log in self.logs]
        return {
            "job": self.job or None,
            "start": self.start,
            "files": files,
            "other_jobs": self.others,
        }

    def add_to(self, evidence: Evidence) -> None:
        """Add the notes, and how the job ended by Slurm's word, as one more file's only line."""
        evidence.notes += self.notes
        evidence.runs = bool(self.slurm and self.slurm.state in slurm_command.RUNNING)
        known = self.slurm
        file = len(evidence.names)
        evidence.names.append("Slurm")  # where a file's name stands
        if known and known.state == "COMPLETED":
            evidence.finished[file] = 1, 2
        elif known and (cause := _CAUSES.get(known.state)):
            text = f"Slurm: job {self.job} ended as {known.state}, exit code {known.exit_code}"
            kind = "secondary" if cause == "unknown" else "ending"
            sure = cause not in ("unknown", "cancelled")
            if known.ended:
                at = logs.time_of(datetime.fromtimestamp(known.ended).isoformat(" "))
            else:
                at = None
            evidence.events.append(Event(cause, kind, sure, file, 1, text, time=at, ours=True))


def find(what: Sequence[str], log_dir: str) -> JobLogs:
    """The newest start of the job that is meant; a ConfigError where there is nothing to read.

    ``what``: a job's number, ``4711``, ``4711.0`` or ``4711_3``; or files and folders; nothing for
    the newest job. ``log_dir``: where jobs are looked for, beside the working directory.
    """
    if len(what) == 1 and not os.path.exists(what[0]):
        match = slurm_command.JOB.fullmatch(what[0])
    else:
        match = None
    if what and not match:
        groups = by_job(logs.find(what))
        files = {Path(each) for each in what if os.path.isfile(each)}
        named = {job for job, each in groups.items() for log in each if log.path in files}
        return _choose(groups, named - {""} or named or groups, files=files)
    if match:
        groups = _of_number(match, log_dir)
    else:
        groups = by_job(_pool(log_dir, "."))
    if not groups:
        found = f"no logs{f' of job {what[0]}' if match else ''} in {log_dir}, and none here"
        raise ConfigError(
            found,
            expected="a folder JOB.STEP, slurm-JOB.out or NAME-JOB.out",
            hint="name the files, or --log-dir as the run had it",
        )
    return _choose(groups, groups, log_dir)


def _of_number(match: re.Match[str], log_dir: str) -> Groups:
    """The job, or the tasks of an array: from where jobs are looked for, else from where Slurm says
    that it ran.
    """
    job = match[0].partition(".")[0]
    known = _known(job)
    numbers = {job, known.number if known else job}  # a task has one of its own too
    another_step = re.compile(rf"(?:^|/){match['number']}\.(?!{match['step'] or '[0-9]+'}/)[0-9]+/")
    for folder in (".", *([known.folder] if known else [])):
        found = [
            log for log in _pool(log_dir, folder, job) if not another_step.search(str(log.path))
        ]
        groups = by_job(found)
        if own := {
            each: groups[each] for each in groups if numbers & {each, each.partition("_")[0]}
        }:
            if match["task"]:
                return {job: [log for each in own.values() for log in each]}
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
    own = [log for each in parent.glob(f"{job}.[0-9]*") for log in logs.of_folder(each)]
    beside = [
        log
        for log in logs.of_folder(folder, deep=False)
        if _BESIDE.search(log.name) and _number(log)[1]
    ]
    return list({log.path: log for log in (*own, *logs.of_folder(parent), *beside)}.values())


def by_job(found: Sequence[Log]) -> Groups:
    """By the numbers that names of folders and files tell."""
    ranks = ranks_of_names([log.name for log in found])
    named = [(*_number(log, ranks.get(log.name)), log) for log in found]
    # An array has no file without a task: beside one the numbers are ranks.
    whole = {name for name, _, task, _ in named if not task}
    groups = group_by_key(
        (f"{job}_{task}" if task and name not in whole else job, log)
        for name, job, task, log in named
    )
    local = [log for log in found if log.path.name.startswith("preflight.local.")]  # of no job
    nameless = [log for log in groups.get("", ()) if log not in local]
    if (
        len(groups) == 2
        and nameless
        and abs(_last(nameless) - _last(groups[max(groups)])) <= _TOGETHER
    ):
        return {max(groups): [log for log in found if log not in local]} | (
            {"": local} if local else {}
        )
    return groups


def _number(log: Log, rank: int | None = None) -> tuple[str, str, str]:
    """The file's name up to the job's number, or empty, the number, and that of an array's task; or
    the folder's.
    """
    name = log.path.name
    numbers = [each for each in _NUMBER.finditer(name) if int(each[0]) != rank]
    if not numbers:  # up to the folder that the user named
        folders = (
            _FOLDER.fullmatch(each.name)
            for each in log.path.parents[: len(PurePath(log.name).parts)]
        )
        return "", next((each[1] for each in folders if each), ""), ""
    job = max(
        numbers,
        key=lambda each: (not _DATE.fullmatch(each[0]), len(each[0]) > _SHORT, each.start()),
    )
    task = _TASK.match(name, job.end())
    return name[: job.end()], job[0], task[1] if task else ""


def _choose(
    groups: Groups, wanted: Collection[str], log_dir: str = "", files: Collection[Path] = ()
) -> JobLogs:
    """The newest of the wanted ones, with the files that the user named if they tell no number."""
    order = sorted(
        groups, key=lambda each: (int(_last(groups[each])), logs.natural(each)), reverse=True
    )
    job = next(each for each in order if each in wanted)
    known = _known(job) if job else None
    found = groups[job] + [log for log in groups.get("", ()) if log.path in files]
    # Of an array's task, as --log-dir's folder has it.
    if known:
        found += groups.get(known.number, [])
    own = {log.path: log for log in found}
    # Another cluster's job may have the same number.
    if (
        known
        and not (known.started or math.inf) - _SLACK
        <= _last(found)
        <= (known.ended or time.time()) + _SLACK
    ):
        known = None
    kept, start, notes = _newest_start(own.values(), known.started or 0.0 if known else 0.0)
    if known and known.state in slurm_command.RUNNING:
        notes.append(f"job {job} still runs")
    rest = {each: [log for log in groups[each] if log.path not in own] for each in order}
    return JobLogs(
        job,
        start,
        kept,
        [_other(each, left, log_dir) for each, left in rest.items() if left],
        known,
        notes,
    )


def _other(job: str, found: Sequence[Log], log_dir: str) -> dict[str, Any]:
    # That the user named.
    folder = os.path.normpath(str(found[0].path).removesuffix(found[0].name) or ".")
    # As the command reads it: where the user's own setting is another folder, this one is named.
    known = os.path.normpath(os.environ.get("SRUNDDP_LOG_DIR") or "logs")
    if known == (log_dir or folder):
        where = []
    else:
        where = [f"--log-dir={log_dir or folder}"]
    command = shlex.join(["srunddp", "triage", *where, job]) if job else None
    return {"job": job or None, "folder": folder, "last_unix_s": _last(found), "command": command}


def _title(job: str | None, last: float) -> str:
    named = f"job {job}" if job else "files without a job's number"
    return f"{named}, {time.strftime('%Y-%m-%d %H:%M', time.localtime(last))}"


def _last(found: Sequence[Log]) -> float:
    return max(log.mtime for log in found)


def _newest_start(found: Collection[Log], started: float) -> tuple[list[Log], int, list[str]]:
    """The logs of the newest start, as certain marks and Slurm tell it, its number from 0, and what
    is left out.
    """
    # The last of each agent.
    last = {match[1]: int(match[2]) for log in found if (match := _ATTEMPT.match(log.name))}
    kept = []
    earlier = []
    start = max(last.values(), default=0)
    for log in found:
        attempt = _ATTEMPT.match(log.name)
        is_earlier = (
            re.fullmatch(r"failure\.\d+\.json", log.path.name) or log.mtime < started - _SLACK
        )
        if is_earlier or (attempt and int(attempt[2]) < last[attempt[1]]):
            earlier.append(log.name)
            continue
        begins = _begins(log, started)
        log.begin = max(begins, default=0)
        start = max(start, len(begins))
        if begins:
            earlier.append(f"{log.name} before line {log.begin}")
        kept.append(log)
    names = ", ".join(earlier[:4]) + (f" and {len(earlier) - 4} more" if len(earlier) > 4 else "")
    # Where nothing is kept the user named what is of an earlier one.
    return (
        kept or list(found),
        start,
        [f"left out, of earlier starts: {names}"] if kept and earlier else [],
    )


def _begins(log: Log, started: float) -> list[int]:
    """The first line of each start after the first."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(started))
    begins = list[int]()
    # When the job was requeued; empty where another start has begun since.
    requeued = ""
    # torchrun's reports, and its tables, which are of the last start.
    failed = dict[str, int]()
    tables = 0
    spoke = 0
    for number, line in log.lines():
        if "Root Cause (first observed failure)" in line:
            tables += 1
        latest = max(failed.values(), default=0)
        if match := says("restarted", line):
            if not latest or number > latest + _NEAR:
                failed[match[0]] = number
        elif spoke < latest and not says("launcher", line):
            spoke = number
        is_next = _PLACED.match(line) or (
            requeued < stamp and not line.startswith(("srun: ", "slurmstepd"))
        )
        if match := says("requeued", line):
            requeued = match[1]
        elif _AGAIN.fullmatch(line) or (requeued and is_next):
            begins.append(number)
            requeued = ""
    again = list(failed.values())[: len(failed) - tables]
    return [*begins, *(number + 1 for number in again if spoke > number)]
