"""Copies folders to those nodes of a job that do not see them, one copy per node, and removes the
copies.
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
    """A folder that the ranks need, and which nodes get copies of it.

    Attributes:
        role: ``env``, ``project`` or ``data``.
        path: the absolute path as the user writes it: links in it are kept.
        leave_out: patterns of what is not packed; see :func:`srunddp.stage.archive.pack`.
        name: the name of its copies in the job's folder; empty if no node gets one.
        nodes: the nodes that work in a copy.
    """

    role: str
    path: str
    leave_out: Sequence[str] = ()
    name: str = ""
    nodes: Sequence[str] = ()


def collect(
    env: str | None, project: str | None, data: Sequence[str], exclude: Sequence[str]
) -> list[Item]:
    """List the folders that the ranks need.

    Args:
        env: the environment's folder; None for none.
        project: the project's folder; None for none. Data folders in it are packed with it,
            environments in it are not.
        data: the folders with data.
        exclude: patterns of what is not packed with the project.

    Raises:
        ConfigError: a path is not a readable folder or is given twice, or the environment cannot
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
    """Check that an environment to be copied contains srunddp itself.

    Raises:
        ConfigError: srunddp is outside the environment, as an editable installation leaves it.
    """
    if item.role == "env" and not glob.glob(
        f"{glob.escape(item.path)}/lib/python*/site-packages/srunddp/__init__.py"
    ):
        raise ConfigError(
            f"{item.path} has srunddp somewhere else, as pip install -e leaves it",
            expected="a complete environment",
            hint="make one with srunddp stage build",
        )


def _aside(project: str, env: str | None) -> list[str]:
    """Return patterns of what is in a project but not part of it: Git's history, bytecode, Slurm's
    logs, and environments with their logs.
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
    # Bytecode and the job's log change with each run, which would change the copy's hash and
    # therefore its name. `stage build` writes ENV.log beside ENV.
    return [".git", "__pycache__", "/slurm-*.out", *environments]


def absolute(path: str) -> str:
    """Make a path absolute as the user would write it. A link on the way to the working directory
    is kept, as the shell keeps it in PWD.
    """
    logical = os.path.normpath(os.path.join(os.environ.get("PWD", ""), path))
    # PWD may be wrong, because any process can set it. Use it only if it gives the same file.
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
    """Stage the items on all nodes of the job that do not see them.

    Args:
        job: the job, on all of whose nodes the items are needed.
        items: the result of :func:`collect`. This function sets their ``name`` and ``nodes``.
        program: the path of the srunddp command. If no environment is staged, the nodes start it
            with this Python.
        timeout: the seconds that a node may take for each request.
        say: takes lines for the user.
        everywhere: whether nodes that see an item get a copy too; not of the project, because all
            ranks should write into one folder.

    Returns:
        The path of the program that srun must run to start srunddp, the same on every node.

    Raises:
        UnavailableError: a node cannot take the copies, or one of Slurm's commands fails.
        ConfigError: an item cannot be packed.
    """
    env = next((item.path for item in items if item.role == "env"), None)
    start = (
        os.path.join(env, "bin", "python") if env else sys.executable,
        os.path.abspath(program),
    )
    # In a venv, bin/python is a link. The nodes need its target.
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
    """Check that each node has the interpreter or gets it with an item. A conda environment has its
    own Python; a venv does not.

    Raises:
        UnavailableError: a node has no interpreter, and no item brings it.
    """
    without = sorted(node for node in found if not found[node].python)
    if without and not any(interpreter.startswith(item.path + "/") for item in items):
        raise UnavailableError(
            f"{fold(without)}: no {interpreter}",
            expected="the Python that the environment was made with",
            hint="install it there, or make the environment with one that all nodes have",
        )


def _stage(step: RemoteStep, item: Item, timeout: float, say: Say) -> None:
    """Pack an item, and copy it to those of its nodes that have no copy from an earlier push."""
    require_whole(item)
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="sdd-pack-") as folder:
            packed = pack(item.path, f"{folder}/tar", leave_out=item.leave_out)
            item.name = f"{item.role}-{packed.sha256[:12]}"
            # sbcast keeps the file's name, by which the node finds it. The name depends on the
            # content, so a changed folder never replaces a copy in which ranks still run.
            archive = shutil.move(f"{folder}/tar", f"{folder}/{item.name}.tar")
            sending = time.monotonic()
            if nodes := _without(step, item, os.path.getsize(archive) + packed.size, say):
                send(step.job, archive, nodes, timeout)
    except OSError as error:
        raise UnavailableError(
            f"no archive can be written in {tempfile.gettempdir()}: {error.strerror}",
            expected="free space for it",
            hint="set TMPDIR to a folder with free space",
        ) from None
    if nodes:
        seconds = f"packed in {sending - began:.1f} s, sent in {time.monotonic() - sending:.1f} s"
        _unpack(step, item, packed, nodes, seconds, say)


def _without(step: RemoteStep, item: Item, needed: int, say: Say) -> list[str]:
    """Return the nodes that have no copy of an item yet.

    Raises:
        UnavailableError: one of them has no room for the archive and its content. Nothing has been
            sent then.
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
            f"{fold(without)}: no archive has arrived in {step.job.folder}",
            expected="the archive",
            hint="name a folder on each node's own disk with --dir",
        )
    for node in nodes:
        say(f"{node} staged -> {step.job.folder}/{item.name}")
    slowest = max(seconds_of[node] or 0.0 for node in nodes)
    say(
        f"{item.role}: {packed.files} files, {packed.size >> 20} MiB, {seconds}, unpacked in"
        f" {slowest:.1f} s"
    )


def clean(job: Job, timeout: float, say: Say) -> None:
    """Remove the job's folder from all nodes, except files that were written in its copies.

    Args:
        job: the job whose nodes have the folder.
        timeout: the seconds that a node may take.
        say: takes lines for the user: on nodes that keep files, or if nothing was staged.

    Raises:
        UnavailableError: ranks still use the folder, or a node does not answer within ``timeout``
            seconds.
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
