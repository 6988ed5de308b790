"""What is staged: the environment, the project, folders of data."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from srunddp.errors import ConfigError
from srunddp.util.filesystem import FolderIdentity, mark


@dataclass(frozen=True)
class Item:
    """A folder that ranks need.

    Attributes:
        role: ``env``, ``project`` or ``data``.
        path: absolute, as users write it: links on the way to it are kept.
        mark: by which a node is asked whether it sees it.
        apart: patterns of what is not packed, for :func:`srunddp.stage.pack.pack`.
    """

    role: str
    path: str
    mark: FolderIdentity
    apart: tuple[str, ...]


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
    items = [Item(role, path, mark(path), ()) for role, path in places if path]
    for item in items:
        _check(item, [other.path for other in items])
    aside = (*exclude, *_aside(home, env)) if project else ()
    return [replace(item, apart=aside) if item.role == "project" else item for item in items]


def _check(item: Item, paths: list[str]) -> None:
    if not item.mark["content"] or item.path == "/":
        found = f"{item.path}: no folder that can be read"
        raise ConfigError(found, expected="a folder that this node sees", hint="correct the path")
    if paths.count(item.path) > 1:
        raise ConfigError(f"{item.path} is named twice", expected="each folder once", hint="remove one of the two")
    for name in ("bin/python", "bin/srunddp") if item.role == "env" else ():
        if not os.path.exists(os.path.join(item.path, name)):
            raise ConfigError(
                f"{item.path} has no {name}",
                expected="an environment with srunddp in it",
                hint="make one with srunddp stage build",
            )


def require_whole(item: Item) -> None:
    """Of an environment that is to be copied: that srunddp is in it, and not installed as editable.

    Raises:
        ConfigError: it is not.
    """
    if item.role == "env" and not glob.glob(f"{glob.escape(item.path)}/lib/python*/site-packages/srunddp/__init__.py"):
        raise ConfigError(
            f"{item.path} has srunddp somewhere else, as pip install -e leaves it",
            expected="an environment that is whole",
            hint="make one with srunddp stage build",
        )


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
    links = [f"/proc/{process}/fd/{number}" for process in ("self", os.getppid()) for number in (1, 2)]
    found = []
    for link in links:
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))
    return [path for path in found if path.startswith("/")]


def absolute(path: str) -> str:
    """The path as users write it: a link on the way to the working directory is kept, as the shell keeps it."""
    logical = os.path.normpath(os.path.join(os.environ.get("PWD", ""), path))
    with contextlib.suppress(OSError):
        if logical.startswith("/") and os.path.samefile(logical, path):
            return "/" + logical.lstrip("/")
    return os.path.abspath(path)
