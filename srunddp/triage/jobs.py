"""Which files are judged: those of one job, and of its newest start."""

import os
import re
import shlex
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any

from srunddp.errors import ConfigError
from srunddp.triage import logs
from srunddp.triage.collect import Evidence
from srunddp.triage.event import Event
from srunddp.triage.logs import Log, time_of
from srunddp.triage.rank_labels import node_of_name, ranks_of_names
from srunddp.triage.starts import SLACK, newest_start
from srunddp.util import slurm_job
from srunddp.util.slurm_job import JOB

_RUN = re.compile(r"(\d{1,18})\.(\w+)", re.ASCII)  # --log-dir's
# The second is torchrun's, where the job's number is its --rdzv-id.
_FOLDER = re.compile(r"(\d{3,18}(?:_\d{1,7})?)(?:_\w{8})?", re.ASCII)
_CERTAIN = re.compile(r"(?:slurm-|preflight\.|.+\.[oe])(?P<job>\d{1,18})", re.ASCII)
_NUMBER = re.compile(r"(?<![A-Za-z0-9])(?P<job>[1-9]\d{2,17})(?![A-Za-z0-9])", re.ASCII)
_NO_JOB = re.compile(r"(?:rank|task|proc|process|node|host|gpu|epoch|step|part|worker)[-_.]?$", re.IGNORECASE)
_TASK = re.compile(r"_(\d{1,7})(?!\d|_log\.)", re.ASCII)  # submitit has ranks there
_BESIDE = re.compile(r"\.(?:out|err|log|[oe]\d+)$|^preflight\.")
_TOGETHER = 3600.0  # seconds between the last lines of files of one job
_LISTED = 8
_ENDS = {  # states of a job: cause and kind
    "TIMEOUT": ("time-limit", "ending"),
    "OUT_OF_MEMORY": ("host-out-of-memory", "ending"),
    "NODE_FAIL": ("node-failure", "ending"),
    "PREEMPTED": ("preempted", "ending"),
    "CANCELLED": ("cancelled", "ending"),
    "FAILED": ("unknown", "secondary"),
    "COMPLETED": ("", ""),
}

Groups = dict[str, list[Log]]  # by the job's number; of an array's task ``4711_3``; empty where no name tells one


@dataclass
class JobLogs:
    """One job's logs.

    Attributes:
        job: its number, as in :data:`Groups`; start: the newest, from 0; logs: of that alone.
        others: the other jobs, the newest first, as ``--json`` has them.
        slurm: what Slurm says of the job; notes: what else is to be known; is_chosen: the user did not name the job.
    """

    job: str
    logs: list[Log]
    start: int
    others: list[dict[str, Any]]
    slurm: slurm_job.Job | None
    notes: list[str] = field(default_factory=list)
    is_chosen: bool = False

    def lines(self) -> list[str]:
        """What was judged where there was a choice, and the other jobs."""
        if not (self.is_chosen or self.others):
            return []
        names = ", ".join(log.name for log in self.logs[:3]) + (", …" if len(self.logs) > 3 else "")
        said = [f"judged: {_title(self.job)}, {_date(_newest(self.logs))}: {names}"]
        for other in self.others[:_LISTED]:
            hint = f" -> {other['command']}" if other["command"] else ""
            said.append(f"also in {other['where']}/: {_title(other['job'])}, {_date(other['last_unix_s'])}{hint}")
        left = len(self.others) - _LISTED
        return [*said, *([f"and {left} others"] if left > 0 else [])]

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
    if len(what) == 1 and not os.path.exists(what[0]) and (match := JOB.fullmatch(what[0])):
        return _of_number(match, log_dir)
    if not what:
        if not (groups := by_job(_pool(log_dir, "."))):
            hint = "srunddp triage slurm-4711.out, or --log-dir as the run had it"
            raise ConfigError(f"no log in {log_dir}, and no slurm-*.out here", expected="logs of a job", hint=hint)
        found = _choose(groups, groups, log_dir)
        found.is_chosen = True
        return found
    groups, files = by_job(logs.find(what)), {Path(each) for each in what if os.path.isfile(each)}
    named = dict.fromkeys(job for job, each in groups.items() for log in each if log.path in files)
    folders = [os.path.normpath(each) for each in what if Path(each) not in files]
    folder = folders[0] if len(folders) == 1 and not files else ""
    return _choose(groups, [job for job in named if job] or named or groups, folder, files)


def _of_number(match: re.Match[str], log_dir: str) -> JobLogs:
    what, step = match[0].partition(".")[0], match["step"]
    groups = _tasks(by_job(_pool(log_dir, "."), step), what)
    known = None if groups else slurm_job.job(what)
    if known:
        folders = dict.fromkeys(os.path.join(known.folder, name) for name in (log_dir, "logs"))
        pools = (by_job(_pool(each, known.folder), step) for each in folders)
        groups = next(filter(None, (_tasks(each, what, known.number) for each in pools)), {})
        # The controller tells the file of the job's output, whose name need not have the number.
        own = groups.setdefault(next(iter(groups), what), [])
        if os.path.isfile(known.output) and Path(known.output) not in [log.path for log in own]:
            own += logs.find([known.output])
    if not any(groups.values()):
        raise ConfigError(
            f"no logs of job {what} in {log_dir}{f' and {known.folder}' if known else ', and none here'}",
            expected=f"a folder {match['number']}.STEP, slurm-{what}.out or NAME-{what}.out",
            hint="name the files, or --log-dir as the run had it",
        )
    return _choose(groups, groups, log_dir)


def _tasks(groups: Groups, *numbers: str) -> Groups:
    """The job, and the tasks of an array."""
    return {job: each for job, each in groups.items() if job in numbers or job.partition("_")[0] in numbers}


def _pool(log_dir: str, folder: str) -> list[Log]:
    """The logs of ``--log-dir``, and those beside it whose names tell a job's number."""
    beside = [log for log in logs.of_folder(folder, deep=False) if _BESIDE.search(log.name) and _of_name(log.name)[1]]
    return list({log.path: log for log in [*logs.of_folder(log_dir), *beside]}.values())


def by_job(found: Sequence[Log], step: str | None = None) -> Groups:
    """By the numbers that names of folders and files tell.

    Args:
        step: the one whose folder counts, ``0`` of ``4711.0``; None for all.
    """
    runs = [[match for each in _folders(log) if (match := _RUN.fullmatch(each.name))] for log in found]
    found = [log for log, run in zip(found, runs, strict=True) if not (step and run and run[0][2] != step)]
    ranks = ranks_of_names([log.name for log in found])
    zero = {folder for log in found for folder in log.path.parents if folder.name == "0"}
    named = [_of_log(log, ranks.get(log.name), zero) for log in found]
    # An array has no file without a task: beside one the numbers are ranks.
    whole = {(before, job) for before, job, task in named if not task}
    groups: Groups = {}
    for log, (before, job, task) in zip(found, named, strict=True):
        groups.setdefault(f"{job}_{task}" if task and (before, job) not in whole else job, []).append(log)
    numbers = [job for job in groups if job]
    if len(numbers) == 1 and "" in groups and abs(_newest(groups[""]) - _newest(groups[numbers[0]])) <= _TOGETHER:
        return {numbers[0]: list(found)}
    return groups


def _folders(log: Log) -> Sequence[Path]:
    """Those above it, up to the one that was named."""
    return log.path.parents[: len(PurePath(log.name).parts)]


def _of_log(log: Log, rank: int | None, zero: Collection[Path]) -> tuple[str, str, str]:
    """What is before the job's number, the number, and that of an array's task; empty where there is none."""
    folders = _folders(log)
    if run := next(filter(None, (_RUN.fullmatch(each.name) for each in folders)), None):
        return "", run[1], ""
    of_name = _of_name(log.path.name, rank)
    # Folders beside a folder 0 are of ranks.
    of_folder = (_FOLDER.fullmatch(each.name) for each in folders if each.with_name("0") not in zero)
    if not of_name[1] and (match := next(filter(None, of_folder), None)):
        return "", match[1], ""
    return of_name


def _of_name(name: str, rank: int | None = None) -> tuple[str, str, str]:
    numbers = [match] if (match := _CERTAIN.match(name)) else list(_NUMBER.finditer(name))
    numbers = [each for each in numbers if int(each["job"]) != rank and not _NO_JOB.search(name, 0, each.start("job"))]
    if node_of_name(name) or not numbers:
        return "", "", ""
    chosen = max(numbers, key=lambda each: int(each["job"]))
    task = _TASK.match(name, chosen.end())
    return name[: chosen.start("job")], chosen["job"], task[1] if task else ""


def _choose(groups: Groups, wanted: Collection[str], log_dir: str, files: Collection[Path] = ()) -> JobLogs:
    """The newest of the wanted ones.

    Args:
        log_dir: where the others' numbers are found; files: which the user named.
    """
    job = max(wanted, key=lambda each: (int(_newest(groups[each])), *map(int, filter(None, each.split("_")))))
    own = [*groups[job], *(log for log in groups.get("", ()) if job and log.path in files)]
    known = slurm_job.job(job) if job else None
    number = known.number if known else job  # an array's task has a number of its own, as --log-dir's folder has
    own += groups.get(number, ()) if number != job else ()
    known = known if known and _is_of(known, own) else None
    kept, start, note = newest_start(own, known.started if known else None)
    notes = [note] if note else []
    notes += [f"job {job} still runs"] if known and known.state in slurm_job.RUNNING else []
    rest = {each: found for each, found in groups.items() if each not in (job, number)}
    rest = {each: [log for log in found if log not in own] for each, found in rest.items()}
    others = [_other(each, found, log_dir) for each, found in rest.items() if found]
    return JobLogs(job, kept, start, sorted(others, key=lambda each: -each["last_unix_s"]), known, notes)


def _is_of(known: slurm_job.Job, found: Sequence[Log]) -> bool:
    """Whether this is the job that wrote them, by its times, and not another cluster's of the same number."""
    ended = None if known.state in slurm_job.RUNNING else known.ended
    return known.started is not None and known.started - SLACK <= _newest(found) <= (ended or time.time()) + SLACK


def _other(job: str, found: Sequence[Log], log_dir: str) -> dict[str, Any]:
    words = [str(log.path) for log in found]
    if job and log_dir:
        words = [*([] if log_dir == "logs" else [f"--log-dir={log_dir}"]), job]
    command = shlex.join(["srunddp", "triage", *words]) if len(words) <= _LISTED else None
    where = str(_folders(found[0])[-1])
    return {"job": job or None, "where": where, "last_unix_s": _newest(found), "command": command}


def _title(job: str) -> str:
    return f"job {job}" if job else "files without a job's number"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _newest(found: Sequence[Log]) -> float:
    return max(log.mtime for log in found)


def add_state(evidence: Evidence, job: JobLogs) -> None:
    """What Slurm says of the end, as one more event."""
    known = job.slurm
    if not known or known.state not in _ENDS:
        return
    file = len(evidence.names)
    evidence.names.append("Slurm")
    if known.state == "COMPLETED":
        evidence.finished[file] = 1
        evidence.well.add(file)
        return
    text = f"Slurm: job {job.job} ended as {known.state}, exit code {known.exit_code}"
    cause, kind = _ENDS[known.state]
    event = Event(cause, kind, kind == "ending" and cause != "cancelled", file, 1, text, ours=True)
    event.time = time_of(datetime.fromtimestamp(known.ended).isoformat(" ")) if known.ended else None
    evidence.events.append(event)
