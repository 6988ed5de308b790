"""Brings folders to the nodes of a job that do not see them, once a node, says where they are, and removes them."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from srunddp.errors import ConfigError, UnavailableError
from srunddp.stage.archive import ArchiveInfo, fingerprint, pack
from srunddp.stage.slurm import Job, RemoteStep, alive, send
from srunddp.util.filesystem import mark
from srunddp.util.hostlist import fold

Say = Callable[[str], None]


@dataclass(frozen=True)
class Item:
    """A folder that ranks need, and where copies of it are.

    Attributes:
        role: ``env``, ``project`` or ``data``.
        path: absolute, as users write it: links on the way to it are kept.
        mark: by which a node is asked whether it sees it.
        leave_out: patterns of what is not packed, for :func:`srunddp.stage.archive.pack`.
        name: of a copy in a node's folder; empty where no node takes one.
        nodes: that take a copy; missing_on: those of them that have none yet.
    """

    role: str
    path: str
    mark: dict[str, str]
    leave_out: tuple[str, ...] = ()
    name: str = ""
    nodes: tuple[str, ...] = ()
    missing_on: tuple[str, ...] = ()


def collect(env: str | None, project: str | None, data: Sequence[str], exclude: Sequence[str]) -> list[Item]:
    """The folders; data in the project comes with it, and an environment there does not.

    Args:
        exclude: patterns of what is not packed with the project.

    Raises:
        ConfigError: one is no folder that can be read, or is given twice; the environment cannot run srunddp.
    """
    home = absolute(project) if project else ""
    further = [path for path in map(absolute, data) if not (home and path.startswith(home + "/"))]
    places = [("env", absolute(env) if env else ""), ("project", home), *(("data", path) for path in further)]
    items = [Item(role, path, mark(path)) for role, path in places if path]
    for item in items:
        _check(item, [other.path for other in items])
    aside = (*exclude, *_aside(home, env)) if project else ()
    return [replace(item, leave_out=aside) if item.role == "project" else item for item in items]


def _check(item: Item, paths: list[str]) -> None:
    if not item.mark["content"] or item.path == "/":
        found = f"{item.path}: no folder that can be read"
        raise ConfigError(found, expected="a folder that this node sees", hint="correct the path")
    if paths.count(item.path) > 1:
        raise ConfigError(f"{item.path} is named twice", expected="each folder once", hint="remove one of the two")
    for name in ("bin/python", "bin/srunddp") if item.role == "env" else ():
        if not os.path.exists(os.path.join(item.path, name)):
            found, hint = f"{item.path} has no {name}", "make one with srunddp stage build"
            raise ConfigError(found, expected="an environment with srunddp in it", hint=hint)


def require_whole(item: Item) -> None:
    """Of an environment that is to be copied: that srunddp is in it, and not installed as editable.

    Raises:
        ConfigError: it is not.
    """
    if item.role == "env" and not glob.glob(f"{glob.escape(item.path)}/lib/python*/site-packages/srunddp/__init__.py"):
        found = f"{item.path} has srunddp somewhere else, as pip install -e leaves it"
        raise ConfigError(found, expected="an environment that is whole", hint="make one with srunddp stage build")


def _aside(project: str, env: str | None) -> list[str]:
    """Patterns of what is in a project and is not its own: history, bytecode, environments, wheels, the job's log."""
    named = [absolute(env)] if env else []
    made = [entry.path for entry in os.scandir(project) if os.path.exists(os.path.join(entry, "pyvenv.cfg"))]
    beside = [f"{path}.{suffix}" for path in (*named, *made) for suffix in ("wheels", "log")]
    ours = [os.path.join(project, os.path.relpath(log, os.path.realpath(project))) for log in _logs()]
    paths = [path for path in (*named, *made, *beside, *ours) if path.startswith(project + "/")]
    return [".git", "__pycache__", *(glob.escape(path.removeprefix(project)) for path in paths)]


def _logs() -> list[str]:
    """Where this process and the shell that started it write to."""
    found = []
    for process in ("self", os.getppid()):
        for stream in (1, 2):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{process}/fd/{stream}"))
    return [path for path in found if path.startswith("/")]


def absolute(path: str) -> str:
    """The path as users write it: a link on the way to the working directory is kept, as the shell keeps it."""
    logical = os.path.normpath(os.path.join(os.environ.get("PWD", ""), path))
    with contextlib.suppress(OSError):
        if logical.startswith("/") and os.path.samefile(logical, path):
            return "/" + logical.lstrip("/")
    return os.path.abspath(path)


def push(job: Job, items: Sequence[Item], program: str, timeout: float, say: Say, *, everywhere: bool = False) -> str:
    """Stage items on all nodes of the job that do not see them.

    Args:
        program: srunddp's, for the case that no environment is among the items.
        timeout: seconds that a node may take for each step.
        say: takes lines for the user.
        everywhere: also where they are seen, but for the project: what ranks write in it is to be in one place.

    Returns:
        The path of the program that starts srunddp on each node, for srun.

    Raises:
        UnavailableError: a node cannot take the copies, or one of Slurm's commands fails.
        ConfigError: an item cannot be packed.
    """
    env = next((item.path for item in items if item.role == "env"), None)
    python = os.path.join(env, "bin", "python") if env else sys.executable
    interpreter, words = os.path.realpath(python), {"python": python, "srunddp": os.path.abspath(program)}
    with RemoteStep(job, interpreter, timeout) as step:
        copies = _copies(step, items, interpreter, everywhere)
        for copy in copies:
            if there := [node for node in copy.nodes if node not in copy.missing_on]:
                say(f"{fold(there)} staged before -> {os.path.join(job.folder, copy.name)}")
            if not copy.nodes:
                say(f"all nodes see {copy.path}")
            if copy.missing_on:
                _stage(step, copy, timeout, say)
        places = [{"role": copy.role, "path": copy.path, "name": copy.name, "nodes": copy.nodes} for copy in copies]
        step.ask(do="finish", places=places, cwd=absolute("."), **words)
    return os.path.join(job.folder, "srunddp")


def _copies(step: RemoteStep, items: Sequence[Item], interpreter: str, everywhere: bool) -> list[Item]:
    places = [{"path": item.path, "mark": item.mark} for item in items]
    found = step.ask(do="look", places=places, alive=alive(), python=interpreter)
    _check_interpreter(items, found, interpreter)
    copies = []
    for index, item in enumerate(items):
        anyway = everywhere and item.role != "project"
        nodes = tuple(sorted(node for node in found if anyway or found[node]["sees"][index] == "0"))
        if nodes:
            require_whole(item)
            name = f"{item.role}-{fingerprint(item.path, leave_out=item.leave_out)[:12]}"
            item = replace(item, name=name, nodes=nodes)
        copies.append(item)
    there = step.ask(do="has", names=[copy.name for copy in copies])
    return [
        replace(copy, missing_on=tuple(node for node in copy.nodes if there[node]["has"][index] == "0"))
        for index, copy in enumerate(copies)
    ]


def _check_interpreter(items: Sequence[Item], found: Mapping[str, Mapping[str, Any]], interpreter: str) -> None:
    """An environment of venv's has no Python of its own, and one of conda's has."""
    without = sorted(node for node in found if not found[node]["python"])
    if without and not any(interpreter.startswith(item.path + "/") for item in items):
        raise UnavailableError(
            f"{fold(without)}: no {interpreter}",
            expected="the Python that the environment was made with",
            hint="install it there, or make the environment with one that all nodes have",
        )


def _stage(step: RemoteStep, copy: Item, timeout: float, say: Say) -> None:
    times = [time.monotonic()]
    try:
        with tempfile.TemporaryDirectory(prefix="sdd-pack-") as folder:
            archive = os.path.join(folder, copy.name + ".tar")
            packed = pack(copy.path, archive, leave_out=copy.leave_out)
            times.append(time.monotonic())
            _check_room(step, copy, packed)
            send(step.job, archive, copy.missing_on, timeout)
            times.append(time.monotonic())
    except OSError as error:
        found = f"no archive can be written in {tempfile.gettempdir()}: {error.strerror}"
        raise UnavailableError(found, expected="room for it", hint="set TMPDIR to a folder with room") from None
    done = step.ask(do="unpack", name=copy.name, sha256=packed.sha256, links=packed.links)
    if without := [node for node in copy.missing_on if done[node]["seconds"] is None]:
        found = f"{fold(without)}: nothing has come to {step.job.folder}"
        raise UnavailableError(found, expected="the archive", hint="name a disk of each node's own with --dir")
    slowest = max(float(done[node]["seconds"]) for node in copy.missing_on)
    for node in copy.missing_on:
        say(f"{node} staged -> {os.path.join(step.job.folder, copy.name)}")
    say(
        f"{copy.role}: {packed.files} files, {packed.size >> 20} MiB, packed in {times[1] - times[0]:.1f} s, "
        f"sent in {times[2] - times[1]:.1f} s, unpacked in {slowest:.1f} s"
    )


def _check_room(step: RemoteStep, copy: Item, packed: ArchiveInfo) -> None:
    """Before anything is sent, the archive and its content have to fit."""
    needed = packed.archive_size + packed.size
    free = {node: answer["free"] for node, answer in step.ask(do="has", names=[]).items() if node in copy.missing_on}
    if short := sorted(node for node in free if free[node] < needed):
        verb, least = "has" if len(short) == 1 else "have", min(free[node] for node in short)
        raise UnavailableError(
            f"{fold(short)} {verb} {least >> 20} MiB free in {step.job.base}",
            expected=f"{needed >> 20} MiB for {copy.path} and its archive",
            hint="clear it, name another folder with --dir, or leave files out with --exclude",
        )


def clean(job: Job, timeout: float, say: Say) -> None:
    """Remove the job's folder from all nodes, but for files that were written there.

    Args:
        timeout: seconds that a node may take; say: takes a line for each node where files stay.

    Raises:
        UnavailableError: ranks still use it, or a node does not answer.
    """
    with RemoteStep(job, sys.executable, timeout) as step:
        answers = step.ask(do="clean")
        if all(answer["kept"] is None for answer in answers.values()):
            say(f"nothing was staged for job {job.number} in {job.base}")
        for node in sorted(answers):
            if kept := answers[node]["kept"]:
                files = "1 file" if kept == 1 else f"{kept} files"
                say(f"{node} keeps {files} written in a copy: {job.folder}")
        step.wait()
