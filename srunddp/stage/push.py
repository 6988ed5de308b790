"""Brings folders to the nodes of a job that do not see them, once a node, says where they are, and
removes them.
"""

import contextlib
import glob
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from srunddp.errors import ConfigError, UnavailableError
from srunddp.stage.archive import ArchiveInfo, pack
from srunddp.stage.messages import (
    Answer,
    Clean,
    Cleaned,
    CopyLookedFor,
    Finish,
    Look,
    Looked,
    LookForCopy,
    MarkedPlace,
    StagedPlace,
    Unpack,
    Unpacked,
)
from srunddp.stage.slurm import Job, RemoteStep, send
from srunddp.util.filesystem import mark
from srunddp.util.hostlist import fold

Say = Callable[[str], None]


@dataclass
class Item:
    """A folder that ranks need, and where copies of it are.

    Attributes:
        role: ``env``, ``project`` or ``data``.
        path: absolute, as users write it: links on the way to it are kept.
        leave_out: patterns of what is not packed, for :func:`srunddp.stage.archive.pack`.
        name: of a copy in a node's folder; empty where no node takes one.
        nodes: that work in a copy.
    """

    role: str
    path: str
    leave_out: Sequence[str] = ()
    name: str = ""
    nodes: Sequence[str] = ()


def collect(
    env: str | None, project: str | None, data: Sequence[str], exclude: Sequence[str]
) -> list[Item]:
    """Tell which folders are needed.

    Args:
        env: of the environment; None without one.
        project: whose data in it comes with it, and whose environments do not; None without one.
        data: further folders.
        exclude: patterns of what in the project is left out.

    Raises:
        ConfigError: one is no folder that can be read, or is given twice; the environment cannot
            run srunddp.
    """
    items = []
    if env:
        items.append(Item("env", absolute(env)))
    home = None
    if project:
        home = Item("project", absolute(project))
        items.append(home)
    for path in map(absolute, data):
        is_in_project = home is not None and path.startswith(f"{home.path}/")
        if not is_in_project:
            items.append(Item("data", path))
    for item in items:
        _check(item, [other.path for other in items])
    if home:
        home.leave_out = (*exclude, *_aside(home.path, env))
    return items


def _check(item: Item, paths: list[str]) -> None:
    if item.path == "/" or not (
        os.path.isdir(item.path) and os.access(item.path, os.R_OK | os.X_OK)
    ):
        raise ConfigError(
            f"{item.path}: no folder that can be read",
            expected="a folder that this node sees",
            hint="correct the path",
        )
    if paths.count(item.path) > 1:
        raise ConfigError(
            f"{item.path} is named twice", expected="each folder once", hint="remove one of the two"
        )
    if item.role == "env":
        for name in ("bin/python", "bin/srunddp"):
            if not os.path.exists(os.path.join(item.path, name)):
                raise ConfigError(
                    f"{item.path} has no {name}",
                    expected="an environment with srunddp in it",
                    hint="make one with srunddp stage build",
                )


def require_whole(item: Item) -> None:
    """See to it that an environment which is to be copied has srunddp in it.

    Raises:
        ConfigError: srunddp is somewhere else, because its installation is an editable one.
    """
    if item.role == "env" and not glob.glob(
        f"{glob.escape(item.path)}/lib/python*/site-packages/srunddp/__init__.py"
    ):
        raise ConfigError(
            f"{item.path} has srunddp somewhere else, as pip install -e leaves it",
            expected="an environment that is whole",
            hint="make one with srunddp stage build",
        )


def _aside(project: str, env: str | None) -> list[str]:
    """Return patterns of what is in a project and is not its own: history, bytecode, Slurm's logs,
    environments and their logs.
    """
    found = [
        entry.path
        for entry in os.scandir(project)
        if os.path.exists(os.path.join(entry, "pyvenv.cfg"))
    ]
    if env:
        found.append(absolute(env))
    inside = [path.removeprefix(project) for path in found if path.startswith(f"{project}/")]
    environments = [
        pattern for path in map(glob.escape, inside) for pattern in (path, f"{path}.log")
    ]
    # Bytecode and the job's log change with each run, and would give the copy another hash and so
    # another name. `stage build` writes ENV.log beside ENV.
    return [".git", "__pycache__", "/slurm-*.out", *environments]


def absolute(path: str) -> str:
    """Make a path absolute as users write it: a link on the way to the working directory is kept,
    as the shell keeps it.
    """
    logical = os.path.normpath(os.path.join(os.environ.get("PWD", ""), path))
    # PWD may be wrong, because any process can set it: it counts only if it leads to the same file.
    with contextlib.suppress(OSError):
        if logical.startswith("/") and os.path.samefile(logical, path):
            return "/" + logical.lstrip("/")
    return os.path.abspath(path)


def push(
    job: Job,
    items: Sequence[Item],
    program: str,
    timeout: float,
    say: Say,
    *,
    everywhere: bool = False,
) -> str:
    """Stage items on all nodes of the job that do not see them.

    Args:
        job: on whose nodes they are staged.
        items: by :func:`collect`; where their copies are is filled in.
        program: srunddp's, for the case that no environment is among the items.
        timeout: seconds that a node may take for each step.
        say: takes lines for the user.
        everywhere: also where they are seen, but for the project: what ranks write in it is to be
            in one place.

    Returns:
        The path of the program that starts srunddp on each node, for srun.

    Raises:
        UnavailableError: a node cannot take the copies, or one of Slurm's commands fails.
        ConfigError: an item cannot be packed.
    """
    env = next((item.path for item in items if item.role == "env"), None)
    start = (
        os.path.join(env, "bin", "python") if env else sys.executable,
        os.path.abspath(program),
    )
    # In a venv bin/python is a link, and it is the file behind it that a node must have.
    interpreter = os.path.realpath(start[0])
    with RemoteStep(job, interpreter, timeout) as step:
        looked_at = tuple(MarkedPlace(item.path, mark(item.path)) for item in items)
        found = step.ask(Look(looked_at, python=interpreter), Looked)
        _check_interpreter(items, found, interpreter)
        for index, item in enumerate(items):
            anyway = everywhere and item.role != "project"
            item.nodes = sorted(node for node in found if anyway or found[node].sees[index] == "0")
            if item.nodes:
                _stage(step, item, timeout, say)
            else:
                say(f"all nodes see {item.path}")
        places = tuple(
            StagedPlace(item.role, item.path, item.name, tuple(item.nodes)) for item in items
        )
        step.ask(Finish(places, cwd=absolute("."), start=start), Answer)
    return os.path.join(job.folder, "srunddp")


def _check_interpreter(
    items: Sequence[Item], found: Mapping[str, Looked], interpreter: str
) -> None:
    """See to it that each node has the interpreter. An environment of venv's has no Python of its
    own, and one of conda's has.

    Raises:
        UnavailableError: a node does not have it, and no item brings it.
    """
    without = sorted(node for node in found if not found[node].python)
    if without and not any(interpreter.startswith(item.path + "/") for item in items):
        raise UnavailableError(
            f"{fold(without)}: no {interpreter}",
            expected="the Python that the environment was made with",
            hint="install it there, or make the environment with one that all nodes have",
        )


def _stage(step: RemoteStep, item: Item, timeout: float, say: Say) -> None:
    """Bring an item to those of its nodes that have no copy of it from an earlier push."""
    require_whole(item)
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="sdd-pack-") as folder:
            packed = pack(item.path, f"{folder}/tar", leave_out=item.leave_out)
            item.name = f"{item.role}-{packed.sha256[:12]}"
            # sbcast keeps the file's name, by which the node looks for it. The name is that of the
            # content, so a changed folder never takes the place of a copy in which ranks still run.
            archive = shutil.move(f"{folder}/tar", f"{folder}/{item.name}.tar")
            sending = time.monotonic()
            if nodes := _without(step, item, os.path.getsize(archive) + packed.size, say):
                send(step.job, archive, nodes, timeout)
    except OSError as error:
        raise UnavailableError(
            f"no archive can be written in {tempfile.gettempdir()}: {error.strerror}",
            expected="room for it",
            hint="set TMPDIR to a folder with room",
        ) from None
    if nodes:
        seconds = f"packed in {sending - began:.1f} s, sent in {time.monotonic() - sending:.1f} s"
        _unpack(step, item, packed, nodes, seconds, say)


def _without(step: RemoteStep, item: Item, needed: int, say: Say) -> list[str]:
    """Return the nodes that have no copy of an item yet.

    Raises:
        UnavailableError: one of them has no room for the archive and its content; nothing has been
            sent yet.
    """
    answers = step.ask(LookForCopy(item.name), CopyLookedFor)
    nodes = [node for node in item.nodes if not answers[node].found]
    if there := [node for node in item.nodes if node not in nodes]:
        say(f"{fold(there)} staged before -> {step.job.folder}/{item.name}")
    if free := {node: answers[node].free for node in nodes if answers[node].free < needed}:
        verb = "has" if len(free) == 1 else "have"
        raise UnavailableError(
            (
                f"{fold([*free])} {verb} {min(free.values()) >> 20} MiB free in"
                f" {os.path.dirname(step.job.folder)}"
            ),
            expected=f"{needed >> 20} MiB for {item.path} and its archive",
            hint="clear it, name another folder with --dir, or leave files out with --exclude",
        )
    return nodes


def _unpack(
    step: RemoteStep, item: Item, packed: ArchiveInfo, nodes: Sequence[str], seconds: str, say: Say
) -> None:
    request = Unpack(item.name, sha256=packed.sha256, links=packed.links)
    seconds_of = {node: answer.seconds for node, answer in step.ask(request, Unpacked).items()}
    if without := [node for node in nodes if seconds_of[node] is None]:
        raise UnavailableError(
            f"{fold(without)}: nothing has come to {step.job.folder}",
            expected="the archive",
            hint="name a disk of each node's own with --dir",
        )
    for node in nodes:
        say(f"{node} staged -> {step.job.folder}/{item.name}")
    slowest = max(seconds_of[node] or 0.0 for node in nodes)
    say(
        f"{item.role}: {packed.files} files, {packed.size >> 20} MiB, {seconds}, unpacked in"
        f" {slowest:.1f} s"
    )


def clean(job: Job, timeout: float, say: Say) -> None:
    """Remove the job's folder from all nodes, but for files that were written there.

    Args:
        job: whose nodes have it.
        timeout: seconds that a node may take.
        say: is told of the files that stay.

    Raises:
        UnavailableError: ranks still use it, or a node does not answer within ``timeout`` seconds.
    """
    with RemoteStep(job, sys.executable, timeout) as step:
        answers = step.ask(Clean(), Cleaned)
        if all(answer.kept is None for answer in answers.values()):
            say(f"nothing was staged for job {job.number} in {os.path.dirname(job.folder)}")
        for node in sorted(answers):
            if kept := answers[node].kept:
                say(
                    f"{node} keeps {kept} {'file' if kept == 1 else 'files'} written in a copy:"
                    f" {job.folder}"
                )
