"""Finds the files of a run by a folder or a job id."""

import os
import re
from pathlib import Path

from srunddp.errors import ConfigError, file_errors
from srunddp.util.slurm_command import JOB, job

# Matches monitor.REQUEUES and monitor.REQUEUES.RESTARTS, such as monitor.2 and monitor.2.1.
_RESTART = re.compile(r"monitor\.(\d{1,9})(?:\.(\d{1,9}))?", re.ASCII)
_HINT = "name a run's folder such as logs/4711.0, or start the run with --monitor"
# The folder of one start, ``monitor.N``, and notes on what was chosen among several.
RunFolder = tuple[Path, tuple[str, ...]]
# How often Slurm has requeued the job, and how often --restarts has restarted the ranks since.
Start = tuple[int, int]


def start_of(folder: Path) -> Start | None:
    """Read from the name of a folder, ``monitor.N`` or ``monitor.N.G``, which start it holds.

    Returns:
        None for a folder with another name.
    """
    match = _RESTART.fullmatch(folder.absolute().name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def find(what: str, monitor_dir: str, restart: int | None) -> RunFolder:
    """Find the folder of the start that the user means.

    Args:
        what: A folder, or a job id: ``4711``, ``4711.0`` or ``4711_3``.
        monitor_dir: The folder in which a job's folder is searched.
        restart: The number of the start, as in ``monitor.N``; None for the last.

    Raises:
        ConfigError: There is no such folder, or it contains no run or several runs.
    """
    if os.path.isdir(what):
        return _below(Path(what), restart)
    if match := JOB.fullmatch(what):
        return _of_job(what, match, monitor_dir, restart)
    raise ConfigError(f"no folder {what}", expected="a run's folder or a job's number", hint=_HINT)


def _below(folder: Path, restart: int | None) -> RunFolder:
    if (own := start_of(folder)) is not None:
        if restart in (None, own[0]):
            return (folder, ())
        return _start(folder.absolute().parent, restart)
    if starts_of(folder):
        runs = [folder]
    else:
        runs = [each for each in _folders(folder) if starts_of(each)]
    if not runs:
        raise ConfigError(
            f"no run that was monitored in {folder}",
            expected="a folder monitor.0 in it",
            hint=_HINT,
        )
    if len(runs) > 1:
        raise ConfigError(
            f"{len(runs)} runs in {folder}", expected="one", hint=f"name one, as {runs[-1]}"
        )
    return _start(runs[0], restart)


def _folders(folder: Path) -> list[Path]:
    with file_errors(
        str(folder), expected="a folder that can be read", hint="ask whose run it is for the right"
    ):
        return sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_dir())


def starts_of(folder: Path) -> dict[Start, Path]:
    """List the folders of all starts of a run, each under the start that it holds."""
    return {start: each for each in _folders(folder) if (start := start_of(each)) is not None}


def _start(run: Path, restart: int | None, *notes: str) -> RunFolder:
    starts = starts_of(run)
    chosen = max((start for start in starts if restart in (None, start[0])), default=None)
    if chosen is None:
        numbers = ", ".join(map(str, sorted({number for number, _ in starts})))
        raise ConfigError(
            f"--restart {restart}: {run} has {numbers}",
            expected="one of these",
            hint="leave it out for the last",
        )
    label = starts[chosen].name.partition(".")[2]
    if restart is None and len(starts) > 1:
        notes += (
            f"{run} has {len(starts)} starts; this is the last, {label} (--restart N for another)",
        )
    return starts[chosen], notes


def _of_job(what: str, match: re.Match[str], monitor_dir: str, restart: int | None) -> RunFolder:
    number = match["number"]
    step = match["step"]
    # A task of an array is a job of its own. Its folder has the id of that job, which only Slurm
    # knows.
    if match["task"]:
        runs = []
    else:
        runs = _runs(Path(monitor_dir), number, step)
    folders = [Path(monitor_dir)]
    if not runs and (known := job(what.partition(".")[0])):
        number = known.number
        # A relative --monitor-dir is below the job's working directory. Path() ignores that
        # directory if --monitor-dir is absolute.
        folders = list(
            dict.fromkeys([*folders, Path(known.folder, monitor_dir), Path(known.folder, "logs")])
        )
        runs = next(filter(None, (_runs(folder, number, step) for folder in folders)), [])
    if not runs:
        raise ConfigError(
            f"no files of job {what} in {', '.join(map(str, folders))}",
            expected=f"a folder {number}.{step or 'STEP'}/monitor.0, which --monitor writes",
            hint="run it with --monitor; or name the folder, or --monitor-dir as the run had it",
        )
    listed = ", ".join(each.name for each in runs)
    if len(runs) > 1:
        several = [f"job {number} has the runs {listed}; this is the newest, {runs[-1].name}"]
    else:
        several = []
    return _start(runs[-1], restart, *several)


def _runs(folder: Path, number: str, step: str | None) -> list[Path]:
    """List the folders of the job's monitored steps, the newest last."""
    # A folder's name lacks the step if the run was not started by srun, but in the batch script.
    wanted = re.compile(rf"{number}\.({step})" if step else rf"{number}(?:\.([0-9]{{1,9}}))?")
    if folder.is_dir():
        folders = _folders(folder)
    else:
        folders = []
    found = [
        # A folder without a step sorts before all steps.
        (int(match[1] or -1), each)
        for each in folders
        if (match := wanted.fullmatch(each.name))
    ]
    return [each for _, each in sorted(found) if starts_of(each)]
