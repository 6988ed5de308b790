"""What is staged: the environment, the project, folders of data."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from srunddp.errors import ConfigError
from srunddp.site.staging.node import mark


@dataclass(frozen=True)
class Item:
    """A folder that ranks need.

    Attributes:
        role: ``env``, ``project`` or ``data``.
        path: absolute, as users write it: links on the way to it are kept.
        mark: see :func:`srunddp.site.staging.node.mark`.
        apart: relative names in it that are not packed.
    """

    role: str
    path: str
    mark: str
    apart: tuple[str, ...]


def collect(env: str | None, project: str | None, data: Sequence[str], exclude: Sequence[str]) -> list[Item]:
    """The folders; what lies in one of them and is another of them is packed once.

    Args:
        exclude: names, with wildcards, that are not packed with the project.

    Raises:
        ConfigError: one is no folder, or given twice; the environment cannot run srunddp.
    """
    named = [("env", env), ("project", project), *(("data", folder) for folder in data)]
    places = [(role, absolute(path)) for role, path in named if path]
    paths = [path for _, path in places]
    for path in paths:
        if not os.path.isdir(path) or path == "/":
            raise ConfigError(f"{path}: no folder", expected="a folder that this node sees", cure="correct the path")
        if paths.count(path) > 1:
            raise ConfigError(f"{path} is named twice", expected="each folder once", cure="remove one of the two")
    if env:
        _check_environment(absolute(env))
    return [
        Item(role, path, mark(path), (*_inside(path, paths), *(_aside(path, exclude) if role == "project" else ())))
        for role, path in places
    ]


def _aside(project: str, exclude: Sequence[str]) -> list[str]:
    """What is not packed with a project: what the user names, its history, other environments and their wheels."""
    environments = [
        entry.name
        for entry in os.scandir(project)
        if entry.is_dir(follow_symlinks=False) and os.path.exists(os.path.join(entry, "pyvenv.cfg"))
    ]
    names = [*environments, *(f"{name}.{made}" for name in environments for made in ("wheels", "log"))]
    return [*exclude, ".git", *map(glob.escape, names)]


def absolute(path: str) -> str:
    """The path as users write it: a link on the way to the working directory is kept, as the shell keeps it."""
    logical = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if logical == os.path.normpath(logical) and os.path.samefile(logical, "."):
            return os.path.normpath(os.path.join(logical, path))
    return os.path.abspath(path)


def _inside(path: str, paths: Iterable[str]) -> list[str]:
    return [glob.escape(os.path.relpath(other, path)) for other in paths if other.startswith(path + "/")]


def _check_environment(env: str) -> None:
    for name in ("bin/python", "bin/srunddp"):
        if not os.path.exists(os.path.join(env, name)):
            raise ConfigError(
                f"{env} has no {name}",
                expected="an environment with srunddp in it",
                cure="make one with srunddp stage build",
            )
