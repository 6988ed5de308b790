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
    """A folder that the ranks need, and the nodes that work in a copy of it.

    Attributes:
        role: What the folder contains: ``env``, ``project`` or ``data``.
        path: The folder's absolute path. Symbolic links in it are kept.
        leave_out: Patterns of what is not packed; see :func:`srunddp.stage.archive.pack`.
        name: The name of the copies in the job's folder; empty if no node needs a copy.
        nodes: The names of the nodes that work in a copy.
    """

    role: str
    path: str
    leave_out: Sequence[str] = ()
    name: str = ""
    nodes: Sequence[str] = ()


def collect(
    env: str | None, project: str | None, data: Sequence[str], exclude: Sequence[str]
) -> list[Item]:
    """Return the folders that the ranks need, without their nodes.

    Args:
        env: The environment's folder; None for none.
        project: The project's folder; None for none. Data folders inside it are packed with it,
            environments inside it are not.
        data: The folders with data.
        exclude: Patterns of what is not packed with the project.

    Raises:
        ConfigError: A path is not a readable folder or is given twice, or the environment cannot
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
    """Check that an environment contains srunddp itself, so that its copies do too. Any other item
    passes.

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
    """Return patterns of what is never packed with a project: Git's history, bytecode, Slurm's
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
    """Return a path as an absolute path, as the user would write it. Symbolic links on the way to
    the working directory are kept, as the shell keeps them in ``PWD``.
    """
    logical = os.path.normpath(os.path.join(os.environ.get("PWD", ""), path))
    # PWD may be wrong, because any process can set it. Use it only if it leads to the same file.
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
        job: The job. All its nodes need the items.
        items: The result of :func:`collect`. This function sets their ``name`` and ``nodes``.
        program: The path of the srunddp command. If no environment is staged, the nodes start this
            command with the Python of this process.
        timeout: The seconds that a node may take for each request.
        say: Takes lines for the user.
        everywhere: Whether nodes that see an item get a copy, too. The project is excepted, because
            all ranks should write into one folder.

    Returns:
        The path of the program that srun must run to start srunddp, the same on every node.

    Raises:
        UnavailableError: A node cannot take the copies, or one of Slurm's commands fails.
        ConfigError: An item cannot be packed.
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
        UnavailableError: A node has no interpreter, and no item brings it.
    """
    without = sorted(node for node in found if not found[node].python)
    if without and not any(interpreter.startswith(item.path + "/") for item in items):
        raise UnavailableError(
            f"{fold(without)}: no {interpreter}",
            expected="the Python that the environment was made with",
            hint="install it there, or make the environment with one that all nodes have",
        )


def _stage(step: RemoteStep, item: Item, timeout: float, say: Say) -> None:
    """Pack an item, and send and unpack the archive on those of the item's nodes that have no copy
    from an earlier push.

    Raises:
        ConfigError: The item cannot be packed.
        UnavailableError: The archive cannot be written, or a node cannot take it.
    """
    require_whole(item)
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="sdd-pack-") as folder:
            packed = pack(item.path, f"{folder}/tar", leave_out=item.leave_out)
            item.name = f"{item.role}-{packed.sha256[:12]}"
            # sbcast keeps the name of the archive, and the node finds the archive by this name. The
            # name depends on the content, so a changed folder never replaces a copy in which ranks
            # still run.
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
    """Return those of an item's nodes that have no copy of it yet. Tell the user which nodes have
    one.

    Args:
        step: The job step that answers requests.
        item: The item, whose name and nodes are set.
        needed: The number of bytes that a node needs for the archive and its content.
        say: Takes lines for the user.

    Raises:
        UnavailableError: A node without a copy has fewer free bytes. Nothing has been sent then.
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
        job: The job whose nodes have the folder.
        timeout: The seconds that a node may take.
        say: Takes lines for the user. There is one for each node that keeps files, or one if
            nothing was staged.

    Raises:
        UnavailableError: Ranks still use the folder, or a node does not answer within ``timeout``
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
