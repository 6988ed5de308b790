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
_writers: set[int] = set()


def write(path: Path, text: str, *, new: bool = False) -> int:
    """Start to append to a file, or to make a ``new`` one; returns the process that does."""
    data = text.encode(errors="backslashreplace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: what they may hold is not needed there
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            # While it is kept, nobody is to wait for the end of a line or of our output.
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_APPEND), 0o644)
            while data:
                data = data[os.write(opened, data) :]
            code = 0
        except FileExistsError:
            code = IS_THERE
        finally:
            os._exit(code)
    _writers.add(pid)
    return pid


def wait(pid: int, limit: float) -> int | None:
    """The exit code of one; None where it was not there in time, or somebody else has collected it."""
    end = time.monotonic() + limit
    with contextlib.suppress(ChildProcessError):
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= end:
                return None
            time.sleep(_POLL)
    _writers.discard(pid)
    return None


def finish() -> set[int]:
    """Wait a moment for all that were started; returns those that are not through, and need not be waited for."""
    end = time.monotonic() + _WITHIN
    for pid in [*_writers]:
        if wait(pid, max(0.0, end - time.monotonic())) is not None:
            _writers.discard(pid)
    return set(_writers)
