"""A run in what `srunddp stage push` has left in a folder on this node: it is read, held, and entered."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from srunddp.errors import ConfigError, Scope
from srunddp.stage.paths import ROLES, PathMapping, StagedPaths

VARIABLE = "SRUNDDP_STAGED"
_PLACES, _LOCK = "places.json", "lock"
_LARGEST = 1 << 20
_AGAIN = "run `srunddp stage push` again, and start the ranks by the path that it prints"


def read(environ: Mapping[str, str]) -> StagedPaths:
    """Read what was staged, from the folder that ``SRUNDDP_STAGED`` names.

    Raises:
        ConfigError: it is not set; the folder or its file is not there, is broken, or is not this user's alone.
    """
    folder = environ.get(VARIABLE, "")
    if not folder.startswith("/"):
        found = f"--staged, and {VARIABLE} is {folder!r}" if folder else f"--staged, and {VARIABLE} is not set"
        hint = "start the ranks by the path that `srunddp stage push` printed"
        raise ConfigError(found, expected="ranks that a staged srunddp started", hint=hint, scope=Scope.NODE)
    with _entered(folder) as inside:
        text = _content(folder, inside)
    return _staged(folder, text)


def lock(folder: str) -> int:
    """Keep the folder from being removed, as long as this process lives or one that it forks.

    Returns:
        The descriptor that holds it, which processes inherit; above 2, also where standard output is closed.

    Raises:
        ConfigError: it is being removed.
    """
    with _entered(folder) as inside, _errors(os.path.join(folder, _LOCK)):
        opened = os.open(_LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=inside)
        lock = fcntl.fcntl(opened, fcntl.F_DUPFD, 3)
        os.close(opened)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise _wrong(folder, "is being removed", "a staged folder that stays during the run") from None
    if not os.fstat(lock).st_nlink:
        os.close(lock)
        raise _wrong(folder, "has been removed", "a staged folder that stays during the run")
    return lock


def activate(staged: StagedPaths) -> str:
    """Let this process, and what it starts, work with what is here: working directory, modules, variables.

    Returns:
        The working directory that the step was to have.

    Raises:
        ConfigError: its copy is not there.
    """
    before = ""
    with contextlib.suppress(FileNotFoundError):  # it has been deleted, which is said when the script is looked for
        before = os.getcwd()
    wished = staged.wished(os.environ, before)
    folder = staged.here(wished)
    if folder != before:
        with _errors(folder):
            os.chdir(folder)
        os.environ["PWD"] = folder
    sys.path[:] = staged.search_path(sys.path, os.environ, before, folder)
    os.environ.update(staged.variables(os.environ))
    return wished


def refuse_inside_copy(staged: StagedPaths, folder: str, file: Path, option: str) -> Path:
    """What a rank writes, and must not write to a copy, for copies are removed.

    Args:
        folder: the working directory that the step was to have.
        option: that says where.

    Raises:
        ConfigError: it would be in a place that this node does not see.
    """
    path = os.path.normpath(os.path.join(folder, file))
    if staged.here(path) != path:
        raise ConfigError(
            f"{option} leads to {path}, which this node has as a copy alone",
            expected="a folder that all nodes see, or one of each node's own",
            hint=f"name another with {option}",
            scope=Scope.NODE,
        )
    return Path(path)


@contextlib.contextmanager
def _entered(folder: str) -> Iterator[int]:
    """A descriptor of the folder, if that is ours."""
    with _errors(folder):
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _require_ours(folder, os.fstat(inside))
        yield inside
    finally:
        os.close(inside)


def _content(folder: str, inside: int) -> bytes:
    path = os.path.join(folder, _PLACES)
    with _errors(path):
        opened = os.open(_PLACES, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=inside)
    with open(opened, "rb") as file:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise _wrong(path, "is not a regular file", "the file that `srunddp stage push` wrote")
        _require_ours(path, status)
        return file.read(_LARGEST)


def _require_ours(path: str, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise _wrong(path, f"belongs to user id {status.st_uid}", "one of yours")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _wrong(path, "may be changed by others", "that its owner alone may")


@contextlib.contextmanager
def _errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        found = f"cannot be read: {os.strerror(error.errno or 0)}"
        raise _wrong(path, found, "what `srunddp stage push` left on this node") from None


def _staged(folder: str, text: bytes) -> StagedPaths:
    try:
        written = json.loads(text)
        places, cwd = tuple(PathMapping(**each) for each in written["places"]), written["cwd"]
        paths = [cwd, *(path for place in places for path in (place.path, place.here))]
        right = all(map(_is_path, paths)) and all(place.role in ROLES and place.path != "/" for place in places)
    except (ValueError, TypeError, KeyError, RecursionError):
        right = False
    if not right:
        path = os.path.join(folder, _PLACES)
        raise _wrong(path, "is broken", "the places that `srunddp stage push` wrote")
    return StagedPaths(os.path.normpath(folder), places, cwd)


def _is_path(path: object) -> bool:
    """Whether it is an absolute path as it is compared here."""
    return isinstance(path, str) and path.startswith("/") and path == os.path.normpath(path)


def _wrong(path: str, found: str, expected: str) -> ConfigError:
    return ConfigError(f"{path} {found}", expected=expected, hint=_AGAIN, scope=Scope.NODE)
