"""How a run was made: its options, the git commit of its script, and the versions of packages.

All of this is read from files: no package is imported for its version, and git is not called.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from srunddp._version import __version__
from srunddp.run.command import RunCommand
from srunddp.run.script import Script

_PACKAGES = ("torch", "numpy")
# Parameters that are left out of "options", most of them because run.json has the script and its
# arguments anyway.
_NOT_OPTIONS = ("script", "arguments", "module", "explain")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LONGEST = 1 << 24  # bytes of packed-refs, which has a line for each branch and tag


def provenance(command: RunCommand, script: Script) -> dict[str, Any]:
    """Return the options, the git commit and the versions of a run, for run.json. What cannot be
    read is left out or empty.

    Args:
        command: The options of the command line.
        script: The script. The commit is that of the folder of the script, or of the working
            directory for a module.
    """
    folder = Path() if script.module else Path(script.name).parent
    return {
        "options": {
            field.name: getattr(command, field.name)
            for field in fields(command)
            if field.name not in _NOT_OPTIONS
        },
        "git_commit": git_commit(folder),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of srunddp and Python, and of torch and numpy if they are installed, by
    name.
    """
    found = {"srunddp": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        # Leave out a package whose installation is damaged, which may raise any error.
        with suppress(Exception):
            found[name] = metadata.version(name)
    return found


def git_commit(folder: Path) -> str:
    """Return the commit that is checked out in the git work tree that contains a folder; empty if
    there is none.

    Files may have been changed since this commit. That is not found out, because comparing all
    files would take long.
    """
    # A ValueError means that a file of git is no text, or was filled with zeros by a power cut.
    with suppress(OSError, ValueError, RuntimeError):
        whole = folder.resolve()
        for each in (whole, *whole.parents):
            if (each / ".git").exists():
                return _head(_git_folder(each / ".git"))
    return ""


def _git_folder(path: Path) -> Path:
    """Return git's folder. ``path`` is that of ``.git``, which in a worktree or a submodule is a
    file that contains the path of git's folder.
    """
    if path.is_dir():
        return path
    return path.parent / _text(path).removeprefix("gitdir:").strip()


def _head(folder: Path) -> str:
    head = _text(folder / "HEAD")
    if not head.startswith("ref:"):
        return _checked(head)
    name = head.removeprefix("ref:").strip()
    # In a worktree, the branches are in the git folder of the main repository, whose path the file
    # "commondir" contains.
    common = folder
    with suppress(FileNotFoundError):
        common = folder / _text(folder / "commondir")
    for place in (folder, common):
        with suppress(FileNotFoundError, NotADirectoryError):
            return _checked(_text(place / name))
    with suppress(FileNotFoundError):
        for line in _text(common / "packed-refs").splitlines():
            commit, _, branch = line.partition(" ")
            if branch == name:
                return _checked(commit)
    return ""


def _checked(commit: str) -> str:
    return commit if _HASH.fullmatch(commit) else ""


def _text(path: Path) -> str:
    with open(path, "rb") as file:
        return file.read(_LONGEST).decode().strip()
