"""Removes a job's folder from a node; sent to the nodes beside :mod:`srunddp.site.staging.node`."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence

from srunddp.errors import ConfigError

LOCK = "lock"
UNPACKED = ".unpacked"


def touch(path: str) -> int:
    """Open a file of our own, which is made if it is not there."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def remove(folder: str, wait: float) -> int:
    """Remove a job's folder once no rank uses it.

    Args:
        wait: seconds.

    Returns:
        How many files stay, since somebody has written them in a copy.

    Raises:
        ConfigError: it is still in use.
    """
    held = touch(os.path.join(folder, LOCK))
    try:
        if not lock(held, wait):
            cure = "end them; else it is removed when the job ends"
            raise ConfigError(f"{folder} is in use", expected="ranks that have ended", cure=cure)
        return _remove(folder)
    finally:
        os.close(held)


def lock(descriptor: int, wait: float) -> bool:
    """Lock a file for this process alone; whether that was possible within so many seconds."""
    end = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.1)


def _remove(folder: str) -> int:
    copies = [name.removesuffix(UNPACKED) for name in os.listdir(folder) if name.endswith(UNPACKED)]
    kept = sum(_remove_copy(os.path.join(folder, name)) for name in copies)
    if not kept:
        shutil.rmtree(folder)
        return 0
    for entry in list(os.scandir(folder)):
        if entry.is_file(follow_symlinks=False):
            os.unlink(entry)
    return kept


def _remove_copy(folder: str) -> int:
    """Remove what was unpacked, and return how many files are newer."""
    unpacked, kept = os.stat(folder + UNPACKED).st_mtime_ns, 0
    for here, folders, files in os.walk(folder, topdown=False):
        for name in files:
            path = os.path.join(here, name)
            if not name.endswith(".pyc") and os.lstat(path).st_mtime_ns > unpacked:
                kept += 1
            else:
                os.unlink(path)
        for name in folders:
            path = os.path.join(here, name)
            if os.path.islink(path):
                os.unlink(path)
            elif not os.listdir(path):
                os.rmdir(path)
    if not kept and os.path.isdir(folder):
        os.rmdir(folder)
    return kept


def remove_if_over(folder: str, alive: Sequence[str]) -> bool:
    """Remove what an earlier job has left, unless that job or one of its processes is still there."""
    if folder.rpartition("-")[2] in alive or os.lstat(folder).st_uid != os.geteuid():
        return False
    try:
        return remove(folder, 0.0) == 0
    except (OSError, ConfigError):
        return False


def left(folder: str) -> Iterator[str]:
    """The folders beside a job's that are of other jobs of this user."""
    base, name = os.path.split(folder)
    ours = name.rpartition("-")[0] + "-"
    for other in os.listdir(base):
        if other.startswith(ours) and other != name and other[len(ours) :].isdigit():
            yield os.path.join(base, other)
