"""Reads a configuration file that nobody else can have changed, as ssh and sudo do: it, its folders and links.

What it says is exported to every rank, and a variable such as ``LD_PRELOAD`` is as good as a program. Root, the user
and the owners of srunddp's own code are trusted: the latter can change what runs anyway. A software folder of a service
account stays usable so, and one in a user namespace, where root appears as the overflow uid: the root folder counts.

Who else may write makes a file refused; where it is a group, it is a note alone, for a site may mean it so. Root's
group is worth no note, nor is a folder's that is the user's primary one and has the user's own number: so distributions
number a group of one user, and then have umask 002. Who is in it is not looked up, for each rank of a large job would
ask the site's name service; a primary group of another number is one of many users, such as ``users`` or a department.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from srunddp.errors import ConfigError, Scope

LARGEST = 1 << 20
_MOST_LINKS = 40  # as the kernel
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True)
class Content:
    """Of a file: its bytes, and lines to be said once of who else may write."""

    data: bytes
    notes: tuple[str, ...]


def read(path: str | os.PathLike[str]) -> Content:
    """Read a configuration file of at most 1 MiB.

    Raises:
        ConfigError: somebody else may have changed it, it is no regular file, or it is too large.
        OSError: it is not there or cannot be read; links that lead in a circle.
    """
    asked, trusted, notes = os.fspath(path), owners(), []
    for step, status in _steps(asked):
        notes += _judged(asked, step, status, trusted)
    # Before it is opened, as a device may do anything then, and once more: this is the one that is read.
    _require_regular(asked, status)
    with open(os.open(step, _FLAGS), "rb") as file:
        status = os.fstat(file.fileno())
        _require_regular(asked, status)
        _judged(asked, step, status, trusted)
        data = file.read(LARGEST + 1) if status.st_size <= LARGEST else b""
    if max(len(data), status.st_size) > LARGEST:
        raise _wrong(asked, "more than 1 MiB", "some settings", "is this the right file?")
    return Content(data, tuple(dict.fromkeys(notes)))


def _require_regular(asked: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _wrong(asked, "is not a regular file", "a file", "name a file")


def owners() -> set[int]:
    """The user ids whose files are trusted."""
    code = Path(__file__).resolve()
    return {0, os.geteuid(), *(place.stat().st_uid for place in (code, *code.parents))}


def _steps(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Each folder and link on the way, from the root on, and what it leads to; links are followed one by one."""
    left = os.path.join(os.getcwd(), path).split("/")
    here, links = "/", 0
    yield here, os.lstat(here)
    while left:
        name = left.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            here = os.path.dirname(here)
            continue
        step = os.path.join(here, name)
        status = os.lstat(step)
        yield step, status
        if not stat.S_ISLNK(status.st_mode):
            here = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(step)
        here = "/" if target.startswith("/") else here
        left[:0] = target.split("/")


def _judged(asked: str, step: str, status: os.stat_result, trusted: set[int]) -> list[str]:
    """What is to be noted of a file, or of a folder or link on the way to it.

    Raises:
        ConfigError: it is not to be trusted.
    """
    mode, what, named = status.st_mode, "it" if step == asked else step, shlex.quote(step)
    if status.st_uid not in trusted:
        found = f"{what} belongs to user id {status.st_uid}"
        cure = f"copy the file to a folder of yours, or `chown root {named}`"
        raise _wrong(asked, found, "root, yourself or the owner of srunddp as the owner", cure)
    # A link's own mode means nothing. In a sticky folder all may change their own alone, and that is looked at next.
    if stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return []
    if mode & stat.S_IWOTH:
        found, cure = f"{what} may be changed by every user", f"chmod o-w {named}"
        raise _wrong(asked, found, "a file, folders and links that others cannot change", cure)
    users_own = stat.S_ISDIR(mode) and status.st_gid == os.getegid() == os.geteuid()
    if mode & stat.S_IWGRP and status.st_gid and not users_own:
        found = f"{step} may be changed by all of group id {status.st_gid}"
        return [f"{found}; expected that its owner alone may -> chmod g-w {named}"]
    return []


def _wrong(where: str, found: str, expected: str, cure: str) -> ConfigError:
    return ConfigError(found, expected=expected, cure=cure, where=where, scope=Scope.NODE)
