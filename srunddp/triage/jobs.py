"""Which files are judged: those of one job, and of its newest start."""

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
from srunddp.triage.logs import Log, time_of
from srunddp.triage.rank_labels import node_of_name, ranks_of_names
from srunddp.triage.starts import SLACK, newest_start
from srunddp.util import slurm_command as slurm_job

# --log-dir's, and others; torchrun's has eight letters after its --rdzv-id.
_FOLDER = re.compile(r"(\d{1,18})\.(?P<step>\d{1,9})|(\d{3,18}(?:_\d{1,7})?)(?:_\w{8})?", re.ASCII)
_CERTAIN = re.compile(r"(?:slurm-|preflight\.|.+\.[oe])(?P<job>\d{1,18})", re.ASCII)
_NUMBER = re.compile(r"(?<![A-Za-z0-9])(?P<job>[1-9]\d{2,17})(?![A-Za-z0-9])", re.ASCII)
_NO_JOB = re.compile(r"(?:rank|task|proc|process|node|host|gpu|epoch|step|part|worker)[-_.]?$", re.IGNORECASE)
_TASK = re.compile(r"_(\d{1,7})(?!\d|_log\.)", re.ASCII)  # submitit has a rank before _log
_BESIDE = re.compile(r"\.(?:out|err|log|[oe]\d+)$|^preflight\.")
_TOGETHER = 3600.0  # seconds between the last lines of files of one job
_LISTED = 8
_CAUSES = {
    "TIMEOUT": "time-limit", "OUT_OF_MEMORY": "host-out-of-memory", "NODE_FAIL": "node-failure",
    "PREEMPTED": "preempted", "CANCELLED": "cancelled", "FAILED": "unknown",
}  # fmt: skip

Groups = dict[str, list[Log]]  # by the job's number; of an array's task ``4711_3``; empty where no name tells one


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
    slurm: slurm_job.Job | None
    notes: list[str]

    def lines(self) -> list[str]:
        """What was judged, and the other jobs."""
        said = [f"judged: {_title(self.job)}, {_date(_newest(self.logs))}"]
        for each in self.others[:_LISTED]:
            hint = f" -> {each['command']}" if each["command"] else ""
            said.append(f"also in {each['folder']}/: {_title(each['job'])}, {_date(each['last_unix_s'])}{hint}")
        left = len(self.others) - _LISTED
        return [one_line(line) for line in (*said, *([f"and {left} others"] if left > 0 else []))]

    def record(self) -> dict[str, Any]:
        """For ``--json``."""
        files = [str(log.path) for log in self.logs]
        return {"job": self.job or None, "start": self.start, "files": files, "other_jobs": self.others}


def find(what: Sequence[str], log_dir: str) -> JobLogs:
    """The newest start of the job that is meant.

    Args:
        what: a job's number, ``4711``, ``4711.0`` or ``4711_3``; or files and folders; nothing for the newest job.
        log_dir: where jobs are looked for, beside the working directory.

    Raises:
        ConfigError: there is nothing to read.
    """
    match = slurm_job.JOB.fullmatch(what[0]) if len(what) == 1 and not os.path.exists(what[0]) else None
    if what and not match:
        groups, files = by_job(logs.find(what)), {Path(each) for each in what if os.path.isfile(each)}
        named = {job for job, each in groups.items() for log in each if log.path in files}
        folders = [os.path.normpath(each) for each in what if Path(each) not in files]
        return _choose(groups, named - {""} or named or groups, folders[0] if len(folders) == 1 else None, files)
    groups = _of_number(match, log_dir) if match else by_job(_pool(log_dir, "."))
    if not groups:
        found = f"no logs{f' of job {what[0]}' if match else ''} in {log_dir}, and none here"
        hint = "name the files, or --log-dir as the run had it"
        raise ConfigError(found, expected="a folder JOB.STEP, slurm-JOB.out or NAME-JOB.out", hint=hint)
    return _choose(groups, groups, log_dir)


def _of_number(match: re.Match[str], log_dir: str) -> Groups:
    what = match[0].partition(".")[0]
    known = slurm_job.job(what) if match["task"] else None  # which has a number of its own
    numbers = (what, known.number if known else what)
    groups = _tasks(_pool(log_dir, "."), match["step"], *numbers)
    if not groups:  # of very many files the pool has those of newer jobs
        own = [log for each in Path(log_dir).glob(f"{what}*") for log in logs.of_folder(each)]
        groups = _tasks(own, match["step"], *numbers)
    if groups or not (known := known or slurm_job.job(what)):
        return {what: [log for each in groups.values() for log in each]} if groups and match["task"] else groups
    for folder in (os.path.join(known.folder, log_dir), os.path.join(known.folder, "logs")):
        groups = groups or _tasks(_pool(folder, known.folder), match["step"], what, known.number)
    if os.path.isfile(known.output):  # its name need not have the number
        group = groups.setdefault(next(iter(groups), what), [])
        group += logs.find([known.output]) if Path(known.output) not in [log.path for log in group] else []
    return groups


def _tasks(found: Sequence[Log], step: str | None, *numbers: str) -> Groups:
    """The job, or the tasks of an array, without other steps' folders."""
    found = [log for log in found if not (step and (own := _folder(log)) and own["step"] not in (None, step))]
    groups = by_job(found)
    return {job: each for job, each in groups.items() if job in numbers or job.partition("_")[0] in numbers}


def _pool(log_dir: str, folder: str) -> list[Log]:
    """The logs of ``--log-dir``, and those beside it whose names tell a job's number."""
    beside = [log for log in logs.of_folder(folder, deep=False) if _BESIDE.search(log.name) and _of_name(log.name)[1]]
    return list({log.path: log for log in [*logs.of_folder(log_dir), *beside]}.values())


def by_job(found: Sequence[Log]) -> Groups:
    """By the numbers that names of folders and files tell."""
    ranks = ranks_of_names([log.name for log in found])
    named = [_of_log(log, ranks.get(log.name)) for log in found]
    # An array has no file without a task: beside one the numbers are ranks.
    whole = {(before, job) for before, job, task in named if not task}
    groups: Groups = {}
    for log, (before, job, task) in zip(found, named, strict=True):
        groups.setdefault(f"{job}_{task}" if task and (before, job) not in whole else job, []).append(log)
    numbers = [job for job in groups if job]
    if len(numbers) == 1 and "" in groups and abs(_newest(groups[""]) - _newest(groups[numbers[0]])) <= _TOGETHER:
        return {numbers[0]: list(found)}
    return groups


def _folder(log: Log) -> re.Match[str] | None:
    """The folder of a job, among those above it up to the one that the user named."""
    folders = log.path.parents[: len(PurePath(log.name).parts)]
    return next(filter(None, (_FOLDER.fullmatch(each.name) for each in folders)), None)


def _of_log(log: Log, rank: int | None) -> tuple[str, str, str]:
    """What is before the job's number, the number, and that of an array's task; empty where there is none."""
    found, folder = _of_name(log.path.name, rank), _folder(log)
    return ("", folder[1] or folder[3], "") if folder and not found[1] else found


def _of_name(name: str, rank: int | None = None) -> tuple[str, str, str]:
    numbers = [match] if (match := _CERTAIN.match(name)) else list(_NUMBER.finditer(name))
    numbers = [each for each in numbers if int(each["job"]) != rank and not _NO_JOB.search(name, 0, each.start("job"))]
    if node_of_name(name) or not numbers:
        return "", "", ""
    chosen = max(numbers, key=lambda each: int(each["job"]))
    task = _TASK.match(name, chosen.end())
    return name[: chosen.start("job")], chosen["job"], task[1] if task else ""


def _choose(groups: Groups, wanted: Collection[str], log_dir: str | None, files: Collection[Path] = ()) -> JobLogs:
    """The newest of the wanted ones.

    Args:
        log_dir: where the others' numbers are looked for; files: which the user named.
    """
    order = sorted(groups, key=lambda each: (int(_newest(groups[each])), *map(int, re.findall(r"\d+", each))))[::-1]
    job = next(each for each in order if each in wanted)
    known = slurm_job.job(job) if job else None
    number = known.number if known else job  # of an array's task, as --log-dir's folder has it
    own = groups[job] + [log for log in groups.get("", ()) if job and log.path in files]
    own += groups.get(number, []) if number != job else []
    known = known if known and _is_of(known, own) else None
    kept, start, notes = newest_start(own, known.started if known else None)
    notes += [f"job {job} still runs"] if known and known.state in slurm_job.RUNNING else []
    taken = {log.path for log in own}
    rest = {each: [log for log in groups[each] if log.path not in taken] for each in order}
    others = [_other(each, found, log_dir) for each, found in rest.items() if found]
    return JobLogs(job, start, kept, others, known, notes)


def _is_of(known: slurm_job.Job, found: Sequence[Log]) -> bool:
    """Whether this is the job that wrote them, by its times, and not another cluster's of the same number."""
    ended = None if known.state in slurm_job.RUNNING else known.ended
    return known.started is not None and known.started - SLACK <= _newest(found) <= (ended or time.time()) + SLACK


def _other(job: str, found: Sequence[Log], log_dir: str | None) -> dict[str, Any]:
    words = [str(log.path) for log in found]
    if job and log_dir and any(log.path.is_relative_to(log_dir) for log in found):
        words = [*([] if log_dir == "logs" else [f"--log-dir={log_dir}"]), job]
    command = shlex.join(["srunddp", "triage", *words]) if len(words) <= _LISTED else None
    folder = found[0].path.parents[len(PurePath(found[0].name).parts) - 1]  # that the user named
    return {"job": job or None, "folder": str(folder), "last_unix_s": _newest(found), "command": command}


def _title(job: str) -> str:
    return f"job {job}" if job else "files without a job's number"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _newest(found: Sequence[Log]) -> float:
    return max(log.mtime for log in found)


def add_state(evidence: Evidence, job: JobLogs) -> None:
    """Add how the job ended by Slurm's word, as one more file's only line."""
    known, file = job.slurm, len(evidence.names)
    if known and known.state == "COMPLETED":
        evidence.finished[file] = 1
        evidence.well.add(file)
    elif known and (cause := _CAUSES.get(known.state)):
        text = f"Slurm: job {job.job} ended as {known.state}, exit code {known.exit_code}"
        kind = "secondary" if cause == "unknown" else "ending"
        event = Event(cause, kind, cause not in ("unknown", "cancelled"), file, 1, text, ours=True)
        event.time = time_of(datetime.fromtimestamp(known.ended).isoformat(" ")) if known.ended else None
        evidence.events.append(event)
    else:
        return
    evidence.names.append("Slurm")  # where a file's name stands
