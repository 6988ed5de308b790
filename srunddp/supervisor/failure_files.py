"""The files about a failure.

Each is written by a process of its own: a file system that does not answer holds up that process
alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from pathlib import Path

from srunddp.supervisor.worker_process import wait_for_child

FILE_EXISTS = 3  # the exit code of a writer where a new file was wanted
_writers: list[int] = []


def start_writer(path: Path, text: str, *, new: bool = False) -> int:
    """Start to append to a file, or to make a ``new`` one; returns the process that does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: what they may hold is not needed there
        pid = os.fork()
    if pid:
        _writers.append(pid)
        return pid
    code = 1
    try:
        # While it is held up, nobody is to wait for the end of a connection or of our output.
        os.closerange(0, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        opened = os.open(
            path, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_APPEND), 0o644
        )
        os.write(opened, text.encode(errors="backslashreplace"))
        code = 0
    except FileExistsError:
        code = FILE_EXISTS
    finally:
        os._exit(code)


def finish_writers(within: float) -> set[int]:
    """Wait for all that were started, for so many seconds at most.

    Returns:
        Those that have not ended, and need not be waited for.
    """
    end = time.monotonic() + within
    return {pid for pid in _writers if wait_for_child(pid, end - time.monotonic()) is None}


def rotate_previous(folder: Path) -> None:
    """Rank 0, before its run can fail: rename the ``failure.json`` of an earlier attempt in the
    same folder.
    """
    for number in itertools.count(1):
        earlier = folder / f"failure.{number}.json"
        if not earlier.exists():
            with contextlib.suppress(OSError):
                (folder / "failure.json").rename(earlier)
            return
