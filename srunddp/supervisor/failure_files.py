"""Files about a failure, each written by a process of its own: a file system that does not answer keeps that alone."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from pathlib import Path

IS_THERE = 3  # the exit code where a new file was wanted
_WITHIN = 2.0
_POLL = 0.005
_writers: list[int] = []


def write(path: Path, text: str, *, new: bool = False) -> int:
    """Start to append to a file, or to make a ``new`` one; returns the process that does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: what they may hold is not needed there
        pid = os.fork()
    if pid:
        _writers.append(pid)
        return pid
    code = 1
    try:
        # While it is kept, nobody is to wait for the end of a line or of our output.
        os.closerange(0, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_APPEND), 0o644)
        os.write(opened, text.encode(errors="backslashreplace"))
        code = 0
    except FileExistsError:
        code = IS_THERE
    finally:
        os._exit(code)


def wait(pid: int, limit: float = _WITHIN) -> int | None:
    """The exit code of one; None where it is not through in time, -1 where others have collected it."""
    end = time.monotonic() + limit
    with contextlib.suppress(ChildProcessError):
        while not (found := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() >= end:
                return None
            time.sleep(_POLL)
        return os.waitstatus_to_exitcode(found[1])
    return -1


def finish() -> set[int]:
    """Wait a moment for all that were started; returns those that are not through, and need not be waited for."""
    end = time.monotonic() + _WITHIN
    return {pid for pid in _writers if wait(pid, end - time.monotonic()) is None}
