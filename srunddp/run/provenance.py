"""How a run was made: its options, the git commit of its script, and the versions of packages.

All of it is read from files. No package is imported for its version, and git need not be installed.
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
# run.json has the script and its arguments in any case.
_NOT_OPTIONS = ("script", "arguments", "module", "explain")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LONGEST = 1 << 24  # bytes of packed-refs, which has a line for each branch and tag


def provenance(command: RunCommand, script: Script) -> dict[str, Any]:
    """Return how a run is made, for run.json. Files that cannot be read are left out.

    Args:
        command: The options of the command line.
        script: What runs. For a module, the commit is that of the working directory.
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
    """Return the version of Python and of each package that is installed for it."""
    found = {"srunddp": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        # A damaged installation may raise anything, and is left out.
        with suppress(Exception):
            found[name] = metadata.version(name)
    return found


def git_commit(folder: Path) -> str:
    """Return the commit that is checked out in the git work tree of a folder; empty if there is
    none.

    The commit does not show whether files have been changed since: comparing all would take long.
    """
    # ValueError: the file is not text, or a power cut has filled it with zeros.
    with suppress(OSError, ValueError, RuntimeError):
        whole = folder.resolve()
        for each in (whole, *whole.parents):
            if (each / ".git").exists():
                return _head(_git_folder(each / ".git"))
    return ""


def _git_folder(path: Path) -> Path:
    """Return git's folder; in a worktree or a submodule, ``.git`` is a file with its path."""
    if path.is_dir():
        return path
    return path.parent / _text(path).removeprefix("gitdir:").strip()


def _head(folder: Path) -> str:
    head = _text(folder / "HEAD")
    if not head.startswith("ref:"):
        return _checked(head)
    name = head.removeprefix("ref:").strip()
    # The branches of a worktree are in the folder of its main repository.
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
