"""Removes a job's folder from a node, but for what was written there; sent to the nodes beside the node agent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Sequence

from srunddp.errors import ConfigError

LOCK, KEEPER = "lock", "keeper"
# Beside a copy that is whole, of the time when it was; the name changes before anything is taken from the copy.
UNPACKED, SPOILT = ".unpacked", ".removing"


def touch(path: str) -> int:
    """Open a file of our own, which is made if it is not there."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def lock(descriptor: int, wait: float, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file; whether that was possible within so many seconds."""
    end = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.1)


def remove(folder: str, wait: float) -> int:
    """Remove a job's folder once no rank uses it, within so many seconds.

    Returns:
        How many files stay, since they were written there after the copy was whole, or cannot be removed.

    Raises:
        ConfigError: it is still in use.
    """
    held = touch(os.path.join(folder, LOCK))
    try:
        if not lock(held, wait):
            hint = "end them; else it is removed when the job ends"
            raise ConfigError(f"{folder} is in use", expected="ranks that have ended", hint=hint)
        # A copy whose unpacking was killed has a dot before its name: nobody has seen it.
        entries = list(os.scandir(folder))
        copies = [each.path for each in entries if each.is_dir(follow_symlinks=False) and each.name[0] != "."]
        kept = sum(map(_remove_copy, copies))
        for entry in list(os.scandir(folder)):
            if entry.is_file(follow_symlinks=False) and not entry.name.endswith(SPOILT):
                os.unlink(entry)
        if not kept:
            shutil.rmtree(folder)
        return kept
    finally:
        os.close(held)


def _remove_copy(folder: str) -> int:
    """Remove what was unpacked, and return how many files are newer; without a mark all of them are."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder + UNPACKED, folder + SPOILT)
    whole = os.stat(folder + SPOILT).st_mtime_ns if os.path.exists(folder + SPOILT) else 0
    kept = 0
    for here, folders, files in os.walk(folder, topdown=False):
        links = [name for name in folders if os.path.islink(os.path.join(here, name))]
        kept += sum(not _removed(os.path.join(here, name), whole) for name in (*files, *links))
        with contextlib.suppress(OSError):
            os.rmdir(here)
    if not kept:
        os.unlink(folder + SPOILT)
    return kept


def _removed(path: str, whole: int) -> bool:
    """Not what was made or changed since; of times only that of the change cannot be set by programs such as cp -p."""
    try:
        if os.lstat(path).st_ctime_ns > whole and not path.endswith(".pyc"):
            return False
        os.unlink(path)
    except OSError:
        return False
    return True


def remove_others(folder: str, alive: Sequence[str]) -> None:
    """Remove what this user's earlier jobs have left beside a job's folder.

    A folder stays while its job is alive, the task that keeps it, or a rank in it.
    """
    base, name = os.path.split(folder)
    ours = name.rpartition("-")[0] + "-"
    for other in os.listdir(base):
        number = other.removeprefix(ours)
        if other.startswith(ours) and other != name and number.isdigit() and number not in alive:
            with contextlib.suppress(OSError, ConfigError):
                _remove_unless_kept(os.path.join(base, other))


def _remove_unless_kept(folder: str) -> None:
    if os.lstat(folder).st_uid != os.geteuid():
        return
    keeper = touch(os.path.join(folder, KEEPER))
    try:
        if lock(keeper, 0.0):
            remove(folder, 0.0)
    finally:
        os.close(keeper)
