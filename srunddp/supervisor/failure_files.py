"""Writes the files about a failure. A separate process writes each file, so that only this process
hangs if the file system does not answer.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from pathlib import Path

from srunddp.supervisor.worker_process import wait_for_child

FILE_EXISTS = 3  # the exit code of a writer that found the file that it was to create
_writers: list[int] = []


def start_writer(path: Path, text: str, *, new: bool = False) -> int | None:
    """Start a process that appends a text to a file.

    Args:
        path: The file.
        text: What to write.
        new: Whether to write nothing if the file exists; the process then ends with
            :data:`FILE_EXISTS`.

    Returns:
        The process id. None if the kernel cannot create a process now, because of a limit on
        processes or memory; then nothing is written, and the supervisor goes on.
    """
    with warnings.catch_warnings():
        # Python warns of a fork while other threads run. The child needs none of their locks.
        warnings.simplefilter("ignore")
        try:
            pid = os.fork()
        except OSError:
            return None
    if pid:
        _writers.append(pid)
        return pid
    code = 1
    try:
        # Close the inherited descriptors: if this process hangs, its copy of a connection or of an
        # output pipe would keep that open, and a process at the other end would wait for its end.
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


def writers() -> list[int]:
    """Return the process ids of all writers so far; those that have ended may be among them."""
    return list(_writers)


def has_ended(writer: int) -> bool:
    """Return whether a writer has ended. If so, it is no longer among :func:`writers`."""
    if wait_for_child(writer, 0.0) is None:
        return False
    _writers.remove(writer)
    return True


def finish_writers(within: float) -> set[int]:
    """Wait for all writers.

    Args:
        within: How many seconds to wait at most, for all of them together.

    Returns:
        The process ids of the writers that have not ended by then.
    """
    end = time.monotonic() + within
    return {pid for pid in _writers if wait_for_child(pid, end - time.monotonic()) is None}


def rotate_previous(folder: Path) -> None:
    """Rename the ``failure.json`` of an earlier attempt at the job to ``failure.N.json``, with the
    lowest N from 1 that is free. Do nothing if there is no such file, or it cannot be renamed.

    Rank 0 calls this before its run can fail.

    Args:
        folder: The folder of the run's logs.
    """
    for number in itertools.count(1):
        earlier = folder / f"failure.{number}.json"
        if not earlier.exists():
            with contextlib.suppress(OSError):
                (folder / "failure.json").rename(earlier)
            return
