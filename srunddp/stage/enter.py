"""A run in what `srunddp stage push` has left in a folder on this node: it is read, locked, and entered."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from srunddp.errors import ConfigError, Scope
from srunddp.stage.paths import LOCK, PLACES, StagedPaths, lock_file

VARIABLE = "SRUNDDP_STAGED"


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
    folder = os.path.normpath(folder)
    try:
        with _reading():
            _require_ours(folder)
            return StagedPaths.load(folder)
    except (ValueError, TypeError, KeyError):
        raise _wrong(f"{folder}/{PLACES} is broken", "the places that `srunddp stage push` wrote") from None


def _require_ours(folder: str) -> None:
    """Then nobody else can have put anything there."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise _wrong(f"{folder} is not a folder", "the one that `srunddp stage push` made")
    if status.st_uid != os.geteuid():
        raise _wrong(f"{folder} belongs to user id {status.st_uid}", "one of yours")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _wrong(f"{folder} may be changed by others", "that its owner alone may")


def lock(folder: str) -> int:
    """Keep the folder from being removed, as long as this process lives or one that it forks.

    Returns:
        The descriptor that holds it, which processes inherit; above 2, also where standard output is closed.

    Raises:
        ConfigError: it is being removed.
    """
    with _reading(), open(os.path.join(folder, LOCK), "rb") as file:
        held = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD, 3)
    if lock_file(held, kind=fcntl.LOCK_SH) and os.fstat(held).st_nlink:
        return held
    os.close(held)
    raise _wrong(f"{folder} is being removed", "a staged folder that stays during the run")


def enter() -> StagedPaths:
    """Read what was staged, and work with it."""
    staged = read(os.environ)
    activate(staged)
    return staged


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
    intended = staged.intended_cwd(os.environ, before)
    folder = staged.here(intended)
    if folder != before:
        with _reading():
            os.chdir(folder)
        os.environ["PWD"] = folder
    sys.path[:] = staged.search_path(sys.path, os.environ, before, folder)
    os.environ.update(staged.variables(os.environ))
    return intended


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
        found = f"{option} leads to {path}, which this node has as a copy alone"
        expected = "a folder that all nodes see, or one of each node's own"
        raise ConfigError(found, expected=expected, hint=f"name another with {option}", scope=Scope.NODE)
    return Path(path)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        found = f"{error.filename} cannot be read: {error.strerror}"
        raise _wrong(found, "what `srunddp stage push` left on this node") from None


def _wrong(found: str, expected: str) -> ConfigError:
    hint = "run `srunddp stage push` again, and start the ranks by the path that it prints"
    return ConfigError(found, expected=expected, hint=hint, scope=Scope.NODE)
